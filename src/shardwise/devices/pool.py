"""Buffers that are taken in turn: what was given back serves the next one that fits, without fresh pages."""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock

import torch

from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.devices import torch_private
from shardwise.devices.malloc import Heap

CPU = torch.device("cpu")
WASTE = 0.5
"""A buffer serves a request if not more than this part of it stays unused."""
_LARGE_BYTES = 2**20
"""From here on it is worth while to look at the heap first."""


class Poison:
    """Whether memory that nobody holds is filled with NaN, so that a late read cannot go unnoticed. Tests turn it on."""

    enabled = False


@dataclass(eq=False)
class _Free:
    """A storage that nobody holds, and whether it was given back since the last step ended."""

    storage: torch.UntypedStorage
    num_bytes: int
    device: torch.device
    is_fresh: bool = True

    @staticmethod
    def of(buffer: torch.Tensor) -> _Free:
        """The storage of a buffer."""
        storage = buffer.untyped_storage()
        return _Free(storage, storage.nbytes(), buffer.device)


_LENT = (Kind.GATHERED, Kind.FULL_GRAD, Kind.GRAD, Kind.WIRE)


@dataclass(frozen=True)
class PoolReport:
    """Bytes of a pool on its device: lent, and taken for nothing."""

    lent_bytes: int
    slack_bytes: int
    """What nobody asked for of storages that are lent: these may be larger than what they serve."""
    idle_bytes: int
    """Kept for the next request."""
    largest_idle_bytes: int
    num_idle: int

    @property
    def taken_bytes(self) -> int:
        """All that was taken from the system."""
        return self.lent_bytes + self.slack_bytes + self.idle_bytes


