"""Turns a plain model into a sharded one, in place: flat buffers, stand-ins, hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.core.ledger import Ledger, Tier
from shardwise.core.plan import StateKind
from shardwise.core.rest import Rest, rests_of
from shardwise.core.unit import FlatSpec, Unit
from shardwise.devices.host import on_host
from shardwise.devices.malloc import release_unused
from shardwise.runtime.engine import Engine, Setup
from shardwise.runtime.executor import UnitState
from shardwise.runtime.flat import HOST, FlatState, ParamState, Precision, nothing_of, put_on_disk, remember, state_of
from shardwise.runtime.form import Form, book, copy_of
from shardwise.runtime.grads import assign_grad, make_live
from shardwise.runtime.hooks import attach_hooks
from shardwise.runtime.materialize import Initial, check_meta, is_on_meta, materialize
from shardwise.runtime.offload import DiskTier
from shardwise.runtime.parameter import Face, point_away
from shardwise.runtime.registry import register


def attach(model: nn.Module, units: Sequence[Unit], setup: Setup, device: torch.device) -> Engine:
    """Shard a model in place. Everything was checked before: from here on nothing is refused."""
    ledger = Ledger()
    states = []
    disk = None
    if setup.store is not None:
        disk = DiskTier(setup.store, ledger, setup.load_bytes, setup.plan.staging_bytes, device)
    rests = rests_of(units, setup.plan, is_on_host=device.type == "cpu")
    initial = materialize(model, units, setup, device, rests, disk) if is_on_meta(model) else Initial()
    for unit in units:
        # Flat by flat, so that at most one full buffer stands beside the model while it is taken apart.
        states.append(UnitState(unit, [_make_flat(model, flat, setup, rests[flat.name], initial, disk) for flat in unit.flats]))
    engine = Engine(model, states, setup, ledger, disk)
    engine.book_buffers()
    for flat_state in engine.executor.flats:
        book(flat_state, ledger)
        _adopt_params(model, flat_state, engine)
    for old, new in initial.replaced:
        state = state_of(new)
        if state is not None:
            remember(old, state)
    _attach_hooks(engine, units)
    register(engine)
    if device.type == "cpu":
        release_unused()
    return engine


def _attach_hooks(engine: Engine, units: Sequence[Unit]) -> None:
    for name, module in engine.modules.items():
        has_units = any(_contains(name, unit.name) for unit in units)
        if has_units or any(state_of(param) is not None for param in module.parameters()):
            engine.handles.extend(attach_hooks(engine, name, module, has_units=has_units))
        if isinstance(module, nn.TransformerEncoder):
            # It looks at the weights of its first layer to choose a kernel.
            for unit in units:
                if _contains(f"{name}.layers.0" if name else "layers.0", unit.name):
                    engine.open_also_at(name, unit.name)
    if engine.recompute is not None:
        engine.recompute.attach()


def _contains(module: str, unit: str) -> bool:
    return module in ("", unit) or unit.startswith(f"{module}.")


def _make_flat(
    model: nn.Module, spec: FlatSpec, setup: Setup, rest: Rest, initial: Initial, disk: DiskTier | None
) -> FlatState:
    plan, lanes = setup.plan, setup.lanes
    device = model.get_parameter(spec.params[0].name).device
    is_away = rest.master is not Tier.DEVICE
    precision = Precision.of(spec, plan)
    form = Form.of(spec, rest, precision, plan)
    layout = spec.layout(setup.layout_kind, num_ranks=lanes.size, weights=plan.weights)
    bounds = layout.bounds(lanes.rank) if StateKind.OPTIM in plan.sharded else (0, layout.numel)
    full: torch.Tensor | None
    is_new = all(param.name in initial.parts for param in spec.params)
    line = initial.lines.pop(spec.name, None)
    if line is not None:
        full, master = None, nothing_of((line.numel,), line.dtype, HOST)
    elif is_new and StateKind.PARAM in plan.sharded:
        full = None
        master = _pack_parts(model, spec, bounds, initial)
    else:
        whole = _pack(model, spec, layout.numel, initial)
        if plan.initial == "rank0" and lanes.size > 1 and not is_new:
            lanes.gather.broadcast(whole, 0, label=f"initial values of {spec.name}").wait()
        full = None if form.is_fetched else whole if form.is_aliased else whole.to(precision.compute)
        owned = whole[slice(*bounds)]
        is_free = owned.numel() == whole.numel() and full is not whole
        master = owned if form.is_aliased or is_away or is_free else owned.clone()
    shard = None
    if form.has_copy:
        shard = copy_of(master, spec, rest, precision, device)
    if is_away and line is None:
        if disk is not None and rest.master is Tier.DISK:
            line = put_on_disk(master, disk, spec.name)
            master = nothing_of((line.numel,), line.dtype, HOST)
        else:
            master = on_host(master, f"parameters of {spec.name}")
    is_owned_whole = StateKind.OPTIM not in plan.sharded or lanes.size == 1
    state = FlatState(
        spec,
        layout,
        precision,
        bounds,
        master,
        full,
        form.is_aliased,
        is_owned_whole,
        form.is_fetched,
        device,
        rest,
        shard,
        line,
    )
    _detach_originals(model, state)
    return state


def _pack(model: nn.Module, spec: FlatSpec, numel: int, initial: Initial) -> torch.Tensor:
    """Copy parameters into one buffer."""
    first = model.get_parameter(spec.params[0].name)
    whole = torch.zeros(numel, dtype=spec.dtype, device=first.device)
    with torch.no_grad():
        for param in spec.params:
            if param.name in initial.parts:
                whole[param.offset : param.stop] = initial.parts.pop(param.name)
            else:
                param.view(whole).copy_(model.get_parameter(param.name))
    return whole


def _pack_parts(model: nn.Module, spec: FlatSpec, bounds: tuple[int, int], initial: Initial) -> torch.Tensor:
    """Put this rank's parts of new parameters into its shard."""
    first = model.get_parameter(spec.params[0].name)
    device = next((initial.parts[param.name].device for param in spec.params), first.device)
    master = torch.zeros(bounds[1] - bounds[0], dtype=spec.dtype, device=device)
    with torch.no_grad():
        for piece in spec.segments(bounds):
            part = initial.parts.pop(piece.param.name)
            if piece.numel:
                master[piece.start - bounds[0] : piece.stop - bounds[0]] = part
    return master


