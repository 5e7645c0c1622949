"""``shardwise train``: a ready job, from a recipe."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.exits import CommandError, ExitCode
from shardwise.cli.jobs import Job, call_on_ranks
from shardwise.cli.launch import RanksFailedError, StoppedError
from shardwise.cli.machine import LOCALHOST, check_port, check_ranks
from shardwise.cli.parsing import MAX_PORT, Commands, Parser, add_command, add_ranks, port_number, whole_number
from shardwise.core.errors import UsageError
from shardwise.recipes.catalog import load_recipe, recipe_names
from shardwise.recipes.config import GPTRecipe, Recipe
from shardwise.recipes.requirements import check_requirements
from shardwise.recipes.run_folder import (
    RunFolder,
    check_folder,
    make_folder,
    name_folder,
    newest_run,
    reopen_folder,
)

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.recipes.train import TrainResult
    from shardwise.telemetry.sink import Sink

RUNS_FOLDER = Path("runs")
PRECISIONS = ("fp32", "bf16", "fp16")
_KEY_OF_OPTION = {
    "data": "data.path",
    "stage": "plan.stage",
    "ranks": "ranks",
    "steps": "train.steps",
    "precision": "plan.precision",
    "seed": "seed",
}
"""Options that are short for ``--set``."""

_EXAMPLE = """\
shardwise train
shardwise train gpt --data book.txt --stage 2 --ranks 4 --steps 500
shardwise train digits --set model.channels=64 --set train.learning_rate=1e-3
shardwise train runs/gpt-20260101-120000/config.toml     (the same run again)
shardwise train --resume                                 (go on with the newest run)
shardwise train --resume runs/gpt-20260101-120000 --ranks 4 --stage 2"""


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    recipes = "\n".join(f"{name:<12}{load_recipe(name).about}" for name in recipe_names())
    parser = add_command(commands, "train", execute, summary="train a ready job, from a recipe", example=_EXAMPLE)
    parser.epilog = "recipes:\n" + "".join(f"  {line}\n" for line in recipes.splitlines()) + f"\n{parser.epilog}"
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a name or a .toml file (default: gpt)")
    parser.add_argument("--data", metavar="PATH", help="a text file or folder, for the recipe gpt")
    parser.add_argument("--stage", type=int, choices=range(4), help="ZeRO stage")
    add_ranks(parser, default=None)
    parser.add_argument("--steps", type=whole_number(1), metavar="N", help="optimizer steps")
    parser.add_argument("--precision", choices=PRECISIONS, help="dtype of compute; weights stay in fp32")
    parser.add_argument("--seed", type=whole_number(0), metavar="N", help="draws weights and batches")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change any value of the recipe")
    parser.add_argument("--out", metavar="DIR", help=f"the run folder (default: a new one in {RUNS_FOLDER}/)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help=f"go on from the newest checkpoint of a run folder (default: of the newest run in {RUNS_FOLDER}/)",
    )
    parser.add_argument("--force", action="store_true", help="replace the run in the folder of --out")
    parser.add_argument(
        "--trace",
        type=step_range,
        default=None,
        metavar="FIRST:LAST",
        help="steps to write down in detail (default: the third)",
    )
    parser.add_argument("--tensorboard", action="store_true", help="write figures for TensorBoard into the run folder")
    parser.add_argument(
        "--metrics-port", type=port_number, default=None, metavar="N", help="serve Prometheus metrics: rank R at port N + R"
    )
    parser.add_argument(
        "--metrics-host", default=LOCALHOST, metavar="ADDRESS", help=f"where metrics can be reached (default: {LOCALHOST})"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress, only what came out")
    parser.add_argument("--show", action="store_true", help="print the effective values as TOML, and train nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; all else goes to standard error")


def execute(args: argparse.Namespace) -> int:
    """Run the command: check everything, then write, then start."""
    resumed = _resumed_run(args)
    args.recipe = args.recipe or "gpt"
    if args.data is not None and not isinstance(load_recipe(args.recipe), GPTRecipe):
        raise UsageError(f"The recipe {args.recipe} brings its own data: --data is for the recipe gpt. Leave it out.")
    recipe = load_recipe(args.recipe, read_settings(args))
    if args.show:
        print(recipe.to_toml(), end="")
        return ExitCode.DONE
    check_requirements(recipe)
    check_ranks(recipe.ranks)
    check_port(args.port)
    _check_sinks(args, recipe.ranks)
    if resumed is not None:
        folder = reopen_folder(resumed, recipe.to_toml())
    else:
        path = Path(args.out) if args.out else name_folder(RUNS_FOLDER, recipe.task)
        check_folder(path, is_forced=args.force)
        folder = make_folder(path, recipe.to_toml())

    from rich.console import Console

    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    if not args.quiet:
        console.print(describe_recipe(args.recipe, recipe), markup=False)
        console.print(f"Starting {recipe.ranks} rank{'s' if recipe.ranks > 1 else ''} ...", style="dim")
    result = _train(args, recipe, folder, console)
    folder.write_result(result.to_dict())
    page = _write_report(folder, console)
    if args.json:
        print(json.dumps({**result.to_dict(), "folder": str(folder.path), "report": page}))
    else:
        show_result(result, folder, console)
        if page:
            console.print(f"Report:     {page}", markup=False)
    return ExitCode.DONE


def _resumed_run(args: argparse.Namespace) -> Path | None:
    """The run that is to be gone on with, if any; its recipe becomes the one that is trained.

    Raises:
        UsageError: There is none, it has no checkpoint, or it is at its end.
    """
    if args.resume is None:
        return None
    if args.out or args.force:
        raise UsageError("--resume goes on in the folder of the run: leave --out and --force out.")
    if args.recipe is not None:
        raise UsageError(f"--resume takes the recipe from the run: leave {args.recipe} out, or change values with --set.")
    path = Path(args.resume) if args.resume else newest_run(RUNS_FOLDER)
    if path is None:
        raise UsageError(f"No run in {RUNS_FOLDER}/ has a checkpoint to go on from. Give a run folder: --resume RUN.")
    folder = RunFolder(path)
    try:
        is_run = folder.config.is_file()
    except OSError as error:
        raise UsageError(f"The run folder {path} cannot be looked into: {error.strerror}. Give another.") from error
    if not is_run:
        raise UsageError(
            f"{path} is no run folder: it holds no {folder.config.name}. Give one that shardwise train has written."
        )
    last = last_checkpoint(folder)
    if last is None:
        raise UsageError(f"{path} holds no complete checkpoint to go on from (train.save_every says how often one is saved).")
    args.recipe = str(folder.config)
    steps = load_recipe(args.recipe, read_settings(args)).train.steps
    if last >= steps:
        raise UsageError(f"The run {path} has done its {steps} steps. To train on, give more: --steps {2 * steps}.")
    return path


def last_checkpoint(folder: RunFolder) -> int | None:
    """The step of a run's newest complete checkpoint."""
    from shardwise.checkpoint.folders import find_checkpoints, place_of

    found = find_checkpoints(place_of(folder.checkpoints))
    return found[0].summary.step if found else None


