"""Starts ranks on this machine through torch's elastic launcher, and says which of them failed.

It knows nothing of what the ranks do. They find each other on 127.0.0.1, by the variables that torchrun sets as well.
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
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from shardwise.cli.exits import CommandError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RanksFailedError(CommandError):
    """One or more ranks failed, and all others were ended.

    Attributes:
        is_killed: Whether one was killed by a signal: then the errors of the others are consequences.
    """

    def __init__(self, failures: dict[int, ProcessFailure], num_ranks: int) -> None:
        # Ranks that failed by themselves, not those that were ended because of them.
        own = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM} or failures
        killed = {rank: failure for rank, failure in own.items() if failure.exitcode < 0}
        parts = [f"rank {rank} of {num_ranks} {_describe(failure)}" for rank, failure in sorted((killed or own).items())]
        super().__init__("; ".join(parts) + ".")
        self.is_killed = bool(killed)


class StoppedError(CommandError):
    """A signal ended the launcher and all its ranks."""


def launch(command: Sequence[str], num_ranks: int, *, pass_signal: bool, is_debug: bool = False) -> None:
    """Run a command as that many ranks, and return when all of them have ended well.

    Args:
        command: A program and its arguments, the same for every rank.
        num_ranks: How many to start.
        pass_signal: Whether ranks get the launcher's own signal, such as Ctrl-C, and may clean up; else they end at once.
        is_debug: Whether the launcher's own log is shown.

    Raises:
        RanksFailedError: A rank failed; the others were ended.
        StoppedError: A signal came; all ranks were ended.
    """
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
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
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
