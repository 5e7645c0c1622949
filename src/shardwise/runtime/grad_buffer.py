"""Reduced gradients of one flat buffer: in memory, or on disk with what was done to them since. Knows no collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

import torch

from shardwise.core.errors import OffloadError
from shardwise.core.ledger import Kind
from shardwise.core.unit import Segment
from shardwise.devices.pool import Pool
from shardwise.runtime.flat import HOST, nothing_of
from shardwise.runtime.offload import DiskTier, Line

Change = Callable[[torch.Tensor], object]
"""Changes values in place, each of them by itself."""


@dataclass(eq=False)
class GradBuffer:
    """Reduced gradients of one flat buffer, from element ``start`` on, in memory of a pool. Lives as long as a gradient refers to it.

    Gradients in 16 bits are not scaled in place, where small ones would be lost: ``factors`` says, by parameter, what they are to
    be multiplied with when they are used. Where they rest on disk, ``line`` is their place and ``held`` has their form alone; what is
    done to them in place is then noted, and done again whenever they are read.
    """

    held: torch.Tensor
    start: int
    pool: Pool
    factors: dict[int, torch.Tensor] = field(default_factory=dict)
    line: Line | None = None
    changes: list[tuple[Segment, Change]] = field(default_factory=list)
    in_use: Event | None = None
    """Set when an update that reads the values beside a step has ended."""

    def __del__(self) -> None:
        if not sys.is_finalizing() and self.line is None:
            self.pool.give(self.held, Kind.GRAD)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.held.dtype

    def before_change(self) -> None:
        """Wait until nobody else reads the values."""
        if self.in_use is not None:
            self.in_use.wait()
            self.in_use = None

    @property
    def values(self) -> torch.Tensor:
        """All values, in memory, where they stay: what is on disk is brought back."""
        self.before_change()
        if self.line is not None:
            values = self.pool.take(self.held.numel(), self.dtype, HOST, Kind.GRAD)
            values.copy_(self.read(self.start, self.start + self.held.numel()))
            self.held, self.line = values, None
            self.changes.clear()
        return self.held

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Some values, counted in the whole flat buffer: as they are in memory, or a copy of what is on disk.

        Where that cannot be read, NaN: the tier has noted it, and ranks tell each other when they next meet.
        """
        if self.line is None:
            return self.held[start - self.start : stop - self.start]
        try:
            values = self.line.get(start - self.start, stop - self.start)
        except OffloadError as error:
            self.line.tier.fail(error)
            values = torch.full((stop - start,), float("nan"), dtype=self.dtype)
        self.catch_up(values, start)
        return values

    def catch_up(self, values: torch.Tensor, start: int) -> None:
        """Do to values that were read, from element ``start`` on, what was done to them since they were written."""
        for piece, change in self.changes:
            low, high = max(piece.start, start), min(piece.stop, start + values.numel())
            if low < high:
                change(values[low - start : high - start])

    def change(self, piece: Segment, change: Change) -> None:
        """Change a parameter's part in place."""
        self.before_change()
        if self.line is None:
            change(piece.view(self.held, shift=self.start))
        elif piece.numel:
            self.changes.append((piece, change))

    def put_away(self, disk: DiskTier, label: str, look: Change | None = None) -> None:
        """Let the values rest on disk. They stay in memory where that cannot be, which the tier notes.

        Args:
            look: Shown the values on their way.
        """
        if self.line is not None:
            return
        try:
            line = Line(disk, self.held.numel(), self.dtype, label, Kind.GRAD)
            load = disk.blank([line])
            load.view(line).copy_(self.held)
            if look is not None:
                look(load.view(line))
            load.write([line])
        except OffloadError as error:
            disk.fail(error)
            return
        self.pool.give(self.held, Kind.GRAD)
        self.held, self.line = nothing_of((line.numel,), line.dtype, HOST), line

    def widen(self, dtype: torch.dtype) -> None:
        """Hold the values in a dtype of more bits from now on."""
        narrow = self.values
        self.held = self.pool.take(narrow.numel(), dtype, narrow.device, Kind.GRAD)
        self.held.copy_(narrow)
        self.pool.give(narrow, Kind.GRAD)
