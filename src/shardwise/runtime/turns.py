"""Updates unit by unit, inside the user's own ``optimizer.step``: what rests elsewhere is brought when its turn comes, and put back.

While a step runs, the optimizer's groups are a list that yields each group once for every turn, with the parameters of that turn
alone. So the optimizer's own code runs unchanged, and never needs more than one unit's state at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.errors import OffloadError
from shardwise.core.ledger import Kind, Tier
from shardwise.devices.pool import Pool
from shardwise.runtime.flat import FlatState, ParamState
from shardwise.runtime.grad_buffer import GradBuffer
from shardwise.runtime.grads import GradFace
from shardwise.runtime.offload import DiskTier, Line, Load
from shardwise.runtime.state_lines import StateLines


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer holds of its parameters, and the lines of what rests on disk."""

    values: Mapping[torch.Tensor, dict[str, Any]]
    lines: StateLines

    def of(self, state: ParamState) -> dict[str, Any]:
        """Of one parameter."""
        return self.values.get(state.segment, {})


Publish = Callable[[FlatState, torch.Tensor | None], None]
"""Told of a buffer whose owned values have changed, and of these where they do not stay in memory."""


class Turn:
    """The parameters that are updated together: those of one flat buffer, or all whose state is where it is updated."""

    def __init__(
        self, states: Sequence[ParamState], held: OptimizerState | None = None, publish: Publish = FlatState.publish
    ) -> None:
        self.states = list(states)
        self.params = {id(state.segment) for state in states}
        self._held = held
        self._publish = publish
        self._flats = list({id(state.flat): state.flat for state in states}.values())
        self._load: Load | None = None
        self._fetched: list[tuple[FlatState, torch.Tensor]] = []
        self._grads: dict[int, torch.Tensor] = {}
        """Owned gradients where the optimizer works, by the identity of the buffer that they are from."""
        self._rooms: list[torch.Tensor] = []
        """Memory of the pool that gradients were copied into."""
        self._faces: list[tuple[ParamState, GradFace]] = []
        self._is_begun = False

    @property
    def _pool(self) -> Pool:
        return self.states[0].host.pool

    @property
    def _disk(self) -> DiskTier | None:
        """Where some of the state is, if it is: a disk for activations alone may fail a step beside which this is updated."""
        is_on_disk = self._held is not None and any(Tier.DISK in vars(flat.rest).values() for flat in self._flats)
        return self.states[0].host.disk if is_on_disk else None

    def ahead(self) -> None:
        """Begin to read what is on disk: this turn is the next."""
        if self._disk is not None:
            self._disk.ahead(self._lines())

    def ahead_of_grads(self) -> bool:
        """Begin to read what is on disk before there are gradients; returns whether there was room."""
        if self._disk is None or self._held is None:
            return True
        lines = [flat.line for flat in self._flats if flat.line is not None]
        return self._disk.ahead(lines + [line for flat in self._flats for line in self._held.lines.of(flat)])

    def begin(self) -> None:
        """Bring values and gradients to where the optimizer works. Where they cannot be read, nothing is updated."""
        if self._disk is not None:
            try:
                self._bring_from(self._disk)
            except OffloadError as error:
                self._disk.fail(error)
                self._hide_grads()
                return
        if self._held is not None:
            for flat in self._flats:
                self._fetch_values(flat)
        for state in self.states:
            held = state.segment.grad
            if isinstance(held, GradFace):
                self._faces.append((state, held))
                plain = self._plain_grad(state, held)
                state.segment.grad = None if plain is None else plain.view_as(state.segment)
        self._is_begun = True

    def _lines(self) -> list[Line]:
        """What is on disk of all that the update needs; nothing, if there are no gradients."""
        faces = [state.segment.grad for state in self.states if _is_here(state) and state.segment.grad is not None]
        if not faces or self._held is None:
            return []
        lines = [flat.line for flat in self._flats if flat.line is not None]
        buffers = {id(face.buffer): face.buffer for face in faces if isinstance(face, GradFace) and face.buffer is not None}
        lines += [buffer.line for buffer in buffers.values() if buffer.line is not None]
        return lines + [line for flat in self._flats for line in self._held.lines.of(flat)]

    def _bring_from(self, disk: DiskTier) -> None:
        if disk.failure is not None:
            raise OffloadError(disk.failure)
        lines = self._lines()
        self._load = disk.load(lines) if lines else None
        if self._load is not None and self._held is not None:
            for state in self.states:
                self._held.lines.bring(self._held.of(state), state, self._load)

    def _hide_grads(self) -> None:
        for state in self.states:
            held = state.segment.grad
            if isinstance(held, GradFace):
                self._faces.append((state, held))
                state.segment.grad = None

    def _fetch_values(self, flat: FlatState) -> None:
        """Let the segments of a buffer have its values, where these rest elsewhere."""
        if flat.line is not None:
            if self._load is None or flat.line not in self._load.lines:
                return
            source = self._load.view(flat.line)
        else:
            source = flat.master
        if source.device != flat.update_device:
            values = self._pool.take(source.numel(), source.dtype, flat.update_device, Kind.MASTER)
            self._fetched.append((flat, values))
            values.copy_(source)
        elif flat.line is not None:
            values = source
        else:
            return
        for state in self._states_in(flat):
            state.segment.data = state.piece.view(values, shift=flat.bounds[0])

    def _states_in(self, flat: FlatState) -> list[ParamState]:
        return [state for state in self.states if state.flat is flat]

    def _plain_grad(self, state: ParamState, face: GradFace) -> torch.Tensor | None:
        """This rank's part of a gradient, where the optimizer works: one copy for all of a buffer."""
        if face.buffer is None or not _is_here(state):
            return None
        low = state.flat.bounds[0]
        values = state.piece.view(self._owned_grads(state.flat, face.buffer), shift=low).to(state.spec.dtype)
        return values if face.factor is None else values * face.factor.to(values.device)

    def _owned_grads(self, flat: FlatState, buffer: GradBuffer) -> torch.Tensor:
        if id(buffer) in self._grads:
            return self._grads[id(buffer)]
        low, high = flat.bounds
        if self._load is not None and buffer.line is not None and buffer.line in self._load.lines:
            values = self._load.view(buffer.line)
            buffer.catch_up(values, buffer.start)
            owned = values[low - buffer.start : high - buffer.start]
        else:
            owned = buffer.read(low, high)
        if owned.device != flat.update_device:
            self._rooms.append(self._pool.take(owned.numel(), owned.dtype, flat.update_device, Kind.GRAD))
            owned = self._rooms[-1].copy_(owned)
        self._grads[id(buffer)] = owned
        return owned

    def end(self) -> None:
        """Put back what was changed, and let the device have it."""
        for state, face in self._faces:
            # One that the optimizer, or a hook of its user, has cleared stays cleared.
            if state.segment.grad is not None or not _is_here(state) or not self._is_begun:
                state.segment.grad = face
        self._faces.clear()
        self._grads.clear()
        while self._rooms:
            self._pool.give(self._rooms.pop(), Kind.GRAD)
        load, self._load = self._load, None
        while self._fetched:
            flat, values = self._fetched.pop()
            if self._is_begun:
                (flat.master if load is None or flat.line is None else load.view(flat.line)).copy_(values)
            for state in self._states_in(flat):
                state.segment.data = flat.resting_segment(state.piece)
            self._pool.give(values, Kind.MASTER)
        for flat in self._flats:
            if flat.line is None:
                self._publish(flat, None)
            elif load is not None and flat.line in load.lines:
                self._publish(flat, load.view(flat.line))
                for state in self._states_in(flat):
                    state.segment.data = flat.resting_segment(state.piece)
        if self._disk is not None:
            self._put_back(self._disk, load)

    def _put_back(self, disk: DiskTier, load: Load | None) -> None:
        """Let what was changed go to disk, beside what comes next."""
        held = self._held
        if held is None:
            return
        lines = [flat.line for flat in self._flats if flat.line is not None]
        lines += [line for flat in self._flats for line in held.lines.of(flat)]
        for state in self.states if self._is_begun or load is not None else ():
            try:
                held.lines.put(held.of(state), state, load)
            except OffloadError as error:
                disk.fail(error)
        if load is not None:
            load.write([line for line in lines if line in load.lines] if self._is_begun else [])


