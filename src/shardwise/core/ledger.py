"""Live and peak bytes by tier and kind. Knows nothing of what it counts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum

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
    POOL = "free workspace"


Account = tuple[Tier, Kind]


@dataclass
class Ledger:
    """Bytes held now and at most.

    >>> ledger = Ledger()
    >>> ledger.add(Kind.GRAD, 100); ledger.add(Kind.GRAD, -40)
    >>> ledger.live(Kind.GRAD), ledger.peak(Kind.GRAD), ledger.peak_bytes
    (60, 100, 100)
    """

    _live: dict[Account, int] = field(default_factory=lambda: defaultdict(int))
    _peak: dict[Account, int] = field(default_factory=lambda: defaultdict(int))
    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Book bytes that came (or, negative, went)."""
        account = (tier, kind)
        live = self._live[account] = self._live[account] + num_bytes
        if live > self._peak[account]:
            self._peak[account] = live
        self.live_bytes += num_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    def set(self, kind: Kind, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Book what is held now, whatever was booked before."""
        self.add(kind, num_bytes - self._live[(tier, kind)], tier)

    def live(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """Bytes of a kind that are held now."""
        return self._live[(tier, kind)]

    def peak(self, kind: Kind, tier: Tier = Tier.DEVICE) -> int:
        """The most bytes of a kind that were ever held at once."""
        return self._peak[(tier, kind)]

    def __str__(self) -> str:
        rows = [f"{'tier':<8}{'kind':<22}{'live':>12}{'peak':>12}"]
        for account in sorted(self._peak, key=lambda a: (a[0].value, a[1].value)):
            tier, kind = account
            live, peak = format_bytes(self._live[account]), format_bytes(self._peak[account])
            rows.append(f"{tier.value:<8}{kind.value:<22}{live:>12}{peak:>12}")
        rows.append(f"{'':<8}{'all':<22}{format_bytes(self.live_bytes):>12}{format_bytes(self.peak_bytes):>12}")
        return "\n".join(rows)
