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


@dataclass
class Handle:
    """A collective under way. ``result`` may be read after ``wait``."""

    op: str
    wire_bytes: int = 0
    num_messages: int = 0
    result: torch.Tensor | None = None
    _finish: Callable[[], None] | None = None
    _poll: Callable[[], bool] | None = None
    _keep: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._finish is None or (self._poll is not None and self._poll())

    def wait(self) -> float:
        """Block until the buffers are ready; returns the seconds waited."""
        finish, self._finish = self._finish, None
        if finish is None:
            return 0.0
        begin = time.perf_counter()
        finish()
        # Keep the sent buffers until the collective ends: the allocator would hand their memory on.
        self._keep = ()
        return time.perf_counter() - begin


class Comm(Protocol):
    """One lane of collectives. Calls on one lane are issued in the same order by every rank; lanes do not wait for each other.

    ``label`` says what a collective is for; it stands in errors when a rank is lost.
    """

    rank: int
    size: int

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *, label: str) -> Handle:
        """Fill ``buffer`` in place: rank ``r`` contributes elements ``[cuts[r], cuts[r + 1])``."""
        ...

    def exchange(self, source: torch.Tensor, cuts: Sequence[int], *, label: str) -> Handle:
        """Send each rank its part of ``source``; the result holds every rank's version of one's own part, in rank order."""
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

    ``release`` hands them back when the engine is gone.
    """

    gather: Comm
    reduce: Comm
    regather: Comm
    hosts: tuple[str, ...]
    release: Callable[[], None] = lambda: None

    @property
    def rank(self) -> int:
        """This rank."""
        return self.gather.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.gather.size


def gather_bytes(comm: Comm, payload: bytes, *, label: str) -> list[bytes]:
    """Every rank's bytes, which may differ in length."""
    lengths = comm.gather_small(torch.tensor([len(payload)]), label=label)
    lengths.wait()
    if lengths.result is None or comm.size == 1:
        return [payload]
    counts = [int(length) for length in lengths.result.flatten()]
    padded = torch.zeros(max(*counts, 1), dtype=torch.uint8)
    padded[: len(payload)] = torch.tensor(list(payload), dtype=torch.uint8)
    rows = comm.gather_small(padded, label=label)
    rows.wait()
    if rows.result is None:
        return [payload]
    return [bytes(row[:count].tolist()) for row, count in zip(rows.result.cpu(), counts, strict=True)]