def _is_here(state: ParamState) -> bool:
    """A parameter without elements is updated everywhere, as by plain torch; one whose elements others own is not."""
    return state.piece.numel > 0 or state.spec.numel == 0


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
            turns = [*self._turns()]
            for turn, following in zip([None, *turns], [*turns, None], strict=True):
                try:
                    if turn is not None:
                        turn.begin()
                    if following is not None:
                        following.ahead()
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


def turns_of(states: Sequence[ParamState], held: OptimizerState, publish: Publish = FlatState.publish) -> list[Turn]:
    """All that is at hand in one turn, and then buffer by buffer what must be brought."""
    by_flat: dict[int, list[ParamState]] = {}
    for state in states:
        by_flat.setdefault(id(state.flat), []).append(state)
    at_hand = [members for members in by_flat.values() if is_at_hand(members[0].flat)]
    away = [members for members in by_flat.values() if not is_at_hand(members[0].flat)]
    turns = [Turn([state for members in at_hand for state in members], publish=publish)] if at_hand else []
    return turns + [Turn(members, held, publish) for members in away]


def is_at_hand(flat: FlatState) -> bool:
    """Whether a buffer is updated where all of its state is, with no copy elsewhere."""
    is_there = flat.master.device == flat.update_device == flat.grad_device
    is_on_disk = flat.line is not None or Tier.DISK in (flat.rest.optim, flat.rest.grad)
    return is_there and flat.shard is None and not is_on_disk


def is_apart(flat: FlatState) -> bool:
    """Whether what is computed with is a copy, so that a buffer can be updated while it is used."""
    return flat.shard is not None if flat.is_fetched else not flat.is_aliased
