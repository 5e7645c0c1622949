"""The disk tier of one engine: lines of numbers in its file, and loads that bring several of them through staging memory.

Knows numbers and labels, not what they are for. What goes wrong is noted, so that all ranks can stop together.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock, local

import torch

from shardwise.core.errors import OffloadError, UsageError
from shardwise.core.footprint import LOADS_AT_ONCE  # At work, read ahead, written behind.
from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.devices.malloc import release_unused
from shardwise.stores.disk import DiskStore
from shardwise.stores.ranges import BLOCK_BYTES, round_up
from shardwise.stores.staging import Staging, StagingReport
from shardwise.stores.store import Slot, Ticket

_MOST_IDLE_BYTES = 16 * 2**20
"""What goes to disk from memory of its own, before such memory is given back to the system."""


_THREAD = local()


@contextmanager
def beside_the_loop() -> Iterator[None]:
    """Around what a thread does beside the loop: what it waits for, the loop does not."""
    _THREAD.is_beside = True
    try:
        yield
    finally:
        _THREAD.is_beside = False


def _is_beside() -> bool:
    return getattr(_THREAD, "is_beside", False)


class Line:
    """Numbers of one dtype in a place on disk, which goes with it."""

    def __init__(self, tier: DiskTier, numel: int, dtype: torch.dtype, label: str, kind: Kind) -> None:
        self.tier = tier
        self.numel = numel
        self.dtype = dtype
        self.kind = kind
        tier.sweep()
        self._slot = tier.store.reserve(numel * dtype.itemsize, label)
        tier.ledger.add(kind, self.num_bytes, Tier.DISK)

    @property
    def num_bytes(self) -> int:
        """What it takes on disk."""
        return self.numel * self.dtype.itemsize

    def get(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Some of the numbers, in memory of their own. Waits.

        Raises:
            OffloadError: They cannot be read.
        """
        values = torch.empty((self.numel if stop is None else stop) - start, dtype=self.dtype)
        self.tier.wait_for([self.read(values, start)])
        return values

    def set(self, values: torch.Tensor, start: int = 0) -> None:
        """Overwrite some of the numbers with those of a dense line. Waits.

        Raises:
            OffloadError: They cannot be written.
        """
        self.tier.wait_for([self.write(values.detach().to("cpu", self.dtype).contiguous(), start)])
        self.tier.give_back(values.nbytes)

    def read(self, target: torch.Tensor, start: int = 0) -> Ticket:
        """Begin to fill a line of the host."""
        self.tier.read_bytes += target.nbytes
        return self.tier.store.read(self._slot, target, at=start * self.dtype.itemsize)

    def write(self, source: torch.Tensor, start: int = 0) -> Ticket:
        """Begin to overwrite some of the numbers with a line of the host."""
        self.tier.forget_ahead(self)
        self.tier.written_bytes += source.nbytes
        return self.tier.store.write(self._slot, source, at=start * self.dtype.itemsize)

    def __del__(self) -> None:
        if hasattr(self, "_slot") and not sys.is_finalizing():
            # At any moment, also while the store holds its lock: it is freed later.
            self.tier.discarded.append((self._slot, self.kind))


