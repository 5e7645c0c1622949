"""How arguments are read: one line for a mistake, an example in every help text."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import NoReturn, Protocol

from shardwise.cli.exits import ExitCode

MAX_PORT = 65535


class Execute(Protocol):
    """What runs a command."""

    def __call__(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look, and exit."""
        self.exit(ExitCode.WRONG_USE, f"{self.prog}: error: {message.rstrip('.')}. See '{self.prog} --help'.\n")


Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_command(commands: Commands[Parser], name: str, execute: Execute, *, summary: str, example: str) -> Parser:
    """Add a command with its help text."""
    epilog = "example:\n" + textwrap.indent(example, "  ")
    description = summary[0].upper() + summary[1:] + "."
    formatter = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=summary, description=description, epilog=epilog, formatter_class=formatter)
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks and launcher logs")
    parser.set_defaults(execute=execute)
    return parser


def add_ranks(parser: Parser, default: int | None = 2, otherwise: str = "as the recipe says") -> None:
    """Add ``--ranks`` and ``--port``; without a default, the text says how many ranks there are."""
    text = f"processes on this machine (default: {default or otherwise})"
    parser.add_argument("--ranks", type=whole_number(1), default=default, metavar="N", help=text)
    parser.add_argument("--port", type=port_number, default=0, metavar="N", help="where ranks meet (default: a free port)")


def port_number(text: str) -> int:
    """A type of argument: a port."""
    number = whole_number(1)(text)
    if number > MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to {MAX_PORT} but got {text!r}")
    return number


def whole_number(minimum: int) -> Callable[[str], int]:
    """A type of argument: a whole number, ``minimum`` or more."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise argparse.ArgumentTypeError(f"expected a whole number, {minimum} or more, but got {text!r}")
        return number

    return parse
