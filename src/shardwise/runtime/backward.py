"""Backward passes: units opened before their differentiation, gradients taken as they come, and the common end on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.core.plan import Plan
from shardwise.core.trace import Moment, Point
from shardwise.devices import torch_private
from shardwise.runtime.flat import ParamState
from shardwise.runtime.forward import Packed
from shardwise.runtime.grads import RAW_GRAD
from shardwise.runtime.script import Script
from shardwise.runtime.written import check_version
from shardwise.telemetry.meter import Place

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


@dataclass(slots=True)
class _Tally:
    """The gradients of one unit that have come in a pass. ``missing``: parameters that have brought none in this round; ``goal``: how
    many gradients there were in the last pass that used them all, or 0.
    """

    missing: set[int]
    goal: int
    num_grads: int = 0
    num_rounds: int = 0


@dataclass
class _Pass:
    """One backward pass of autograd. ``opened``: units that the schedule opens; ``needed``: those whose values were read."""

    script: Script
    is_synced: bool
    task: int
    goals: dict[str, int]
    opened: frozenset[str]
    needed: set[str] = field(default_factory=set)
    tallies: dict[str, _Tally] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)


class Backward:
    """The backward pass of one model on one rank; there is at most one at a time.

    Nothing here depends on when units are released: what autograd saved is a place, and reading it gathers the unit again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._executor = engine.executor
        self.use_plan(engine.plan)
        self._pass: _Pass | None = None
        self._leases: Counter[str] = Counter()
        self._num_grads: dict[str, dict[str, int]] = {}
        self.moments: tuple[Moment, ...] = ()
        self.strays: tuple[str, ...] = ()

    def use_plan(self, plan: Plan) -> None:
        """What passes go by from now on."""
        self._is_sharded = plan.fetches_params

    @property
    def is_running(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._pass is not None

    def begin(self) -> _Pass:
        """Take note of a backward pass, at its first sign. Its end is called back by autograd."""
        if self._pass is None:
            if self._engine.opened:
                raise UsageError(
                    "loss.backward() cannot run inside `with shardwise.gathered(...)`: its gradients would be lost. "
                    "Leave the block first."
                )
            self._engine.meter.move(Place.BACKWARD)
            self._engine.spent_grads.clear()
            self._executor.note_activations()  # All that the forward has left is there.
            self._engine.meter.tracer.start_laps()
            entry = self._engine.forward.last_entry
            schedule = self._engine.schedule_of(entry)
            opening = schedule.phase(Point.PRE_BACKWARD) if self._is_sharded else ()
            self._executor.keep(frozenset())
            self._engine.reducer.forget_cleared()
            goals = self._num_grads.get(entry, {})
            opened = frozenset(each.moment.unit for each in opening)
            self._pass = _Pass(Script(opening), self._engine.is_synced, torch_private.graph_task(), goals, opened)
            if self._pass.is_synced:
                self._engine.reducer.begin(schedule.reduced_units)
            if not self._engine.updates.is_beside:
                self._engine.read_ahead(self._engine.plan)
            torch_private.at_end_of_backward(self._end)
        return self._pass

    def note_begin(self) -> None:
        """Gradients reach the outputs of a call from outside: its backward pass has begun."""
        self._engine.updates.before_backward()
        self.begin()

    def expect(self, units: Sequence[str]) -> None:
        """Before the differentiation of a call: gather the units that it used, but for tables whose values nobody read last time."""
        running = self.begin()
        for unit in units:
            if unit in running.opened or torch.is_grad_enabled():
                self._open(unit, running)

    def need(self, unit: str) -> None:
        """Values of a unit are read: gather it unless it is there, and expect the same in the next pass."""
        running = self.begin()
        running.needed.add(unit)
        if self._executor.units[unit].num_leases == 0:
            self._open(unit, running)

    def _open(self, unit: str, running: _Pass) -> None:
        self._follow(unit, running)
        self._executor.hold(unit)
        self._leases[unit] += 1
        running.moments.append(Moment(Point.PRE_BACKWARD, unit))
        if torch.is_grad_enabled():
            # The backward builds a graph of its own, which saves views and not places: keep the buffer.
            running.needed.add(unit)
            self._engine.pin(unit)

    def recompute(self, unit: str) -> None:
        """A call inside the pass is about to use a unit: keep to the schedule's order of gathers on the way to it."""
        running = self.begin()
        running.needed.add(unit)
        self._follow(unit, running)

    def _follow(self, unit: str, running: _Pass) -> None:
        passed, arrived = running.script.arrive(unit)
        self._executor.visit(passed, arrived)

    def adopt(self, unit: str) -> None:
        """Take over a lease that a call has held."""
        self._leases[unit] += 1

    def close(self, units: Sequence[str]) -> None:
        """A call is differentiated: its units are not needed, unless another call needs them."""
        for unit in units:
            if self._leases[unit]:
                self._leases[unit] -= 1
                self._executor.release(unit)

    def restore(self, saved: Packed) -> torch.Tensor:
        """What autograd saved as a place, as a view of the gathered buffer."""
        if saved.flat.full is None:
            self.need(saved.unit)
        elif self._leases[saved.unit] == 0:
            self._executor.hold(saved.unit)
            self._leases[saved.unit] += 1
        if self._pass is not None:
            self._pass.needed.add(saved.unit)
        if torch.is_grad_enabled():
            self._engine.pin(saved.unit)
        if saved.flat.full is None:
            raise RuntimeError(f"Unit '{saved.unit}' was gathered but has no buffer.")
        if saved.flat.written:
            check_version(saved.flat, saved.offset - int(saved.flat.full.storage_offset()), saved.version)
        return saved.flat.full.as_strided(saved.size, saved.stride, saved.offset)

    def take_grad(self, state: ParamState) -> None:
        """A parameter's gradient is ready: move it into the flat local gradients; reduce the unit when it is complete."""
        if torch.is_grad_enabled():  # The backward builds a graph, which gradients that are taken out of it are no part of.
            with torch.no_grad():
                return self.take_grad(state)
        running = self._pass or self.begin()
        unit = state.flat.spec.unit
        with torch_private.without_torch_function():
            grad = RAW_GRAD.__get__(state.compute)
            if grad is None:
                return None
            tally = running.tallies.get(unit)
            if tally is None:
                tally = running.tallies[unit] = _Tally(self._expected(unit), running.goals.get(unit, 0))
            elif not tally.missing:
                tally.missing = self._expected(unit)
            tally.num_grads += 1
            try:
                self._engine.reducer.accumulate(state, grad, self._engine.weight)
            finally:
                del grad
                RAW_GRAD.__set__(state.compute, None)  # Its memory goes here.
        tally.missing.discard(id(state))
        if not tally.missing:
            self._finish_round(unit, tally)
        if tally.num_rounds and _is_complete(tally, running):
            running.moments.append(Moment(Point.POST_BACKWARD, unit))
            if running.is_synced:
                self._engine.reducer.mark_ready(unit)

    def _expected(self, unit: str) -> set[int]:
        """Parameters of a unit that bring a gradient each."""
        return {id(state) for flat in self._executor.units[unit].flats for state in flat.params if state.compute.requires_grad}

    def _finish_round(self, unit: str, tally: _Tally) -> None:
        """Every parameter of a unit has brought a gradient; reentrant checkpoints may bring more of them."""
        while self._leases[unit]:
            self._leases[unit] -= 1
            self._executor.release(unit)
        tally.num_rounds += 1
        self._engine.meter.tracer.lap("backward", unit)

    def _end(self) -> None:
        """The pass has ended: catch up on gathers, give leases back, and bring the gradients together."""
        running, self._pass = self._pass, None
        if running is not None:
            self._bring_together(running)
            self._engine.meter.move(Place.AFTER_BACKWARD)

    def _bring_together(self, running: _Pass) -> None:
        self._executor.visit(running.script.finish(), None)
        self.strays = tuple(running.script.strays)
        self.release_all()
        if not running.tallies:
            if self._engine.disk is not None:  # No later moment would tell.
                self._engine.disk.refuse_failed("Gradients cannot be relied on.")
            return
        # Where not all parameters were used there is nothing to go by: the next pass may use more.
        counts = {unit: tally.num_grads for unit, tally in running.tallies.items() if tally.num_rounds}
        self._num_grads[self._engine.forward.last_entry] = counts
        self.moments = self._moments_of(running)
        if running.is_synced:
            self._engine.reducer.finish_order()
            self._engine.synchronize()
        else:
            self._engine.reducer.announce()

    def _moments_of(self, running: _Pass) -> tuple[Moment, ...]:
        """What the next pass can go by: without the opening of tables that nobody read.

        What other modules read depends on the way that a rank goes: a linear layer needs its weights unless it comes first. Such
        units are opened in any case, so that ranks which go different ways issue the same gathers.
        """
        moments = running.moments
        if self._engine.plan.unused != "zero":
            moments = [
                m
                for m in moments
                if m.unit in running.needed or m.point is not Point.PRE_BACKWARD or not self._is_table(m.unit)
            ]
        reduced = {moment.unit for moment in moments if moment.point is Point.POST_BACKWARD}
        late = [name for name in self._executor.units if name not in reduced and self._engine.reducer.has_pending(name)]
        return (*moments, *(Moment(Point.POST_BACKWARD, name) for name in reversed(late)))

    def _is_table(self, unit: str) -> bool:
        """Whether a unit holds nothing but tables of embeddings, which are differentiated without their values."""
        params = (param for flat in self._executor.units[unit].flats for param in flat.params)
        return all(isinstance(module, nn.Embedding | nn.EmbeddingBag) for param in params for module, _ in param.places)

    def release_all(self) -> None:
        """Give all leases of backward passes back."""
        for unit in list(self._leases):
            while self._leases[unit]:
                self._leases[unit] -= 1
                self._executor.release(unit)
        if self._is_sharded:
            self._executor.drop_idle()

    def abandon(self) -> None:
        """A pass has failed: forget it."""
        self._pass = None
        self._leases.clear()


def _is_complete(tally: _Tally, running: _Pass) -> bool:
    """Whether the gradient that has just come is the last of its unit.

    Reentrant checkpoints bring gradients several times, and not of all parameters as often: how many there are is known from
    the last pass. In the first one such units are reduced at the end.
    """
    if tally.goal:
        return tally.num_grads == tally.goal
    is_nested = torch_private.graph_task() != running.task
    return tally.num_rounds == 1 and not tally.missing and not is_nested
