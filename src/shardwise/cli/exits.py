"""What a command's exit code means, and the errors that carry one."""

from __future__ import annotations

from enum import IntEnum

from shardwise.core.errors import ShardwiseError, UsageError, UsageTypeError


class ExitCode(IntEnum):
    """The same for every command. A command that a signal ended exits with 128 and the signal's number, as in a shell."""

    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    WILL_NOT_FIT = 3


class CommandError(ShardwiseError):
    """A command cannot go on.

    Args:
        message: One line that says what happened and what to do.
        exit_code: What the command exits with.
        detail: Text to show before the message, such as a traceback of the user's own code.
    """

    def __init__(self, message: str, exit_code: int = ExitCode.FAILED, detail: str = "") -> None:
        super().__init__(message)
        self.exit_code = int(exit_code)
        self.detail = detail


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error that ends a command."""
    if isinstance(error, CommandError):
        return error.exit_code
    return ExitCode.WRONG_USE if isinstance(error, UsageError | UsageTypeError) else ExitCode.FAILED
