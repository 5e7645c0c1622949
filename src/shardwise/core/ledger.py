"""Live and peak bytes by tier and kind. Knows nothing of what it counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from threading import RLock
from typing import Any

from shardwise.core.sizes import format_bytes


class Tier(Enum):
    """Where bytes rest."""

    __hash__ = object.__hash__  # In C: enum's own is Python, and members are looked up all through a step.

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Kind(Enum):
    """What bytes are for."""

    __hash__ = object.__hash__  # In C: enum's own is Python, and members are looked up all through a step.

    PARAM = "parameter shards"
    GATHERED = "gathered parameters"
    GRAD = "gradient shards"
    FULL_GRAD = "full gradients"
    OPTIM = "optimizer state"
    MASTER = "master weights"
    BUFFER = "buffers"
    WIRE = "wire staging"
    STAGING = "disk staging"
    POOL = "free workspace"
    SNAPSHOT = "copies for checkpoints"
    ACTIVATION = "activations"
    """Autograd holds them. Booked on accelerators, by what the allocator has given out beyond the rest, as units begin and end."""


MAPPED = Kind.STAGING
"""Its memory is mapped from the system: no allocator counts it."""

Account = tuple[Tier, Kind]

OnChange = Callable[[Account, int], None]
"""Told of an account and of what it holds now."""


@dataclass(slots=True)
class _Held:
    """Bytes of one account or tier: now, at most since the last mark, and at most before it."""

    live: int = 0
    peak: int = 0
    earlier_peak: int = 0

    def mark(self) -> None:
        self.earlier_peak, self.peak = max(self.earlier_peak, self.peak), self.live

    @property
    def most(self) -> int:
        return max(self.earlier_peak, self.peak)


_NOTHING = _Held()


@dataclass
class Ledger:
    """Bytes held now and at most: ever, and since the last `mark`. Those of all tiers together are memory: the disk is left out.

    >>> ledger = Ledger()
    >>> ledger.add(Kind.GRAD, 100); ledger.add(Kind.GRAD, -40)
    >>> ledger.live(Kind.GRAD), ledger.peak(Kind.GRAD), ledger.peak_bytes
    (60, 100, 100)
    >>> ledger.mark(); ledger.peak_since_mark(Kind.GRAD), ledger.peak(Kind.GRAD)
    (60, 100)
    >>> ledger.turn(Kind.GRAD, Kind.POOL, 50); ledger.live(Kind.GRAD), ledger.live(Kind.POOL), ledger.live_bytes
    (10, 50, 60)
    """

    _accounts: dict[Account, _Held] = field(default_factory=lambda: defaultdict(_Held))
    _tiers: dict[Tier, _Held] = field(default_factory=lambda: {tier: _Held() for tier in Tier})
    _memory: _Held = field(default_factory=_Held)
    watch: OnChange | None = None
    _lock: Any = field(default_factory=RLock, repr=False, compare=False)
    """Updates that run beside a step book as well. The collector may let go of a buffer, which books, in the middle of a booking."""

    def add(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Book bytes that came (or, negative, went)."""
        with self._lock:
            self._book((tier, kind), num_bytes)
            held = self._tiers[tier]
            held.live += num_bytes
            if held.live > held.peak:
                held.peak = held.live
            if tier is not Tier.DISK:
                held = self._memory
                held.live += num_bytes
                if held.live > held.peak:
                    held.peak = held.live

    def turn(self, kind: Kind, into: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Book bytes of one kind as of another: they stay where they are."""
        with self._lock:
            self._book((tier, kind), -num_bytes)
            self._book((tier, into), num_bytes)

    def _book(self, account: Account, num_bytes: int) -> None:
        held = self._accounts[account]
        held.live += num_bytes
        if held.live > held.peak:
            held.peak = held.live
        if self.watch is not None:
            self.watch(account, held.live)

    def set(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Book what is held now, whatever was booked before."""
        with self._lock:
            self.add(kind, num_bytes - self.live(kind, tier), tier)

    def mark(self) -> None:
        """Begin to look for peaks anew: a step begins."""
        with self._lock:
            for held in (*self._accounts.values(), *self._tiers.values(), self._memory):
                held.mark()

    @property
    def accounts(self) -> tuple[Account, ...]:
        """All in which anything was ever booked, in one order."""
        return tuple(sorted(self._accounts, key=lambda account: (account[0].value, account[1].value)))

    @property
    def live_bytes(self) -> int:
        """Bytes of memory that are held now."""
        return self._memory.live

    @property
    def peak_bytes(self) -> int:
        """The most bytes of memory that were ever held at once."""
        return self._memory.most

    @property
    def peak_bytes_since_mark(self) -> int:
        """The same since the last `mark`."""
        return self._memory.peak

    def live_on(self, tier: Tier) -> int:
        """Bytes that a tier holds now."""
        return self._tiers[tier].live

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the device now that come from its allocator."""
        return self.live_on(Tier.DEVICE) - self.live(MAPPED)

    def peak_on(self, tier: Tier) -> int:
        """The most bytes that a tier ever held at once."""
        return self._tiers[tier].most

    def peak_on_since_mark(self, tier: Tier) -> int:
        """The same since the last `mark`."""
        return self._tiers[tier].peak

    def live(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """Bytes of a kind that are held now."""
        return self._accounts.get((tier, kind), _NOTHING).live

    def peak(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """The most bytes of a kind that were ever held at once."""
        return self._accounts.get((tier, kind), _NOTHING).most

    def peak_since_mark(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """The same since the last `mark`."""
        return self._accounts.get((tier, kind), _NOTHING).peak

    def __str__(self) -> str:
        rows = [f"{'tier':<8}{'kind':<22}{'live':>12}{'peak':>12}"]
        for tier, kind in self.accounts:
            live, peak = format_bytes(self.live(kind, tier)), format_bytes(self.peak(kind, tier))
            rows.append(f"{tier.value:<8}{kind.value:<22}{live:>12}{peak:>12}")
        rows.append(f"{'':<8}{'all memory':<22}{format_bytes(self.live_bytes):>12}{format_bytes(self.peak_bytes):>12}")
        return "\n".join(rows)
