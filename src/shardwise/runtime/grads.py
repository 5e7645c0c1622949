"""Gradients as users see them: one kind of object at every stage, whatever part of the values this rank holds.

A ``GradFace`` has the form of the parameter (or of the optimizer's segment). Norms are those over all ranks; in-place scaling
acts on this rank's part; reading values is possible where this rank has all of them, and refused by name elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import NotGatheredError, UsageError
from shardwise.core.ledger import Kind
from shardwise.devices import torch_private
from shardwise.runtime.flat import ParamState, Standing, state_of
from shardwise.runtime.grad_buffer import Change, GradBuffer

RAW_GRAD: Any = torch.Tensor.grad
"""The attribute that autograd itself writes, under whatever property a subclass puts over it."""
RAW_DATA: Any = torch.Tensor.data
"""The same for the memory under a parameter."""

aten = torch.ops.aten


class GradFace(Standing, torch.Tensor):
    """A gradient that was reduced over all ranks, or is still being accumulated on this one."""

    buffer: GradBuffer | None

    @staticmethod
    def __new__(cls, state: ParamState, buffer: GradBuffer | None, like: torch.Tensor) -> GradFace:
        """Stand for a parameter's gradient, in the form of ``like``."""
        face: GradFace = torch_private.wrapper(cls, like.device, like.shape, like.stride(), dtype=state.spec.dtype)
        face._state = weakref.ref(state)
        face.buffer = buffer
        return face

    __torch_function__ = torch_private.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @property
    def reduced(self) -> torch.Tensor | None:
        """This rank's part of the reduced values, to be changed: what rests on disk is brought back, and stays."""
        return None if self.buffer is None else self.state.piece.view(self.buffer.values, shift=self.buffer.start)

    @property
    def part(self) -> torch.Tensor | None:
        """This rank's part of the reduced values, to be read."""
        if self.buffer is None:
            return None
        piece = self.state.piece
        if not piece.numel or self.buffer.line is None:
            return piece.view(self.buffer.held, shift=self.buffer.start)
        return piece.view(self.buffer.read(piece.start, piece.stop), shift=piece.start)

    @property
    def factor(self) -> torch.Tensor | None:
        """What the reduced values are to be multiplied with, if they were not scaled in place."""
        return None if self.buffer is None else self.buffer.factors.get(self.state.index)

    def usable(self) -> torch.Tensor | None:
        """This rank's part of the reduced values, in the dtype of the parameter and scaled."""
        part, factor = self.part, self.factor
        if part is None:
            return None
        values = part.to(self.state.spec.dtype)
        return values if factor is None else values * factor.to(values.device)

    def scale_later(self, factor: torch.Tensor | float) -> bool:
        """Note a factor instead of scaling in place, where the values have fewer bits than the parameter."""
        if self.buffer is None or self.buffer.dtype.itemsize >= self.state.spec.dtype.itemsize:
            return False
        self.buffer.before_change()
        before = self.factor
        factor = torch.as_tensor(factor, dtype=self.state.spec.dtype)
        self.buffer.factors[self.state.index] = factor if before is None else before * factor
        return True

    def settle(self) -> None:
        """Multiply a noted factor in, with enough bits, before an operation that must see the values as they are."""
        if self.buffer is None or self.factor is None:
            return
        self.buffer.widen(self.state.spec.dtype)
        factor, reduced = self.buffer.factors.pop(self.state.index), self.reduced
        if reduced is not None:
            reduced.mul_(factor.to(reduced.device))

    @property
    def is_on_disk(self) -> bool:
        """Whether the reduced values are."""
        return self.buffer is not None and self.buffer.line is not None

    @property
    def local(self) -> torch.Tensor | None:
        """What was accumulated on this rank and is not yet reduced."""
        flat = self.state.flat
        is_there = flat.local is not None and self.state.index in flat.filled
        return self.state.spec.view(flat.local) if is_there and flat.local is not None else None

    def parts(self) -> list[torch.Tensor]:
        """All values of this gradient that are in this rank's memory: reduced, and accumulated but not yet reduced."""
        parts = [None if self.is_on_disk else self.reduced, self.local]
        return [part for part in parts if part is not None]

    def change(self, change: Change) -> None:
        """Change all values of this gradient that are on this rank, in place; what rests on disk, when it is read."""
        for part in self.parts():
            change(part)
        if self.buffer is not None and self.buffer.line is not None:
            self.buffer.change(self.state.piece, change)

    def full(self) -> torch.Tensor:
        """The whole gradient, if it is on this rank."""
        if self.buffer is None or not self.state.flat.is_owned_whole:
            why = "are sharded" if self.buffer is not None else "are not reduced yet (they were accumulated inside no_sync)"
            raise NotGatheredError(
                f"The values of the gradient of '{self.state.spec.name}' {why}. Read them inside "
                "`with shardwise.gathered(model):` on all ranks. Norms and in-place scaling work anywhere."
            )
        values = self.buffer.values  # What users do to them in place must reach them.
        usable = self.usable()
        return values.view(self.shape) if usable is None else usable.view(self.shape)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradFace('{self.state.spec.name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.full().clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Serve an operation from what is known on every rank, or from this rank's part."""
        handler = _HANDLERS.get(func) or _HANDLERS.get(func.overloadpacket)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if func in _IN_PLACE_FOREACH:
            return _scale_all(func, args, kwargs or {})
        if func.overloadpacket in _IN_PLACE:
            return _scale(func, args, kwargs or {})
        args = torch_private.map_tensors(GradFace, lambda face: face.full(), args)
        return func(*args, **torch_private.map_tensors(GradFace, lambda face: face.full(), kwargs or {}))


def _scale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An elementwise operation in place whose other arguments are numbers."""
    face, others = args[0], args[1:]
    if not isinstance(face, GradFace) or any(isinstance(other, torch.Tensor) and other.dim() for other in others):
        full = face.full() if isinstance(face, GradFace) else face
        func(full, *torch_private.map_tensors(GradFace, lambda other: other.full(), others), **kwargs)
        return face
    if (
        func.overloadpacket in (aten.mul_, aten.div_)
        and not kwargs
        and _scale_face(face, others[0], func.overloadpacket is aten.div_)
    ):
        return face
    face.settle()
    kept = _own(others)
    face.change(lambda part: func(part, *_on(part.device, kept), **kwargs))
    face.state.host.grads_changed()
    return face


def _on(device: torch.device, values: Sequence[Any]) -> list[Any]:
    """Numbers that came as tensors, where the gradients are that they are used on."""
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in values]


