"""Starts ranks on this machine through torch's elastic launcher, and says which of them failed.

It knows nothing of what the ranks do. They find each other on 127.0.0.1, by the variables that torchrun sets as well. torch is
imported when ranks are started, not before: a help text needs none.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardwise.cli.exits import CommandError
from shardwise.cli.machine import LOCALHOST, check_port, check_ranks

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RanksFailedError(CommandError):
    """One or more ranks failed, and all others were ended.

    Attributes:
        exit_codes: What ranks that failed by themselves exited with.
        killed: Ranks that a signal killed, and its name: the errors of the others are consequences.
    """

    def __init__(self, failures: dict[int, ProcessFailure], num_ranks: int) -> None:
        # Ranks that failed by themselves, not those that were ended because of them.
        own = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM} or failures
        killed = {rank: failure for rank, failure in own.items() if failure.exitcode < 0}
        parts = [f"rank {rank} of {num_ranks} {_describe(failure)}" for rank, failure in sorted((killed or own).items())]
        super().__init__("; ".join(parts) + ".")
        self.exit_codes = {failure.exitcode for failure in own.values()}
        self.killed = {rank: failure.signal_name() for rank, failure in killed.items()}

    @property
    def is_killed(self) -> bool:
        """Whether a signal killed a rank."""
        return bool(self.killed)


class StoppedError(CommandError):
    """A signal ended the launcher and all its ranks."""


def launch(command: Sequence[str], num_ranks: int, *, pass_signal: bool, port: int = 0, is_debug: bool = False) -> None:
    """Run a command as that many ranks, and return when all of them have ended well.

    Args:
        command: A program and its arguments, the same for every rank.
        num_ranks: How many to start.
        pass_signal: Whether ranks get the launcher's own signal, such as Ctrl-C, and may clean up; else they end at once.
        port: Where ranks find each other; any free one, if 0.
        is_debug: Whether the launcher's own log is shown.

    Raises:
        UsageError: There is no room for so many ranks, or the port is in use.
        RanksFailedError: A rank failed; the others were ended.
        StoppedError: A signal came; all ranks were ended.
    """
    check_ranks(num_ranks)
    check_port(port)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    # Ranks share the cores of one machine: with all cores for each, they would only get in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not is_debug:
        _silence_launcher()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as directory, _ending_ranks(pass_signal):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOCALHOST}:{port}",
            local_addr=LOCALHOST,
            max_restarts=0,
            # Short, so that the first rank to fail is seen before the others fail on its account.
            monitor_interval=0.05,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
            # No signals: torch's own handlers leave ranks behind when the user presses Ctrl-C three times.
            signals_to_handle="",
        )
        try:
            launch_agent(config, command[0], list(command[1:]))
        except ChildFailedError as error:
            raise RanksFailedError(error.failures, num_ranks) from error


def _describe(failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        return f"was killed by {failure.signal_name()}"
    # A script that uses torch's @record has left its error in a file.
    recorded: Any = failure.message
    text = f": {recorded['message']}" if isinstance(recorded, dict) and "message" in recorded else ""
    return f"failed with exit code {failure.exitcode}{text.rstrip('.')}"


def _silence_launcher() -> None:
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


@contextmanager
def _ending_ranks(pass_signal: bool) -> Iterator[None]:
    """Turn a signal into an orderly end of all ranks, a second one into a quicker one; further ones change nothing."""
    from torch.distributed.elastic.multiprocessing import SignalException

    received: list[signal.Signals] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) <= 2:
            is_first = len(received) == 1
            raise SignalException("The launcher was stopped.", received[0] if pass_signal and is_first else signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    except SignalException as error:
        # The command ends now, and another Ctrl-C on its way out would only garble its last line.
        before = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
        first = received[0]
        raise StoppedError(f"Stopped by {first.name}: all ranks were ended.", 128 + first) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