def _detach_originals(model: nn.Module, state: FlatState) -> None:
    """Point the users' parameters away from their own memory at once, so that it is freed."""
    nothing = torch.zeros((), dtype=state.precision.compute, device=state.device)
    placeholder = state.full if state.full is not None else nothing
    for spec in state.spec.params:
        param = model.get_parameter(spec.name)
        param.data = spec.view(placeholder) if state.full is not None else placeholder.expand(spec.shape)


def _adopt_params(model: nn.Module, flat: FlatState, engine: Engine) -> None:
    """Make the states of a buffer's parameters, and put stand-ins into the modules where values are elsewhere."""
    pieces = flat.spec.segments(flat.bounds)
    for index, piece in enumerate(pieces):
        spec = piece.param
        compute = model.get_parameter(spec.name)
        is_float = spec.dtype.is_floating_point or spec.dtype.is_complex
        segment = nn.Parameter(flat.resting_segment(piece), requires_grad=is_float)
        state = ParamState(spec, index, flat, engine, compute, list(_places(model, spec.names)), piece, segment)
        state.version = compute._version
        flat.params.append(state)
        remember(compute, state)
        remember(segment, state)
        if flat.has_face:
            state.face = Face(state)
            remember(state.face, state)
            state.show_instead(compute, state.face)
        grad = compute.grad
        make_live(compute)
        compute.grad = None
        if grad is not None:
            assign_grad(compute, grad)  # Of a step that was begun before: the same on every rank, as weights are.
    if flat.full is None:
        point_away(flat)


def _places(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[nn.Module, str]]:
    for name in names:
        path, _, attribute = name.rpartition(".")
        yield model.get_submodule(path), attribute


def check_devices(model: nn.Module, units: Sequence[Unit]) -> torch.device:
    """The one device of all sharded parameters."""
    devices = {model.get_parameter(param.name).device: param.name for unit in units for param in unit.params}
    if len(devices) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise UsageError(f"All sharded parameters must be on one device, but found {places}. Move the model, or ignore some.")
    device = next(iter(devices), torch.device("cpu"))
    if device.type != "meta":
        return device
    check_meta(model)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator if accelerator is not None else torch.device("cpu")
