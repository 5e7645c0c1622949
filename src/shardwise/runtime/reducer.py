"""Local gradients on their way to reduced ones: packed, accumulated, exchanged in one order on all ranks, and installed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.core.ledger import Kind
from shardwise.core.plan import StateKind
from shardwise.core.tree import Tree
from shardwise.runtime.executor import Executor, UnitState
from shardwise.runtime.flat import FlatState, GradBuffer, ParamState
from shardwise.runtime.grads import GradFace
from shardwise.runtime.reduce import Reduction, begin_reduction
from shardwise.wire.comm import Handle


@dataclass(eq=False)
class _InFlight:
    name: str
    flat: FlatState
    local: torch.Tensor
    reduction: Reduction


class Reducer:
    """Owns the full local gradients of one model, and the order in which its units are reduced.

    Units are issued strictly in the order that was agreed, each when it and all before it are ready, and the rest at the end of
    the backward. Nothing waits for other ranks before that end: a rank that skips a unit could otherwise not catch up.
    """

    def __init__(self, executor: Executor, tree: Tree) -> None:
        self._executor = executor
        self._tree = tree
        self._order: tuple[str, ...] = ()
        self._next = 0
        self._ready: set[str] = set()
        self._in_flight: deque[list[_InFlight]] = deque()
        self._regathers: list[tuple[str, Handle]] = []
        self._completed: list[tuple[FlatState, GradBuffer]] = []
        self.num_issued: Counter[str] = Counter()
        self.sent: set[int] = set()

    def accumulate(self, state: ParamState, grad: torch.Tensor, weight: float) -> None:
        """Add one backward's gradient of a parameter, weighted, to the full local gradients."""
        flat = state.flat
        if flat.local is None:
            flat.local = self._new_local(flat)
        target = state.spec.view(flat.local)
        grad = grad.to_dense() if grad.layout is not torch.strided else grad
        if weight == 0.0:
            grad = torch.zeros_like(grad)  # A rank without samples has no say, even if its loss is nan.
        if state.index in flat.filled:
            term = grad.to(target.dtype)
            target.add_(term if weight == 1.0 else term * weight)
        elif grad.dtype == target.dtype:
            torch.mul(grad, weight, out=target) if weight != 1.0 else target.copy_(grad)
        else:
            target.copy_(grad)
            if weight != 1.0:
                target.mul_(weight)
        flat.filled.add(state.index)

    def _new_local(self, flat: FlatState) -> torch.Tensor:
        self._executor.ledger.add(Kind.FULL_GRAD, flat.layout.numel * flat.precision.reduce.itemsize)
        return torch.zeros(flat.layout.numel, dtype=flat.precision.reduce, device=flat.master.device)

    def begin(self, order: Sequence[str]) -> None:
        """A backward begins whose units are ready in an order that all ranks expect."""
        self._order = tuple(order)
        self._next = 0
        self._ready.clear()

    def mark_ready(self, name: str) -> None:
        """All gradients of a unit are in, or it was skipped. Issue what is ready, in the common order."""
        self._ready.add(name)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._issue_next()

    def finish_order(self) -> None:
        """The backward has ended: issue what is left of the common order."""
        while self._next < len(self._order):
            self._issue_next()

    def _issue_next(self) -> None:
        self._next += 1
        self.issue(self._order[self._next - 1])

    def has_pending(self, name: str) -> bool:
        """Whether a unit has local gradients that were not sent."""
        return any(flat.filled for flat in self._executor.units[name].flats)

    def issue(self, name: str) -> None:
        """Begin the reduction of one unit, with zeros where this rank has no gradients."""
        while self._in_flight and all(item.reduction.is_done for item in self._in_flight[0]):
            self._complete(self._in_flight.popleft())
        self._executor.reduce_log.add(f"reduce {name}")
        self.num_issued[name] += 1
        batch = []
        for flat in self._trained_flats(self._executor.units[name]):
            local = flat.local if flat.local is not None else self._new_local(flat)
            self.sent.update(id(flat.params[index]) for index in flat.filled)
            flat.local = None
            flat.filled.clear()
            label = f"gradients of '{self._executor.units[name].unit.label}'"
            reduction = begin_reduction(local, flat.layout, self._tree, self._executor.lanes.reduce, label=label)
            batch.append(_InFlight(name, flat, local, reduction))
        self._in_flight.append(batch)

    @staticmethod
    def _trained_flats(unit: UnitState) -> list[FlatState]:
        return [flat for flat in unit.flats if any(p.resting.requires_grad or p.compute.requires_grad for p in flat.params)]

    def _complete(self, batch: list[_InFlight]) -> None:
        plan = self._executor.plan
        for item in batch:
            flat = item.flat
            total, waited_seconds = item.reduction.finish()
            self._executor.record("reduce", item.name, item.reduction.handle, waited_seconds)
            low, high = flat.layout.bounds(item.reduction.rank)
            if StateKind.GRAD in plan.sharded:
                values, start = (total if total.numel() == item.local.numel() else total.clone()), low
                self._executor.ledger.add(Kind.FULL_GRAD, -item.local.numel() * item.local.element_size())
            else:
                values, start = item.local, 0
                if total.data_ptr() != values[low:high].data_ptr():
                    values[low:high].copy_(total)
                self._executor.ledger.add(Kind.FULL_GRAD, -values.numel() * values.element_size())
            if StateKind.OPTIM not in plan.sharded:
                label = f"reduced gradients of '{item.name or '(root)'}'"
                regather = self._executor.lanes.regather.all_gather(values, flat.layout.cuts, label=label)
                self._regathers.append((item.name, regather))
            self._completed.append((flat, GradBuffer(values, start, self._executor.ledger)))

    def complete_all(self) -> None:
        """Wait for all reductions under way."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        for name, handle in self._regathers:
            self._executor.wait(handle, "gather gradients", name)
        self._regathers.clear()

    def install(self, is_used: Callable[[ParamState], bool]) -> None:
        """Show reduced gradients to model and optimizer: added to earlier ones, and only where some rank had one."""
        completed, self._completed = self._completed, []
        for flat, buffer in completed:
            for state in flat.params:
                if not is_used(state):
                    continue
                held = state.segment.grad
                face = GradFace(state, buffer, state.segment)
                if isinstance(held, GradFace) and held.reduced is not None and face.reduced is not None:
                    face.reduced.add_(held.reduced if held.factor is None else held.reduced * held.factor)
                elif held is not None and not isinstance(held, GradFace) and face.reduced is not None:
                    face.reduced.add_(held.view_as(face.reduced))
                state.segment.grad = face
        self.begin_cycle()

    def announce(self) -> None:
        """After a backward inside no_sync: show that there are gradients, so that clearing them can be noticed."""
        for unit in self._executor.units.values():
            for flat in unit.flats:
                for index in flat.filled:
                    state = flat.params[index]
                    held = state.segment.grad
                    buffer = held.buffer if isinstance(held, GradFace) else None
                    state.segment.grad = GradFace(state, buffer, state.segment)

    def forget_cleared(self) -> None:
        """Drop accumulated gradients that the user has cleared through the model or the optimizer."""
        for unit in self._executor.units.values():
            for flat in unit.flats:
                flat.filled = {index for index in flat.filled if flat.params[index].segment.grad is not None}
                if flat.local is not None and not flat.filled:
                    self._free_local(flat)
                elif flat.local is not None:
                    for state in flat.params:
                        if state.index not in flat.filled:
                            state.spec.view(flat.local).zero_()

    def _free_local(self, flat: FlatState) -> None:
        if flat.local is not None:
            self._executor.ledger.add(Kind.FULL_GRAD, -flat.local.numel() * flat.local.element_size())
        flat.local = None
        flat.filled.clear()

    def begin_cycle(self) -> None:
        """All is reduced: nothing was sent of what comes next."""
        self.begin(())
        self.sent.clear()
        self.num_issued.clear()

    def abandon(self) -> None:
        """After a failure: wait for what is under way, and drop it together with what was accumulated."""
        self.complete_all()
        self._completed.clear()
        for unit in self._executor.units.values():
            for flat in unit.flats:
                self._free_local(flat)
        self.begin_cycle()
