"""Backward passes: units opened before their differentiation, gradients taken as they come, and the common end on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shardwise.core.plan import StateKind
from shardwise.core.trace import Moment, Point
from shardwise.devices import torch_private
from shardwise.runtime.flat import ParamState
from shardwise.runtime.forward import Packed
from shardwise.runtime.grads import RAW_GRAD
from shardwise.runtime.script import Script

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


@dataclass
class _Pass:
    """One backward pass of autograd."""

    script: Script
    is_synced: bool
    task: int
    goals: Counter[str]
    missing: dict[str, set[int]] = field(default_factory=dict)
    num_rounds: Counter[str] = field(default_factory=Counter)
    moments: list[Moment] = field(default_factory=list)
    num_grads: int = 0


class Backward:
    """The backward pass of one model on one rank; there is at most one at a time.

    Nothing here depends on when units are released: what autograd saved is a place, and reading it gathers the unit again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._executor = engine.executor
        self._is_sharded = StateKind.PARAM in engine.plan.sharded
        self._pass: _Pass | None = None
        self._leases: Counter[str] = Counter()
        self._num_rounds: dict[str, Counter[str]] = {}
        self.moments: tuple[Moment, ...] = ()
        self.strays: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._pass is not None

    def begin(self) -> _Pass:
        """Take note of a backward pass, at its first sign. Its end is called back by autograd."""
        if self._pass is None:
            entry = self._engine.forward.last_entry
            schedule = self._engine.schedule_of(entry)
            script = Script(schedule.phase(Point.PRE_BACKWARD) if self._is_sharded else ())
            self._engine.reducer.forget_cleared()
            goals = self._num_rounds.get(entry, Counter())
            self._pass = _Pass(script, self._engine.is_synced, torch_private.graph_task(), goals)
            if self._pass.is_synced:
                self._engine.reducer.begin(schedule.reduced_units)
            torch_private.at_end_of_backward(self._end)
        return self._pass

    def note_begin(self) -> None:
        """Gradients reach the outputs of a call from outside: its backward pass has begun."""
        self.begin()

    def open(self, units: Sequence[str]) -> None:
        """Before the differentiation of a call: gather the units that it used."""
        running = self.begin()
        for unit in units:
            self.follow(unit)
            self._executor.acquire(unit)
            self._leases[unit] += 1
            running.moments.append(Moment(Point.PRE_BACKWARD, unit))
            if torch.is_grad_enabled():
                # The backward builds a graph of its own, which saves views and not places: keep the buffer.
                self._engine.pin(unit)

    def follow(self, unit: str) -> None:
        """Keep to the schedule's order of gathers on the way to a unit."""
        passed, arrived = self.begin().script.arrive(unit)
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
            self.open((saved.unit,))
        elif self._leases[saved.unit] == 0:
            self._executor.acquire(saved.unit)
            self._leases[saved.unit] += 1
        if torch.is_grad_enabled():
            self._engine.pin(saved.unit)
        if saved.flat.full is None:
            raise RuntimeError(f"Unit '{saved.unit}' was gathered but has no buffer.")
        return saved.flat.full.as_strided(saved.size, saved.stride, saved.offset)

    def take_grad(self, state: ParamState) -> None:
        """A parameter's gradient is ready: move it into the flat local gradients; reduce the unit when it is complete."""
        running = self.begin()
        grad = RAW_GRAD.__get__(state.compute)
        if grad is None:
            return
        RAW_GRAD.__set__(state.compute, None)
        running.num_grads += 1
        with torch.no_grad():
            self._engine.reducer.accumulate(state, grad, self._engine.weight)
        unit = state.flat.spec.unit
        missing = running.missing.get(unit)
        if not missing:
            flats = self._executor.units[unit].flats
            missing = {id(p) for flat in flats for p in flat.params if p.compute.requires_grad}
            running.missing[unit] = missing
        missing.discard(id(state))
        if not missing:
            self._finish_round(unit, running)

    def _finish_round(self, unit: str, running: _Pass) -> None:
        """All gradients of a unit are in. Where reentrant checkpoints bring them several times, the last round completes it.

        How many rounds there are is known from the last pass; in the first one such units are reduced at the end.
        """
        while self._leases[unit]:
            self._leases[unit] -= 1
            self._executor.release(unit)
        running.num_rounds[unit] += 1
        is_nested = torch_private.graph_task() != running.task
        if running.num_rounds[unit] != (running.goals[unit] or (0 if is_nested else 1)):
            return
        running.moments.append(Moment(Point.POST_BACKWARD, unit))
        if running.is_synced:
            self._engine.reducer.mark_ready(unit)

    def _end(self) -> None:
        """The pass has ended: catch up on gathers, give leases back, and bring the gradients together."""
        running, self._pass = self._pass, None
        if running is None:
            return
        self._executor.visit(running.script.finish(), None)
        self.strays = tuple(running.script.strays)
        self.release_all()
        if running.num_grads == 0:
            return
        self._num_rounds[self._engine.forward.last_entry] = running.num_rounds
        reduced = {moment.unit for moment in running.moments if moment.point is Point.POST_BACKWARD}
        late = [name for name in self._executor.units if name not in reduced and self._engine.reducer.has_pending(name)]
        self.moments = (*running.moments, *(Moment(Point.POST_BACKWARD, name) for name in reversed(late)))
        if running.is_synced:
            self._engine.reducer.finish_order()
            self._engine.synchronize()
        else:
            self._engine.reducer.announce()

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
