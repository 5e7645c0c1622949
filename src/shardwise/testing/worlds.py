"""Worlds: pools of worker processes on which tests run functions as ranks of a fresh process group.

It owns which processes exist. What becomes of one job is in `flights`, what happens inside a process in `worker`.
"""

import atexit
import tempfile
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from shardwise.testing.flights import Flight, WorkerHandle
from shardwise.testing.worker import Failure, pack_call

GRACE_SECONDS = 5.0


class RankError(RuntimeError):
    """One or more ranks of a job raised, died or hung.

    Attributes:
        errors: what went wrong, by rank. Ranks that died come first, then the others in the order in which they failed.
    """

    def __init__(self, errors: dict[int, Failure], job_name: str, num_ranks: int) -> None:
        # A peer of a dead rank may report its lost connection before the death itself is seen.
        self.errors = dict(sorted(errors.items(), key=lambda item: item[1].type_name != "ProcessDied"))
        ranks = ", ".join(str(rank) for rank in self.errors)
        head = f"{job_name} failed on rank{'s' if len(errors) > 1 else ''} {ranks} of {num_ranks}."
        super().__init__("\n".join([head, *(_describe(rank, failure) for rank, failure in self.errors.items())]))


class World:
    """A pool of worker processes. They start when first needed, serve job after job, and are replaced when they die.

        with World(num_ranks_max=4) as world:
            results = world.run(train, config, ranks=2)

    Args:
        num_ranks_max: the most ranks that a job may ask for.
        grace_seconds: how long the other ranks may go on once one has failed.
        num_devices: how many simulated devices each process has; rank r begins on ``sim:r``.
    """

    def __init__(self, num_ranks_max: int = 4, *, grace_seconds: float = GRACE_SECONDS, num_devices: int = 0) -> None:
        self.num_ranks_max = num_ranks_max
        self.grace_seconds = grace_seconds
        self._num_devices = num_devices
        self._workers: dict[int, WorkerHandle] = {}
        self._is_closed = False
        atexit.register(self.close)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        timeout_seconds: float = 120.0,
        process_group: bool = True,
        expect_deaths: Collection[int] = (),
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank of a fresh gloo process group and return the results by rank.

        Args:
            fn: a module-level function. Arguments and results are pickled; tensors travel by value.
            timeout_seconds: when ranks that still run are killed. It is the process group's timeout as well.
            process_group: False leaves the process group to `fn`.
            expect_deaths: ranks whose process must die. Their result is None, and their death is no failure: the other ranks
                have the whole timeout to go on.

        Raises:
            RankError: a rank raised, died or hung, or was expected to die and did not.
        """
        self._check_request(ranks, expect_deaths)
        call = pack_call(fn, args, kwargs)
        flight = Flight(self._ready_workers(ranks), timeout_seconds, self.grace_seconds, expect_deaths)
        try:
            with tempfile.TemporaryDirectory(prefix="shardwise-") as directory:
                flight.send(call, store_file=f"{directory}/store" if process_group else None)
                flight.collect()
        except BaseException:
            # An interrupt or a test's own alarm: nobody knows what the workers are doing now.
            flight.kill()
            raise
        if flight.errors:
            raise RankError(flight.errors, f"{call.module_name}.{call.name}", ranks)
        return flight.results()

    def close(self) -> None:
        """Kill and join all workers."""
        self._is_closed = True
        atexit.unregister(self.close)
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()

    def __enter__(self) -> Self:
        """Return the world itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the world."""
        self.close()

    def _check_request(self, ranks: int, expect_deaths: Collection[int]) -> None:
        if self._is_closed:
            raise RuntimeError("This World is closed. Make a new one.")
        if not 1 <= ranks <= self.num_ranks_max:
            raise ValueError(f"A job takes 1 to {self.num_ranks_max} ranks, not {ranks}. Raise num_ranks_max of the World.")
        if not set(expect_deaths) <= set(range(ranks)):
            raise ValueError(f"expect_deaths names ranks {sorted(expect_deaths)}, but the job has ranks 0 to {ranks - 1}.")

    def _ready_workers(self, num_ranks: int) -> dict[int, WorkerHandle]:
        """Return the workers of the first ranks, all of them waiting for a job. Those that must start do so side by side."""
        for rank in range(num_ranks):
            if rank in self._workers and not self._workers[rank].is_alive():
                self._workers.pop(rank).kill()
            if rank not in self._workers:
                self._workers[rank] = WorkerHandle(rank, self._num_devices)
        workers = {rank: self._workers[rank] for rank in range(num_ranks)}
        for worker in workers.values():
            worker.await_ready()
        return workers


def _describe(rank: int, failure: Failure) -> str:
    return f"--- rank {rank}: {failure.type_name}: {failure.message}\n{failure.traceback_text}".rstrip()
