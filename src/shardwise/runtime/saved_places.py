"""The places where saved tensors rest: the host's memory, and the disk tier's file. They know lines of numbers, not tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from shardwise.core.errors import OffloadError
from shardwise.core.footprint import LOADS_AT_ONCE
from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.devices import torch_private
from shardwise.devices.host import empty_on_host
from shardwise.runtime.offload import DiskTier, Line
from shardwise.stores.ranges import BLOCK_BYTES, round_down, round_up

PIECE_BYTES = 4 * 2**20
"""In pieces of this size numbers go to disk, unless the memory for it is less: larger ones are not faster."""


_MOST_AHEAD = 64
"""How many lines at most are looked at, to be read ahead."""


class OnHost:
    """The host's memory."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.is_open = True

    def suits(self, device: torch.device) -> bool:
        """What is in the host's memory is there already."""
        return device.type != "cpu"

    def keep(self, line: torch.Tensor) -> _HostLine:
        """Take a line in."""
        return _HostLine(line, self._ledger)

    def fail(self, error: OffloadError) -> None:
        """Nothing fails here that could wait."""
        raise error


class _HostLine:
    def __init__(self, line: torch.Tensor, ledger: Ledger) -> None:
        self._device = line.device
        self._ledger = ledger
        self._values = empty_on_host(line.numel(), line.dtype, "activations").copy_(line)
        ledger.add(Kind.ACTIVATION, self._values.nbytes, Tier.HOST)

    def bring(self) -> torch.Tensor:
        """The numbers on their device."""
        return self._values.to(self._device)

    def __del__(self) -> None:
        if not sys.is_finalizing() and hasattr(self, "_values"):
            self._ledger.add(Kind.ACTIVATION, -self._values.nbytes, Tier.HOST)


class OnDisk:
    """The file of the disk tier: written behind the forward, and read ahead in the backward, in the opposite order.

    Args:
        spared_bytes: What of the memory for loads is left to others when something is read ahead.
    """

    def __init__(self, tier: DiskTier, device: torch.device, spared_bytes: int) -> None:
        self._tier = tier
        self._device = device
        self._spared_bytes = spared_bytes
        self._lines: WeakValueDictionary[int, _DiskLine] = WeakValueDictionary()
        """By their numbers, in the order in which they were written."""
        self._num_lines = 0

    @property
    def is_open(self) -> bool:
        """Not after a failure: what would be written is lost."""
        return self._tier.failure is None and not self._tier.is_closed

    def suits(self, device: torch.device) -> bool:
        """What is on the device that computes."""
        return device == self._device

    def keep(self, line: torch.Tensor) -> _DiskLine:
        """Begin to write a line."""
        kept = _DiskLine(self, line, self._num_lines)
        self._lines[self._num_lines] = kept
        self._num_lines += 1
        return kept

    def fail(self, error: OffloadError) -> None:
        """Let all ranks know, when they meet."""
        self._tier.fail(error)

    @property
    def tier(self) -> DiskTier:
        """The file, and the memory in between."""
        return self._tier

    @property
    def piece_bytes(self) -> int:
        """In pieces of this size numbers go through the memory for loads."""
        return max(BLOCK_BYTES, min(PIECE_BYTES, round_down(self._tier.staging.budget_bytes // LOADS_AT_ONCE)))

    def read_ahead(self, number: int) -> None:
        """Begin to read what was written just before a line, as far as there is room."""
        task = torch_private.graph_task()
        for earlier in range(number - 1, max(number - _MOST_AHEAD, -1), -1):
            line = self._lines.get(earlier)
            if line is not None and line.brought_in != task and not self.begin(line.pieces):
                return

    def begin(self, pieces: Sequence[Line]) -> bool:
        """Begin to read pieces; False if there is no room for all of them."""
        staging = self._tier.staging
        for piece in pieces:
            if staging.live_bytes + round_up(piece.num_bytes) > staging.budget_bytes - self._spared_bytes:
                return False
            self._tier.ahead([piece])
        return True


class _DiskLine:
    """A line in pieces, each of which fits into the memory for loads."""

    def __init__(self, place: OnDisk, line: torch.Tensor, number: int) -> None:
        self._place = place
        self._number = number
        self._dtype, self._device = line.dtype, line.device
        self.pieces: list[Line] = []
        self.brought_in = -1
        """The last backward pass that has asked for it."""
        for part in line.view(torch.uint8).split(place.piece_bytes):
            piece = Line(place.tier, part.numel(), torch.uint8, "activations", Kind.ACTIVATION)
            load = place.tier.blank([piece])
            load.view(piece).copy_(part)
            load.write([piece])
            self.pieces.append(piece)

    def bring(self) -> torch.Tensor:
        """The numbers on their device."""
        tier = self._place.tier
        values = torch.empty(sum(piece.numel for piece in self.pieces), dtype=torch.uint8, device=self._device)
        targets = values.split([piece.numel for piece in self.pieces])
        self.brought_in = torch_private.graph_task()
        for index, (piece, target) in enumerate(zip(self.pieces, targets, strict=True)):
            load = tier.load([piece])
            if self._place.begin(self.pieces[index + 1 :]):
                self._place.read_ahead(self._number)
            target.copy_(load.view(piece))
            load.drop()
        return values.view(self._dtype)
