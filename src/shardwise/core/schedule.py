"""What is done at each moment of a step: ``Moment -> (Op, ...)``. Pure: the runtime executes it, the planner simulates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from shardwise.core.plan import Plan, StateKind
from shardwise.core.sizes import format_bytes
from shardwise.core.trace import Moment, Point, Trace
from shardwise.core.unit import Unit


class Verb(Enum):
    """What an op does to its unit."""

    __hash__ = object.__hash__  # In C: enum's own is Python, and members are looked up all through a step.

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
    by_name = {unit.name: unit for unit in units}
    is_open: set[str] = set()
    forward = _phase(trace.forward, Point.PRE_FORWARD, by_name, plan, is_open)
    backward = _phase(trace.backward, Point.PRE_BACKWARD, by_name, plan, is_open)
    return Schedule((*forward, *backward, *_finish(units, plan)))


def _phase(moments: Sequence[Moment], opening: Point, units: Mapping[str, Unit], plan: Plan, is_open: set[str]) -> list[Entry]:
    """One direction of the step. A unit that is open is not gathered again before it is released."""
    entries = []
    for position, moment in enumerate(moments):
        ops: list[Op] = []
        name, num_bytes = moment.unit, units[moment.unit].num_bytes
        if moment.point is opening and StateKind.PARAM in plan.sharded:
            for wanted in (name, *_upcoming(moments[position + 1 :], opening, name, plan.prefetch)):
                if wanted not in is_open:
                    is_open.add(wanted)
                    ops.append(Op(Verb.GATHER, wanted, units[wanted].num_bytes))
        if moment.point is Point.POST_BACKWARD and units[name].is_trained:
            ops.append(Op(Verb.REDUCE, name, num_bytes))
            if StateKind.OPTIM not in plan.sharded:
                ops.append(Op(Verb.GATHER_GRAD, name, num_bytes))
        if _releases(moment.point, plan):
            is_open.discard(name)
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
    if StateKind.PARAM not in plan.sharded:
        return False
    return point is Point.POST_BACKWARD or (point is Point.POST_FORWARD and plan.reshard_after_forward)


def _finish(units: Sequence[Unit], plan: Plan) -> list[Entry]:
    total = sum(unit.num_bytes for unit in units)
    entries = [Entry(Moment(Point.END_BACKWARD, ""), (Op(Verb.DIGEST, "", total),))]
    for unit in units:
        if not unit.is_trained:
            continue
        ops = [Op(Verb.UPDATE, unit.name, unit.num_bytes)]
        if StateKind.OPTIM in plan.sharded and StateKind.PARAM not in plan.sharded:
            ops.append(Op(Verb.GATHER, unit.name, unit.num_bytes))
        entries.append(Entry(Moment(Point.UPDATE, unit.name), tuple(ops)))
    return entries
