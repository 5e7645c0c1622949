"""One flat buffer on its way to another rest: what it will hold there is made beside what it holds, and takes its place then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import OffloadError
from shardwise.core.ledger import Kind, Tier
from shardwise.core.rest import Rest
from shardwise.devices import torch_private
from shardwise.devices.host import on_host
from shardwise.runtime.engine import Engine
from shardwise.runtime.flat import HOST, FlatState, ParamState, carry_attributes, nothing_of, put_on_disk, remember
from shardwise.runtime.form import Form, book, copy_of, held_at_rest
from shardwise.runtime.grad_buffer import GradBuffer
from shardwise.runtime.grads import GradFace
from shardwise.runtime.move_state import StateMove, put_in_place_of
from shardwise.runtime.offload import DiskTier, Line
from shardwise.runtime.parameter import Face, point_away, point_to

_Read = TypeVar("_Read")


@dataclass
class _Values:
    """The values of a flat buffer as they will be held."""

    master: torch.Tensor
    full: torch.Tensor | None = None
    shard: torch.Tensor | None = None
    line: Line | None = None


@dataclass
class _Grads:
    """Reduced gradients as they will be held, from the first element that this rank owns on."""

    buffer: GradBuffer
    held: torch.Tensor
    line: Line | None = None


class FlatMove:
    """The move of one flat buffer on one rank. Until `commit`, nothing is changed; at most this buffer is in two places."""

    def __init__(self, flat: FlatState, rest: Rest, engine: Engine, optimizers: Sequence[Optimizer]) -> None:
        self.flat = flat
        self._rest = rest
        self._engine = engine
        self._form = Form.of(flat.spec, rest, flat.precision, engine.plan)
        self._optimizers = optimizers
        self._values: _Values | None = None
        self._grads: list[_Grads] = []
        self._states: list[StateMove] = []
        self._owned: torch.Tensor | None = None

    # What will be held

    def prepare(self) -> None:
        """Bring all that the buffer will hold to where it will be.

        Raises:
            OffloadError: A disk cannot be read, whose tier has noted that then; or not be written.
            ShardwiseError, RuntimeError: There is no memory left.
        """
        self._values = self._prepare_values()
        if self._rest.grad is not self.flat.rest.grad:
            for buffer in _grad_buffers(self.flat):
                self._prepare_grads(buffer)
        if self._rest.optim is not self.flat.rest.optim:
            for optimizer in self._optimizers:
                for state in self.flat.params:
                    move = StateMove(optimizer, state, self._rest)
                    self._states.append(move)
                    self._read(move.prepare) if self.flat.rest.optim is Tier.DISK else move.prepare()

    def undo(self) -> None:
        """Let go of what was prepared."""
        for grads in self._grads:
            if grads.line is None:
                self._engine.pool.give(grads.held, Kind.GRAD)
        self._grads.clear()
        for move in self._states:
            move.undo()
        self._states.clear()
        self._values = self._owned = None

    def _read(self, read: Callable[[], _Read]) -> _Read:
        """What cannot be read from disk is lost: its tier notes it, and ranks tell each other."""
        try:
            return read()
        except OffloadError as error:
            self._disk.fail(error)
            raise

    @property
    def _disk(self) -> DiskTier:
        if self._engine.disk is None:
            raise RuntimeError(f"State of {self.flat.spec.name} should go to disk, but there is no disk tier.")
        return self._engine.disk

    def _read_owned(self) -> torch.Tensor:
        """The owned values in memory: as they are, or a copy of what is on disk."""
        if self._owned is None:
            self._owned = self._read(lambda: self.flat.read_part(*self.flat.bounds))
        return self._owned

    def _prepare_values(self) -> _Values:
        flat, form, rest = self.flat, self._form, self._rest
        values = _Values(flat.master)
        if not form.is_fetched:
            values.full = flat.full if flat.full is not None and not flat.is_fetched else self._make_full()
        if form.is_aliased and values.full is not None:
            values.master = values.full[slice(*flat.bounds)]
        elif rest.master is Tier.DISK:
            values.line = flat.line or put_on_disk(self._read_owned(), self._disk, flat.spec.name)
            values.master = nothing_of((values.line.numel,), values.line.dtype, HOST)
        else:
            values.master = self._make_master(flat.device if rest.master is Tier.DEVICE else HOST)
        if form.has_copy and flat.shard is not None and rest.param is flat.rest.param:
            values.shard = flat.shard
        elif form.has_copy:
            is_left = rest.master is not Tier.DEVICE
            values.shard = copy_of(self._read_owned(), flat.spec, rest, flat.precision, flat.device, is_left=is_left)
        return values

    def _make_full(self) -> torch.Tensor:
        """Room for the full values on the device, with this rank's own part in it."""
        flat = self.flat
        full = torch.empty(flat.layout.numel, dtype=flat.precision.compute, device=flat.device)
        full[slice(*flat.bounds)] = self._read_owned()
        return full

    def _make_master(self, device: torch.device) -> torch.Tensor:
        flat = self.flat
        if flat.line is None and flat.master.device == device and not flat.is_aliased:
            return flat.master
        if device != flat.device:
            return on_host(self._read_owned(), f"parameters of {flat.spec.name}")
        return self._read_owned().to(device, copy=flat.line is None)

    def _prepare_grads(self, buffer: GradBuffer) -> None:
        flat, (low, high) = self.flat, self.flat.bounds
        line, start, stop = buffer.line, low - buffer.start, high - buffer.start
        if line is None:
            values = buffer.held[start:stop]
        else:
            values = self._read(lambda: line.get(start, stop))
            buffer.catch_up(values, low)
        if self._rest.grad is Tier.DISK:
            away = Line(self._disk, high - low, buffer.dtype, f"gradients of {flat.spec.name}", Kind.GRAD)
            away.set(values)
            self._grads.append(_Grads(buffer, nothing_of((away.numel,), away.dtype, HOST), away))
        else:
            device = flat.device if self._rest.grad is Tier.DEVICE else HOST
            room = self._engine.pool.take(high - low, buffer.dtype, device, Kind.GRAD)
            self._grads.append(_Grads(buffer, room))
            room.copy_(values)

    # What is held then

    def commit(self) -> None:
        """Let what was prepared take the place of what the buffer held. A collective, where full values come to stay."""
        flat, values = self.flat, self._values
        if values is None:
            raise RuntimeError(f"The move of {flat.spec.name} was not prepared.")
        self._owned = None
        if values.full is not None and flat.is_fetched and not flat.is_owned_whole:
            self._gather(values.full)
        for move in self._states:
            move.commit()
        for grads in self._grads:
            self._install(grads)
        before = held_at_rest(flat)
        flat.rest, flat.is_fetched, flat.is_aliased = self._rest, self._form.is_fetched, self._form.is_aliased
        flat.master, flat.full, flat.shard, flat.line = values.master, values.full, values.shard, values.line
        flat.reserved = None
        book(flat, self._engine.ledger, before)
        _put_faces(flat)
        self._put_segments()
        if flat.rest.optim is not Tier.DISK:
            for move in self._states:
                move.lines.drop(flat)
        self._states.clear()
        self._grads.clear()
        self._values = None

    def _gather(self, full: torch.Tensor) -> None:
        executor, spec = self._engine.executor, self.flat.spec
        executor.gather_log.add(f"move {spec.unit}")
        handle = executor.lanes.gather.all_gather(full, self.flat.layout.cuts, label=f"values of {spec.name}, which are moved")
        executor.wait(handle, "gather", spec.unit)
        executor.wait_until_read([handle.receipt])

    def _install(self, grads: _Grads) -> None:
        buffer = grads.buffer
        if buffer.line is None:
            self._engine.pool.give(buffer.held, Kind.GRAD)
        buffer.held, buffer.line, buffer.start = grads.held, grads.line, self.flat.bounds[0]
        buffer.changes.clear()

    def _put_segments(self) -> None:
        """Let optimizers have the segments where they work now: others, on another device, since tensors do not change theirs."""
        replaced: dict[int, nn.Parameter] = {}
        for state in self.flat.params:
            held, data = state.segment.grad, self.flat.resting_segment(state.piece)
            state.segment.grad = None
            if data.device == state.segment.device:
                state.segment.data = data
            else:
                before, state.segment = state.segment, nn.Parameter(data, requires_grad=state.segment.requires_grad)
                remember(state.segment, state)
                carry_attributes(before, state.segment)
                replaced[id(before)] = state.segment
            if isinstance(held, GradFace):
                state.segment.grad = GradFace(state, held.buffer, state.segment)
            elif held is not None:
                state.segment.grad = held.to(state.segment.device)
        for optimizer in self._optimizers if replaced else ():
            put_in_place_of(optimizer, replaced)


def _grad_buffers(flat: FlatState) -> Iterator[GradBuffer]:
    """The reduced gradients of a buffer: several, where users have set some."""
    faces = (state.segment.grad for state in flat.params)
    found = (face.buffer for face in faces if isinstance(face, GradFace))
    yield from {id(buffer): buffer for buffer in found if buffer is not None}.values()


def _put_faces(flat: FlatState) -> None:
    """Let stand-ins be in the modules where full values are not what rests there, and the users' own parameters elsewhere."""
    if flat.full is not None:
        point_to(flat, flat.full)
    with torch_private.without_torch_function():
        for state in flat.params:
            if flat.has_face and state.face is None:
                _put_face(state)
            elif not flat.has_face and state.face is not None:
                face, state.face = state.face, None
                state.show_instead(face, state.compute)
    if flat.full is None:
        point_away(flat)


def _put_face(state: ParamState) -> None:
    state.face = Face(state)
    remember(state.face, state)
    state.show_instead(state.compute, state.face)
