"""What a plan needs of a device's memory, and which other plan would fit. Pure arithmetic over units; activations are not in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.core.ledger import Tier
from shardwise.core.plan import SHARDED_AT_STAGE, Plan, StateKind
from shardwise.core.rest import rests_of
from shardwise.core.sizes import format_bytes
from shardwise.core.unit import Unit

ADAM_STATES = 2
"""Numbers that Adam and its like keep for each parameter: what is assumed of an optimizer that has no state yet."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device: at rest all the time, and at work for a unit at a time."""

    rest_bytes: int
    work_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.rest_bytes + self.work_bytes


def footprint(units: Sequence[Unit], plan: Plan, num_ranks: int, num_states: int = ADAM_STATES) -> Footprint:
    """What one rank needs on its device for parameters, gradients and optimizer state.

    >>> from shardwise.core.unit import find_units
    >>> from torch import nn
    >>> units = find_units(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), units=[nn.Linear])
    >>> [footprint(units, Plan(stage=stage), num_ranks=4).rest_bytes // 1024 for stage in range(4)]
    [256, 160, 112, 64]
    """
    rests = rests_of(units, plan)
    rest_bytes, largest = 0, 0
    for unit in units:
        unit_bytes = 0
        for flat in unit.flats:
            rest, full = rests[flat.name], flat.numel * flat.dtype.itemsize
            is_cast = flat.dtype.is_floating_point and not flat.keeps_dtype
            compute = plan.dtype("param_dtype") if is_cast else None
            reduced = plan.dtype("reduce_dtype") or compute or flat.dtype
            computed = flat.numel * (compute or flat.dtype).itemsize
            gradient = flat.numel * reduced.itemsize if flat.trainable else 0

            def share(num_bytes: int, kind: StateKind) -> int:
                return num_bytes // num_ranks if kind in plan.sharded else num_bytes

            is_mixed = compute is not None and compute != flat.dtype
            if rest.param is Tier.DEVICE:
                is_single = rest.master is Tier.DEVICE and (StateKind.PARAM in plan.sharded or not is_mixed)
                rest_bytes += share(full if is_single else computed, StateKind.PARAM)
                if is_mixed and rest.master is Tier.DEVICE and not is_single:
                    rest_bytes += share(full, StateKind.OPTIM)
            if rest.grad is Tier.DEVICE:
                rest_bytes += share(gradient, StateKind.GRAD)
            if rest.optim is Tier.DEVICE and flat.trainable:
                rest_bytes += share(num_states * full, StateKind.OPTIM)
            fetched = computed if StateKind.PARAM in plan.sharded or rest.param is not Tier.DEVICE else 0
            unit_bytes += fetched + 2 * gradient  # One to work on, and one on its way, with room for what others send.
        largest = max(largest, unit_bytes)
    return Footprint(rest_bytes, largest)


def _alternatives(plan: Plan, tiers: Sequence[str]) -> Iterator[tuple[str, Plan]]:
    """Other plans, the least trouble first: a higher stage, and then more and more state off the device."""
    for stage in range(plan.stage + 1, max(SHARDED_AT_STAGE) + 1):
        yield f"stage={stage}", plan.replace(stage=stage)
    top = plan.replace(stage=max(SHARDED_AT_STAGE))
    prefix = "" if plan.stage == top.stage else f"stage={top.stage} and "
    for tier in tiers:
        chosen: dict[str, str] = {}
        for kind in (StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM):
            chosen[kind.key] = tier
            yield f"{prefix}tiers={chosen}", top.replace(tiers=dict(chosen), fraction=1.0)


def advice(units: Sequence[Unit], plan: Plan, num_ranks: int, capacity_bytes: int, num_states: int = ADAM_STATES) -> str:
    """What a device of this capacity is told when it runs out of memory: what was needed, and what would fit."""
    needed = footprint(units, plan, num_ranks, num_states)
    text = (
        f"Under this plan (stage {plan.stage} on {num_ranks} ranks) a rank needs {format_bytes(needed.rest_bytes)} for parameters, "
        f"gradients and optimizer state at rest and {format_bytes(needed.work_bytes)} to work on a unit, without activations."
    )
    if needed.num_bytes < capacity_bytes:
        return f"{text} That would fit: the rest is activations. Take a smaller batch, or activations='recompute' or 'host'."
    for change, other in _alternatives(plan, (Tier.HOST.value,)):
        found = footprint(units, other, num_ranks, num_states)
        if found.num_bytes < min(capacity_bytes, needed.num_bytes):
            return f"{text} It would fit with {change}: {format_bytes(found.num_bytes)}."
    return f"{text} No other stage or tier would fit: more ranks are needed, or smaller units."
