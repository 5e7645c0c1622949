"""Flights: one job on its ranks, from the moment it is sent until every rank is idle again or gone.

It owns the parent's end of each worker process (`WorkerHandle`) and the verdict on each rank (`Flight`). It does not decide
which processes exist: that is for the `World`.
"""

import os
import pickle
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import connection, get_context
from typing import Any

from shardwise.testing.worker import END, IDLE, READY, STACK_SIGNAL, Answer, Call, Failure, Job, work

START_SECONDS = 120.0
STACK_SECONDS = 1.0
WATCH_SECONDS = 1.0
LEAVE_SECONDS = 60.0
"""How long ranks of which none has failed may take to leave their process group: on a busy machine that is long, and no fault."""


class WorkerHandle:
    """The parent's end of one worker process."""

    def __init__(self, rank: int, num_devices: int = 0) -> None:
        context = get_context("spawn")
        self.pipe, pipe_end = context.Pipe()
        self._stacks, stacks_end = context.Pipe(duplex=False)
        ends = (pipe_end, stacks_end, num_devices)
        self._process = context.Process(target=work, args=ends, name=f"shardwise-rank{rank}", daemon=True)
        self._process.start()
        # Only the worker may hold its ends, or its death would go unnoticed.
        pipe_end.close()
        stacks_end.close()
        self._is_ready = False

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.is_alive()

    def await_ready(self) -> None:
        """Wait until the process has imported what it needs. This time is no part of any job's timeout."""
        with suppress(EOFError):
            self._is_ready = self._is_ready or self.receive(START_SECONDS) == READY
        if not self._is_ready:
            exit_code = self.kill()
            raise RuntimeError(f"{self._process.name} did not start within {START_SECONDS:.0f} s (exit code {exit_code}).")

    def send(self, message: bytes) -> None:
        """Send a message. If the process is dead, that is found out when its answer is due."""
        with suppress(OSError):
            self.pipe.send_bytes(message)

    def receive(self, timeout_seconds: float) -> bytes | None:
        """Return the next message, or None if there is none in time.

        Raises:
            EOFError: the process died.
        """
        try:
            return self.pipe.recv_bytes() if self.pipe.poll(max(0.0, timeout_seconds)) else None
        except OSError as error:
            raise EOFError(str(error)) from error

    def read_stack(self) -> str:
        """Return the Python stacks of the process's threads, or nothing if it does not react."""
        chunks: list[bytes] = []
        if self._process.pid is None or not self.is_alive():
            return ""
        with suppress(OSError):
            os.kill(self._process.pid, STACK_SIGNAL)
            while self._stacks.poll(0.05 if chunks else STACK_SECONDS) and (chunk := os.read(self._stacks.fileno(), 65536)):
                chunks.append(chunk)
        return b"".join(chunks).decode(errors="replace")

    def kill(self, *, patience_seconds: float = 0.0) -> int | None:
        """End the process if it does not end by itself, and return its exit code. It may be called again."""
        self._process.join(patience_seconds)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._stacks.close()
        return self._process.exitcode