def _own(values: Sequence[Any]) -> list[Any]:
    """Numbers that came as tensors, in tensors that nobody else changes: they may be used later."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def _scale_face(face: GradFace, factor: Any, is_division: bool) -> bool:
    """Scale a gradient of few bits by noting the factor; what is still being accumulated is scaled in place."""
    if not face.scale_later(1.0 / factor if is_division else factor):
        return False
    local = face.local
    if local is not None:
        (factor,) = _on(local.device, [factor])
        local.mul_(1.0 / factor if is_division else factor)
    return True


def _scale_all(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """The same for a list of gradients."""
    parts: list[torch.Tensor] = []
    is_division = func.overloadpacket is aten._foreach_div_
    is_scaling = is_division or func.overloadpacket is aten._foreach_mul_
    for face in args[0]:
        if not isinstance(face, GradFace):
            parts.append(face)
        elif not (is_scaling and _scale_face(face, args[1], is_division)):
            face.settle()
            parts.extend(face.parts())
            if face.buffer is not None and face.is_on_disk:
                face.buffer.change(face.state.piece, _each(func, _own(args[1:]), kwargs))
            face.state.host.grads_changed()
    for device in {part.device for part in parts}:
        func([part for part in parts if part.device == device], *_on(device, args[1:]), **kwargs)


def _each(func: Any, others: Sequence[Any], kwargs: dict[str, Any]) -> Change:
    """What a foreach function does to one tensor."""
    return lambda part: func([part], *_on(part.device, others), **kwargs)


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    face = args[0]
    power = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim not in (None, [], ()):
        raise UsageError(f"The norm of the gradient of '{face.state.spec.name}' is over all of it; dim={dim} cannot be served.")
    norm: torch.Tensor = face.state.host.grad_norm(face.state, 2.0 if power is None else float(power))
    return norm.to(kwargs.get("dtype") or face.dtype)


def _norms(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    power = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return [torch.linalg.vector_norm(grad, power) for grad in args[0]]


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Loss scalers: divide by the scale, and find infinities on any rank, the same on all of them."""
    grads, found_inf, inverse_scale = args
    for grad in grads:
        if not isinstance(grad, GradFace):
            func([grad], found_inf, inverse_scale)
            continue
        if grad.state.host.has_nonfinite(grad.state):
            found_inf.fill_(1.0)
        if _scale_face(grad, inverse_scale.reshape(()), is_division=False):
            continue
        kept = inverse_scale.clone()

        def scale(part: torch.Tensor, kept: torch.Tensor = kept) -> None:
            factor = kept.to(part.device)
            part.mul_(factor.to(part.dtype) if part.dtype == torch.float64 else factor)

        grad.change(scale)
        grad.state.host.grads_changed()


