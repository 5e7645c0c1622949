"""A step of a user's module on fake tensors: no memory, no device, but every moment, kernel and activation of forward and backward.

Knows nothing of ranks and stages. What the engine does to a model that changes what it computes (casts, blocks that are run again,
activations that rest elsewhere) is done here too; what it holds besides is the matter of ``memory.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.core.errors import UsageError
from shardwise.core.ledger import Tier
from shardwise.core.plan import Plan
from shardwise.core.trace import Trace
from shardwise.core.unit import Unit, find_units
from shardwise.devices import torch_private
from shardwise.devices.live import Live
from shardwise.planning.away import Away
from shardwise.planning.beats import Beats, tables_of
from shardwise.planning.profile import Profile
from shardwise.runtime.flat import Precision
from shardwise.runtime.forward import OnGrads
from shardwise.runtime.recompute import RECOMPUTE, find_blocks
from shardwise.runtime.rehearsal import Reads, as_call, fake_values
from shardwise.runtime.tensors import cast, tensors_in

Loss = Callable[..., torch.Tensor]
"""Makes a number of what a model returns, and of the targets."""


class FakeRunError(UsageError):
    """A model cannot be run on fake tensors: it looks at values, or calls what has no rule for them. Use the closed form."""


@dataclass(frozen=True)
class Example:
    """One micro-batch: what the model is given (a tensor, a tuple of arguments or a dict of keywords), and what its loss is made with.

    Args:
        inputs: Tensors of the real forms, on any device, also ``meta``.
        loss: Called with what the model returns, and the targets. If None, the loss that the model returns (a number, or ``.loss``);
            of a model that returns neither, a loss that holds as much as cross entropy.
        targets: Further arguments of the loss.
    """

    inputs: Any
    loss: Loss | None = None
    targets: tuple[Any, ...] = ()


def profile_model(
    model: nn.Module, example: Example | Any, *, plan: Plan | None = None, device: torch.device | str = "cpu"
) -> Profile:
    """Run forward and backward once on fake tensors.

    Args:
        model: On any device, also ``meta``. It is left as it was.
        example: An `Example`, or the inputs alone.
        plan: Of which precision, units and what is done with activations matter; all others may be changed afterwards.
        device: That is computed on: torch takes other kernels on other devices. ``cpu``, or one that this process has.

    Raises:
        FakeRunError: The model cannot be run so.
    """
    plan = plan or Plan()
    batch = example if isinstance(example, Example) else Example(example)
    units = find_units(model, units=plan.units, is_cast=plan.param_dtype is not None)
    if not units:
        raise UsageError("The model has no parameters, so there is nothing to predict.")
    also_opened: list[tuple[str, str]] = []
    for _ in range(2):
        run = _Run(model, units, plan, _whole(device), also_opened)
        try:
            profile = run.profile(batch)
        except Exception as error:  # Whatever user code does with values that are not there.
            raise FakeRunError(
                f"The model cannot be run on fake tensors: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} "
                "Expected a forward and a backward that look at no values. Use the closed form, or give another example."
            ) from error
        if run.beats.also_opened == also_opened:
            break
        also_opened = run.beats.also_opened  # From the second step on, such units are open from the beginning of the call.
    return profile


def _whole(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors name it."""
    found = torch.device(device)
    return found if found.type in ("cpu", "meta") or found.index is not None else torch.device(found.type, 0)


