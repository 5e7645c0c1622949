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


@dataclass
class Ledger:
    """Bytes held now and at most: ever, and since the last `mark`. Those of all tiers together are memory: the disk is left out.

    >>> ledger = Ledger()
    >>> ledger.add(Kind.GRAD, 100); ledger.add(Kind.GRAD, -40)
    >>> ledger.live(Kind.GRAD), ledger.peak(Kind.GRAD), ledger.peak_bytes
    (60, 100, 100)
    >>> ledger.mark(); ledger.peak_since_mark(Kind.GRAD), ledger.peak(Kind.GRAD)
    (60, 100)
    """

    _live: dict[Account, int] = field(default_factory=lambda: defaultdict(int))
    _peak: dict[Account, int] = field(default_factory=lambda: defaultdict(int))
    _earlier_peak: dict[Account, int] = field(default_factory=lambda: defaultdict(int))
    _tier_live: dict[Tier, int] = field(default_factory=lambda: defaultdict(int))
    _tier_peak: dict[Tier, int] = field(default_factory=lambda: defaultdict(int))
    _recent_tier_peak: dict[Tier, int] = field(default_factory=lambda: defaultdict(int))
    live_bytes: int = 0
    peak_bytes_since_mark: int = 0
    _earlier_peak_bytes: int = 0
    watch: OnChange | None = None
    _lock: Any = field(default_factory=RLock, repr=False, compare=False)
    """Updates that run beside a step book as well. The collector may let go of a buffer, which books, in the middle of a booking."""

    def add(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Book bytes that came (or, negative, went)."""
        with self._lock:
            account = (tier, kind)
            live = self._live[account] = self._live[account] + num_bytes
            if live > self._peak[account]:
                self._peak[account] = live
            on_tier = self._tier_live[tier] = self._tier_live[tier] + num_bytes
            if on_tier > self._recent_tier_peak[tier]:
                self._recent_tier_peak[tier] = on_tier
                self._tier_peak[tier] = max(self._tier_peak[tier], on_tier)
            if tier is not Tier.DISK:
                self.live_bytes += num_bytes
            if self.live_bytes > self.peak_bytes_since_mark:
                self.peak_bytes_since_mark = self.live_bytes
            if self.watch is not None:
                self.watch(account, live)

    def set(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Book what is held now, whatever was booked before."""
        with self._lock:
            self.add(kind, num_bytes - self._live[(tier, kind)], tier)

    def mark(self) -> None:
        """Begin to look for peaks anew: a step begins."""
        with self._lock:
            for account, peak in self._peak.items():
                self._earlier_peak[account] = max(self._earlier_peak[account], peak)
                self._peak[account] = self._live[account]
            self._recent_tier_peak = defaultdict(int, self._tier_live)
            self._earlier_peak_bytes, self.peak_bytes_since_mark = self.peak_bytes, self.live_bytes

    @property
    def accounts(self) -> tuple[Account, ...]:
        """All in which anything was ever booked, in one order."""
        return tuple(sorted(self._peak, key=lambda account: (account[0].value, account[1].value)))

    @property
    def peak_bytes(self) -> int:
        """The most bytes of memory that were ever held at once."""
        return max(self._earlier_peak_bytes, self.peak_bytes_since_mark)

    def live_on(self, tier: Tier) -> int:
        """Bytes that a tier holds now."""
        return self._tier_live[tier]

    @property
    def allocated_bytes(self) -> int:
        """Bytes on the device now that come from its allocator."""
        return self._tier_live[Tier.DEVICE] - self._live[(Tier.DEVICE, MAPPED)]

    def peak_on(self, tier: Tier) -> int:
        """The most bytes that a tier ever held at once."""
        return self._tier_peak[tier]

    def peak_on_since_mark(self, tier: Tier) -> int:
        """The same since the last `mark`."""
        return self._recent_tier_peak[tier]

    def live(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """Bytes of a kind that are held now."""
        return self._live[(tier, kind)]

    def peak(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """The most bytes of a kind that were ever held at once."""
        account = (tier, kind)
        return max(self._earlier_peak[account], self._peak[account])

    def peak_since_mark(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """The same since the last `mark`."""
        return self._peak[(tier, kind)]

    def __str__(self) -> str:
        rows = [f"{'tier':<8}{'kind':<22}{'live':>12}{'peak':>12}"]
        for tier, kind in self.accounts:
            live, peak = format_bytes(self.live(kind, tier)), format_bytes(self.peak(kind, tier))
            rows.append(f"{tier.value:<8}{kind.value:<22}{live:>12}{peak:>12}")
        rows.append(f"{'':<8}{'all memory':<22}{format_bytes(self.live_bytes):>12}{format_bytes(self.peak_bytes):>12}")
        return "\n".join(rows)
