"""What a plan needs of the memory of device and host, and which other plan would fit: arithmetic over units, without activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.core.errors import PlanError
from shardwise.core.ledger import Tier
from shardwise.core.plan import SHARDED_AT_STAGE, Plan, StateKind, choices_of
from shardwise.core.rest import Rest, rests_of
from shardwise.core.sizes import format_bytes
from shardwise.core.unit import FlatSpec, Unit

ADAM_STATES = 2
"""Numbers that Adam and its like keep for each parameter: what is assumed of an optimizer that has no state yet."""


LOADS_AT_ONCE = 3
"""Loads of the largest size that there is memory for between disk and computation, unless the plan says otherwise."""

_OTHER_TIERS: tuple[tuple[Tier, ...], ...] = (
    (Tier.HOST,),
    (Tier.HOST, Tier.HOST),
    (Tier.HOST, Tier.HOST, Tier.HOST),
    (Tier.DISK,),
    (Tier.DISK, Tier.HOST),
    (Tier.DISK, Tier.HOST, Tier.HOST),
    (Tier.DISK, Tier.DISK, Tier.HOST),
    (Tier.DISK, Tier.DISK, Tier.DISK),
)
"""Tiers of optimizer state, gradients and parameters, what costs the least time first: the host before the disk, and first what
travels the least."""

_ACTIVATIONS = ("recompute", Tier.HOST.value, Tier.DISK.value)
"""What may be done with activations, what costs the least time first."""


@dataclass(frozen=True)
class Footprint:
    """Bytes on the device: at rest all the time, and at work for a unit at a time; and what rests elsewhere."""

    rest_bytes: int
    work_bytes: int
    host_bytes: int = 0
    """With the memory between disk and computation."""
    disk_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All of it that is on the device."""
        return self.rest_bytes + self.work_bytes


def footprint(units: Sequence[Unit], plan: Plan, num_ranks: int, num_states: int = ADAM_STATES) -> Footprint:
    """What one rank needs for parameters, gradients and optimizer state.

    >>> from shardwise.core.unit import find_units
    >>> from torch import nn
    >>> units = find_units(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), units=[nn.Linear])
    >>> [footprint(units, Plan(stage=stage), num_ranks=4).rest_bytes // 1024 for stage in range(4)]
    [256, 160, 112, 64]
    """
    rests = rests_of(units, plan)
    at_rest = dict.fromkeys(Tier, 0)
    most_work = most_loaded = 0
    for unit in units:
        work_bytes = 0
        for flat in unit.flats:
            rest, precision = rests[flat.name], _Sizes.of(flat, plan)
            loaded_bytes = 0
            for tier, num_bytes in _held(flat.trainable, rest, precision, plan, num_ranks, num_states):
                at_rest[tier] += num_bytes
                loaded_bytes += num_bytes if tier is Tier.DISK else 0
            most_loaded = max(most_loaded, loaded_bytes)
            fetched = precision.computed if StateKind.PARAM in plan.sharded or rest.param is not Tier.DEVICE else 0
            # One gradient to work on, and one on its way, with room for what others send.
            work_bytes += fetched + 2 * (precision.gradient if flat.trainable else 0)
        most_work = max(most_work, work_bytes)
    staging_bytes = (plan.staging_bytes or LOADS_AT_ONCE * most_loaded) if most_loaded else 0
    return Footprint(at_rest[Tier.DEVICE], most_work, at_rest[Tier.HOST] + staging_bytes, at_rest[Tier.DISK])


@dataclass(frozen=True)
class _Sizes:
    """Bytes of all elements of a flat buffer: as they rest, as they are computed with, and of their gradients."""

    full: int
    computed: int
    gradient: int
    is_mixed: bool

    @classmethod
    def of(cls, flat: FlatSpec, plan: Plan) -> _Sizes:
        is_cast = flat.dtype.is_floating_point and not flat.keeps_dtype
        compute = (plan.dtype("param_dtype") if is_cast else None) or flat.dtype
        reduced = plan.dtype("reduce_dtype") or compute
        full, computed, gradient = (flat.numel * dtype.itemsize for dtype in (flat.dtype, compute, reduced))
        return cls(full, computed, gradient, compute != flat.dtype)