def _write_report(folder: RunFolder, console: Console) -> str:
    """The page of the run that has just ended. What was trained is kept if it cannot be written."""
    from shardwise.cli.report import PAGE_NAME, write_page
    from shardwise.report.runs import load_run

    page = folder.path / PAGE_NAME
    try:
        write_page([load_run(folder.path)], page)
    except UsageError as error:
        console.print(f"note: no report was written: {error}", markup=False)
        return ""
    return str(page)


def _check_sinks(args: argparse.Namespace, num_ranks: int) -> None:
    """Refuse what cannot be listened with, before anything is written."""
    if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("TensorBoard is not installed: pip install 'shardwise[tensorboard]', or leave --tensorboard out.")
    if args.metrics_port is not None:
        last = args.metrics_port + num_ranks - 1
        if last > MAX_PORT:
            raise UsageError(f"--metrics-port {args.metrics_port} leaves no ports for {num_ranks} ranks. Give a lower one.")
        for port in range(args.metrics_port, last + 1):
            check_port(port, "--metrics-port")


def step_range(text: str) -> tuple[int, int]:
    """A type of argument: steps such as ``10:12``, or one."""
    first, colon, last = text.partition(":")
    try:
        bounds = int(first), int(last if colon else first)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"expected steps such as 10:12, or one step, but got {text!r}")
    return bounds


def read_settings(args: argparse.Namespace) -> dict[str, str]:
    """What was set on the command line, by key.

    Raises:
        UsageError: It is no ``key=value``, or a key is set twice.
    """
    settings: dict[str, str] = {}
    for text in args.set:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise UsageError(f"--set takes KEY=VALUE, such as train.steps=100, but got '{text}'.")
        if key in settings:
            raise UsageError(f"{key} is set twice. Give it once.")
        settings[key.strip()] = value.strip()
    for option, key in _KEY_OF_OPTION.items():
        given = getattr(args, option)
        if given is not None and key in settings:
            raise UsageError(f"{key} is set twice: with --{option} and with --set. Give it once.")
        if given is not None:
            # Absolute, so that the saved recipe means the same from everywhere.
            settings[key] = str(Path(given).absolute()) if option == "data" else str(given)
    return settings


