"""What a rank has of a training state: parts of tensors that it alone writes, and values. Reads the engine, changes nothing."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import names, tree
from shardwise.checkpoint.kinds import kind_of
from shardwise.checkpoint.manifest import DTYPES, contiguous_stride
from shardwise.checkpoint.shards import Part, bytes_of
from shardwise.core.errors import UsageError, UsageTypeError
from shardwise.core.unit import Segment
from shardwise.runtime.copying import Guards, guards_of
from shardwise.runtime.engine import Engine
from shardwise.runtime.flat import HOST, FlatState, ParamState, nothing_of, state_of
from shardwise.runtime.grads import GradFace
from shardwise.runtime.optimizer import adopt, lines_of
from shardwise.runtime.state_lines import StateLines, is_form, is_per_element, line_of


@dataclass
class Item:
    """Something that all ranks may have alike: a value without its tensors, and these."""

    value: Any
    parts: list[Part]

    @property
    def digest(self) -> int:
        """A number that changes when anything of it does."""
        digest = zlib.crc32(json.dumps(self.value).encode())
        for part in self.parts:
            digest = zlib.crc32(f"{part.name} {part.shape} {part.line.dtype}".encode(), digest)
            digest = zlib.crc32(bytes_of(part.line.cpu()), digest)
        return digest


@dataclass
class Collected:
    """What one rank contributes to a checkpoint.

    Args:
        parts: Of tensors that are shared out: this rank alone writes these elements.
        values: What belongs to parameters whose first element this rank writes, encoded.
        items: What every rank has, alike or not.
    """

    parts: list[Part] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)

    def settle(self, rank: int, reference: Mapping[str, int]) -> None:
        """Keep of the items, beside rank 0's, those that are not like rank 0's, under this rank's own name."""
        for name, item in self.items.items():
            if rank and reference.get(name) == item.digest:
                continue
            prefix = names.of_rank(rank, "") if rank else ""
            if item.value is not None:
                self.values[f"{prefix}{name}"] = _renamed(item.value, prefix)
            self.parts.extend(replace(part, name=f"{prefix}{part.name}") for part in item.parts)
        self.items = {}
        # Weights and buffers together: many readers need nothing else.
        self.parts.sort(key=lambda part: not part.name.startswith(names.MODEL))


def _renamed(value: Any, prefix: str) -> Any:
    return tree.map_names(value, lambda name: f"{prefix}{name}") if prefix else value


