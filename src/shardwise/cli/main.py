"""The ``shardwise`` command: reads the arguments, runs one command, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import platform
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

import shardwise
from shardwise.cli import checkpoint, completion, doctor, report, run, train, verify
from shardwise.cli.exits import CommandError, exit_code_of
from shardwise.cli.parsing import Parser
from shardwise.core.errors import ShardwiseError

_EPILOG = """\
exit codes:
  0 done, 1 failed, 2 wrong use, 3 will not fit, 128 + N ended by signal N

example:
  shardwise train --ranks 2 --stage 3
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        exit_code: int = args.execute(args)
    except ShardwiseError as error:
        _explain(error, is_debug=args.debug)
        return exit_code_of(error)
    except KeyboardInterrupt:
        # Before any rank was started: later, the launcher ends them and says so.
        print("shardwise: Stopped by SIGINT: nothing was started.", file=sys.stderr)
        return 128 + signal.SIGINT
    return exit_code


def build_parser() -> Parser:
    """The parser of all commands."""
    versions = f"shardwise {shardwise.__version__} (torch {_torch_version()}, Python {platform.python_version()})"
    parser = Parser(
        prog="shardwise",
        description="Train PyTorch models that do not fit, with the loop that you already have.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=versions)
    parser.add_argument("--debug", action="store_true", help="show tracebacks and launcher logs")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (train, run, report, checkpoint, verify, doctor, completion):
        command.add_to(commands)
    return parser


def _torch_version() -> str:
    """By its metadata: to import torch for a help text would take seconds."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"


def _explain(error: ShardwiseError, *, is_debug: bool) -> None:
    if isinstance(error, CommandError) and error.detail:
        print(error.detail.rstrip(), file=sys.stderr)
    elif is_debug:
        traceback.print_exception(error)
    print(f"shardwise: {error}", file=sys.stderr)
