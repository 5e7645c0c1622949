"""Local gradients on their way to reduced ones: packed, accumulated, exchanged in one order on all ranks, and installed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shardwise.core.layout import ALIGNMENT
from shardwise.core.ledger import Kind, Tier
from shardwise.core.plan import StateKind
from shardwise.core.tree import Tree
from shardwise.devices import torch_private
from shardwise.runtime import exact
from shardwise.runtime.executor import Executor, UnitState
from shardwise.runtime.flat import FlatState, ParamState
from shardwise.runtime.grad_buffer import GradBuffer
from shardwise.runtime.grads import GradFace
from shardwise.runtime.reduce import Reduction, begin_reduction, needs_room
from shardwise.wire.comm import Handle, Receipt

MOST_IN_FLIGHT = 1
"""Reductions that may still be under way when another is begun; none, where memory goes before time."""
_PATIENCE_SECONDS = 1.0
_FIRST_PATIENCE_SECONDS = 2.0
"""Where memory goes before time and nobody knows yet whether ranks go the same way; up to the first time that it was in vain, once in
a run. First steps of several ranks on a busy machine are far apart, and what is not waited for is held."""
_PAUSE_SECONDS = 0.0002


@dataclass(eq=False)
class _InFlight:
    name: str
    flat: FlatState
    local: torch.Tensor
    is_local_pooled: bool
    reduction: Reduction


@dataclass(eq=False)
class _Completed:
    flat: FlatState
    buffer: GradBuffer
    squares: torch.Tensor | None


class Reducer:
    """Owns the full local gradients of one model, and the order in which its units are reduced.

    Units are issued strictly in the order that was agreed, each when it and all before it are ready, and the rest at the end of
    the backward. Nothing waits for other ranks before that end, unless all went the same way in the last step (and then not for
    long): a rank that skips a unit could otherwise not catch up.
    """

    def __init__(self, executor: Executor, tree: Tree) -> None:
        self._executor = executor
        self._tree = tree
        self._most_in_flight = 0 if executor.is_lean else MOST_IN_FLIGHT
        self._is_hopeful = executor.is_lean
        self._order: tuple[str, ...] = ()
        self._next = 0
        self._ready: set[str] = set()
        self._in_flight: deque[list[_InFlight]] = deque()
        self._regathers: list[tuple[str, Handle]] = []
        self._receipts: list[Receipt] = []
        self._completed: list[_Completed] = []
        self._squares: dict[FlatState, torch.Tensor] = {}
        self.is_steady = False
        """Whether all ranks went the same way in the last step: then nobody is waited for who waits for this rank."""
        self.num_issued: Counter[str] = Counter()
        self.sent: set[int] = set()

    def accumulate(self, state: ParamState, grad: torch.Tensor, weight: float) -> None:
        """Add one backward's gradient of a parameter, weighted, to the full local gradients."""
        flat = state.flat
        if flat.local is None and not self._most_in_flight:
            self._complete_ready()  # What they hold is needed now.
        if self._executor.is_lean:
            self._executor.note_activations()
        if flat.local is None:
            if self._take_over(state, grad, weight):
                return
            flat.local = self._take(flat, flat.layout.numel, Kind.FULL_GRAD)
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

    def _take_over(self, state: ParamState, grad: torch.Tensor, weight: float) -> bool:
        """Let a gradient that fills its buffer by itself be the buffer, where it will not be kept: no copy, no further memory."""
        flat = state.flat
        is_all = len(flat.params) == 1 and state.spec.numel == flat.layout.numel and grad.layout is torch.strided
        is_kept = StateKind.GRAD not in self._executor.plan.sharded or self._executor.lanes.size == 1
        if not is_all or is_kept or weight == 0.0 or grad.dtype != flat.precision.reduce:
            return False
        if grad.stride() != state.spec.stride or not torch_private.is_nobody_elses(grad):
            return False
        flat.local = grad.as_strided((state.spec.numel,), (1,)).mul_(weight)
        flat.filled.add(state.index)
        self._executor.ledger.add(Kind.FULL_GRAD, grad.nbytes)
        flat.is_local_pooled = False
        return True

    def _take(self, flat: FlatState, numel: int, kind: Kind) -> torch.Tensor:
        return self._executor.pool.take(numel, flat.precision.reduce, flat.device, kind)

    def _complete_local(self, flat: FlatState) -> torch.Tensor:
        """The full local gradients, with zeros where there are none."""
        local = self._take(flat, flat.layout.numel, Kind.FULL_GRAD) if flat.local is None else flat.local
        for state in flat.params:
            if state.index not in flat.filled:
                state.spec.view(local).zero_()
        for gap in flat.gaps:
            local[gap].zero_()
        return local

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
        self._complete_ready()
        self._executor.reduce_log.add(f"reduce {name}")
        self.num_issued[name] += 1
        batch = []
        for flat in self._trained_flats(self._executor.units[name]):
            local = self._complete_local(flat)
            self.sent.update(id(flat.params[index]) for index in flat.filled)
            is_pooled, flat.local, flat.is_local_pooled = flat.is_local_pooled, None, True
            flat.filled.clear()
            label = f"gradients of '{self._executor.units[name].unit.label}'"
            lane, room = self._executor.lanes.reduce, None
            if needs_room(lane):
                room = self._take(flat, lane.size * flat.layout.sizes[lane.rank], Kind.WIRE)
            reduction = begin_reduction(local, flat.layout, self._tree, lane, label=label, room=room)
            self._receipts.append(reduction.handle.receipt)
            batch.append(_InFlight(name, flat, local, is_pooled, reduction))
        self._in_flight.append(batch)
        self._executor.is_reducing = self._executor.is_lean

    def _complete_ready(self) -> None:
        """Add up what has arrived. Where ranks go the same way, wait a while for the oldest: memory in flight is bounded."""
        patience_seconds = _PATIENCE_SECONDS if self.is_steady else _FIRST_PATIENCE_SECONDS if self._is_hopeful else 0.0
        limit = time.monotonic() + patience_seconds
        while self._in_flight and self._wait_for(self._in_flight[0], limit):
            self._complete(self._in_flight.popleft())
        if not self.is_steady and len(self._in_flight) > self._most_in_flight:
            self._is_hopeful = False
        self._end_reducing()

    def _end_reducing(self) -> None:
        """When nothing is under way any more, its memory is free for what was to be gathered ahead."""
        if self._executor.is_reducing and not self._in_flight:
            self._executor.is_reducing = False
            self._executor.gather_postponed()

    def _wait_for(self, batch: list[_InFlight], limit: float) -> bool:
        """Whether a batch has arrived; waits for it until a limit, if there are more behind it than may be."""
        begin = time.monotonic()
        is_there = True
        while not all(item.reduction.is_done for item in batch):
            if len(self._in_flight) <= self._most_in_flight or time.monotonic() > limit:
                is_there = False
                break
            time.sleep(_PAUSE_SECONDS)
        self._executor.meter.wait(time.monotonic() - begin)
        return is_there

    @staticmethod
    def _trained_flats(unit: UnitState) -> list[FlatState]:
        with torch_private.without_torch_function():
            return [flat for flat in unit.flats if any(p.resting.requires_grad or p.compute.requires_grad for p in flat.params)]

    def _complete(self, batch: list[_InFlight]) -> None:
        for item in batch:
            flat, reduction = item.flat, item.reduction
            reduction.wait()
            low, high = flat.layout.bounds(reduction.rank)
            is_kept = self._is_kept_whole(item)
            is_lean = self._executor.is_lean
            values = item.local if is_kept or is_lean else self._take(flat, high - low, Kind.GRAD)
            self._executor.note_activations()
            # Where memory goes before time, the digest takes the squares from the gradients, when there is more of it again.
            with_squares = not is_lean and flat.rest.grad is not Tier.DISK
            squares = reduction.add_up(values[low:high] if is_kept or is_lean else values, with_squares=with_squares)
            self._executor.record("reduce", item.name, reduction.handle, reduction.waited_seconds)
            self._free_room(reduction)
            if is_lean and not is_kept:
                values = self._take(flat, high - low, Kind.GRAD).copy_(item.local[low:high])
            if is_kept:
                self._executor.ledger.add(Kind.FULL_GRAD, -values.nbytes)
                self._executor.ledger.add(Kind.GRAD, values.nbytes)
            elif item.is_local_pooled:
                self._executor.give_when_read(reduction.handle, item.local, Kind.FULL_GRAD)
            else:
                self._executor.ledger.add(Kind.FULL_GRAD, -item.local.nbytes)
            if StateKind.OPTIM not in self._executor.plan.sharded:
                label = f"reduced gradients of '{item.name or '(root)'}'"
                regather = self._executor.lanes.regather.all_gather(values, flat.layout.cuts, label=label)
                self._regathers.append((item.name, regather))
            self._completed.append(_Completed(flat, GradBuffer(values, 0 if is_kept else low, self._executor.pool), squares))
            if StateKind.OPTIM in self._executor.plan.sharded:
                self._bring_to_rest(self._completed[-1])

    def _free_room(self, reduction: Reduction) -> None:
        room, reduction.room, reduction.handle.result = reduction.room, None, None
        if room is not None:
            self._executor.pool.give(room, Kind.WIRE)

    def _bring_to_rest(self, item: _Completed) -> None:
        """Let reduced gradients go where they rest, if that is not on the device: this rank's part of them."""
        flat, before = item.flat, item.buffer
        if flat.rest.grad is Tier.DISK:
            self._put_away(item)
        elif before.held.device != flat.grad_device:
            low, high = flat.bounds
            values = self._executor.pool.take(high - low, flat.precision.reduce, flat.grad_device, Kind.GRAD)
            values.copy_(before.held[low - before.start : high - before.start])
            item.buffer = GradBuffer(values, low, self._executor.pool)

    def _put_away(self, item: _Completed) -> None:
        """Let reduced gradients go to disk; the squares for the digest are taken on the way."""

        def look(values: torch.Tensor) -> None:
            low, high = (edge - item.buffer.start for edge in item.flat.layout.bounds(self._executor.lanes.rank))
            item.squares = self._room_for_squares(item.flat).copy_(exact.block_sums(values[low:high], 2.0))

        if self._executor.disk is not None:
            label = f"gradients of {item.flat.spec.name}"
            item.buffer.put_away(self._executor.disk, label, look if item.squares is None else None)

    def _room_for_squares(self, flat: FlatState) -> torch.Tensor:
        """Memory that stays: squares that came between gradients would keep the heap from using the room of one for the next."""
        if not self._squares:
            for each in self._executor.flats:
                num_blocks = each.layout.sizes[self._executor.lanes.rank] // ALIGNMENT
                dtype = exact.accumulation_dtype(each.precision.reduce)
                self._squares[each] = torch.empty(num_blocks if each.rest.grad is Tier.DISK else 0, dtype=dtype)
        return self._squares[flat]

    def forget_squares(self) -> None:
        """Gradients come to rest elsewhere from now on."""
        self._squares.clear()

    def _is_kept_whole(self, item: _InFlight) -> bool:
        """Whether the local buffer goes on as that of the reduced gradients: not where peers may read it when it goes to disk."""
        kind = StateKind.OPTIM if item.flat.rest.grad is Tier.DISK else StateKind.GRAD
        is_sharded = kind in self._executor.plan.sharded
        return not is_sharded or item.flat.layout.sizes[item.reduction.rank] == item.local.numel()

    def complete_all(self) -> None:
        """Wait for all reductions under way."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        self._end_reducing()
        for name, handle in self._regathers:
            self._executor.wait(handle, "gather gradients", name)
        self._receipts.extend(handle.receipt for _, handle in self._regathers)
        self._regathers.clear()
        self._executor.wait_until_read(self._receipts)  # From here on users may change what peers have read, or let go of it.
        self._receipts.clear()
        self._executor.sweep()

    def install(self, is_used: Callable[[ParamState], bool]) -> dict[int, torch.Tensor]:
        """Show reduced gradients to model and optimizer: added to earlier ones, and only where some rank had one.

        Returns the sums of squares of their blocks, by the identity of the buffer, where nothing was added.
        """
        completed, self._completed = self._completed, []
        for item in completed:
            self._bring_to_rest(item)
        squares: dict[int, torch.Tensor] = {}
        for item in completed:
            if item.squares is not None:
                squares[id(item.flat)] = item.squares
        for item in completed:
            for state in item.flat.params:
                held = state.segment.grad
                if held is not None:  # Of an earlier backward: also one that this backward adds nothing to.
                    squares.pop(id(item.flat), None)
                if not is_used(state):
                    continue
                face = GradFace(state, item.buffer, state.segment)
                before = held.part if isinstance(held, GradFace) else held
                if before is not None and face.reduced is not None:
                    factor = held.factor if isinstance(held, GradFace) else None
                    before = before if factor is None else before * factor.to(before.device)
                    face.reduced.add_(before.view_as(face.reduced))
                state.segment.grad = face
            if item.flat.rest.grad is Tier.DISK:
                self._put_away(item)  # Where something was added.
        self.begin_cycle()
        return squares

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
                if not flat.filled:
                    self._free_local(flat)

    def _free_local(self, flat: FlatState) -> None:
        if flat.local is not None:
            local, flat.local = flat.local, None
            if flat.is_local_pooled:
                self._executor.pool.give(local, Kind.FULL_GRAD)
            else:
                self._executor.ledger.add(Kind.FULL_GRAD, -local.nbytes)
        flat.is_local_pooled = True
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
