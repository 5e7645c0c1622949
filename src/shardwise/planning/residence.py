"""Which units are gathered at each moment, and the memory that it takes: the engine's rules of leases and prefetch, without tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from shardwise.core.ledger import Kind
from shardwise.core.plan import Plan
from shardwise.core.schedule import Entry, Schedule, Verb
from shardwise.core.trace import Point
from shardwise.planning.held import HeldFlat
from shardwise.planning.lending import Lending, Loan
from shardwise.runtime.executor import PASSED_LIMIT
from shardwise.runtime.script import Script


class Residence:
    """Gathered units of one rank through a step."""

    def __init__(self, units: dict[str, list[HeldFlat]], plan: Plan, schedule: Schedule, lending: Lending) -> None:
        self._units = units
        self._plan = plan
        self._schedule = schedule
        self._lending = lending
        self._is_sharded = plan.fetches_params
        self._gathered: dict[str, list[Loan]] = {}
        self._under_way: dict[str, list[Loan]] = {}
        """What gathers that have not ended take besides."""
        self._leases: Counter[str] = Counter()
        self._of_backward: Counter[str] = Counter()
        self._kept: frozenset[str] = frozenset()
        self._passed: deque[str] = deque()
        self._postponed: list[str] = []
        self._script = Script(())
        self._opened: frozenset[str] = frozenset()
        self.is_reducing = False

    # The forward

    def begin_forward(self) -> None:
        """A call from outside."""
        self._script = Script(self._schedule.phase(Point.PRE_FORWARD) if self._is_sharded else ())
        self._kept = frozenset()

    def open(self, unit: str) -> None:
        """A call begins that uses a unit."""
        self._follow(unit, self._kept_over_the_turn)
        if self._script.is_finished:
            self._kept = self._kept_over_the_turn
        self._hold(unit)

    def close(self, unit: str) -> None:
        """It has returned."""
        if self._is_sharded and not self._plan.reshard_after_forward:
            self._of_backward[unit] += 1
        else:
            self._release(unit)

    def end_forward(self) -> None:
        """The call from outside has returned."""
        if self._is_sharded:
            self._visit(self._script.finish(), None, self._kept_over_the_turn)
            self._kept = self._kept_over_the_turn
            self._drop_idle()

    @property
    def _kept_over_the_turn(self) -> frozenset[str]:
        return self._schedule.kept_units if self._is_sharded else frozenset()

    # The backward

    def begin_backward(self) -> None:
        """Its first sign."""
        opening = self._schedule.phase(Point.PRE_BACKWARD) if self._is_sharded else ()
        self._script = Script(opening)
        self._opened = frozenset(entry.moment.unit for entry in opening)
        self._kept = frozenset()

    def differentiate(self, unit: str) -> None:
        """A call is about to be differentiated."""
        if unit in self._opened:
            self._follow(unit)
            self._hold(unit)
            self._of_backward[unit] += 1

    def again(self, unit: str) -> None:
        """A call is made again."""
        if self._is_sharded:
            self._follow(unit)
            self._hold(unit)
            self._of_backward[unit] += 1

    def differentiated(self, unit: str) -> None:
        """A call is differentiated."""
        if self._of_backward[unit]:
            self._of_backward[unit] -= 1
            self._release(unit)

    def finish_round(self, unit: str) -> None:
        """Every parameter of a unit has brought a gradient."""
        while self._of_backward[unit]:
            self.differentiated(unit)

    def end_backward(self) -> None:
        """Its end, before gradients are brought together."""
        self._visit(self._script.finish(), None)
        for unit in list(self._of_backward):
            self.finish_round(unit)
        if self._is_sharded:
            self._drop_idle()

    # Gathers

    def _follow(self, unit: str, spared: frozenset[str] = frozenset()) -> None:
        passed, arrived = self._script.arrive(unit)
        self._visit(passed, arrived, spared)

    def _visit(self, entries: Sequence[Entry], arrived: Entry | None, spared: frozenset[str] = frozenset()) -> None:
        for entry in entries:
            self._begin_gathers(entry)
            self._gather(entry.moment.unit)
            if entry.moment.unit not in spared:
                self._passed.append(entry.moment.unit)
            while len(self._passed) > PASSED_LIMIT:
                self._drop(self._passed.popleft())
        if arrived is not None:
            self._begin_gathers(arrived)

    def _begin_gathers(self, entry: Entry) -> None:
        for op in entry.ops:
            if op.verb is not Verb.GATHER:
                continue
            if not self.is_reducing or op.unit == entry.moment.unit:
                self._gather(op.unit)
            elif op.unit not in self._gathered and op.unit not in self._postponed:
                self._postponed.append(op.unit)

    def gather_postponed(self) -> None:
        """Begin the gathers that waited for a reduction to end."""
        postponed, self._postponed = self._postponed, []
        for unit in postponed:
            self._gather(unit)

    def _gather(self, unit: str) -> None:
        if unit in self._gathered:
            return
        self.gather_postponed()
        if unit not in self._gathered:
            loans: list[Loan] = []
            padding: list[Loan] = []
            for flat in self._units[unit]:
                if flat.form.is_fetched:
                    loans.append(self._lending.take(flat.gathered_bytes, Kind.GATHERED))
                    padding.append(self._lending.take(flat.padded_bytes(flat.precision.compute.itemsize), Kind.WIRE))
            self._gathered[unit], self._under_way[unit] = loans, padding

    def _arrive(self, unit: str) -> None:
        """A gather has ended."""
        for loan in self._under_way.pop(unit, []):
            self._lending.give(loan)

    def _hold(self, unit: str) -> None:
        self._gather(unit)
        self._arrive(unit)
        self._leases[unit] += 1

    def _release(self, unit: str) -> None:
        self._leases[unit] -= 1
        self._drop(unit)

    def _drop(self, unit: str) -> None:
        if not self._leases[unit] and unit not in self._kept:
            self._arrive(unit)
            for loan in self._gathered.pop(unit, []):
                self._lending.give(loan)

    def _drop_idle(self) -> None:
        self.gather_postponed()
        self._passed.clear()
        for unit in self._units:
            self._drop(unit)
