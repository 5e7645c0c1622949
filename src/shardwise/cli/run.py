"""``shardwise run``: any script, as many ranks on this machine."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from shardwise.cli.exits import CommandError, ExitCode
from shardwise.cli.launch import RanksFailedError, launch
from shardwise.cli.parsing import Commands, Parser, add_command, add_ranks
from shardwise.cli.simulated import parse_devices, prepare
from shardwise.core.errors import UsageError

_EXAMPLE = """\
shardwise run --ranks 4 train.py --learning-rate 3e-4
shardwise run --ranks 4 -m package.train --learning-rate 3e-4
shardwise run --simulate 4x8GiB train.py"""


_RANKS = 2


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    summary = "run a script or module as many ranks on this machine, as torchrun does"
    parser = add_command(commands, "run", execute, summary=summary, example=_EXAMPLE)
    parser.usage = "shardwise run [-h] [--debug] [--ranks N] [--port N] [--simulate NxSIZE] [-m] SCRIPT [ARGUMENT ...]"
    add_ranks(parser, None, "2, or one for each simulated device")
    simulate = "rehearse on N simulated accelerators of that memory, such as 4x8GiB, a rank for each; says whether it fits"
    parser.add_argument("--simulate", metavar="NxSIZE", help=simulate)
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="passed on to the script")


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.is_module:
        _check_module(args.script)
    else:
        _check_script(args.script)
    target = ["-m", args.script] if args.is_module else [args.script]
    # -u: a rank that is killed would take the lines of its buffer with it.
    if args.simulate is None:
        command = [sys.executable, "-u", *target, *args.arguments]
        launch(command, args.ranks or _RANKS, pass_signal=True, port=args.port, is_debug=args.debug)
        return ExitCode.DONE
    devices = parse_devices(args.simulate)
    if args.ranks not in (None, devices.count):
        raise UsageError(
            f"--simulate {args.simulate} is a rank for each of {devices.count} devices, but --ranks is {args.ranks}."
        )
    prepare(sys.stderr)
    command = [sys.executable, "-u", "-m", "shardwise.cli.simulated", args.simulate, *target, *args.arguments]
    try:
        launch(command, devices.count, pass_signal=True, port=args.port, is_debug=args.debug)
    except RanksFailedError as error:
        if ExitCode.WILL_NOT_FIT in error.exit_codes:
            text = f"It does not fit on {args.simulate}: see above what ran out and what would fit."
            raise CommandError(text, ExitCode.WILL_NOT_FIT) from error
        raise
    return ExitCode.DONE


def _check_script(script: str) -> None:
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"{script} is a directory without __main__.py. Name a Python file, or a module with -m.")
    if not path.exists():
        raise UsageError(f"There is no script {script}. Give its path, or -m and the name of a module.")


def _check_module(name: str) -> None:
    # As `python -m` does in the ranks.
    sys.path.insert(0, os.getcwd())
    try:
        is_found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        is_found = False
    if not is_found:
        raise UsageError(f"There is no module {name} in the current directory or on Python's path.")