class Load:
    """Lines in one buffer of staging memory, on their way in, at hand, or on their way out."""

    def __init__(self, tier: DiskTier, lines: Sequence[Line], buffer: torch.Tensor) -> None:
        self.lines = tuple(lines)
        self._tier = tier
        self._buffer = buffer
        self._tickets: list[Ticket] = []
        self._views: dict[int, torch.Tensor] = {}
        offset = 0
        for line in lines:
            self._views[id(line)] = buffer[offset : offset + line.num_bytes].view(line.dtype)
            offset += round_up(line.num_bytes)

    def view(self, line: Line) -> torch.Tensor:
        """The numbers of a line."""
        return self._views[id(line)]

    def read(self) -> None:
        """Begin to bring all lines."""
        self._tickets = [line.read(self.view(line)) for line in self.lines]

    def wait(self) -> None:
        """Until all lines are here.

        Raises:
            OffloadError: One could not be read. The load is given back then.
        """
        tickets, self._tickets = self._tickets, []
        try:
            self._tier.wait_for(tickets)
        except OffloadError:
            self.drop()
            raise

    def write(self, lines: Sequence[Line]) -> None:
        """Begin to put some of the lines back, and let the memory go when that is done."""
        tickets = []
        try:
            for line in lines:
                tickets.append(line.write(self.view(line)))
        finally:
            self._tier.note_writes(tickets)
            self._views.clear()
            self._tier.staging.give_when(tickets, self._buffer)

    def drop(self) -> None:
        """Nobody needs the numbers: let the memory go."""
        self._tier.join(self._tickets)
        self._views.clear()
        self._tier.staging.give(self._buffer)


