"""``shardwise checkpoint``: what is in a checkpoint, whether it is whole, which ones may go, and other formats."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.exits import CommandError, ExitCode
from shardwise.cli.parsing import Commands, Parser, add_command, whole_number
from shardwise.core.errors import CheckpointError, UsageError
from shardwise.core.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.checkpoint.folders import Found
    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.places import Place

_EXAMPLE = """\
shardwise checkpoint inspect runs/gpt-20260101-120000/checkpoints
shardwise checkpoint verify runs/gpt-20260101-120000/checkpoints/step-000150
shardwise checkpoint prune runs/gpt-20260101-120000/checkpoints --keep-last 3 --dry-run"""
_KINDS = {"model/": "weights and buffers", "optimizer": "optimizer state", "gradient/": "gradients"}
_OTHER_KIND = "values"
_PATH_HELP = "a checkpoint, or a folder that holds some"


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    summary = "look into checkpoints, test them, and remove old ones"
    parser = add_command(commands, "checkpoint", _execute_nothing, summary=summary, example=_EXAMPLE)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    inspect = add_command(
        actions, "inspect", inspect_one, summary="show what is in a checkpoint",
        example="shardwise checkpoint inspect runs/gpt-20260101-120000/checkpoints --tensors",
    )  # fmt: skip
    inspect.add_argument("path", metavar="PATH", help=f"{_PATH_HELP}: then the newest")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--json", action="store_true", help="print all of it as JSON")
    verify = add_command(
        actions, "verify", verify_all, summary="test every byte of checkpoints against its checksum",
        example="shardwise checkpoint verify runs/gpt-20260101-120000/checkpoints",
    )  # fmt: skip
    verify.add_argument("path", metavar="PATH", help=f"{_PATH_HELP}: then all of them")
    verify.add_argument("--json", action="store_true", help="print what was found as JSON")
    export = add_command(
        actions, "export", export_one, summary="write the weights of a checkpoint in another format",
        example="shardwise checkpoint export runs/gpt-20260101-120000/checkpoints weights --to hf",
    )  # fmt: skip
    export.add_argument("path", metavar="PATH", help=f"{_PATH_HELP}: then the newest")
    export.add_argument("target", metavar="TARGET", help="a folder that is to be made; for torch, a file")
    export.add_argument(
        "--to", choices=("hf", "torch", "dcp"), default="hf",
        help="hf: safetensors files as Hugging Face reads them (default); torch: a state dict for torch.load; dcp: a folder for "
        "torch.distributed.checkpoint, with the optimizer's state",
    )  # fmt: skip
    export.add_argument("--with", dest="sides", metavar="FOLDER", help="for hf: copy configuration and tokenizer from there")
    take_in = add_command(
        actions, "import", import_one, summary="make a checkpoint of weights that another tool has written",
        example="shardwise checkpoint import ~/models/llama run/first",
    )  # fmt: skip
    take_in.add_argument(
        "source", metavar="SOURCE", help="a folder of Hugging Face, torch.distributed.checkpoint or DeepSpeed (ZeRO)"
    )
    take_in.add_argument("target", metavar="TARGET", help="the checkpoint that is to be made")
    prune = add_command(
        actions, "prune", prune_folder, summary="remove old checkpoints, and what broken saves have left",
        example="shardwise checkpoint prune runs/gpt-20260101-120000/checkpoints --keep-last 2 --keep-every 1000",
    )  # fmt: skip
    prune.add_argument("path", metavar="FOLDER", help="a folder that holds checkpoints")
    prune.add_argument("--keep-last", type=whole_number(1), metavar="N", help="the newest N stay")
    prune.add_argument("--keep-every", type=whole_number(1), metavar="N", help="those whose step is a multiple of N stay")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")


def _execute_nothing(args: argparse.Namespace) -> int:
    raise UsageError("Choose an action: shardwise checkpoint --help lists them.")


# What is in it


def inspect_one(args: argparse.Namespace) -> int:
    """Show one checkpoint."""
    from shardwise.checkpoint.folders import candidates, place_of, read_manifest

    place = candidates(place_of(args.path))[0]
    manifest = read_manifest(place)
    if args.json:
        print(json.dumps(facts_of(place, manifest)))
        return ExitCode.DONE

    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for key, value in _headlines(place, manifest).items():
        console.print(f"{key:<10}{value}", markup=False)
    console.print()
    console.print(_kind_table(manifest))
    if args.tensors:
        console.print(_tensor_table(manifest))
    return ExitCode.DONE


def facts_of(place: Place, manifest: Manifest) -> dict[str, Any]:
    """All that a program may want to know."""
    from shardwise.checkpoint.manifest import name_of

    tensors = {
        name: {
            "dtype": name_of(entry.dtype),
            "shape": list(entry.shape),
            "num_bytes": entry.num_bytes,
            "names": list(entry.names),
        }
        for name, entry in manifest.tensors.items()
    }
    summary = vars(manifest.summary)
    return {
        "path": place.path, **summary, "num_ranks": manifest.num_ranks, "num_bytes": manifest.num_bytes,
        "plan": dict(manifest.plan), "versions": dict(manifest.versions), "values": sorted(manifest.values), "tensors": tensors,
    }  # fmt: skip


def _headlines(place: Place, manifest: Manifest) -> dict[str, str]:
    summary = manifest.summary
    ranks = f"{manifest.num_ranks} rank" + ("s" if manifest.num_ranks != 1 else "")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.saved_at))
    return {
        "path": place.path,
        "step": f"{summary.step:,}",
        "saved": f"{saved_at} by {ranks} at stage {manifest.plan.get('stage')}",
        "with": versions,
        "size": f"{format_bytes(manifest.num_bytes)} in {len(manifest.files)} files",
        "extra": ", ".join(sorted(name.removeprefix("extra/") for name in manifest.values if name.startswith("extra/"))) or "-",
    }


def _kind_of(name: str) -> str:
    bare = name.partition("/")[2] if name.startswith("rank.") else name
    return next((kind for prefix, kind in _KINDS.items() if bare.startswith(prefix)), _OTHER_KIND)


def _kind_table(manifest: Manifest) -> Any:
    from rich.table import Table

    from shardwise.checkpoint.manifest import name_of

    table = Table(box=None, pad_edge=False)
    for column in ("kind", "dtype", "tensors", "elements", "bytes"):
        table.add_column(column, justify="left" if column in ("kind", "dtype") else "right")
    groups: dict[tuple[str, str], list[Any]] = {}
    for name, entry in manifest.tensors.items():
        groups.setdefault((_kind_of(name), name_of(entry.dtype)), []).append(entry)
    for (kind, dtype), entries in sorted(groups.items(), key=lambda item: -sum(entry.num_bytes for entry in item[1])):
        numel, size = sum(entry.numel for entry in entries), sum(entry.num_bytes for entry in entries)
        table.add_row(kind, dtype, f"{len(entries):,}", f"{numel:,}", format_bytes(size))
    return table


def _tensor_table(manifest: Manifest) -> Any:
    from rich.table import Table
    from rich.text import Text

    from shardwise.checkpoint.manifest import name_of

    table = Table(box=None, pad_edge=False)
    for column in ("tensor", "dtype", "shape", "bytes", "pieces"):
        table.add_column(column, justify="right" if column in ("bytes", "pieces") else "left", overflow="fold")
    for name, entry in manifest.tensors.items():
        label = name if len(entry.names) < 2 else f"{name} (tied: {', '.join(entry.names[1:])})"
        shape = " x ".join(map(str, entry.shape)) or "-"
        table.add_row(Text(label), name_of(entry.dtype), shape, format_bytes(entry.num_bytes), str(len(entry.pieces)))
    return table


# Whether it is whole


def verify_all(args: argparse.Namespace) -> int:
    """Test one checkpoint, or all in a folder. The exit code is 1 if any is not whole."""
    from shardwise.checkpoint.folders import find_checkpoints, is_checkpoint, nothing_in, place_of

    place = place_of(args.path)
    places = [place] if is_checkpoint(place) else [found.place for found in find_checkpoints(place, with_damaged=True)]
    if not places:
        raise nothing_in(place)
    results = {each.path: _verify(each, is_quiet=args.json) for each in places}
    if args.json:
        print(json.dumps({path: {"is_whole": error is None, "error": error} for path, error in results.items()}))
    bad = [error for error in results.values() if error is not None]
    if bad and not args.json:
        raise CommandError(f"{len(bad)} of {len(results)} checkpoints cannot be used: {bad[0]}", ExitCode.FAILED)
    return ExitCode.FAILED if bad else ExitCode.DONE


def _verify(place: Place, *, is_quiet: bool) -> str | None:
    from shardwise.checkpoint.folders import read_manifest
    from shardwise.checkpoint.reader import Reader

    try:
        manifest = read_manifest(place)
        with Reader(place, manifest) as reader, _progress(place.path, manifest.num_bytes, is_quiet=is_quiet) as on_bytes:
            reader.check_all(on_bytes)
    except CheckpointError as error:
        if not is_quiet:
            print(f"{place.path}: {error}")
        return str(error)
    if not is_quiet:
        print(
            f"{place.path}: whole, {format_bytes(manifest.num_bytes)} in {len(manifest.files)} files, step {manifest.summary.step:,}"
        )
    return None


@contextmanager
def _progress(what: str, num_bytes: int, *, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=is_quiet or not console.is_terminal) as progress:
        task = progress.add_task(Path(what).name, total=num_bytes)
        yield lambda count: progress.advance(task, count)


# Other formats


def export_one(args: argparse.Namespace) -> int:
    """Write in another format."""
    from shardwise.checkpoint.convert import export_bytes, export_checkpoint
    from shardwise.checkpoint.folders import place_of

    if args.sides is not None and (args.to != "hf" or not os.path.isdir(args.sides)):
        raise UsageError(f"--with takes a folder with configuration and tokenizer, for --to hf, but got {args.sides}.")
    place, target = place_of(args.path), Path(args.target)
    sides = None if args.sides is None else Path(args.sides)
    with _progress(args.target, export_bytes(place), is_quiet=False) as on_bytes:
        source = export_checkpoint(place, target, args.to, on_bytes, sides)
    print(f"{source.path} was exported to {target}.")
    return ExitCode.DONE


def import_one(args: argparse.Namespace) -> int:
    """Take in from another format."""
    import shardwise
    from shardwise.checkpoint.convert import import_checkpoint
    from shardwise.checkpoint.folders import place_of
    from shardwise.checkpoint.places import explaining

    source = Path(args.source).expanduser()
    with explaining(source, "looked into"):
        if not source.is_dir():
            raise UsageError(
                f"There is no folder {source}. Give one of Hugging Face, torch.distributed.checkpoint or DeepSpeed."
            )
        num_bytes = sum(path.stat().st_size for path in source.iterdir() if path.is_file())
    with _progress(args.target, num_bytes, is_quiet=False) as on_bytes:
        count = import_checkpoint(source, place_of(args.target), on_bytes, {"shardwise": shardwise.__version__})
    print(f"{count} tensors of {source} are now in {args.target}.")
    return ExitCode.DONE


# Which may go


def prune_folder(args: argparse.Namespace) -> int:
    """Remove what is not to be kept."""
    from shardwise.checkpoint.folders import Keep, candidates, find_checkpoints, is_checkpoint, nothing_in, place_of, read_head

    if args.keep_last is None and args.keep_every is None:
        raise UsageError("Say what stays: --keep-last N, --keep-every N, or both. The newest checkpoint stays in any case.")
    place = place_of(args.path)
    if is_checkpoint(place):
        raise UsageError(f"{args.path} is itself a checkpoint. Give the folder that holds it.")
    found = find_checkpoints(place)
    if not found:
        read_head(candidates(place)[0])  # Says why what is there cannot be read.
        raise nothing_in(place)
    surplus = Keep(args.keep_last, args.keep_every).surplus(found)
    damage = _verify(found[0].place, is_quiet=True) if surplus else None
    if damage is not None:
        raise CheckpointError(f"Nothing was removed, since the newest checkpoint cannot be used: {damage}")
    _remove(surplus, is_dry=args.dry_run)
    if not args.dry_run:
        for left in place.child("x").clean():
            print(f"removed {left}, which a save had left that did not come to its end")
    print(f"{len(found)} checkpoints were there; the newest is {found[0].place.path}.")
    return ExitCode.DONE


def _remove(surplus: Iterable[Found], *, is_dry: bool) -> None:
    for each in surplus:
        if not is_dry:
            each.place.remove()
        print(f"{'would remove' if is_dry else 'removed'} {each.place.path} (step {each.summary.step:,})")
        sys.stdout.flush()
