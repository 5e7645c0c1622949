"""Every private name of torch that Shardwise calls, in one place, with the reason."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

_PROBE = torch.zeros(1)
_OWN_STORAGE_COUNT = torch._C._storage_Use_Count(_PROBE.untyped_storage()._cdata)
"""What the count is for memory that one tensor alone holds, with a handle to its storage."""

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def default_store() -> Any:
    """The store behind the default process group: survivors of a failure talk through it."""
    return distributed_c10d._get_default_store()


def group_timeout(group: dist.ProcessGroup | None) -> timedelta:
    """How long the collectives of a group may take."""
    group = group or distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu")) if dist.get_backend(group) == "gloo" else None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else distributed_c10d.default_pg_timeout


def graph_task() -> int:
    """Number of the backward pass that this thread is in, or -1."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the current backward pass has ended."""
    Variable._execution_engine.queue_callback(callback)


def top_saved_tensor_hooks() -> tuple[Pack, Unpack] | None:
    """The innermost saved-tensor hooks in force. Only these are called: ours must call those that they cover."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def push_saved_tensor_hooks(pack: Pack, unpack: Unpack) -> None:
    """Put saved-tensor hooks on top. They cannot be a context manager: forward hooks of modules open and close them."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Take the innermost saved-tensor hooks off."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def saved_tensor_hooks_allowed() -> bool:
    """Whether hooks may be pushed now (torch.func transforms forbid it)."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def is_of_checkpoint(pack: Pack) -> bool:
    """Whether saved-tensor hooks are those of activation checkpointing, in its forward or in its recomputation."""
    return getattr(pack, "__module__", None) == checkpoint.__name__


def checkpointed(again: Callable[..., Any], *inputs: Any) -> Generator[None]:
    """A checkpoint around what runs between the first and the second ``next`` of it, with ``again`` to compute the same again.

    The public function calls what it checkpoints itself; hooks before and after a forward cannot. torch's own checkpointing by
    hooks uses this.
    """
    make: Any = checkpoint._checkpoint_without_reentrant_generator
    mode = checkpoint._DEFAULT_DETERMINISM_MODE
    return make(again, True, checkpoint.noop_context_fn, mode, False, True, *inputs)  # type: ignore[no-any-return]


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the memory under a tensor (data_ptr is 0 for fake tensors); 0 for tensors that have none of their own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def put_around_forward(module: torch.nn.Module, before: int, after: int) -> None:
    """Let two hooks of a module, by their keys, be the last of those before its forward and the first of those after it."""
    hooks: Any = module._forward_pre_hooks
    if next(reversed(hooks)) != before:
        hooks.move_to_end(before)
    hooks = module._forward_hooks
    if next(iter(hooks)) != after:
        hooks.move_to_end(after, last=False)


def named_buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers that a module itself has, by name: what is put there stands in the module, without the checks of an attribute."""
    return module._buffers


def buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a module itself has. Asked of all modules between steps: the public way takes ten times as long."""
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor lies in the same memory. Counts owners of the storage: this tensor, and the handle made here."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > _OWN_STORAGE_COUNT


@cache
def _num_owners_of_new_grad(is_fake: bool) -> int:
    """How many owners the memory of a gradient has while autograd hands it to a hook and nobody else knows of it."""
    if is_fake:
        with fake_tensor_mode():
            return _count_owners_of_new_grad()
    return _count_owners_of_new_grad()


def _count_owners_of_new_grad() -> int:
    counts: list[int] = []
    param = torch.nn.Parameter(torch.zeros(2))

    def look(param: torch.Tensor) -> None:
        grad = param.grad
        counts.append(torch._C._storage_Use_Count(grad.untyped_storage()._cdata) if grad is not None else 0)

    param.register_post_accumulate_grad_hook(look)
    with torch.enable_grad():
        (param * 2.0).sum().backward()
    return counts[0]


def is_nobody_elses(grad: torch.Tensor) -> bool:
    """Whether a gradient in a hook after accumulation has memory of its own, of which nobody else holds a view."""
    storage = grad.untyped_storage()
    num_owners = torch._C._storage_Use_Count(storage._cdata)
    return storage.nbytes() == grad.nbytes and num_owners <= _num_owners_of_new_grad(isinstance(grad, FakeTensor))


def num_owners(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor, and how many its memory: comparable between calls from one place."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


def tensor_over(storage: torch.UntypedStorage, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor at the beginning of a storage, which it owns."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (numel,), (1,))


def wrapper(
    cls: type,
    device: torch.device,
    shape: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype,
    requires_grad: bool = False,
) -> Any:
    """A tensor of a subclass that has a form but no memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""For subclasses that answer to dispatch only."""


SHALLOW_COPY_CHECK = torch._has_compatible_shallow_copy_type
"""What ``Module.to`` asks before it sets ``param.data``; stand-ins answer it from their form."""


def map_tensors(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to all leaves of one type in nested lists, tuples and dicts."""
    return tree_map_only(kind, function, tree)


def outside_transforms() -> Any:
    """Context for the engine's own work inside a transform of torch.func: what it writes is no part of the function."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


def fake_tensor_mode() -> Any:
    """A mode in which tensors have forms but no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


FAKES: tuple[type, ...] = (FakeTensor,)
"""What tensors are in such a mode."""


without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""Context in which subclasses' ``__torch_function__`` is not consulted."""


def dcp_classes() -> tuple[type, ...]:
    """Classes without public names that the metadata of torch's distributed checkpoints is made of. They hold values alone."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _StorageInfo, _MEM_FORMAT_ENCODING


def tensor_builders() -> dict[tuple[str, str], Callable[..., Any]]:
    """What pickles of torch name to make tensors of storages, without what users have put on them. They run nothing else."""
    parameters = ("_rebuild_parameter", "_rebuild_parameter_with_state")
    found: dict[tuple[str, str], Callable[..., Any]] = {("torch._utils", name): _first for name in parameters}
    found["torch._tensor", "_rebuild_from_type_v2"] = _call_first
    return {("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2, **found}


def _first(values: torch.Tensor, *others: Any) -> torch.Tensor:
    return values


def _call_first(build: Callable[..., Any], kind: Any, args: Sequence[Any], state: Any) -> Any:
    """``build`` is one of the builders, too: a reader finds no other."""
    return build(*args)


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """What an accelerator has given out, now and at most. The public functions make a table of all it counts first, which takes ten
    times as long."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found = torch._C._accelerator_getDeviceStats(index)["allocated_bytes"]["all"]
    return int(found["current"]), int(found["peak"])


def put_around_step_hooks(optimizer: torch.optim.Optimizer, before: int, after: int) -> None:
    """Let two hooks of an optimizer, by their keys, be the last of those before a step and the first of those after it."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(before)
    hooks = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(after, last=False)


def double_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another optimizer with the same attributes, and no hooks. It was never initialised: that would register its parameters."""
    double: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer))
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(double, name, OrderedDict())
    return double


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's own ``step``, under the wrapper that calls hooks."""
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    step(optimizer)


def register_device_module(device_type: str, module: Any) -> None:
    """Let ``torch.<device type>`` be a module: how a device of an extension shows its functions."""
    torch._register_device_module(device_type, module)