def _held(
    is_trained: bool, rest: Rest, sizes: _Sizes, plan: Plan, num_ranks: int, num_states: int
) -> Iterator[tuple[Tier, int]]:
    """What one rank holds of a flat buffer at rest, and where."""

    def share(num_bytes: int, kind: StateKind) -> int:
        return num_bytes // num_ranks if kind in plan.sharded else num_bytes

    is_apart = plan.is_delayed and is_trained  # Updated while a copy of its values is computed with.
    is_single = rest.master is Tier.DEVICE and not is_apart and (StateKind.PARAM in plan.sharded or not sizes.is_mixed)
    if rest.param is Tier.DEVICE:
        yield Tier.DEVICE, share(sizes.full if is_single else sizes.computed, StateKind.PARAM)
    elif is_apart:
        yield rest.param, share(sizes.computed, StateKind.OPTIM)
    if not is_single:
        yield rest.master, share(sizes.full, StateKind.OPTIM)
    if is_trained:
        yield rest.grad, share(sizes.gradient, StateKind.GRAD) * (2 if is_apart else 1)
        yield rest.optim, share(num_states * sizes.full, StateKind.OPTIM)


def _alternatives(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Other plans, the least trouble first: a higher stage, and then more and more state off the device."""
    for stage in range(plan.stage + 1, max(SHARDED_AT_STAGE) + 1):
        yield f"stage={stage}", plan.replace(stage=stage)
    top = plan.replace(stage=max(SHARDED_AT_STAGE))
    prefix = "" if plan.stage == top.stage else f"stage={top.stage} and "
    for chosen in _OTHER_TIERS:
        kinds = (StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM)
        tiers = {kind.key: tier.value for kind, tier in zip(kinds, chosen, strict=False)}
        other = _changed(top, tiers=tiers, fraction=1.0)
        if other is not None:
            yield f"{prefix}tiers={tiers}", other


def _changed(plan: Plan, **changes: Any) -> Plan | None:
    """Another plan, if there can be one: updates beside the next step do not go with all tiers."""
    try:
        return plan.replace(**changes)
    except PlanError:
        return None


def advice(
    units: Sequence[Unit],
    plan: Plan,
    num_ranks: int,
    capacity_bytes: int,
    num_states: int = ADAM_STATES,
    free_host_bytes: int | None = None,
) -> str:
    """What a device of this capacity is told when it runs out of memory: what was needed, and what would fit.

    Args:
        free_host_bytes: What this rank may take of the host's memory; as much as it likes, if None.
    """
    needed = footprint(units, plan, num_ranks, num_states)
    text = (
        f"Under this plan (stage {plan.stage} on {num_ranks} ranks) a rank needs {format_bytes(needed.rest_bytes)} for parameters, "
        f"gradients and optimizer state at rest and {format_bytes(needed.work_bytes)} to work on a unit, without activations."
    )
    if needed.num_bytes < capacity_bytes:
        return f"{text} {_advice_on_activations(plan, capacity_bytes - needed.num_bytes)}"
    too_much = ""
    for change, other in _alternatives(plan):
        found = footprint(units, other, num_ranks, num_states)
        if found.num_bytes >= min(capacity_bytes, needed.num_bytes):
            continue
        if free_host_bytes is None or found.host_bytes <= free_host_bytes:
            return f"{text} It would fit with {change}: {_places(found)}.{too_much}"
        too_much = too_much or (
            f" The host alone has too little room: {change.rpartition(' and ')[2]} would take {format_bytes(found.host_bytes)} of it, "
            f"and {format_bytes(free_host_bytes)} are free for a rank."
        )
    return f"{text} No other stage or tier would fit: more ranks are needed, or smaller units.{too_much}"


def _places(found: Footprint) -> str:
    places = {"on the device": found.num_bytes, "in the host's memory": found.host_bytes, "on disk": found.disk_bytes}
    if not found.host_bytes and not found.disk_bytes:
        return format_bytes(found.num_bytes)
    return ", ".join(f"{format_bytes(num_bytes)} {where}" for where, num_bytes in places.items() if num_bytes)


def _advice_on_activations(plan: Plan, room_bytes: int) -> str:
    known = [choice for choice in _ACTIVATIONS if choice in choices_of("activations") and choice != plan.activations]
    known = [choice for choice in known if _changed(plan, activations=choice) is not None]
    choices = " or ".join(f"activations={choice!r}" for choice in known)
    return (
        f"That would fit, and leave {format_bytes(room_bytes)} for activations, which take more. Take a smaller batch, activation "
        f"checkpointing{f' or {choices}' if choices else ''}."
    )
