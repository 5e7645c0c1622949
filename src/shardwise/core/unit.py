"""Units: parameters that travel together, with their names, shapes and places in flat buffers.

Knows nothing of ranks and devices. A unit has one flat buffer for each (dtype, trainable), parameter-major; a parameter is a
view of it. The *gather point* of a unit is the module whose call spans all reads of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import nn

from shardwise.core.errors import PlanError
from shardwise.core.layout import Layout, align

ROOT = ""
"""Name of the model itself among its modules."""

_INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""torch's own modules that read the weights of their parts without calling them, and look at them before choosing a kernel."""
# fmt: off
_WITH_STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)
# fmt: on
"""Their kernels take inputs of 16 bits, but want weights in the dtype of the running statistics, which must stay wide."""
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its names (several where it is tied), form, and offset in its flat buffer."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    offset: int

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @cached_property
    def numel(self) -> int:
        """Elements without padding."""
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """One past its last element in the flat buffer."""
        return self.offset + self.numel

    def view(self, buffer: torch.Tensor, *, shift: int = 0) -> torch.Tensor:
        """The parameter as a view of a flat buffer whose first element is element ``shift`` of the whole."""
        start = buffer.storage_offset() + self.offset - shift
        return buffer.as_strided(self.shape, self.stride, start)


@dataclass(frozen=True)
class Segment:
    """One parameter's part ``[start, stop)`` of the elements that a rank owns, possibly empty."""

    param: ParamSpec
    start: int
    stop: int

    @cached_property
    def numel(self) -> int:
        """Elements in the segment."""
        return self.stop - self.start

    @cached_property
    def is_whole(self) -> bool:
        """Whether the segment is the whole parameter, so that it can keep its shape."""
        return self.numel == self.param.numel

    def view(self, buffer: torch.Tensor, *, shift: int) -> torch.Tensor:
        """The segment as a view of a buffer that begins at element ``shift`` of the flat buffer."""
        if self.param.numel == 0:
            return buffer.new_empty(self.param.shape)
        if self.is_whole:
            return self.param.view(buffer, shift=shift)
        return buffer[self.start - shift : self.stop - shift] if self.numel else buffer[:0]


@dataclass(frozen=True)
class FlatSpec:
    """One flat buffer of a unit: parameters of one dtype that are all trained or all frozen.

    Those in a buffer that ``keeps_dtype`` are computed with as they are, whatever the plan casts others to.
    """

    unit: str
    dtype: torch.dtype
    trainable: bool
    params: tuple[ParamSpec, ...]
    keeps_dtype: bool = False

    @property
    def name(self) -> str:
        """Unit, dtype and use, for messages."""
        kind = ("trained" if self.trainable else "frozen") + (", not cast" if self.keeps_dtype else "")
        return f"{self.unit or '(root)'}[{str(self.dtype).removeprefix('torch.')}, {kind}]"

    @cached_property
    def numel(self) -> int:
        """Elements up to the aligned end of the last parameter."""
        last = self.params[-1]
        return last.offset + align(last.numel)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Where parameters begin, and where the last one ends."""
        return (*(param.offset for param in self.params), self.numel)

    def segments(self, bounds: tuple[int, int]) -> tuple[Segment, ...]:
        """Each parameter's part of ``bounds``, in order."""
        if bounds not in self._segments:
            low, high = bounds
            parts = ((param, max(low, param.offset), min(high, param.stop)) for param in self.params)
            self._segments[bounds] = tuple(
                Segment(param, start, stop) if start < stop else Segment(param, low, low) for param, start, stop in parts
            )
        return self._segments[bounds]

    @cached_property
    def _segments(self) -> dict[tuple[int, int], tuple[Segment, ...]]:
        return {}

    def layout(self, kind: str, *, num_ranks: int, weights: Sequence[float] | None) -> Layout:
        """Cut the buffer for a number of ranks, as the plan's ``layout`` says."""
        if kind == "whole":
            return Layout.whole(self.boundaries, num_ranks=num_ranks)
        if kind == "weighted" and weights is not None:
            return Layout.weighted(self.numel, weights=weights)
        return Layout.even(self.numel, num_ranks=num_ranks)


