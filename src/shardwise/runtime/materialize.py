"""Values for models that were built on the meta device: module by module, the same on every rank, never the whole at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from shardwise.core.errors import UsageError
from shardwise.core.ledger import Kind, Tier
from shardwise.core.plan import StateKind
from shardwise.core.rest import Rest
from shardwise.core.unit import ParamSpec, Unit
from shardwise.runtime.engine import Setup
from shardwise.runtime.offload import DiskTier, Line


@dataclass
class Initial:
    """What a model on the meta device was given.

    ``parts`` has, by parameter name, this rank's part of the values in the order of memory; ``lines``, by the name of a flat buffer,
    those that went to disk at once; ``replaced`` the parameters on the
    meta device, which optimizers may hold, with those that took their places.
    """

    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    lines: dict[str, Line] = field(default_factory=dict)
    replaced: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model, or a part of it, has no values yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_meta(model: nn.Module) -> None:
    """Refuse a model on the meta device that cannot be given values."""
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        missing = [attribute for attribute, tensor in own if tensor is not None and tensor.is_meta]
        if missing and not callable(getattr(module, "reset_parameters", None)):
            raise UsageError(
                f"'{f'{name}.' if name else ''}{missing[0]}' is on the meta device, but its module {type(module).__name__} has no "
                "reset_parameters() to give it values. Define it, or build this model on a real device."
            )


def materialize(
    model: nn.Module,
    units: Sequence[Unit],
    setup: Setup,
    device: torch.device,
    rests: Mapping[str, Rest],
    disk: DiskTier | None,
) -> Initial:
    """Call ``reset_parameters`` of each module in order, and keep this rank's part of what it drew.

    The numbers come from the plan's own seed, so they are the same on all ranks and at every stage; the global generator is
    left as it was.
    """
    initial = Initial()
    bounds = {param.name: _part_of(param, unit, setup) for unit in units for param in unit.params}
    away = {
        param.name
        for unit in units
        for flat in unit.flats
        if rests[flat.name].master is not Tier.DEVICE
        for param in flat.params
    }
    on_disk = {} if disk is None else _make_lines(model, units, setup, rests, disk, initial)
    specs = {name: param for unit in units for param in unit.params for name in param.names}
    done: dict[int, nn.Parameter] = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(setup.plan.init_seed)
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            owned = _allocate(module, device, done, initial)
            if not owned:
                continue
            cast(Callable[[], None], module.reset_parameters)()
            for attribute, param in owned.items():
                spec = specs.get(prefix + attribute)
                if spec is not None:
                    if spec.name in on_disk:
                        line, at, edges = on_disk[spec.name]
                        with line.tier.attempt():
                            line.set(_cut(param, spec, edges), at)
                    else:
                        part = _cut(param, spec, bounds[spec.name])
                        initial.parts[spec.name] = part.cpu() if spec.name in away else part
                    # Keep the form only: the next module needs the memory.
                    param.data = param.data.new_zeros(()).expand(spec.shape)
    return initial


def _make_lines(
    model: nn.Module, units: Sequence[Unit], setup: Setup, rests: Mapping[str, Rest], disk: DiskTier, initial: Initial
) -> dict[str, tuple[Line, int, tuple[int, int]]]:
    """Places on disk for parameters that are nowhere else: by name, the line, where in it they begin, and which elements go there."""
    found = {}
    for flat in (flat for unit in units for flat in unit.flats if rests[flat.name].param is Tier.DISK):
        if not all(model.get_parameter(param.name).is_meta for param in flat.params):
            continue
        layout = flat.layout(setup.layout_kind, num_ranks=setup.lanes.size, weights=setup.plan.weights)
        low, high = layout.bounds(setup.lanes.rank) if StateKind.OPTIM in setup.plan.sharded else (0, layout.numel)
        line = Line(disk, high - low, flat.dtype, f"parameters of {flat.name}", Kind.PARAM)
        initial.lines[flat.name] = line
        for piece in flat.segments((low, high)):
            offset, at = piece.param.offset, piece.start - low if piece.numel else 0
            found[piece.param.name] = (line, at, (piece.start - offset, piece.start - offset + piece.numel))
    return found


def _allocate(
    module: nn.Module, device: torch.device, done: dict[int, nn.Parameter], initial: Initial
) -> dict[str, nn.Parameter]:
    """Give a module's own parameters and buffers memory; returns the parameters. Tied ones stay tied."""
    owned: dict[str, nn.Parameter] = {}
    has_buffers = False
    for attribute, param in module.named_parameters(recurse=False):
        if id(param) in done:
            module._parameters[attribute] = done[id(param)]
        elif param.is_meta:
            real = nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
            done[id(param)] = real
            done[id(real)] = real
            initial.replaced.append((param, real))
            module._parameters[attribute] = real
            owned[attribute] = real
    for attribute, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            has_buffers = True
            module._buffers[attribute] = torch.empty_like(buffer, device=device)
    if has_buffers and not owned:
        cast(Callable[[], None], module.reset_parameters)()
    return owned


def _part_of(param: ParamSpec, unit: Unit, setup: Setup) -> tuple[int, int]:
    """Which elements of a parameter this rank keeps."""
    if StateKind.PARAM not in setup.plan.sharded:
        return 0, param.numel
    flat = next(flat for flat in unit.flats if param in flat.params)
    layout = flat.layout(setup.layout_kind, num_ranks=setup.lanes.size, weights=setup.plan.weights)
    low, high = layout.bounds(setup.lanes.rank)
    start, stop = (min(max(edge, param.offset), param.stop) - param.offset for edge in (low, high))
    return start, stop


def _cut(param: torch.Tensor, spec: ParamSpec, bounds: tuple[int, int]) -> torch.Tensor:
    ordered = torch.empty_strided(spec.shape, spec.stride, dtype=param.dtype, device=param.device)
    ordered.copy_(param)
    return ordered.as_strided((spec.numel,), (1,))[slice(*bounds)].clone()