class Pool:
    """Free storages, and the ledger's account of them and of those in use.

    Only memory for gathered parameters is kept: it is needed all through a step. Gradients come as activations go; from the
    allocator of the device they take turns with them in the same memory, which in a pool of their own would lie idle just when
    activations need the most. The allocators of accelerators keep memory themselves, for whatever is asked for next: there, all of it
    goes back to them.

    Args:
        is_scarce: Whether memory goes before time. Then gradients rest elsewhere, and those of one unit at a time take turns in memory
            that is kept: what comes between two of them would leave holes in the heap that the next does not fit into.
    """

    def __init__(self, ledger: Ledger, device: torch.device = CPU, *, is_scarce: bool = False) -> None:
        self._ledger = ledger
        self._device = device
        self._free: list[_Free] = []
        self._lingering: list[torch.Tensor] = []
        """Given back on an accelerator's host while someone still had a view, such as an optimizer its list of gradients until its next
        turn."""
        self._tiers: dict[torch.device, Tier] = {}
        self._lock = RLock()  # Updates that run beside a step take and give as well.
        self.be_scarce(is_scarce)

    def be_scarce(self, is_scarce: bool) -> None:
        """Whether memory goes before time from now on."""
        self._heap = Heap(is_scarce=is_scarce)
        self._is_scarce = is_scarce
        self._kept = {Kind.GATHERED, Kind.FULL_GRAD, Kind.GRAD} if is_scarce else {Kind.GATHERED}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, kind: Kind) -> torch.Tensor:
        """A buffer of a size, with whatever values."""
        if torch.is_inference_mode_enabled():  # A buffer that is first used in inference must serve training as well.
            with torch.inference_mode(False):
                return self.take(numel, dtype, device, kind)
        num_bytes, tier = numel * dtype.itemsize, self.tier_of(device)
        if self._is_scarce and device.type == "cpu":
            self._heap.keep_lean()
        with self._lock:
            storage = self._find(num_bytes, device) if self._is_kept(kind, tier) else None
        if storage is None:
            if num_bytes >= _LARGE_BYTES and device.type == "cpu":
                self._heap.keep_lean()
            buffer = torch.empty(numel, dtype=dtype, device=device)
            self._ledger.add(kind, num_bytes, tier)
        else:
            buffer = torch_private.tensor_over(storage, numel, dtype)
            self._ledger.turn(Kind.POOL, kind, num_bytes, tier)
        if Poison.enabled:
            poison(buffer)
        return buffer

    def tier_of(self, device: torch.device) -> Tier:
        """The tier whose memory a device's is: that of the model's own device, or the host's."""
        tier = self._tiers.get(device)  # A device's type is a text that is made anew each time it is asked for.
        if tier is None:
            tier = self._tiers[device] = Tier.DEVICE if device.type == self._device.type else Tier.HOST
        return tier

    def _is_kept(self, kind: Kind, tier: Tier) -> bool:
        """Whether memory is lent again after it was given back. An accelerator's host lends all: fresh pages cost more than copies."""
        return kind in self._kept or tier is Tier.HOST

    def _find(self, num_bytes: int, device: torch.device) -> torch.UntypedStorage | None:
        """The smallest free storage that is large enough and not much too large; of several the last: the others may go."""
        if self._lingering:
            self._collect()
        best: _Free | None = None
        for free in self._free:
            fits = num_bytes <= free.num_bytes and free.num_bytes * (1 - WASTE) <= num_bytes
            if fits and free.device == device and (best is None or free.num_bytes <= best.num_bytes):
                best = free
        if best is None:
            return None
        self._free.remove(best)
        return best.storage

    def give(self, buffer: torch.Tensor, kind: Kind) -> None:
        """Hand a buffer back: its values are nobody's from here on. One of which someone holds a view is left to them."""
        tier, num_bytes = self.tier_of(buffer.device), buffer.nbytes
        if not torch_private.is_shared(buffer):
            if Poison.enabled:
                poison(buffer)
            if num_bytes and self._is_kept(kind, tier) and buffer.is_cpu:
                with self._lock:
                    self._free.append(_Free.of(buffer))
                    self._ledger.turn(kind, Kind.POOL, num_bytes, tier)
                return
        elif tier is Tier.HOST:
            with self._lock:
                self._lingering.append(buffer)
                self._ledger.turn(kind, Kind.POOL, num_bytes, tier)
            return
        self._ledger.add(kind, -num_bytes, tier)
        self._ledger.add(Kind.POOL, num_bytes - buffer.untyped_storage().nbytes(), tier)

    def _collect(self) -> None:
        """Lend again what nobody has a view of any more."""
        free = [buffer for buffer in self._lingering if not torch_private.is_shared(buffer)]
        if free:
            self._lingering = [buffer for buffer in self._lingering if all(buffer is not each for each in free)]
            for buffer in free:
                if Poison.enabled:
                    poison(buffer)
                self._free.append(_Free.of(buffer))

    @property
    def report(self) -> PoolReport:
        """What is lent, and what lies idle or is wasted."""
        with self._lock:
            idle = [free.num_bytes for free in self._free if self.tier_of(free.device) is Tier.DEVICE]
            lent_bytes = sum(self._ledger.live(kind) for kind in _LENT)
            slack_bytes = self._ledger.live(Kind.POOL) - sum(idle)
        return PoolReport(lent_bytes, slack_bytes, sum(idle), max(idle, default=0), len(idle))

    def end_step(self) -> None:
        """A step has ended: free what it did not use, and keep the rest for the next one."""
        with self._lock:
            self._leave_lingering()
            self._drop([free for free in self._free if not free.is_fresh])
            for free in self._free:
                free.is_fresh = False

    def _leave_lingering(self) -> None:
        """What someone still has a view of is theirs."""
        self._collect()
        for buffer in self._lingering:
            self._ledger.add(Kind.POOL, -buffer.untyped_storage().nbytes(), Tier.HOST)
        self._lingering.clear()

    def trim(self) -> None:
        """Free what nobody holds."""
        with self._lock:
            self._leave_lingering()
            self._drop(list(self._free))

    def _drop(self, dropped: list[_Free]) -> None:
        for free in dropped:
            self._free.remove(free)
            self._ledger.add(Kind.POOL, -free.num_bytes, self.tier_of(free.device))


def poison(buffer: torch.Tensor) -> None:
    """Overwrite a buffer with values that no sum survives."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(float("nan"))
    else:
        buffer.fill_(1)
