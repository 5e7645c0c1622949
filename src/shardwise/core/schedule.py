"""What is done at each moment of a step: ``Moment -> (Op, ...)``. Pure: the runtime executes it, the planner simulates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import takewhile

from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan, StateKind
from shardwise.core.rest import rests_of
from shardwise.core.sizes import format_bytes
from shardwise.core.trace import Moment, Point, Trace
from shardwise.core.unit import Unit


class Verb(Enum):
    """What an op does to its unit."""

    __hash__ = object.__hash__  # In C: enum's own is Python, and members are looked up all through a step.

    FETCH = "read from disk"
    GATHER = "gather parameters"
    RELEASE = "release parameters"
    REDUCE = "reduce gradients"
    GATHER_GRAD = "gather gradients"
    DIGEST = "digest"
    UPDATE = "update"


@dataclass(frozen=True)
class Op:
    """One thing to do, and the full bytes of the buffers it concerns."""

    verb: Verb
    unit: str
    num_bytes: int


@dataclass(frozen=True)
class Entry:
    """What is done at one moment."""

    moment: Moment
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Schedule:
    """One step: its moments in order, each with its ops. Printing it shows the step as a table."""

    entries: tuple[Entry, ...]

    def phase(self, *points: Point) -> tuple[Entry, ...]:
        """The entries at certain kinds of moments, in order."""
        return tuple(entry for entry in self.entries if entry.moment.point in points)

    @property
    def reduced_units(self) -> tuple[str, ...]:
        """Units in the order in which their gradients are reduced."""
        return tuple(op.unit for entry in self.entries for op in entry.ops if op.verb is Verb.REDUCE)

    @cached_property
    def kept_units(self) -> frozenset[str]:
        """Units that stay gathered from the forward to the backward."""
        is_open: set[str] = set()
        for entry in self.phase(Point.PRE_FORWARD, Point.POST_FORWARD):
            for op in entry.ops:
                if op.verb is Verb.GATHER:
                    is_open.add(op.unit)
                elif op.verb is Verb.RELEASE:
                    is_open.discard(op.unit)
        return frozenset(is_open)

    def __str__(self) -> str:
        rows = [f"{'moment':<18}{'at unit':<28}{'op':<20}{'unit':<28}{'bytes':>12}"]
        for entry in self.entries:
            for op in entry.ops:
                at, unit = entry.moment.unit or "(root)", op.unit or "(root)"
                row = f"{entry.moment.point.value:<18}{at:<28}{op.verb.value:<20}{unit:<28}{format_bytes(op.num_bytes):>12}"
                rows.append(row)
        return "\n".join(rows)


def build_schedule(units: Sequence[Unit], plan: Plan, trace: Trace) -> Schedule:
    """Lay the plan over a trace."""
    step = _Step({unit.name: unit for unit in units}, plan, fetched_units(units, plan), _units_on_disk(units, plan))
    last, both = _turn(trace)
    forward = _phase(trace.forward[:last], Point.PRE_FORWARD, step)
    forward += _phase(trace.forward[last:], Point.PRE_FORWARD, step, kept=both)
    backward = _phase(trace.backward, Point.PRE_BACKWARD, step)
    return Schedule((*forward, *backward, *_finish(step)))


def fetched_units(units: Sequence[Unit], plan: Plan) -> frozenset[str]:
    """Units whose full parameters are there only while they are used: others own parts of them, or they rest elsewhere."""
    if StateKind.PARAM in plan.sharded:
        return frozenset(unit.name for unit in units)
    rests = rests_of(units, plan)
    return frozenset(unit.name for unit in units if any(rests[flat.name].param is not Tier.DEVICE for flat in unit.flats))


def _units_on_disk(units: Sequence[Unit], plan: Plan) -> frozenset[str]:
    """Units whose parameters rest on disk."""
    if plan.tier(StateKind.PARAM) is not Tier.DISK:
        return frozenset()
    rests = rests_of(units, plan)
    return frozenset(unit.name for unit in units if any(rests[flat.name].param is Tier.DISK for flat in unit.flats))


@dataclass
class _Step:
    """What a step is laid out over, and the units that are open at a moment of it."""

    units: Mapping[str, Unit]
    plan: Plan
    fetched: frozenset[str]
    on_disk: frozenset[str]
    is_open: set[str] = field(default_factory=set)


def _turn(trace: Trace) -> tuple[int, frozenset[str]]:
    """Where the forward does nothing but close, and the units that it closes there and the backward opens before all else.

    They were open together, and will be: to keep them over the turn needs no more memory, and a gather less.
    """
    closing = [moment.unit for moment in takewhile(lambda m: m.point is Point.POST_FORWARD, reversed(trace.forward))]
    opening = {moment.unit for moment in takewhile(lambda m: m.point is Point.PRE_BACKWARD, trace.backward)}
    return len(trace.forward) - len(closing), frozenset(closing) & opening


def _phase(moments: Sequence[Moment], opening: Point, step: _Step, kept: frozenset[str] = frozenset()) -> list[Entry]:
    """Moments of one direction of the step. A unit that is open is not gathered again before it is released."""
    entries = []
    plan, units = step.plan, step.units
    for position, moment in enumerate(moments):
        ops: list[Op] = []
        name, num_bytes = moment.unit, units[moment.unit].num_bytes
        if moment.point is opening and step.fetched:
            upcoming = _upcoming(moments[position + 1 :], opening, name, plan.prefetch + 1)
            for wanted in (name, *upcoming[: plan.prefetch]):
                if wanted in step.fetched and wanted not in step.is_open:
                    step.is_open.add(wanted)
                    ops.append(Op(Verb.GATHER, wanted, units[wanted].num_bytes))
            for wanted in upcoming[plan.prefetch :]:  # The disk needs more time: it is read one opening before the gather.
                if wanted in step.on_disk and wanted not in step.is_open:
                    ops.append(Op(Verb.FETCH, wanted, units[wanted].num_bytes))
        if moment.point is Point.POST_BACKWARD and units[name].is_trained:
            ops.append(Op(Verb.REDUCE, name, num_bytes))
            if StateKind.OPTIM not in plan.sharded:
                ops.append(Op(Verb.GATHER_GRAD, name, num_bytes))
        if name in step.fetched and name not in kept and _releases(moment.point, plan):
            step.is_open.discard(name)
            ops.append(Op(Verb.RELEASE, name, num_bytes))
        entries.append(Entry(moment, tuple(ops)))
    return entries


def _upcoming(moments: Sequence[Moment], opening: Point, current: str, depth: int) -> list[str]:
    """The next ``depth`` units that are opened after this moment."""
    names: list[str] = []
    for moment in moments:
        if len(names) == depth:
            break
        if moment.point is opening and moment.unit != current and moment.unit not in names:
            names.append(moment.unit)
    return names


def _releases(point: Point, plan: Plan) -> bool:
    return point is Point.POST_BACKWARD or (point is Point.POST_FORWARD and plan.reshard_after_forward)


def _finish(step: _Step) -> list[Entry]:
    plan, units = step.plan, step.units.values()
    total = sum(unit.num_bytes for unit in units)
    entries = [Entry(Moment(Point.END_BACKWARD, ""), (Op(Verb.DIGEST, "", total),))]
    for unit in units:
        if not unit.is_trained:
            continue
        ops = [Op(Verb.UPDATE, unit.name, unit.num_bytes)]
        if StateKind.OPTIM in plan.sharded and unit.name not in step.fetched:
            ops.append(Op(Verb.GATHER, unit.name, unit.num_bytes))
        entries.append(Entry(Moment(Point.UPDATE, unit.name), tuple(ops)))
    return entries