@dataclass(frozen=True)
class Unit:
    """Parameters that travel together, gathered around the calls of the module named ``name``."""

    name: str
    flats: tuple[FlatSpec, ...]

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """All parameters, buffer by buffer."""
        return tuple(param for flat in self.flats for param in flat.params)

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(flat.trainable for flat in self.flats)

    @property
    def label(self) -> str:
        """Name for people."""
        return self.name or "(root)"

    @property
    def num_bytes(self) -> int:
        """Bytes of the full parameters in their own dtypes, padding included."""
        return sum(flat.numel * flat.dtype.itemsize for flat in self.flats)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that a parameter keeps in a flat buffer: its own if it fills its memory once, else contiguous ones."""
    order = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= size
    return tuple(tensor.stride())


def find_units(
    model: nn.Module,
    *,
    ignored: Iterable[nn.Parameter] = (),
    units: Sequence[type | str] | None = None,
    is_cast: bool = False,
) -> tuple[Unit, ...]:
    """Partition a model's parameters into units.

    Args:
        model: Any module.
        ignored: Parameters that belong to no unit.
        units: Module classes or module names to make units of; by themselves, if None.
        is_cast: Whether parameters are cast for compute; those that cannot be then travel in buffers of their own.
    """
    skipped = {id(param) for param in ignored}
    sites = _param_sites(model, skipped)
    points = _named_points(model, units) if units is not None else _natural_points(model, skipped)
    members: dict[str, list[str]] = {name: [] for name, module in model.named_modules() if id(module) in points}
    home = {id(module): name for name, module in model.named_modules()}
    for names in sites.values():
        members[home[id(_innermost(model, names, points))]].append(names[0])
    tied = {names[0]: names for names in sites.values()}
    uncast = _uncast_params(model) if is_cast else set()
    return tuple(_make_unit(model, point, [tied[name] for name in names], uncast) for point, names in members.items() if names)


def _uncast_params(model: nn.Module) -> set[int]:
    """Parameters that must be computed with in their own dtype, by identity."""
    modules = (module for module in model.modules() if isinstance(module, _WITH_STATISTICS) and module.track_running_stats)
    return {id(param) for module in modules for param in module.parameters(recurse=False)}


def _param_sites(model: nn.Module, skipped: set[int]) -> dict[int, tuple[str, ...]]:
    sites: dict[int, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in skipped:
            sites[id(param)] = (*sites.get(id(param), ()), name)
    return sites


def _chain(model: nn.Module, param_name: str) -> list[nn.Module]:
    """Modules on the way from the model to the owner of a parameter."""
    chain = [model]
    for part in param_name.split(".")[:-1]:
        chain.append(getattr(chain[-1], part))
    return chain


def _innermost(model: nn.Module, names: Sequence[str], points: set[int]) -> nn.Module:
    """The innermost point whose call spans the reads of a parameter under all of its names."""
    chains = [_chain(model, name) for name in names]
    common = set.intersection(*({id(module) for module in chain} for chain in chains))
    return next(module for module in reversed(chains[0]) if id(module) in common and id(module) in points)


def _named_points(model: nn.Module, units: Sequence[type | str]) -> set[int]:
    modules = dict(model.named_modules())
    points = {id(model)}
    whole = [module for module in modules.values() if isinstance(module, _INDIVISIBLE)]
    inner = {id(part) for module in whole for part in module.modules() if part is not module}
    for wanted in units:
        if isinstance(wanted, str):
            if wanted not in modules:
                raise PlanError(f"units names the module {wanted!r}, but the model has none of that name.")
            points.add(id(modules[wanted]))
        elif isinstance(wanted, type) and issubclass(wanted, nn.Module):
            points.update(id(module) for module in modules.values() if isinstance(module, wanted) and id(module) not in inner)
        else:
            raise PlanError(f"units takes module names and nn.Module classes, but got {wanted!r}.")
    for module in modules.values():
        if id(module) in points and isinstance(module, _NEVER_CALLED):
            raise PlanError(f"units names a {type(module).__name__}, which is never called. Name its elements instead.")
    return points


def _natural_points(model: nn.Module, skipped: set[int]) -> set[int]:
    """Blocks of about the size of a layer, large leaves, and the modules that hold what is left over."""
    sizes: dict[int, int] = {}

    def size(module: nn.Module) -> int:
        if id(module) not in sizes:
            sizes[id(module)] = sum(p.numel() for p in module.parameters() if id(p) not in skipped)
        return sizes[id(module)]

    total, points = size(model), {id(model)}
    if not isinstance(model, _INDIVISIBLE):
        _split(model, size, total, points)
    return points


def _split(module: nn.Module, size: Callable[[nn.Module], int], total: int, points: set[int]) -> None:
    """Mark the points below a module: children that are small enough for a unit, or the same inside them."""
    repeated = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(module) > 1
    limit = total // 3 if repeated else total // 8
    leftover = 0
    for child in module.children():
        numel = size(child)
        if numel == 0 or id(child) in points:
            continue
        if numel <= total // 512 and leftover + numel <= total // 64:
            leftover += numel  # Too small for a collective of its own: it travels with the parent's unit.
        elif isinstance(child, _NEVER_CALLED):
            _split(child, size, total, points)
        else:
            points.add(id(child))
            if numel > limit and not isinstance(child, _INDIVISIBLE):
                _split(child, size, total, points)


def _make_unit(model: nn.Module, point: str, tied_names: Sequence[tuple[str, ...]], uncast: set[int]) -> Unit:
    groups: dict[tuple[torch.dtype, bool, bool], list[tuple[tuple[str, ...], nn.Parameter]]] = {}
    for names in tied_names:
        param = model.get_parameter(names[0])
        groups.setdefault((param.dtype, param.requires_grad, id(param) in uncast), []).append((names, param))
    flats = []
    for (dtype, trainable, keeps_dtype), members in groups.items():
        specs, offset = [], 0
        for names, param in members:
            specs.append(ParamSpec(names, tuple(param.shape), dense_stride(param), dtype, trainable, offset))
            offset += align(param.numel())
        flats.append(FlatSpec(point, dtype, trainable, tuple(specs), keeps_dtype))
    return Unit(point, tuple(flats))
