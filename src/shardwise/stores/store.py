"""The ``Store`` protocol: places for bytes, read and written beside the computation. Knows bytes and labels, not what they mean."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Event
from typing import Protocol

import torch


@dataclass(frozen=True, eq=False)
class Slot:
    """A place in a store. ``label`` says for people what is kept there."""

    offset: int
    num_bytes: int
    label: str


class Ticket:
    """A read or a write under way. Until it is done, a target must not be touched and a source must not be changed.

    ``begin_seconds`` and ``end_seconds`` (of ``time.perf_counter``) tell when its bytes began to move, and when they had moved.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.num_bytes = tensor.nbytes
        self.begin_seconds = 0.0
        self.end_seconds = 0.0
        self.error: BaseException | None = None
        """What went wrong, once it is done."""
        self._done = Event()
        # Threads know its address alone: the allocator must not hand its memory on.
        self._keep: torch.Tensor | None = tensor

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return, or raise, at once."""
        return self._done.is_set()

    def begin(self) -> None:
        """Its first bytes move. For stores alone."""
        if not self.begin_seconds:
            self.begin_seconds = time.perf_counter()

    def finish(self, error: BaseException | None = None) -> None:
        """It has ended, well or not. For stores alone."""
        self.begin()
        self.end_seconds = time.perf_counter()
        self.error = error
        self._keep = None
        self._done.set()

    def wait(self) -> float:
        """Block until it is done; returns the seconds waited.

        Raises:
            OffloadError: It failed. After a failed read, the tensor holds anything.
        """
        seconds = self.join()
        if self.error is not None:
            raise self.error
        return seconds

    def join(self) -> float:
        """Block until it is done, well or not; returns the seconds waited."""
        if self._done.is_set():
            return 0.0
        begin = time.perf_counter()
        self._done.wait()
        return time.perf_counter() - begin


class Store(Protocol):
    """Where bytes rest. What touches the same bytes happens in the order in which it was asked for."""

    @property
    def live_bytes(self) -> int:
        """What is reserved."""
        ...

    def reserve(self, num_bytes: int, label: str) -> Slot:
        """A place for so many bytes, which hold anything before they are written.

        Raises:
            OffloadError: There is no room.
        """
        ...

    def free(self, slot: Slot) -> None:
        """Nobody needs its bytes any more. What is under way there comes to its end first."""
        ...

    def read(self, slot: Slot, target: torch.Tensor, *, at: int = 0) -> Ticket:
        """Fill a contiguous tensor on the CPU with what lies in a slot, from byte ``at`` of it on."""
        ...

    def write(self, slot: Slot, source: torch.Tensor, *, at: int = 0) -> Ticket:
        """Put the bytes of a contiguous tensor on the CPU into a slot, from byte ``at`` of it on."""
        ...

    def close(self) -> None:
        """Let everything go; what is still under way fails."""
        ...
