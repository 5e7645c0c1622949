"""Updates unit by unit, inside the user's own ``optimizer.step``: what rests elsewhere is brought when its turn comes, and put back.

While a step runs, the optimizer's groups are a list that yields each group once for every turn, with the parameters of that turn
alone. So the optimizer's own code runs unchanged, and never needs more than one unit's state at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.core.ledger import Kind
from shardwise.devices.pool import Pool
from shardwise.runtime.flat import FlatState, GradBuffer, ParamState
from shardwise.runtime.grads import GradFace


class Turn:
    """The parameters that are updated together: those of one flat buffer, or all whose state is where it is updated."""

    def __init__(self, states: Sequence[ParamState], pool: Pool | None) -> None:
        self.states = list(states)
        self.params = {id(state.segment) for state in states}
        self._pool = pool
        self._flats = list({id(state.flat): state.flat for state in states}.values())
        self._fetched: list[tuple[FlatState, torch.Tensor]] = []
        self._faces: list[tuple[ParamState, GradFace]] = []
        self._is_begun = False

    def begin(self) -> None:
        """Bring values and gradients to where the optimizer works."""
        for flat in self._flats:
            if flat.master.device != flat.update_device and self._pool is not None:
                values = self._pool.take(flat.master.numel(), flat.master.dtype, flat.update_device, Kind.MASTER)
                self._fetched.append((flat, values))
                values.copy_(flat.master)
                for state in flat.params:
                    state.segment.data = state.piece.view(values, shift=flat.bounds[0])
        brought: dict[int, torch.Tensor] = {}
        for state in self.states:
            held = state.segment.grad
            if isinstance(held, GradFace):
                self._faces.append((state, held))
                plain = _plain_grad(state, held, brought)
                state.segment.grad = None if plain is None else plain.view_as(state.segment)
        self._is_begun = True

    def end(self) -> None:
        """Put back what was changed, and let the device have it."""
        for state, face in self._faces:
            # One that the optimizer, or a hook of its user, has cleared stays cleared.
            if state.segment.grad is not None or not _is_here(state) or not self._is_begun:
                state.segment.grad = face
        self._faces.clear()
        for flat, values in self._fetched:
            if self._is_begun:
                flat.master.copy_(values)
            for state in flat.params:
                state.segment.data = flat.resting_segment(state.piece)
        while self._fetched:
            _, values = self._fetched.pop()
            if self._pool is not None:
                self._pool.give(values, Kind.MASTER)
        for flat in self._flats:
            flat.publish()


def _is_here(state: ParamState) -> bool:
    """A parameter without elements is updated everywhere, as by plain torch; one whose elements others own is not."""
    return state.piece.numel > 0 or state.spec.numel == 0


def _plain_grad(state: ParamState, face: GradFace, brought: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """This rank's part of a gradient, where the optimizer works: one copy for all of a buffer."""
    if face.buffer is None or not _is_here(state):
        return None
    buffer: GradBuffer = face.buffer
    low, high = state.flat.bounds
    if id(buffer) not in brought:
        owned = buffer.values[low - buffer.start : high - buffer.start]
        brought[id(buffer)] = owned.to(state.flat.update_device)
    values = state.piece.view(brought[id(buffer)], shift=low).to(state.spec.dtype)
    return values if face.factor is None else values * face.factor.to(values.device)


class GroupsByTurn(list[dict[str, Any]]):
    """An optimizer's groups while it steps. Indexing gives the groups themselves, iteration their parts, turn by turn."""

    def __init__(self, groups: Sequence[dict[str, Any]], turns: Callable[[], Iterator[Turn]], known: set[int]) -> None:
        super().__init__(groups)
        self._turns = turns
        self._known = known

    def __iter__(self) -> Iterator[dict[str, Any]]:
        groups = [self[index] for index in range(len(self))]
        params = [list(group["params"]) for group in groups]
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        is_begun = [False] * len(groups)
        try:
            for turn in (None, *self._turns()):
                try:
                    if turn is not None:
                        turn.begin()
                    for at, group in enumerate(groups):
                        mine = [param for param in params[at] if self._is_of(param, turn)]
                        if not mine and (turn is not None or params[at]):
                            continue
                        if is_begun[at]:
                            # An optimizer that counts in its groups counts once a step: every turn begins with what was there.
                            group.update(options[at])
                        is_begun[at] = True
                        group["params"] = mine
                        yield group
                finally:
                    if turn is not None:
                        turn.end()
        finally:
            for group, held in zip(groups, params, strict=True):
                group["params"] = held

    def _is_of(self, param: torch.Tensor, turn: Turn | None) -> bool:
        """Parameters that are no sharded model's have the first turn."""
        return id(param) not in self._known if turn is None else id(param) in turn.params


def turns_of(states: Sequence[ParamState]) -> list[Turn]:
    """All that is at hand in one turn, and then buffer by buffer what must be brought."""
    by_flat: dict[int, list[ParamState]] = {}
    for state in states:
        by_flat.setdefault(id(state.flat), []).append(state)
    at_hand = [members for members in by_flat.values() if is_at_hand(members[0].flat)]
    away = [members for members in by_flat.values() if not is_at_hand(members[0].flat)]
    turns = [Turn([state for members in at_hand for state in members], None)] if at_hand else []
    return turns + [Turn(members, members[0].host.pool) for members in away]


def is_at_hand(flat: FlatState) -> bool:
    """Whether a buffer is updated where all of its state is, with no copy elsewhere."""
    is_there = flat.master.device == flat.update_device == flat.grad_device
    return is_there and flat.shard is None