def _same(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> GradFace:
    face = args[0]
    return GradFace(face.state, face.buffer, face)


def _zero(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> GradFace:
    face: GradFace = args[0]
    if face.buffer is not None:
        face.buffer.before_change()
        face.buffer.factors.pop(face.state.index, None)  # It may be nan: nothing times nan is not nothing.
    face.change(torch.Tensor.zero_)
    face.state.host.grads_changed()
    return face


_HANDLERS: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    aten.linalg_vector_norm: _norm,
    aten.norm: _norm,
    aten._foreach_norm: _norms,
    aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
    aten.detach: _same,
    aten.alias: _same,
    aten.zero_: _zero,
}
_IN_PLACE = {
    aten.mul_,
    aten.div_,
    aten.clamp_,
    aten.clamp_min_,
    aten.clamp_max_,
    aten.neg_,
    aten.nan_to_num_,
    aten.add_,
    aten.sub_,
    aten.fill_,
}
_IN_PLACE_FOREACH = {
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
    aten._foreach_clamp_min_.Scalar,
    aten._foreach_clamp_max_.Scalar,
    aten._foreach_neg_.default,
    aten._foreach_zero_.default,
}


def visible_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient that a model's parameter shows: that of its segment in the optimizer, in the parameter's form."""
    state = state_of(param)
    if state is None:
        return None
    held = state.segment.grad
    if isinstance(held, GradFace):
        is_alike = held.shape == param.shape and held.device == param.device
        return held if is_alike else GradFace(state, held.buffer, param)
    return held


def assign_grad(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """Clear the gradient of a parameter, or replace it by full values that every rank has."""
    state = state_of(param)
    if state is None:
        return
    if value is None or isinstance(value, GradFace):
        state.segment.grad = None if value is None else GradFace(state, value.buffer, state.segment)
        return
    if value.shape != param.shape:
        raise UsageError(
            f"The gradient of '{state.spec.name}' must have shape {tuple(param.shape)} but got {tuple(value.shape)}."
        )
    pool, flat = state.host.pool, state.flat
    zeros = pool.take(flat.master.numel(), flat.precision.reduce, flat.grad_device, Kind.GRAD).zero_()
    buffer = GradBuffer(zeros, flat.bounds[0], pool)
    face = GradFace(state, buffer, state.segment)
    whole = state.spec.view(value.new_zeros(state.flat.layout.numel))
    whole.copy_(value.detach())
    low, high = state.piece.start, state.piece.stop
    reduced = face.reduced
    if reduced is not None and state.piece.numel:
        flat_values = whole.as_strided((state.spec.numel,), (1,), whole.storage_offset())
        reduced.copy_(flat_values[low - state.spec.offset : high - state.spec.offset].view_as(reduced))
    state.segment.grad = face
    state.host.grads_changed()


class Live:
    """Mixed into the class of a user's parameter that stays in place: its ``.grad`` is the reduced gradient."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient, or None. Inside hooks on the parameter: the local one that autograd has just made."""
        raw: torch.Tensor | None = RAW_GRAD.__get__(self)
        return raw if raw is not None else visible_grad(self)  # type: ignore[arg-type]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            RAW_GRAD.__set__(self, None)
        assign_grad(self, value)  # type: ignore[arg-type]

    @property
    def data(self) -> torch.Tensor:
        """The values outside autograd, whose writes it does not count: note that there may be some."""
        _note_handed_out(self)
        values: torch.Tensor = RAW_DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        _note_handed_out(self)
        RAW_DATA.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = nn.Parameter(self.detach().clone(), self.requires_grad)  # type: ignore[attr-defined]
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[attr-defined]


def _note_handed_out(param: object) -> None:
    state = state_of(param)
    if state is not None:
        state.is_handed_out = True
        if state.flat.is_aliased:
            state.host.wait_until_copied()


_DERIVED: dict[tuple[type, type], type] = {}
_PLAIN: dict[type, type] = {}
"""The users' own class under each derived one."""


def derive(param: nn.Parameter, mixin: type) -> None:
    """Mix a class into that of a parameter, in the place of one that was mixed in before."""
    now = type(param)
    derived = _DERIVED.get((mixin, now))
    if derived is None:
        cls = _PLAIN.get(now, now)
        derived = _DERIVED.get((mixin, cls))
        if derived is None:
            derived = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
            _DERIVED[mixin, cls], _PLAIN[derived] = derived, cls
        _DERIVED[mixin, now] = derived
    if now is not derived:
        param.__class__ = derived


def make_live(param: nn.Parameter) -> None:
    """Let a parameter show its reduced gradient."""
    derive(param, Live)


def make_plain(param: nn.Parameter) -> None:
    """Give a parameter its own class back."""
    cls = _PLAIN.get(type(param))
    if cls is not None:
        param.__class__ = cls
