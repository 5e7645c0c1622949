"""The state of one flat buffer on one rank: owned values, gathered values, gradients on their way. Knows no collectives."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import nn

from shardwise.core.errors import ShardwiseError
from shardwise.core.layout import Layout
from shardwise.core.ledger import Kind, Tier
from shardwise.core.plan import Plan
from shardwise.core.rest import ON_DEVICE, Rest
from shardwise.core.unit import FlatSpec, ParamSpec, Segment
from shardwise.devices.pool import Pool
from shardwise.runtime.offload import DiskTier, Line

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Precision:
    """Dtypes of one flat buffer: at rest, in compute, and in reductions."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def of(cls, spec: FlatSpec, plan: Plan) -> Precision:
        """What the plan makes of the parameters of a buffer. Only floating-point parameters are cast."""
        dtype = spec.dtype
        if not dtype.is_floating_point:
            return cls(dtype, dtype, dtype)
        compute = dtype if spec.keeps_dtype else plan.dtype("param_dtype") or dtype
        return cls(dtype, compute, plan.dtype("reduce_dtype") or compute)


class Host(Protocol):
    """What stand-ins ask of the engine that they belong to."""

    plan: Plan
    layout_kind: str
    pool: Pool
    disk: DiskTier | None

    @property
    def is_computing(self) -> bool:
        """Whether a call of the model or a backward pass is under way."""
        ...

    def read(self, state: ParamState) -> torch.Tensor:
        """The full values of a parameter, where they are present or may be gathered; else NotGatheredError."""
        ...

    def write(self, state: ParamState, values: torch.Tensor) -> None:
        """Overwrite a parameter with full values that every rank has."""
        ...

    def wait_until_copied(self) -> None:
        """Until no save is copying values at rest."""
        ...

    def cast(self, state: ParamState, dtype: torch.dtype) -> None:
        """Show a parameter in another dtype from now on."""
        ...

    def grad_norm(self, state: ParamState, power: float) -> torch.Tensor:
        """The norm of a parameter's reduced gradient over all ranks."""
        ...

    def grads_changed(self) -> None:
        """Someone wrote to gradients: norms that were computed are stale."""
        ...

    def has_nonfinite(self, state: ParamState) -> bool:
        """Whether a parameter's reduced gradient holds inf or nan on any rank."""
        ...


@dataclass(eq=False)
class ParamState:
    """One parameter on one rank: the user's own object, its stand-in, its places in modules, and the optimizer's segment."""

    spec: ParamSpec
    index: int
    flat: FlatState
    host: Host
    compute: nn.Parameter
    places: list[tuple[nn.Module, str]]
    piece: Segment
    segment: nn.Parameter
    face: nn.Parameter | None = None
    opened: nn.Parameter | None = None
    version: int = 0
    """Autograd's count of writes to the compute parameter that are known of."""
    is_handed_out: bool = False
    """Whether a user has taken or set its ``.data``, whose writes autograd does not count."""

    @property
    def resting(self) -> nn.Parameter:
        """What stands in the modules outside compute: plain full values while the user has opened them, else a stand-in."""
        if self.opened is not None:
            return self.opened
        return self.compute if self.face is None else self.face

    @property
    def shown(self) -> nn.Parameter:
        """What stands in the modules now."""
        module, name = self.places[0]
        shown = module._parameters[name]
        return self.resting if shown is None else shown

    def show(self, param: nn.Parameter) -> None:
        """Put a tensor into the modules, at every place that shares the parameter."""
        for module, name in self.places:
            module._parameters[name] = param

    def show_instead(self, before: nn.Parameter, param: nn.Parameter) -> None:
        """Put a tensor into the modules where another stood, with what users have set on that one."""
        if before is param:
            return
        is_first = True
        for module, name in self.places:
            params = module._parameters
            if params.get(name) is before:
                params[name] = param
                if is_first and before.requires_grad != param.requires_grad:
                    param.requires_grad_(before.requires_grad)
            is_first = False
        if before.__dict__:
            carry_attributes(before, param)


def lies_at(tensor: torch.Tensor, buffer: torch.Tensor, offset: int) -> bool:
    """Whether a tensor's memory begins at an element of a buffer. Empty tensors lie anywhere."""
    return tensor.numel() == 0 or tensor.data_ptr() == buffer.data_ptr() + offset * buffer.element_size()


