"""``shardwise verify``: the user's own model for a few steps, the chosen plan against plain data parallelism."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.cli.exits import CommandError, ExitCode
from shardwise.cli.jobs import Job, call_on_ranks
from shardwise.cli.parsing import Commands, Parser, add_command, add_ranks, whole_number
from shardwise.core.errors import UsageError

if TYPE_CHECKING:
    from shardwise.core.plan import Plan

DEFAULT_STAGE = 3

_EXAMPLE = """\
shardwise verify package.module:build --stage 3 --ranks 2

where package/module.py holds:
  def build():
      model = Model()
      optimizer = torch.optim.AdamW(model.parameters())
      batches = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(3)]
      return model, optimizer, batches

The loss is model(*batch), unless build returns a fourth value:
a function, called as loss_function(model, batch)."""


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    summary = "train your own model for a few steps under a plan and without, and compare every bit"
    parser = add_command(commands, "verify", execute, summary=summary, example=_EXAMPLE)
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="makes the model, the optimizer and the batches")
    parser.add_argument("--stage", type=int, choices=range(4), help=f"ZeRO stage (default: the plan's, or {DEFAULT_STAGE})")
    parser.add_argument("--plan", metavar="FILE", help="a plan, as .toml or .json")
    add_ranks(parser)
    parser.add_argument("--steps", type=whole_number(1), default=3, metavar="N", help="steps to compare (default: 3)")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON; all else goes to standard error")


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    load_function(args.function)
    plan = None if args.plan is None else read_plan(args.plan)
    stage = DEFAULT_STAGE if plan is None and args.stage is None else args.stage
    arguments = {
        "function": args.function,
        "plan": None if plan is None else plan.to_dict(),
        "stage": stage,
        "steps": args.steps,
        "is_json": args.json,
    }
    job = Job("shardwise.cli.verify:verify_rank", arguments)
    verdict = call_on_ranks(job, args.ranks, port=args.port, is_debug=args.debug)
    print(json.dumps(verdict["values"]) if args.json else verdict["text"])
    return ExitCode.DONE if verdict["is_equal"] else ExitCode.FAILED


def verify_rank(function: str, plan: dict[str, Any] | None, stage: int | None, steps: int, is_json: bool) -> dict[str, Any]:
    """What every rank does."""
    from shardwise.api.verify import verify
    from shardwise.core.plan import Plan

    # What the user's code prints must not stand between the lines of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        build = load_function(function)
        verdict = verify(build, plan=None if plan is None else Plan.from_dict(plan), stage=stage, steps=steps)
    return {"is_equal": verdict.equal, "text": str(verdict), "values": verdict.to_dict()}


def read_plan(path: str) -> Plan:
    """Read a plan from a file that a user named."""
    from shardwise.core.plan import Plan

    try:
        return Plan.read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The plan {path} cannot be read: {error}.") from error


def load_function(path: str) -> Callable[..., Any]:
    """Find a function by ``package.module:function``, in the current directory or on Python's path.

    Raises:
        UsageError: There is no such module or function.
        CommandError: The module raises when it is imported.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"Expected MODULE:FUNCTION, such as package.module:build, but got {path!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(module_name)
    function = getattr(module, name, None)
    if function is None:
        close = difflib.get_close_matches(name, [key for key in vars(module) if callable(getattr(module, key))], n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise UsageError(f"Module {module_name} ({module.__file__}) has no function '{name}'.{hint}")
    if not callable(function):
        raise UsageError(f"{path} is no function but a {type(function).__name__}.")
    found: Callable[..., Any] = function
    return found


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise CommandError(f"Module {name} needs a module that is not there: {error}.") from error
        raise UsageError(f"There is no module {error.name} in {os.getcwd()} or on Python's path.") from error
    except Exception as error:
        text = f"Module {name} cannot be imported: {type(error).__name__}: {error}."
        raise CommandError(text, detail="".join(traceback.format_exception(error))) from error
