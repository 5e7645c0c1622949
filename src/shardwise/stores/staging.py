"""Memory that bytes pass through on their way between disk and computation, within a budget. Knows bytes, not what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import NamedTuple

import torch

from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes
from shardwise.devices.pool import Poison
from shardwise.stores.direct_io import aligned_memory
from shardwise.stores.ranges import BLOCK_BYTES, FreeRanges, round_down, round_up
from shardwise.stores.store import Ticket


class _Lent(NamedTuple):
    """What was asked for, and what it takes of the arena."""

    asked_bytes: int
    num_bytes: int


class _Promise(NamedTuple):
    """A buffer that comes back by itself."""

    tickets: tuple[Ticket, ...]
    offset: int

    @property
    def is_done(self) -> bool:
        """Whether nothing is under way any more."""
        return all(ticket.is_done for ticket in self.tickets)


@dataclass(frozen=True)
class StagingReport:
    """What is lent of the budget, and was at most."""

    budget_bytes: int
    live_bytes: int
    peak_bytes: int
    slack_bytes: int
    """What of the live bytes nobody asked for: buffers are whole blocks."""
    largest_free_bytes: int
    """The most that can be taken now."""
    touched_bytes: int
    """How far the arena was ever lent: no more than this is resident."""
    wait_seconds: float
    """How long requests waited for buffers to come back."""


class Staging:
    """Buffers at addresses that suit the disk, cut from one arena that is never larger than the budget.

    What was given back serves the next request, without fresh pages. Requests are served from the beginning of the arena: pages
    behind what was ever lent at once cost nothing.

    Args:
        budget_bytes: The most memory that it may hold.
        on_change: Told the number of live bytes when it changes, in the thread that takes or gives.

    >>> staging = Staging(8192)
    >>> buffer = staging.take(5000)
    >>> buffer.shape, buffer.data_ptr() % 4096, staging.live_bytes
    (torch.Size([5000]), 0, 8192)
    >>> staging.give(buffer); staging.live_bytes
    0
    """

    def __init__(self, budget_bytes: int, *, on_change: Callable[[int], None] | None = None) -> None:
        if budget_bytes < BLOCK_BYTES:
            raise UsageError(f"A budget for staging must be at least {BLOCK_BYTES} bytes but got {budget_bytes}.")
        self.budget_bytes = budget_bytes
        self._arena: torch.Tensor | None = aligned_memory(round_down(budget_bytes))
        self._free = FreeRanges(self._arena.nbytes)
        self._lent: dict[int, _Lent] = {}
        self._promises: list[_Promise] = []
        self._on_change = on_change
        self._peak_bytes = self._touched_bytes = 0
        self.wait_seconds = 0.0
        """How long requests waited for buffers to come back."""
        # While a request waits, it keeps the lock: what it waits for is done by threads that never come here.
        self._lock = RLock()

    @property
    def live_bytes(self) -> int:
        """What is lent, in whole blocks."""
        with self._lock:
            self._collect()
            return self._live_bytes

    @property
    def report(self) -> StagingReport:
        """What is lent of the budget, and was at most."""
        with self._lock:
            live_bytes = self.live_bytes
            slack_bytes = live_bytes - sum(lent.asked_bytes for lent in self._lent.values())
            largest_bytes = self._free.largest_bytes
            return StagingReport(
                self.budget_bytes,
                live_bytes,
                self._peak_bytes,
                slack_bytes,
                largest_bytes,
                self._touched_bytes,
                self.wait_seconds,
            )

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer with whatever values; waits, if need be, for those that were promised to come back.

        Raises:
            UsageError: It does not fit, and nothing that was promised will change that.
        """
        with self._lock:
            buffer = self.take_at_once(num_bytes)
            room_bytes = round_up(num_bytes)
            if buffer is None and room_bytes > self._open_arena().nbytes:
                raise UsageError(
                    f"A buffer of {format_bytes(room_bytes)} ({room_bytes} bytes) is needed between disk and memory, but the budget "
                    f"for staging is {format_bytes(self.budget_bytes)}. Raise it to {room_bytes} bytes at least."
                )
            while buffer is None:
                self._wait_for_promise(room_bytes)
                buffer = self.take_at_once(num_bytes)
            return buffer

    def take_at_once(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer with whatever values, or None if it does not fit now."""
        with self._lock:
            arena = self._open_arena()
            room_bytes = round_up(num_bytes)
            if room_bytes < 0:
                raise UsageError(f"A buffer cannot have {num_bytes} bytes.")
            self._collect()
            offset = self._free.take(room_bytes)
            if offset is None:
                return None
            if room_bytes:
                self._lent[offset] = _Lent(num_bytes, room_bytes)
                self._touched_bytes = max(self._touched_bytes, offset + room_bytes)
                self._changed()
            return arena[offset : offset + num_bytes]

    def _wait_for_promise(self, room_bytes: int) -> None:
        if not self._promises:
            live_bytes, free_bytes = self.live_bytes, self._free.free_bytes
            raise UsageError(
                f"A buffer of {format_bytes(room_bytes)} is needed between disk and memory, but {format_bytes(live_bytes)} of the "
                f"budget of {format_bytes(self.budget_bytes)} are lent until somebody gives them back, and of the "
                f"{format_bytes(free_bytes)} that are free at most {format_bytes(self._free.largest_bytes)} lie together. "
                f"Raise the budget to {self.budget_bytes + room_bytes} bytes, or give buffers back first."
            )
        # Those that failed come back as well: whoever holds the ticket, or reads what was written, is told.
        self.wait_seconds += sum(ticket.join() for ticket in self._promises[0].tickets)
        self._collect()

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back, or any view from its beginning: its values are nobody's from here on."""
        with self._lock:
            if buffer.nbytes and self._arena is not None:
                self._give(self._offset_of(buffer, self._arena))

    def give_when(self, tickets: Ticket | Sequence[Ticket], buffer: torch.Tensor) -> None:
        """Promise that a buffer comes back as soon as all tickets are done; nobody else gives it back then."""
        tickets = (tickets,) if isinstance(tickets, Ticket) else tuple(tickets)
        with self._lock:
            if buffer.nbytes and self._arena is not None:
                self._promises.append(_Promise(tickets, self._offset_of(buffer, self._arena)))

    def close(self) -> None:
        """Let the memory go. Buffers that are still lent keep it until nobody holds them, and need not be given back."""
        with self._lock:
            self._arena = None
            self._free = FreeRanges()
            self._lent.clear()
            self._promises.clear()
            self._changed()

    def _open_arena(self) -> torch.Tensor:
        if self._arena is None:
            raise UsageError("The memory for staging is closed: no buffer can be taken from it any more.")
        return self._arena

    def _offset_of(self, buffer: torch.Tensor, arena: torch.Tensor) -> int:
        offset = buffer.data_ptr() - arena.data_ptr()
        if offset not in self._lent or any(promise.offset == offset for promise in self._promises):
            raise UsageError(f"A tensor of {buffer.nbytes} bytes was given back that is not lent, or was promised already.")
        return offset

    @property
    def _live_bytes(self) -> int:
        return (0 if self._arena is None else self._arena.nbytes) - self._free.free_bytes

    def _collect(self) -> None:
        """Take back what was promised and is done."""
        done = [promise for promise in self._promises if promise.is_done]
        for promise in done:
            self._promises.remove(promise)
            self._give(promise.offset)

    def _give(self, offset: int) -> None:
        num_bytes = self._lent.pop(offset).num_bytes
        if Poison.enabled and self._arena is not None:
            self._arena[offset : offset + num_bytes].fill_(0xFF)  # NaN in every floating dtype.
        self._free.give(offset, num_bytes)
        self._changed()

    def _changed(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        if self._on_change is not None:
            self._on_change(self._live_bytes)