class Flight:
    """One job in flight.

    Every rank of it ends in one of four ways: with a result, with a failure, dead, or stuck and then killed. As soon as one
    rank fails, the others have `grace_seconds` left, and ranks that have answered leave the process group, so that their peers
    notice. If none fails, all leave together.
    """

    def __init__(
        self, workers: dict[int, WorkerHandle], timeout_seconds: float, grace_seconds: float, expect_deaths: Collection[int]
    ) -> None:
        self.errors: dict[int, Failure] = {}
        self._workers = workers
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self._expect_deaths = frozenset(expect_deaths)
        self._deadline = time.monotonic() + timeout_seconds
        self._pending = set(workers)
        self._answered: set[int] = set()
        self._leaving: set[int] = set()
        self._pickled_results: dict[int, bytes] = {}

    def send(self, call: Call, store_file: str | None) -> None:
        """Send the call to all ranks."""
        for rank, worker in self._workers.items():
            job = Job(call, rank, len(self._workers), store_file, self._timeout_seconds)
            worker.send(pickle.dumps(job))

    def collect(self) -> None:
        """Wait until every rank has ended, and leave every worker idle or dead."""
        while self._pending and time.monotonic() < self._deadline:
            for rank in self._find_ready():
                self._take_answer(rank)
            if self.errors:
                self._dismiss_answered()
        self._kill_stuck(self._pending, self._describe_delay())
        self._dismiss_answered()
        self._await_idle()

    def kill(self) -> None:
        """Kill all workers of the flight."""
        for worker in self._workers.values():
            worker.kill()

    def results(self) -> list[Any]:
        """Return the results by rank, None for ranks that died as expected."""
        return [
            pickle.loads(self._pickled_results[rank]) if rank in self._pickled_results else None
            for rank in sorted(self._workers)
        ]

    def _find_ready(self) -> list[int]:
        """Return the pending ranks that have something to say or are dead, after waiting for the first of them."""
        pipes = {self._workers[rank].pipe: rank for rank in self._pending}
        wait_seconds = min(WATCH_SECONDS, max(0.0, self._deadline - time.monotonic()))
        ready = [pipes[pipe] for pipe in connection.wait(list(pipes), wait_seconds) if isinstance(pipe, connection.Connection)]
        # A process that the dead rank started may hold its pipe open: then only the parent's own look at it tells.
        return ready or [rank for rank in self._pending if not self._workers[rank].is_alive()]

    def _take_answer(self, rank: int) -> None:
        self._pending.discard(rank)
        try:
            message = self._workers[rank].receive(0.0)
        except EOFError:
            message = None
        if message is None:
            self._note_death(rank)
            return
        self._answered.add(rank)
        answer: Answer = pickle.loads(message)
        if answer.failure is not None:
            self._note_error(rank, answer.failure)
        elif rank in self._expect_deaths:
            self._note_error(rank, Failure("DidNotDie", "the rank is in expect_deaths but returned"))
        else:
            self._pickled_results[rank] = answer.pickled_result

    def _note_error(self, rank: int, failure: Failure) -> None:
        self.errors.setdefault(rank, failure)
        self._deadline = min(self._deadline, time.monotonic() + self._grace_seconds)

    def _note_death(self, rank: int) -> None:
        exit_code = self._workers[rank].kill(patience_seconds=self._grace_seconds)
        self._pickled_results.pop(rank, None)
        if rank not in self._expect_deaths:
            self._note_error(rank, Failure("ProcessDied", _describe_exit(exit_code)))

    def _kill_stuck(self, ranks: Collection[int], reason: str) -> None:
        # All stacks before the first kill: it would move the others on.
        stacks = {rank: self._workers[rank].read_stack() for rank in sorted(ranks)}
        for rank, stack in stacks.items():
            self._note_error(rank, Failure("Stuck", reason, stack))
            self._workers[rank].kill()

    def _describe_delay(self) -> str:
        if self.errors:
            return f"still running {self._grace_seconds:g} s after rank {next(iter(self.errors))} failed"
        return f"still running after the timeout of {self._timeout_seconds:g} s"

    def _dismiss_answered(self) -> None:
        """Let the ranks that have answered leave the process group."""
        for rank in self._answered - self._leaving:
            self._workers[rank].send(END)
        self._leaving |= self._answered

    def _await_idle(self) -> None:
        patience_seconds = self._grace_seconds if self.errors else max(self._grace_seconds, LEAVE_SECONDS)
        deadline = time.monotonic() + patience_seconds
        for rank in sorted(self._leaving):
            try:
                is_idle = self._workers[rank].receive(deadline - time.monotonic()) == IDLE
            except EOFError:
                self._note_death(rank)
                continue
            if not is_idle:
                self._kill_stuck([rank], f"returned, but did not leave the process group within {patience_seconds:g} s")


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"exit code {exit_code} ({signal.Signals(-exit_code).name})"
    return f"exit code {exit_code}"