def collect(engine: Engine, optimizers: Sequence[Optimizer], extra: Mapping[str, Any]) -> Collected:
    """All of a training state on this rank.

    Raises:
        UsageTypeError: It holds something that cannot be kept without pickle.
        OffloadError: It is that of a step that failed.
    """
    if engine.disk is not None:
        engine.disk.settle()
        engine.disk.refuse_failed("The state is not whole.")
    found = Collected()
    found.parts.extend(_param_parts(engine))
    known = {id(param): name for name, param in engine.model.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        adopt(optimizer)
        _add_optimizer(found, index, optimizer, engine, known)
    _add_grads(found, engine)
    _add_replicated(found, engine.model)
    found.items[names.RANDOM] = encode_item(names.RANDOM, random_state(engine.device))
    found.items[names.ENGINE] = encode_item(names.ENGINE, engine_state(engine))
    for key, value in extra.items():
        state = value.state_dict() if hasattr(value, "state_dict") else value
        found.items[f"{names.EXTRA}{key}"] = encode_item(f"{names.EXTRA}{key}", state, f"extra[{key!r}]")
    for part in (*found.parts, *(part for item in found.items.values() for part in item.parts)):
        if part.line.dtype not in DTYPES.values():
            raise UsageTypeError(f"'{part.name}' has the dtype {part.line.dtype}, which checkpoints do not know.")
    return found


# Parameters


def _written(flat: FlatState, rank: int) -> tuple[Segment, ...]:
    """The parts of a buffer's parameters that a rank writes: every element is written once, whoever owns it."""
    return flat.spec.segments(flat.layout.bounds(rank))


def _is_first(piece: Segment, rank: int) -> bool:
    """Whether a rank writes the first element of a parameter, and with it what belongs to the parameter as a whole."""
    return piece.start == piece.param.offset and piece.numel > 0 if piece.param.numel else rank == 0


def _part_of(name: str, piece: Segment, line: torch.Tensor, fetch: Callable[[], torch.Tensor] | None = None) -> Part:
    spec = piece.param
    start = piece.start - spec.offset if piece.numel else 0
    return Part(name, spec.names, spec.shape, spec.stride, start, start + piece.numel, line, fetch)


def _param_parts(engine: Engine) -> Iterator[Part]:
    rank = engine.lanes.rank
    for flat in engine.executor.flats:
        low = flat.bounds[0]
        for state, piece in zip(flat.params, _written(flat, rank), strict=True):
            if piece.numel or _is_first(piece, rank):
                line = flat.master[piece.start - low : piece.start - low + piece.numel]
                fetch = None if flat.line is None else partial(flat.read_part, piece.start, piece.start + piece.numel)
                part = _part_of(f"{names.MODEL}{piece.param.name}", piece, line, fetch)
                yield replace(part, guards=_guards_of_values(state, line))


def _guards_of_values(state: ParamState, line: torch.Tensor) -> Guards:
    """Those of a parameter that is in memory, unless it was written to outside of updates: that may happen again at any time."""
    flat = state.flat
    if flat.line is not None or state.index in flat.written:
        return ()
    return guards_of(line, state.segment, state.compute) if flat.is_aliased else guards_of(line, state.segment)


# Optimizers


def _add_optimizer(found: Collected, index: int, optimizer: Optimizer, engine: Engine, known: Mapping[int, str]) -> None:
    groups = []
    parts: dict[str, list[Part]] = {}
    for number, group in enumerate(optimizer.param_groups):
        members = []
        for place, param in enumerate(group["params"]):
            held, state = optimizer.state.get(param, {}), state_of(param)
            if state is None:
                name = known.get(id(param), f"group {number}, parameter {place}")
                item = names.state(index, name)
                found.items[item] = encode_item(item, held)
            else:
                name = state.spec.name
                own = OptimizerPart(held, lines_of(optimizer), is_guarded=state.host is engine)
                for key, part in _add_param_state(found, index, state, own, engine.lanes.rank):
                    parts.setdefault(key, []).append(part)
            members.append(name)
        groups.append({"options": {key: value for key, value in group.items() if key != "params"}, "params": members})
    # Kind by kind, so that what one reader needs of one kind lies together.
    found.parts.extend(part for group in parts.values() for part in group)
    found.items[names.groups(index)] = encode_item(names.groups(index), groups)
    found.items[names.kinds(index)] = encode_item(names.kinds(index), [kind_of(optimizer)])


@dataclass(frozen=True)
class OptimizerPart:
    """What an optimizer holds of one parameter, the lines of what rests on disk, and whether its updates wait for copies."""

    held: Mapping[str, Any]
    lines: StateLines
    is_guarded: bool


def _add_param_state(
    found: Collected, index: int, state: ParamState, own: OptimizerPart, rank: int
) -> Iterator[tuple[str, Part]]:
    """Parts of tensors that have the parameter's form; what is one for all of its elements, the writer of the first one keeps."""
    piece = state.flat.spec.segments(state.flat.layout.bounds(rank))[state.index]
    values: dict[str, Any] = {}
    for key, value in own.held.items():
        if not is_per_element(key, value, state):
            values[key] = value
            continue
        values[key] = None
        if piece.numel or _is_first(piece, rank):
            name = names.elements(index, state.spec.name, key)
            if is_form(value):
                fetch = partial(own.lines.read, key, value, state, piece.start, piece.stop)
                yield key, _part_of(name, piece, nothing_of((piece.numel,), value.dtype, HOST), fetch)
            else:
                start = piece.start - state.piece.start if piece.numel else 0
                line = line_of(value, state)[start : start + piece.numel]
                yield key, replace(_part_of(name, piece, line), guards=guards_of(line) if own.is_guarded else ())
    if _is_first(piece, rank) and own.held:
        item = names.state(index, state.spec.name)
        plain = {key: value for key, value in values.items() if value is not None or own.held[key] is None}
        encoded = encode_item(item, plain)
        found.values[item] = {key: encoded.value.get(key, names.ELEMENTS) for key in values}
        found.parts.extend(encoded.parts)


# Gradients of a step that is under way


def _add_grads(found: Collected, engine: Engine) -> None:
    rank = engine.lanes.rank
    engine.reducer.forget_cleared()
    for flat in engine.executor.flats:
        for state, piece in zip(flat.params, _written(flat, rank), strict=True):
            if id(state) in engine.spent_grads:
                continue
            held = state.segment.grad
            if isinstance(held, GradFace) and held.buffer is not None:
                name, start = f"{names.GRADIENT}{state.spec.name}", piece.start - held.buffer.start
                if piece.numel or _is_first(piece, rank):
                    line = held.buffer.held[start : start + piece.numel] if piece.numel else held.buffer.held[:0]
                    fetch = partial(held.buffer.read, piece.start, piece.stop) if held.is_on_disk and piece.numel else None
                    found.parts.append(_part_of(name, piece, line, fetch))
                if _is_first(piece, rank):
                    encoded = encode_item(name, {"factor": held.factor})
                    found.values[name] = encoded.value
                    found.parts.extend(encoded.parts)
            if flat.local is not None and state.index in flat.filled:
                whole = Segment(state.spec, state.spec.offset, state.spec.stop)
                own = names.of_rank(rank, f"{names.GRADIENT}{state.spec.name}")
                found.parts.append(_part_of(own, whole, flat.local[state.spec.offset : state.spec.stop]))


# What every rank has


def _add_replicated(found: Collected, model: nn.Module) -> None:
    """Buffers that are to be kept, parameters that are not sharded, and what modules keep by themselves."""
    tensors: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in plain_tensors(model):
        tensors.setdefault(id(tensor), (tensor, []))[1].append(name)
    for tensor, aliases in tensors.values():
        name = f"{names.MODEL}{aliases[0]}"
        found.items[name] = Item(None, [_whole_part(name, tensor, tuple(aliases), f"'{aliases[0]}'")])
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            item = f"{names.MODULE}{name}"
            found.items[item] = encode_item(item, module.get_extra_state(), f"the extra state of module '{name}'")


def plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong into a state dict, and parameters that are not sharded, under all of their names."""
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        for key, param in module._parameters.items():
            if param is not None and state_of(param) is None:
                yield f"{prefix}{key}", param
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{prefix}{key}", buffer


def _whole_part(name: str, tensor: torch.Tensor, aliases: tuple[str, ...], what: str) -> Part:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UsageTypeError(
            f"{what} is a tensor without plain values ({tensor.layout}, {tensor.device}), which cannot be kept."
        )
    shape = tuple(tensor.shape)
    return Part(name, aliases, shape, contiguous_stride(shape), 0, tensor.numel(), tensor.contiguous().view(-1))


def encode_item(name: str, value: Any, what: str = "") -> Item:
    """A value, with its tensors as parts."""
    parts: list[Part] = []

    def keep(tensor: torch.Tensor) -> str:
        parts.append(_whole_part(f"values/{name}/{len(parts)}", tensor, (), what or name))
        return parts[-1].name

    return Item(tree.encode(value, keep, what or name), parts)


def random_state(device: torch.device) -> dict[str, Any]:
    """Where all generators of this process are that users draw from."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def engine_state(engine: Engine) -> dict[str, Any]:
    """What an engine counts from step to step."""
    return {
        "num_updates": engine.num_updates,
        "num_steps": engine.meter.num_steps,
        "num_nonfinite_steps": engine.num_nonfinite_steps,
        "num_skipped_in_a_row": engine.num_skipped_in_a_row,
        "weight": engine.weight,
    }


def check_at_rest(engine: Engine, what: str) -> None:
    """Refuse where the state is in motion.

    Raises:
        UsageError: A call of the model, a backward pass, or a `gathered` block is under way.
    """
    where = "`with shardwise.gathered(...)`" if engine.opened else "a call of the model" if engine.forward.is_open else ""
    where = where or ("a backward pass" if engine.is_computing else "")
    if where:
        raise UsageError(f"shardwise.{what} cannot run inside {where}. Leave it first.")