class _Run:
    """One run."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], plan: Plan, device: torch.device, also_opened: list[tuple[str, str]]
    ) -> None:
        self._model = model
        self._units = tuple(units)
        self._plan = plan
        self._device = device
        self._live = Live(device)
        self._away = Away(device) if plan.activations in (Tier.HOST.value, Tier.DISK.value) else None
        self.beats = Beats(units, self._live, self._away, also_opened, tables_of(model, units))
        self._dtypes = {
            name: (Precision.of(flat, plan).compute, param)
            for unit in units
            for flat in unit.flats
            for param in flat.params
            for name in param.names
        }
        self._params: list[tuple[str, nn.Parameter]] = []
        self._buffers: list[torch.Tensor] = []

    def profile(self, batch: Example) -> Profile:
        """Run a batch."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            mode = stack.enter_context(torch_private.fake_tensor_mode())
            unit_of = stack.enter_context(fake_values(self._model, self._units, self._fake))
            inputs, targets = torch_private.map_tensors(torch.Tensor, self._fake_input, (as_call(batch.inputs), batch.targets))
            given = [*tensors_in((inputs, targets))]
            self._live.ignore([*(param for _, param in self._params), *self._buffers, *given])
            if self._away is not None:
                self._away.leave([*(param for _, param in self._params), *self._buffers])
            self._hook(stack)
            stack.enter_context(self._live)
            with Reads(self.beats, unit_of):
                loss = self._loss(batch, inputs, targets)
            loss.backward()
            del loss, mode
            self.beats.end()
        return self._summarize(given)

    def _loss(self, batch: Example, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        args, kwargs = inputs
        with nullcontext() if self._away is None else self._away.hooks():
            output = self._model(*args, **kwargs)
        if self._plan.dtype("output_dtype") is not None:
            output = cast(output, self._plan.dtype("output_dtype") or torch.float32)
        if batch.loss is not None:
            return batch.loss(output, *targets)
        return _own_loss(output)

    # Fake values

    def _fake(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name:
            buffer = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            self._buffers.append(buffer)
            return buffer
        dtype, spec = self._dtypes[name]
        values = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=self._device)
        param = nn.Parameter(values, requires_grad=tensor.requires_grad)
        self._params.append((name, param))
        return param

    def _fake_input(self, tensor: torch.Tensor) -> torch.Tensor:
        form = tensor.detach()
        fake = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=self._device)
        return fake.requires_grad_(tensor.requires_grad)

    # What the engine hooks

    def _hook(self, stack: ExitStack) -> None:
        names = {unit.name for unit in self._units}
        modules = dict(self._model.named_modules())
        if self._plan.activations == RECOMPUTE:
            for name in find_blocks(self._units, modules):
                modules[name].forward = self._run_again(name, modules[name].forward)
        for name, module in modules.items():
            has_units = any(unit in ("", name) or unit.startswith(f"{name}.") or name == "" for unit in names)
            if not has_units:
                continue
            before = module.register_forward_pre_hook(_Enter(self, name), prepend=True, with_kwargs=True)
            after = module.register_forward_hook(lambda _m, _a, output: self._leave(output), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        for name, param in self._params:
            if param.requires_grad:
                stack.callback(param.register_post_accumulate_grad_hook(self.beats.taker(name)).remove)

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before a module's forward."""
        is_entry = not self.beats.open_calls and not self.beats.is_backward
        self.beats.enter(name)
        opened = tuple(self.beats.open_units[-1])
        if opened and not self.beats.is_backward and torch.is_grad_enabled():
            given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad and not tensor.is_leaf]
            if given:
                OnGrads(given, lambda: self.beats.differentiated(opened), needs_all=True)
        dtype = self._plan.dtype("param_dtype")
        if dtype is not None and self._plan.cast_forward_inputs and (is_entry or opened):
            return cast(args, dtype), cast(kwargs, dtype)
        return None

    def _leave(self, output: Any) -> None:
        opened = tuple(self.beats.open_units[-1])
        if opened and torch.is_grad_enabled() and output is not None:
            returned = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if returned:
                OnGrads(returned, lambda: self.beats.differentiate(opened), needs_all=False)
        self.beats.leave()

    def _run_again(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, which leaves its inputs alone."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.beats.is_backward:
                self.beats.again(name)
            return forward(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Fake generators have no state to keep: random numbers take the same memory each time.
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return call

    def _summarize(self, given: Sequence[torch.Tensor]) -> Profile:
        beats = self.beats
        trace = Trace(tuple(beats.forward), tuple(beats.backward), "fake")
        first = next((tensor for tensor in given if tensor.dim()), None)
        num_samples = 1 if first is None else first.shape[0]
        is_text = first is not None and first.dim() == 2 and not first.is_floating_point()
        dtype = self._plan.param_dtype or str(self._units[0].flats[0].dtype).removeprefix("torch.")
        return Profile(
            self._units,
            trace,
            beats.spans(),
            dtype,
            num_samples,
            first.numel() if is_text and first is not None else num_samples,
            _bytes_of(given),
            "fake",
            _bytes_of(self._buffers),
            tuple(beats.beats),
        )


class _Enter:
    """A hook before a module's forward."""

    def __init__(self, run: _Run, name: str) -> None:
        self._run = run
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run.enter(self._name, args, kwargs)


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    storages = {torch_private.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _own_loss(output: Any) -> torch.Tensor:
    """The loss in what a model returns; else one that holds as much as cross entropy does."""
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not found:
        raise UsageError("The model returns no tensor with a gradient. Give a loss.")
    number = next((tensor for tensor in found if tensor.numel() == 1), None)
    return torch.log_softmax(found[0].float(), -1).mean() if number is None else number.sum()
