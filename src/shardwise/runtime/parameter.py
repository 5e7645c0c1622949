"""The face of a sharded parameter: what stands in the module outside compute. It has a form and a gradient, but no values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.core.errors import NotGatheredError, ShardwiseError, UsageError
from shardwise.devices import torch_private
from shardwise.runtime.flat import FlatState, ParamState, Standing, nothing_of, state_of
from shardwise.runtime.grads import RAW_DATA, Live, assign_grad, derive, visible_grad

# fmt: off
_FORM_ATTRIBUTES = [
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "itemsize", "nbytes", "names", "grad_fn",
    "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_xla", "is_ipu", "is_maia", "is_meta", "is_vulkan", "is_mkldnn", "is_quantized",
    "is_sparse", "is_sparse_csr", "is_nested", "output_nr", "retains_grad", "_version", "_base", "_backward_hooks",
    "_post_accumulate_grad_hooks",
]
_FORM_METHODS = [
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device", "requires_grad_",
    "is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_inference", "is_conj", "is_neg", "is_same_size",
    "is_distributed", "is_pinned", "__len__", "__hash__", "register_hook", "register_post_accumulate_grad_hook",
]
# fmt: on


def _form_functions() -> set[Any]:
    """Functions that need the form of a tensor only, as ``__torch_function__`` names them."""
    functions: set[Any] = {torch.is_floating_point, torch.is_complex, torch.numel, torch_private.SHALLOW_COPY_CHECK}
    for name in _FORM_ATTRIBUTES:
        if hasattr(torch.Tensor, name):
            functions.add(getattr(torch.Tensor, name).__get__)
    functions.add(torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
    functions.update(getattr(torch.Tensor, name) for name in _FORM_METHODS if hasattr(torch.Tensor, name))
    return functions


_FORM = _form_functions()
_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class Away(Live):
    """Mixed into the class of a user's own parameter while its values are elsewhere: it answers as its face does."""

    @property
    def state(self) -> ParamState:
        """The parameter's state."""
        state = state_of(self)
        if state is None:
            raise ShardwiseError("The sharded model that this parameter belongs to is gone.")
        return state

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Serve the form, or the values where they may be had."""
        return _answer(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Parameter('{self.state.spec.name}', shape={self.state.spec.shape}, values sharded)"


class Face(Standing, nn.Parameter):
    """A parameter whose values are elsewhere: sharded over the ranks, or held in another dtype.

    Inside a call of the model that owns it, reading it gathers its unit; elsewhere reading raises ``NotGatheredError``.
    """

    @staticmethod
    def __new__(cls, state: ParamState, dtype: torch.dtype | None = None) -> Face:
        """Stand for a parameter, in its own dtype or in one that it is to be cast to."""
        face: Face = torch_private.wrapper(
            cls,
            state.flat.device,
            state.spec.shape,
            state.spec.stride,
            dtype=dtype or state.spec.dtype,
            requires_grad=state.compute.requires_grad,
        )
        face._state = weakref.ref(state)
        return face

    def __init__(self, state: ParamState, dtype: torch.dtype | None = None) -> None:
        # nn.Parameter has no initialiser of its own: all is done in __new__.
        pass

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient, or None."""
        return visible_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        assign_grad(self, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Serve the form; write through; put the values in the place of the face where they may be had."""
        return _answer(func, args, kwargs or {})

    def register_hook(self, hook: Any) -> Any:
        """A hook on the gradient that autograd makes: it belongs to the parameter behind the face."""
        return self._compute.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """The same for hooks after accumulation."""
        return self._compute.register_post_accumulate_grad_hook(hook)

    @property
    def _compute(self) -> nn.Parameter:
        compute = self.state.compute
        if self.requires_grad and not compute.requires_grad:
            compute.requires_grad_(True)
        return compute

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The last guard: whatever reaches a face below Python reads or returns real values."""
        if func is torch.ops.aten.detach.default:
            return args[0].state.host.read(args[0].state).detach()
        args, kwargs = _with_values(args, kwargs or {})
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Face('{self.state.spec.name}', shape={self.state.spec.shape}, dtype={self.state.spec.dtype}, values sharded)"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = nn.Parameter(self.state.host.read(self.state).detach().clone(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.state.host.read(self.state).detach(), self.requires_grad).__reduce_ex__(protocol)


def _answer(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a parameter whose values are elsewhere answers to a function of torch."""
    if func in _FORM:
        if func == _DTYPE and args[0].state.host.is_computing:
            return args[0].state.flat.precision.compute  # Inside a call, what the values have there.
        with torch_private.without_torch_function():
            return func(*args, **kwargs)
    if func in (torch.autograd.grad, torch.autograd.backward):
        args, kwargs = torch_private.map_tensors(Face, lambda face: face.state.compute, (tuple(args), kwargs))
        with torch_private.without_torch_function():
            return func(*args, **kwargs)
    first = args[0] if args else None
    if func in _CASTS and isinstance(first, Face):
        return _cast(func, args, kwargs)
    if func == _SET_DATA and isinstance(first, Face):
        if isinstance(args[1], Face):
            return first.state.host.cast(first.state, args[1].dtype)
        return first.state.host.write(first.state, args[1])
    if func is torch.Tensor.copy_ and isinstance(first, Face) and not isinstance(args[1], (Face, Away)):
        first.state.host.write(first.state, args[1])
        return first
    args, kwargs = _with_values(args, kwargs)
    if any(isinstance(arg, Away) for arg in args):
        with torch_private.without_torch_function():
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def _with_values(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Arguments with values in the places of stand-ins."""

    def read(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.state.host.read(tensor.state) if isinstance(tensor, (Face, Away)) else tensor

    return torch_private.map_tensors(torch.Tensor, read, (tuple(args), kwargs))


_CASTS = {getattr(torch.Tensor, name) for name in ("to", "double", "float", "half", "bfloat16", "cpu", "cuda", "type")}
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _cast(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A cast of a whole module reaches its faces: answer with a face of the new dtype. Inside a call, cast the values."""
    face = args[0]
    state = face.state
    if state.host.is_computing:
        return func(state.host.read(state), *args[1:], **kwargs)
    probe = func(torch.empty(0, dtype=face.dtype, device=face.device), *args[1:], **kwargs)
    if probe.device != face.device:
        raise UsageError(
            f"A sharded model stays on its device: '{state.spec.name}' cannot go from {face.device} to {probe.device}. "
            "Move the model before shardwise.shard."
        )
    if probe.dtype == face.dtype:
        return face
    with torch_private.without_torch_function():
        return Face(state, probe.dtype)


def point_to(flat: FlatState, buffer: torch.Tensor) -> None:
    """Make the compute parameters of a flat views of a gathered buffer."""
    with torch_private.without_torch_function():
        for state in flat.params:
            bring_values(state, buffer)


def point_away(flat: FlatState) -> None:
    """Leave the compute parameters of a flat with their shapes but without memory."""
    with torch_private.without_torch_function():
        dtype, device = flat.precision.compute, flat.device
        for state in flat.params:
            take_values(state, nothing_of(state.spec.shape, dtype, device))


def bring_values(state: ParamState, buffer: torch.Tensor) -> None:
    """Make the user's own parameter a view of a gathered buffer."""
    derive(state.compute, Live)
    RAW_DATA.__set__(state.compute, state.spec.view(buffer))


def take_values(state: ParamState, nothing: torch.Tensor) -> None:
    """Leave the user's own parameter with its form but without memory: reading it is refused by name."""
    RAW_DATA.__set__(state.compute, nothing)
    derive(state.compute, Away)


def not_gathered(state: ParamState) -> NotGatheredError:
    """The error for a read of values that are not here."""
    return NotGatheredError(
        f"The values of parameter '{state.spec.name}' are sharded over the ranks and not gathered here. Read or write them inside "
        "`with shardwise.gathered(model):`, entered on all ranks (for one parameter: gathered(the module that holds it))."
    )