class DiskTier:
    """The file of one engine on one rank, and the memory between it and the computation.

    Args:
        least_bytes: What the largest load takes, as far as it is known.
        staging_bytes: The most memory for loads; as much as is useful, if None.
        device: Which computes: if it is the CPU, the host's memory is the device's.
    """

    def __init__(
        self, store: DiskStore, ledger: Ledger, least_bytes: int, staging_bytes: int | None, device: torch.device
    ) -> None:
        self.store = store
        self.ledger = ledger
        self.is_closed = False
        self.read_bytes = self.written_bytes = 0
        self.failure: str | None = None
        """What went wrong. From then on nothing here can be relied on, until all state is loaded anew."""
        self.is_stopped = False
        """Whether all ranks know of it."""
        self.discarded: deque[tuple[Slot, Kind]] = deque()
        """Places of lines that are gone."""
        self._is_elastic = staging_bytes is None
        self._host_tier = Tier.DEVICE if device.type == "cpu" else Tier.HOST
        self._aheads: dict[tuple[int, ...], Load] = {}
        self._writes: list[Ticket] = []
        self._idle_bytes = 0
        self._joined_seconds = 0.0
        self._lock = RLock()  # An update that runs beside a step writes, while the step looks at what was written.
        self.staging = self._make_staging(staging_bytes or LOADS_AT_ONCE * least_bytes)

    @property
    def waited_seconds(self) -> float:
        """How long the loop has waited for what is read, for what is written, and for memory to come back from it."""
        return self._joined_seconds + self.staging.wait_seconds

    def join(self, tickets: Sequence[Ticket]) -> None:
        """Wait until all have ended, well or not."""
        seconds = sum(ticket.join() for ticket in tickets)
        self._joined_seconds += 0.0 if _is_beside() else seconds

    def wait_for(self, tickets: Sequence[Ticket]) -> None:
        """Wait until all have ended.

        Raises:
            OffloadError: One has failed.
        """
        self.join(tickets)
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def use_staging(self, budget_bytes: int) -> None:
        """Have more or less memory for loads. Waits until nothing is under way."""
        self.settle()
        self._joined_seconds += self.staging.wait_seconds
        self.staging.close()
        self.staging = self._make_staging(budget_bytes)

    def _make_staging(self, budget_bytes: int) -> Staging:
        return Staging(max(budget_bytes, BLOCK_BYTES), on_change=self._book_staging)

    def _book_staging(self, live_bytes: int) -> None:
        self.ledger.set(Kind.STAGING, live_bytes, self._host_tier)

    @property
    def report(self) -> StagingReport:
        """What is lent of the memory for loads, and was at most."""
        return self.staging.report

    def give_back(self, num_bytes: int) -> None:
        """So many bytes went to disk from memory of their own, which is let go: the allocator would find no use for all of it."""
        self._idle_bytes += num_bytes
        if self._idle_bytes > _MOST_IDLE_BYTES:
            self._idle_bytes = 0
            release_unused()

    def sweep(self) -> None:
        """Free the places of lines that are gone."""
        with self._lock:
            while self.discarded and not self.is_closed:
                slot, kind = self.discarded.popleft()
                self.store.free(slot)
                self.ledger.add(kind, -slot.num_bytes, Tier.DISK)

    # Loads

    def ahead(self, lines: Sequence[Line]) -> bool:
        """Begin to bring lines that will be loaded soon; returns whether there was room."""
        key = tuple(map(id, lines))
        if not lines or key in self._aheads or self.failure is not None:
            return True
        buffer = self.staging.take_at_once(_room_bytes(lines))
        if buffer is None:
            return False
        load = self._aheads[key] = Load(self, lines, buffer)
        load.read()
        return True

    def load(self, lines: Sequence[Line]) -> Load:
        """Bring lines, and wait until they are here.

        Raises:
            OffloadError: One could not be read.
        """
        load = self._aheads.pop(tuple(map(id, lines)), None)
        if load is None:
            load = self.blank(lines)
            load.read()
        load.wait()
        return load

    def blank(self, lines: Sequence[Line]) -> Load:
        """Memory for lines that are about to be written, with whatever values."""
        num_bytes = _room_bytes(lines)
        if num_bytes > self.staging.budget_bytes and self._is_elastic:
            self.use_staging(LOADS_AT_ONCE * num_bytes)
        while True:
            waited_seconds = self.staging.wait_seconds
            try:
                buffer = self.staging.take(num_bytes)
                self._joined_seconds -= self.staging.wait_seconds - waited_seconds if _is_beside() else 0.0
                return Load(self, lines, buffer)
            except UsageError as error:
                if not self._aheads:
                    raise OffloadError(f"{error} It is the plan's staging_bytes.") from error
                self.forget_all_ahead()

    def forget_ahead(self, line: Line) -> None:
        """What was read ahead of a line would be out of date."""
        for key in [key for key in self._aheads if id(line) in key]:
            self._aheads.pop(key).drop()

    def forget_all_ahead(self, *, but: Kind | None = None) -> None:
        """Let go of all that was read ahead, but for loads in which a kind of state is."""
        for key, load in list(self._aheads.items()):
            if all(line.kind is not but for line in load.lines):
                del self._aheads[key]
                load.drop()

    # Errors

    def fail(self, error: BaseException | str) -> None:
        """Note what went wrong: ranks tell each other when they next meet."""
        if self.failure is None:
            self.failure = str(error)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Leave the rest of a block out where the disk refuses, and note it: an error raised at once would leave peers waiting."""
        try:
            yield
        except OffloadError as error:
            self.fail(error)

    def forgive(self) -> None:
        """All state is about to be loaded anew."""
        self.settle()
        self.failure, self.is_stopped = None, False

    def refuse_failed(self, what: str) -> None:
        """Refuse to go on with the state of a step that failed.

        Raises:
            OffloadError: There is such a state.
        """
        if self.failure is not None:
            raise OffloadError(
                f"{what} The disk tier has failed: {self.failure} Load a checkpoint first, or start again from one."
            )

    def note_writes(self, tickets: Sequence[Ticket]) -> None:
        """Remember writes that are under way: nobody waits for them, but all are looked at."""
        with self._lock:
            self.check_writes()
            self._writes.extend(tickets)

    def check_writes(self) -> None:
        """Note what went wrong of the writes that have ended."""
        with self._lock:
            done = [ticket for ticket in self._writes if ticket.is_done]
            self._writes = [ticket for ticket in self._writes if ticket not in done]
        for ticket in done:
            if ticket.error is not None:
                self.fail(ticket.error)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        self.forget_all_ahead()
        self.join(self._writes)
        self.check_writes()
        self.sweep()

    def close(self) -> None:
        """Let the file and the memory go."""
        self.is_closed = True
        self._aheads.clear()
        self.store.close()
        self.staging.close()


def _room_bytes(lines: Sequence[Line]) -> int:
    return sum(round_up(line.num_bytes) for line in lines)