def carry_attributes(source: nn.Parameter, target: nn.Parameter) -> None:
    """Let a tensor have the attributes that users have set on the one that it stands for."""
    for key, value in source.__dict__.items():
        if key != "_state":
            target.__dict__[key] = value


@dataclass(eq=False)
class FlatState:
    """One flat buffer on one rank.

    ``master`` holds the values at rest of the elements in ``bounds``; ``full`` those of the whole buffer in the dtype of compute,
    while gathered (``is_fetched``) or always. ``rest`` says where state is: perhaps off the ``device`` that computes; ``shard`` is then
    a copy of the owned values, in the dtype of compute, that stayed on the device and from which gathers read. Where both dtypes
    agree and ``full`` stays resident, ``master`` is a part of it (``is_aliased``). Where every rank owns every element
    (``is_owned_whole``), no collective is needed to read them. Where the values at rest are on disk, ``line`` is their place, and
    ``master`` has their form alone; a ``full`` that stays resident has the owned part of them in its place then. ``reserved`` is a
    released buffer of which someone still holds a view: only this flat may be gathered into it. ``local`` holds the full gradients
    of this rank, in memory of the pool or in autograd's
    own.
    """

    spec: FlatSpec
    layout: Layout
    precision: Precision
    bounds: tuple[int, int]
    master: torch.Tensor
    full: torch.Tensor | None
    is_aliased: bool
    is_owned_whole: bool
    is_fetched: bool
    device: torch.device
    rest: Rest = ON_DEVICE
    shard: torch.Tensor | None = None
    line: Line | None = None
    reserved: torch.Tensor | None = None
    params: list[ParamState] = field(default_factory=list)
    local: torch.Tensor | None = None
    is_local_pooled: bool = True
    filled: set[int] = field(default_factory=set)
    written: dict[int, int] = field(default_factory=dict)
    """Parameters, by index, to which a forward has written, and autograd's count of writes after it."""

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """Elements that belong to no parameter."""
        ends = [0, *(param.stop for param in self.spec.params)]
        starts = [*(param.offset for param in self.spec.params), self.layout.numel]
        return tuple(slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def resting_segment(self, piece: Segment) -> torch.Tensor:
        """What the optimizer holds of a parameter between updates: its part of the owned values, if they rest where it works."""
        if self.line is None and self.master.device == self.update_device:
            return self.segment_view(piece)
        return nothing_of(piece_shape(piece), self.master.dtype, self.update_device)

    def segment_view(self, piece: Segment) -> torch.Tensor:
        """A parameter's part of the owned values in memory."""
        return piece.view(self.master, shift=self.bounds[0])

    def read_part(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the owned values, counted in the whole buffer: as they are in memory, or a copy of what is on disk."""
        low = self.bounds[0]
        return self.master[start - low : stop - low] if self.line is None else self.line.get(start - low, stop - low)

    @contextmanager
    def part_at_hand(self, piece: Segment) -> Iterator[torch.Tensor]:
        """A parameter's part of the owned values, to be changed. What the disk refuses is noted: ranks meet later."""
        if self.line is None:
            yield self.segment_view(piece)
            self.publish()
            return
        values = torch.empty(piece.numel, dtype=self.line.dtype)
        with self.attempt():
            values = self.line.get(piece.start - self.bounds[0], piece.stop - self.bounds[0])
        yield piece.view(values, shift=piece.start)
        with self.attempt():
            self.write_part(values, piece.start)

    def attempt(self) -> AbstractContextManager[None]:
        """Around what reads or writes values at rest on this rank alone: what the disk refuses is noted, and left out."""
        return nullcontext() if self.line is None else self.line.tier.attempt()

    def bring(self) -> None:
        """Let the owned values rest in the host's memory.

        Raises:
            OffloadError: They cannot be read.
        """
        if self.line is not None:
            self.master, self.line = self.line.get(), None

    def write_part(self, values: torch.Tensor, start: int) -> None:
        """Overwrite owned values from element ``start`` of the whole buffer on with those of a line."""
        if self.line is None:
            self.master[start - self.bounds[0] :][: values.numel()].copy_(values)
        else:
            self.line.set(values, start - self.bounds[0])
        self.publish(values, start)

    @property
    def has_face(self) -> bool:
        """Whether a stand-in is shown outside compute: the full values at rest are not what compute uses."""
        return not self.is_aliased

    @property
    def source(self) -> torch.Tensor:
        """The owned values from which full ones are gathered."""
        return self.master if self.shard is None else self.shard

    @property
    def is_offered(self) -> bool:
        """Whether peers can be given the source as it is; else they are given a copy of it in the dtype of compute."""
        is_here = self.source.device == self.device and not self.is_source_on_disk
        return is_here and self.source.dtype == self.precision.compute

    @property
    def is_source_on_disk(self) -> bool:
        """Whether values must be read from disk to be gathered."""
        return self.line is not None and self.shard is None

    @property
    def is_fetched_alone(self) -> bool:
        """Whether this rank has all of the values where they rest, and brings them to the device without its peers."""
        is_away = self.source.device != self.device or self.is_source_on_disk
        return self.is_fetched and self.is_owned_whole and is_away

    @property
    def update_device(self) -> torch.device:
        """Where the optimizer works: where its state rests."""
        return self.device if self.rest.optim is Tier.DEVICE else HOST

    @property
    def grad_device(self) -> torch.device:
        """Where reduced gradients rest."""
        return self.device if self.rest.grad is Tier.DEVICE else HOST

    def publish(self, values: torch.Tensor | None = None, start: int | None = None) -> None:
        """Owned values have changed: let the copy on the device have them.

        Args:
            values: Those that have changed, from element ``start`` of the whole buffer on; all of them, if None.
        """
        values = self.master if values is None else values
        start = self.bounds[0] if start is None else start
        if self.shard is not None:
            self.shard[start - self.bounds[0] :][: values.numel()].copy_(values.to(self.shard.dtype))
        elif self.line is not None and self.full is not None and not self.is_fetched:
            self.full[start : start + values.numel()].copy_(values)


def put_on_disk(values: torch.Tensor, disk: DiskTier, name: str) -> Line:
    """Let the owned values of a flat buffer rest on disk. What cannot be written is noted.

    Raises:
        OffloadError: There is no room for them.
    """
    line = Line(disk, values.numel(), values.dtype, f"parameters of {name}", Kind.PARAM)
    with disk.attempt():
        line.set(values.view(-1))
    return line


def piece_shape(piece: Segment) -> tuple[int, ...]:
    """The form of a segment."""
    return piece.param.shape if piece.is_whole else (piece.numel,)


def slice_of(values: torch.Tensor, state: ParamState, target: torch.Tensor) -> torch.Tensor:
    """This rank's part of full values, in the form of the segment."""
    if state.piece.is_whole:
        return values
    ordered = torch.empty_strided(state.spec.shape, state.spec.stride, dtype=values.dtype, device=values.device)
    ordered.copy_(values)
    line = ordered.as_strided((state.spec.numel,), (1,))
    return line[state.piece.start - state.spec.offset : state.piece.stop - state.spec.offset].view_as(target)


_STATES: dict[int, tuple[weakref.ref[ParamState], weakref.ref[torch.Tensor]]] = {}
"""Leads from any object of a parameter, by its identity, to its state. Keeps neither alive: hooks on the model's modules keep the
engine. The second reference takes the entry out when the object goes, before another can have its identity."""


class Standing:
    """Mixed into stand-ins: they lead to a parameter's state without keeping it, since cycles through tensors are never freed."""

    _state: weakref.ref[ParamState]

    @property
    def state(self) -> ParamState:
        """The parameter that this stands for."""
        state = self._state()
        if state is None:
            raise ShardwiseError("The sharded model that this belongs to is gone.")
        return state


def remember(tensor: torch.Tensor, state: ParamState) -> None:
    """Note that a tensor stands for a parameter: the user's own, a stand-in, or the optimizer's segment."""
    key = id(tensor)
    _STATES[key] = (weakref.ref(state), weakref.ref(tensor, lambda _: _STATES.pop(key, None)))


def forget(tensor: torch.Tensor) -> None:
    """Note that a tensor stands for itself again."""
    _STATES.pop(id(tensor), None)


def state_of(tensor: object) -> ParamState | None:
    """The state of a parameter that belongs to a sharded model, or None."""
    found = _STATES.get(id(tensor))
    return None if found is None else found[0]()


@cache
def nothing_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that has a form but hardly any memory; whoever reads it finds no values."""
    with torch.inference_mode(False):
        return torch.full((), float("nan") if dtype.is_floating_point else 1, dtype=dtype, device=device).expand(shape)
