"""The ``Comm`` protocol: collectives that only move bytes and return a ``Handle``. Knows no units and no plans.

Nothing here adds numbers: sums are made by the caller, in the order of the plan's reduction tree, so that every path gives the
same bits. A buffer in flight belongs to its handle and must not be touched before the handle was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise.core.errors import ShardwiseError
from shardwise.wire.notices import LocalNotices, Notices


class Receipt(Protocol):
    """Tells when what this rank brought may be overwritten: where peers read its memory, they may still be at it."""

    @property
    def is_read(self) -> bool:
        """Whether all peers have read it."""
        ...

    def wait(self) -> None:
        """Until they have."""
        ...


class _AllRead:
    """Where bytes are sent, what was waited for is free."""

    is_read = True

    def wait(self) -> None:
        """There is nothing to wait for."""


ALL_READ = _AllRead()


@dataclass
class Moved:
    """How long this rank itself moved bytes of a collective."""

    seconds: float = 0.0


@dataclass
class Handle:
    """A collective under way. ``result`` may be read after ``wait``.

    ``link`` says what its bytes go over; ``moved`` is there where this rank moves them itself, and not the network.
    """

    op: str
    wire_bytes: int = 0
    num_messages: int = 0
    result: torch.Tensor | None = None
    _finish: Callable[[], None] | None = None
    _poll: Callable[[], bool] | None = None
    _keep: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    receipt: Receipt = field(default=ALL_READ, repr=False)
    _cancel: Callable[[], None] | None = None
    link: str = ""
    moved: Moved | None = None
    begin_seconds: float = field(default_factory=time.perf_counter)
    end_seconds: float = 0.0

    @property
    def moving_seconds(self) -> float:
        """How long its bytes were on their way, or at most, where only its beginning and its end are known."""
        return self.end_seconds - self.begin_seconds if self.moved is None else self.moved.seconds

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._finish is None or (self._poll is not None and self._poll())

    @property
    def is_over(self) -> bool:
        """Whether it was waited for or cancelled, so that this rank does nothing more for it."""
        return self._finish is None

    def cancel(self) -> float:
        """Nobody needs the result: do no more than the peers need; returns the seconds waited."""
        if self._cancel is None or self._finish is None:
            return self.wait()
        self._finish = None
        self._cancel()
        self.end_seconds = time.perf_counter()
        return 0.0

    def wait(self) -> float:
        """Block until the buffers are ready; returns the seconds waited."""
        finish, self._finish = self._finish, None
        if finish is None:
            return 0.0
        begin = time.perf_counter()
        finish()
        # Keep the sent buffers until the collective ends: the allocator would hand their memory on.
        self._keep, self._poll = (), None
        self.end_seconds = time.perf_counter()
        return self.end_seconds - begin


@dataclass
class Exchange(Handle):
    """An exchange under way. After ``wait``, ``part`` gives what ranks brought of one's own part, until ``close``.

    Where this rank moves the bytes itself, it does so in ``part``: ``moved`` is then part of the time that is waited.
    """

    _part: Callable[[int, int, int], torch.Tensor] | None = None
    _close: Callable[[], None] | None = None

    def part(self, rank: int, low: int, high: int) -> torch.Tensor:
        """Elements from ``low`` to ``high`` of one's own part, as ``rank`` has them. May be overwritten, also by the next call."""
        if self._part is None:
            raise ShardwiseError("An exchange was read that was never begun, or is closed.")
        return self._part(rank, low, high)

    def close(self) -> None:
        """All was read."""
        self._part = None
        close, self._close = self._close, None
        if close is not None:
            close()


Room = Callable[[], torch.Tensor]
"""Gives the buffer that a collective fills."""


