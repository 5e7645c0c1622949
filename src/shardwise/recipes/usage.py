"""What each rank held and sent, beside what plain data parallelism would have held. Reads the ledger; counts nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.sizes import format_bytes

NUM_COLUMNS_MAX = 6
_SENT = {"gather": "parameters", "reduce": "gradients"}
_CHECKS = "agreement and norms"


@dataclass(frozen=True)
class RankUse:
    """One rank's account.

    Args:
        rank: Whose it is.
        held_bytes: The most of each kind of the ledger.
        peak_bytes: The most of all kinds at one moment.
        resident_bytes: The most memory that the whole process ever had, the program itself and activations included.
        sent_bytes: By what it was for, in the training steps alone.
        num_steps: How many these were.
    """

    rank: int
    held_bytes: dict[str, int]
    peak_bytes: int
    resident_bytes: int
    sent_bytes: dict[str, int]
    num_steps: int


@dataclass(frozen=True)
class ComputedUse:
    """What a rank of plain data parallelism holds and sends: computed from a ledger, not measured.

    It keeps all parameters, gradients and optimizer state in fp32, its buckets share memory with the gradients (which torch DDP
    does on request only), and its all-reduce is a ring.
    """

    held_bytes: dict[str, int]
    sent_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return sum(self.held_bytes.values())


def held_bytes(ledger: Ledger) -> dict[str, int]:
    """The most of each kind, in all tiers, without those of which there was nothing."""
    peaks = {kind.value: sum(ledger.peak(kind, tier) for tier in Tier) for kind in Kind}
    return {name: num_bytes for name, num_bytes in peaks.items() if num_bytes}


def describe_held(held: dict[str, int], limit: int = 4) -> str:
    """The largest items, largest first."""
    largest = sorted(held.items(), key=lambda item: -item[1])[:limit]
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in largest) or "nothing yet"


def plain_data_parallelism(uses: Sequence[RankUse], plan: Plan) -> ComputedUse:
    """What each of these ranks would have held and sent without sharding, from what they did hold."""

    def whole(kind: Kind, is_sharded: bool) -> int:
        parts = [use.held_bytes.get(kind.value, 0) for use in uses]
        return sum(parts) if is_sharded else max(parts)

    is_mixed = any(Kind.MASTER.value in use.held_bytes for use in uses)
    if is_mixed:
        params = whole(Kind.MASTER, StateKind.OPTIM in plan.sharded)
    else:
        params = whole(Kind.PARAM, StateKind.PARAM in plan.sharded)
    optim = whole(Kind.OPTIM, StateKind.OPTIM in plan.sharded)
    sent = uses[0].num_steps * 2 * params * (len(uses) - 1) // len(uses)
    return ComputedUse({"parameters": params, "gradients": params, "optimizer state": optim}, {"gradients": sent})


def usage_table(uses: Sequence[RankUse], computed: ComputedUse) -> Table:
    """Rows for what was held and sent, a column for each rank, and one for plain data parallelism."""
    # Of many ranks, the first and the last ones.
    half = NUM_COLUMNS_MAX // 2
    shown = list(uses) if len(uses) <= NUM_COLUMNS_MAX else [*uses[:half], *uses[-half:]]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("at most held")
    for use in shown:
        table.add_column(f"rank {use.rank}", justify="right")
    table.add_column("plain DDP (computed)", justify="right")
    weights = Kind.MASTER if any(Kind.MASTER.value in use.held_bytes for use in shown) else Kind.PARAM
    of_ddp = {
        weights: computed.held_bytes["parameters"],
        Kind.GRAD: computed.held_bytes["gradients"],
        Kind.OPTIM: computed.held_bytes["optimizer state"],
    }
    for kind in Kind:
        counts = [use.held_bytes.get(kind.value, 0) for use in shown]
        if any(counts):
            ddp = of_ddp.get(kind)
            table.add_row(kind.value, *map(format_bytes, counts), "-" if ddp is None else format_bytes(ddp))
    peaks = [format_bytes(use.peak_bytes) for use in shown]
    table.add_row("all of these at once", *peaks, format_bytes(computed.peak_bytes), style="bold")
    table.add_row("whole process (resident)", *(format_bytes(use.resident_bytes) for use in shown), "-")
    table.add_section()
    table.add_row("sent a step", style="bold")
    for name in (*_SENT.values(), _CHECKS):
        per_step = [_sent(use, name) // use.num_steps for use in shown]
        ddp = computed.sent_bytes.get(name, 0) // uses[0].num_steps
        if any(per_step) or ddp:
            table.add_row(name, *map(format_bytes, per_step), format_bytes(ddp) if ddp else "-")
    return table


def _sent(use: RankUse, name: str) -> int:
    return sum(count for op, count in use.sent_bytes.items() if _SENT.get(op, _CHECKS) == name)
