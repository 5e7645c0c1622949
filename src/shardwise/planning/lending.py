"""Memory that is taken and given back, as bytes: what the engine's pool lends, and what it keeps for the next request."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.devices.pool import WASTE


@dataclass(frozen=True, eq=False)
class Loan:
    """Bytes that are lent of a stretch of memory that may be larger."""

    num_bytes: int
    held_bytes: int
    kind: Kind
    tier: Tier


@dataclass(eq=False)
class _Free:
    num_bytes: int
    tier: Tier
    is_fresh: bool = True


class Lending:
    """The pool of one rank. An accelerator's own memory goes back to its allocator; the host's is kept.

    Args:
        is_on_host: Whether the device is the CPU.
        is_scarce: Whether gradients rest on disk.
    """

    def __init__(self, ledger: Ledger, *, is_on_host: bool, is_scarce: bool) -> None:
        self._ledger = ledger
        self._is_on_host = is_on_host
        self._kept = {Kind.GATHERED, Kind.FULL_GRAD, Kind.GRAD} if is_scarce else {Kind.GATHERED}
        self._free: list[_Free] = []
        self._lingering: list[_Free] = []

    def _is_kept(self, kind: Kind, tier: Tier) -> bool:
        return tier is Tier.HOST or (self._is_on_host and kind in self._kept)

    def take(self, num_bytes: int, kind: Kind, tier: Tier = Tier.DEVICE) -> Loan:
        """Lend."""
        found = self._find(num_bytes, tier) if self._is_kept(kind, tier) else None
        if found is not None:
            self._free.remove(found)
            self._ledger.add(Kind.POOL, -num_bytes, tier)
        self._ledger.add(kind, num_bytes, tier)
        return Loan(num_bytes, num_bytes if found is None else found.num_bytes, kind, tier)

    def _find(self, num_bytes: int, tier: Tier) -> _Free | None:
        fitting = [each for each in self._free if each.tier is tier and num_bytes <= each.num_bytes]
        fitting = [each for each in fitting if each.num_bytes * (1 - WASTE) <= num_bytes]
        return min(reversed(fitting), key=lambda each: each.num_bytes, default=None)

    def give(self, loan: Loan) -> None:
        """Take back."""
        self._ledger.add(loan.kind, -loan.num_bytes, loan.tier)
        if self._is_kept(loan.kind, loan.tier) and loan.num_bytes:
            self._free.append(_Free(loan.held_bytes, loan.tier))
            self._ledger.add(Kind.POOL, loan.num_bytes, loan.tier)
        else:
            self._ledger.add(Kind.POOL, loan.num_bytes - loan.held_bytes, loan.tier)

    def linger(self, loan: Loan) -> None:
        """Take back what someone has a view of until the next call, as an optimizer has of its gradients: it cannot be lent before."""
        for free in self._lingering:
            self._free.append(free)
        self._lingering.clear()
        if loan.tier is Tier.HOST:
            self._ledger.add(loan.kind, -loan.num_bytes, loan.tier)
            self._ledger.add(Kind.POOL, loan.num_bytes, loan.tier)
            self._lingering.append(_Free(loan.held_bytes, loan.tier))
        else:
            self.give(loan)

    def rebook(self, loan: Loan, kind: Kind) -> Loan:
        """The same memory for something else."""
        self._ledger.add(loan.kind, -loan.num_bytes, loan.tier)
        self._ledger.add(kind, loan.num_bytes, loan.tier)
        return Loan(loan.num_bytes, loan.held_bytes, kind, loan.tier)

    def end_step(self) -> None:
        """Let go of what a step did not use."""
        self._free += self._lingering
        self._lingering.clear()
        for free in [free for free in self._free if not free.is_fresh]:
            self._free.remove(free)
            self._ledger.add(Kind.POOL, -free.num_bytes, free.tier)
        for free in self._free:
            free.is_fresh = False