class Comm(Protocol):
    """One lane of collectives. Calls on one lane are issued in the same order by every rank; lanes do not wait for each other.

    ``label`` says what a collective is for; it stands in errors when a rank is lost.
    """

    rank: int
    size: int
    link: str
    """What bytes go over, for reports."""
    is_staged: bool
    """Whether an exchange needs room for all ranks' versions of one's own part; else they are read from where they are."""

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *, label: str) -> Handle:
        """Fill ``buffer`` in place: rank ``r`` contributes elements ``[cuts[r], cuts[r + 1])``."""
        ...

    def gather_parts(self, source: torch.Tensor, cuts: Sequence[int], room: Room, *, label: str) -> Handle:
        """The same from a part that lies elsewhere, into a buffer that is asked for when there is something to fill it with."""
        ...

    def exchange(self, source: torch.Tensor, cuts: Sequence[int], *, room: torch.Tensor | None = None, label: str) -> Exchange:
        """Bring each rank its part of ``source``: every rank's version of one's own part can then be read.

        Args:
            room: Memory for all of these versions, where the comm is staged; it finds some by itself, if None.
        """
        ...

    def swap(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], *, label: str
    ) -> Handle:
        """Send to and receive from single peers, all at once."""
        ...

    def broadcast(self, buffer: torch.Tensor, source: int, *, label: str) -> Handle:
        """Overwrite ``buffer`` with that of rank ``source``."""
        ...

    def gather_small(self, values: torch.Tensor, *, label: str) -> Handle:
        """Every rank's ``values`` (of one size) as the rows of a matrix."""
        ...


@dataclass(frozen=True)
class Lanes:
    """The lanes of one engine, each with an order of its own: parameters, reductions of gradients, reduced gradients.

    ``release`` hands them back when the engine is gone. ``notices`` are for what is done beside the steps, in any thread;
    ``deadline_seconds`` is how long a collective may take.
    """

    gather: Comm
    reduce: Comm
    regather: Comm
    hosts: tuple[str, ...]
    release: Callable[[], None] = lambda: None
    notices: Notices = field(default_factory=LocalNotices)
    deadline_seconds: float = 1800.0

    @property
    def rank(self) -> int:
        """This rank."""
        return self.gather.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.gather.size


def put_in_place(source: torch.Tensor, cuts: Sequence[int], room: Room, rank: int) -> torch.Tensor:
    """A buffer that holds one's own part, and room for the others."""
    buffer = room()
    buffer[cuts[rank] : cuts[rank + 1]].copy_(source)
    return buffer


def part_of(parts: torch.Tensor, own: int) -> Callable[[int, int, int], torch.Tensor]:
    """How parts are read that lie one after the other, ``own`` elements each."""
    return lambda rank, low, high: parts[rank * own + low : rank * own + high]


def gather_bytes(comm: Comm, payload: bytes, *, label: str) -> list[bytes]:
    """Every rank's bytes, which may differ in length."""
    lengths = comm.gather_small(torch.tensor([len(payload)]), label=label)
    lengths.wait()
    if lengths.result is None or comm.size == 1:
        return [payload]
    counts = [int(length) for length in lengths.result.flatten()]
    padded = torch.zeros(max(*counts, 1), dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = comm.gather_small(padded, label=label)
    rows.wait()
    if rows.result is None:
        return [payload]
    return [row[:count].numpy().tobytes() for row, count in zip(rows.result.cpu(), counts, strict=True)]


def broadcast_bytes(comm: Comm, payload: bytes, source: int, *, label: str) -> bytes:
    """The bytes of one rank, on all."""
    lengths = comm.gather_small(torch.tensor([len(payload)]), label=label)
    lengths.wait()
    if lengths.result is None or comm.size == 1:
        return payload
    size = max(1, int(lengths.result.flatten()[source]))
    buffer = torch.zeros(size, dtype=torch.uint8, device=lengths.result.device)
    if payload and comm.rank == source:
        buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    comm.broadcast(buffer, source, label=label).wait()
    return buffer[: int(lengths.result.flatten()[source])].cpu().numpy().tobytes()