def describe_recipe(name: str, recipe: Recipe) -> str:
    """All effective values and their hash, a line a table."""
    values = recipe.to_dict()
    plain = {key: value for key, value in values.items() if not isinstance(value, dict) and key not in ("task", "about")}
    tables = {"": plain} | {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"  {name:<7}" + ", ".join(f"{key} = {value!r}" for key, value in table.items()) for name, table in tables.items()]
    return "\n".join([f"Recipe {name}, hash {recipe.hash}: {recipe.about}", *lines])


def show_result(result: TrainResult, folder: RunFolder, console: Console) -> None:
    """What came out, for people."""
    from shardwise.recipes.usage import usage_table

    losses = f"loss {result.first_loss:.4f} -> {result.last_loss:.4f}, validation {result.validation_loss:.4f}"
    console.print(
        f"\n{result.steps} steps in {result.seconds:.1f} s: {losses}, accuracy {result.accuracy:.1%} on held-out data"
    )
    console.print(f"{result.items_per_second:,.0f} {result.item}/s over all ranks\n")
    console.print(usage_table(result.ranks, result.plain_ddp))
    if result.sample:
        console.print("\nA sample:")
        console.print("\n".join(f"  | {line}" for line in result.sample.split("\n")), markup=False)
    console.print(f"\nRun folder: {folder.path}", markup=False)
    if result.checkpoint:
        console.print(f"Checkpoint: {result.checkpoint}", markup=False)


def train_rank(recipe: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """What every rank does."""
    import torch.distributed as dist
    from rich.console import Console

    from shardwise.api.recording import DEFAULT_TRACE
    from shardwise.recipes.train import train

    is_shown = dist.get_rank() == 0 and not options["quiet"]
    console = Console(stderr=options["json"]) if is_shown else None
    trace = DEFAULT_TRACE if options["trace"] is None else range(options["trace"][0], options["trace"][1] + 1)
    sinks = _make_sinks(folder, options)
    run_folder, is_resumed = RunFolder(Path(folder)), options["is_resumed"]
    return train(load_recipe(recipe), console, run_folder, trace, sinks, is_resumed=is_resumed).to_dict()


def _make_sinks(folder: str, options: dict[str, Any]) -> list[Sink]:
    import torch.distributed as dist

    from shardwise.telemetry.prometheus import Prometheus
    from shardwise.telemetry.tensorboard import TensorBoard

    sinks: list[Sink] = []
    if options["tensorboard"]:
        sinks.append(TensorBoard(Path(folder) / "tensorboard"))
    if options["metrics_port"] is not None:
        sinks.append(Prometheus(options["metrics_port"] + dist.get_rank(), options["metrics_host"]))
    return sinks


def _train(args: argparse.Namespace, recipe: Recipe, folder: RunFolder, console: Console) -> TrainResult:
    options = {name: getattr(args, name) for name in ("json", "quiet", "trace", "tensorboard", "metrics_port", "metrics_host")}
    options["is_resumed"] = args.resume is not None
    config = folder.config if args.resume is None else folder.new_config
    arguments = {"recipe": str(config), "folder": str(folder.path), "options": options}
    job = Job("shardwise.cli.train:train_rank", arguments)
    try:
        values = call_on_ranks(job, recipe.ranks, port=args.port, is_debug=args.debug)
    except StoppedError as error:
        if console.is_terminal and not args.quiet:
            console.line()  # The bar of a rank that was ended stands where it was: what is said comes below it.
        raise StoppedError(f"{error} {_how_to_go_on(recipe, folder)}", error.exit_code) from error
    except RanksFailedError as error:
        raise _explain_kill(error, folder) from error
    finally:
        # A rank that was killed leaves its progress bar without the cursor.
        console.show_cursor(True)

    from shardwise.recipes.train import TrainResult

    return TrainResult.from_dict(values)


def _how_to_go_on(recipe: Recipe, folder: RunFolder) -> str:
    done = f"{folder.last_step()} of {recipe.train.steps} steps were done."
    last = last_checkpoint(folder)
    if last is not None:
        return f"{done} To go on after step {last}, with the same numbers: shardwise train --resume {shlex.quote(str(folder.path))}"
    return (
        f"{done} Their metrics and the recipe are in {folder.path}; no checkpoint was saved yet. The same run from its first step, "
        f"with the same numbers: shardwise train {shlex.quote(str(folder.config))}"
    )


def _explain_kill(error: RanksFailedError, folder: RunFolder) -> CommandError:
    from shardwise.recipes.usage import describe_held

    killed = [rank for rank, name in error.killed.items() if name == "SIGKILL"]
    if not killed:
        return error
    held = describe_held(folder.read_rank(killed[0]).get("held_bytes", {}))
    return CommandError(
        f"{error} This is how a machine that runs out of memory ends a process. The largest items of the ledger of rank "
        f"{killed[0]}: {held}. Use smaller batches (--set train.batch_size=N), a higher --stage, or fewer ranks.",
        error.exit_code,
    )
