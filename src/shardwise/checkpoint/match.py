"""Finds, for everything that a rank needs of a training state, where a checkpoint has it. Reads no data, changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint import names, tree
from shardwise.checkpoint.collect import plain_tensors
from shardwise.checkpoint.kinds import can_hold, is_of_kind, kind_of
from shardwise.checkpoint.manifest import Entry, Manifest, contiguous_stride, name_of
from shardwise.checkpoint.reader import Slot
from shardwise.runtime.engine import Engine
from shardwise.runtime.flat import FlatState, ParamState, state_of
from shardwise.runtime.grad_buffer import GradBuffer
from shardwise.runtime.optimizer import adopt
from shardwise.runtime.state_lines import line_of

_MOST_NAMED = 8


@dataclass
class Problems:
    """Names that do not fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def __str__(self) -> str:
        texts = []
        for what, found in (
            ("not in it", self.missing),
            ("not in the model", self.unexpected),
            ("other shapes or kinds", self.misshapen),
        ):
            if found:
                more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
                texts.append(f"{what}: {', '.join(found[:_MOST_NAMED])}{more}")
        return "; ".join(texts)


@dataclass(frozen=True)
class StateMatch:
    """What a checkpoint has of an optimizer for one parameter, under which name; tensors of the parameter's form as entries."""

    param: nn.Parameter
    state: ParamState | None
    saved_name: str
    values: Mapping[str, Any]


@dataclass
class Match:
    """What is to be read, and what is to be done with it.

    Args:
        slots: Lines that are filled from the checkpoint.
        values: Encoded values, by name, of which the tensors are read as well.
        optimizers: By their order.
        grads: Gradients of a step that was under way: made when all was tested.
        after: What follows when all lines are filled.
        problems: What does not fit.
    """

    slots: list[Slot] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[int, list[StateMatch]] = field(default_factory=dict)
    grads: list[tuple[FlatState, dict[int, Entry]]] = field(default_factory=list)
    local_grads: list[tuple[FlatState, dict[int, Entry]]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    foreign_ranks: list[str] = field(default_factory=list)


class Matcher:
    """Matches one checkpoint with one rank's state."""

    def __init__(self, manifest: Manifest, engine: Engine) -> None:
        self._manifest = manifest
        self._engine = engine
        self._rank = engine.lanes.rank
        self.is_same_world = manifest.num_ranks == engine.lanes.size
        self.found = Match()

    # Weights and buffers

    def match_model(self) -> None:
        """Parameters, buffers, and what modules keep by themselves."""
        index = self._index(names.MODEL)
        used: set[str] = set()
        for flat in self._engine.executor.flats:
            for state in flat.params:
                key = self._find(state.spec.names, index, used)
                entry = self._match(state.spec.name, state.spec.shape, flat.master.dtype, key)
                if entry is not None:
                    self._add_slot(entry, state)
        for aliases, tensor in _by_identity(self._engine.model):
            key = self._find(aliases, index, used)
            own = names.of_rank(self._rank, key or "")
            entry = self._match(
                aliases[0],
                tuple(tensor.shape),
                tensor.dtype,
                own if self.is_same_world and own in self._manifest.tensors else key,
            )
            if entry is not None:
                self._add_plain(entry, tensor)
        self.found.problems.unexpected.extend(sorted(key.removeprefix(names.MODEL) for key in set(index.values()) - used))
        for name, module in self._engine.model.named_modules():
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                self.want(f"{names.MODULE}{name}", f"extra state of module '{name}'")

    def _index(self, prefix: str) -> dict[str, str]:
        """Where every name of a tensor leads."""
        found = {}
        for key, entry in self._manifest.tensors.items():
            if key.startswith(prefix):
                found.update(dict.fromkeys(entry.names, key))
                found[key.removeprefix(prefix)] = key
        return found

    def _find(self, aliases: Sequence[str], index: Mapping[str, str], used: set[str]) -> str | None:
        """Where a tensor is. Others that a tied one is kept under as well hold the same."""
        found = [index[name] for name in aliases if name in index]
        used.update(found)
        return found[0] if found else None

    def _match(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, key: str | None) -> Entry | None:
        """What is to be read into a tensor of the model, if it is there and fits."""
        if key is None:
            self.found.problems.missing.append(name)
            return None
        entry = self._manifest.tensors[key]
        if entry.shape != shape:
            self.found.problems.misshapen.append(f"{name} (here {list(shape)}, there {list(entry.shape)})")
            return None
        if not can_hold(dtype, entry.dtype):
            self.found.problems.misshapen.append(f"{name} (here {name_of(dtype)}, there {name_of(entry.dtype)})")
            return None
        return entry

    def _add_slot(self, entry: Entry, state: ParamState) -> None:
        piece, offset, flat = state.piece, state.spec.offset, state.flat
        if piece.numel:
            line, done = partial(_owned_line, flat, state), None
            if flat.line is not None:
                done = partial(flat.write_part, start=piece.start)
            self.found.slots.append(Slot(entry, state.spec.stride, piece.start - offset, piece.stop - offset, line, done))

    def _add_plain(self, entry: Entry, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        if tensor.is_contiguous():
            self.found.slots.append(Slot(entry, contiguous_stride(shape), 0, tensor.numel(), lambda: tensor.detach().view(-1)))
            return
        room = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        self.found.slots.append(Slot(entry, contiguous_stride(shape), 0, tensor.numel(), lambda: room.view(-1)))
        self.found.after.append(lambda: _copy_into(tensor, room))

    # Values

    def pick(self, name: str) -> Any:
        """A value as this rank is to have it: its own, or what all had alike; None, if there is neither."""
        values = self._manifest.values
        own = names.of_rank(self._rank % self._manifest.num_ranks if self._manifest.num_ranks else 0, name)
        return values.get(own, values.get(name))

    def is_by_rank(self, name: str) -> bool:
        """Whether ranks had values of their own."""
        return any(key.startswith("rank.") and key.partition("/")[2] == name for key in self._manifest.values)

    def want(self, name: str, what: str) -> bool:
        """Ask for a value; says whether it is there."""
        found = self.pick(name)
        if found is None:
            self.found.problems.missing.append(what)
            return False
        self.found.values[name] = found
        if not self.is_same_world and self.is_by_rank(name):
            self.found.foreign_ranks.append(what)
        return True

    # Optimizers

    def match_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Groups and states of all optimizers."""
        for index, optimizer in enumerate(optimizers):
            adopt(optimizer)
            label = f"optimizer {index}" if len(optimizers) > 1 else "the optimizer's state"
            kinds = self._manifest.values.get(names.kinds(index))
            if kinds is not None and not is_of_kind(optimizer, kinds):
                there = " or ".join(map(str, kinds))
                self.found.problems.misshapen.append(f"{label} (here of {kind_of(optimizer)}, there of {there})")
                continue
            if not self.want(names.groups(index), label):
                continue
            groups = self._manifest.values[names.groups(index)]
            self._match_optimizer(index, optimizer, groups, label)
        if optimizers and names.groups(len(optimizers)) in self._manifest.values:
            self.found.problems.unexpected.append(f"a further optimizer (number {len(optimizers)})")

    def _match_optimizer(self, index: int, optimizer: Optimizer, groups: Any, label: str) -> None:
        known = {id(param): name for name, param in self._engine.model.named_parameters()}
        found = self.found.optimizers.setdefault(index, [])
        saved = [list(group["params"]) for group in groups] if isinstance(groups, list) else []
        aliases = {name: set(entry.names) | {name} for name, entry in self._by_param()}
        for number, group in enumerate(optimizer.param_groups):
            theirs = saved[number] if number < len(saved) else []
            for place, param in enumerate(group["params"]):
                state = state_of(param)
                own = state.spec.names if state is not None else (known.get(id(param), f"group {number}, parameter {place}"),)
                there = theirs[place] if place < len(theirs) else None
                if there is None or not (there in own or aliases.get(there, {there}) & set(own)):
                    self.found.problems.missing.append(f"{label} for '{own[0]}' (group {number}, place {place})")
                    continue
                self._match_state(index, found, param, state, there)
            extra = theirs[len(group["params"]) :]
            self.found.problems.unexpected.extend(f"{label} for '{name}'" for name in extra)
        for surplus in saved[len(optimizer.param_groups) :]:
            self.found.problems.unexpected.extend(f"{label} for '{name}'" for name in surplus)

    def _by_param(self) -> Iterator[tuple[str, Entry]]:
        for key, entry in self._manifest.tensors.items():
            if key.startswith(names.MODEL):
                yield key.removeprefix(names.MODEL), entry

    def _match_state(
        self, index: int, found: list[StateMatch], param: nn.Parameter, state: ParamState | None, saved_name: str
    ) -> None:
        item = names.state(index, saved_name)
        picked = self.pick(item)
        values = dict(picked) if isinstance(picked, dict) else {}
        shape = tuple(param.shape) if state is None else state.spec.shape
        for key, value in list(values.items()):
            name = names.elements(index, saved_name, key) if names.is_elements(value) else tree.name_of_tensor(value)
            entry = self._manifest.tensors.get(name or "")
            if names.is_elements(value) and (entry is None or entry.shape != shape):
                self.found.problems.misshapen.append(f"the optimizer's '{key}' of '{saved_name}'")
                return  # A part of a state is none: what the optimizer holds stays.
            is_per_element = names.is_elements(value) or (key != "step" and entry is not None and entry.shape == shape)
            if state is not None and entry is not None and is_per_element:
                values[key] = entry  # Also what was saved of a parameter that was not sharded then.
            elif names.is_elements(value):
                values[key] = tree.tensor_named(name or "")
        plain = {key: value for key, value in values.items() if not isinstance(value, Entry)}
        if plain:
            self.found.values[item] = plain
        found.append(StateMatch(param, state, saved_name, values))

    # Gradients

    def match_grads(self) -> bool:
        """Gradients of a step that was under way. Says whether they fit this number of ranks."""
        index = self._index(names.GRADIENT)
        own = self._index(names.of_rank(self._rank, names.GRADIENT))
        for flat in self._engine.executor.flats:
            reduced = self._of_flat(flat, index)
            for at in reduced:
                item = f"{names.GRADIENT}{index_name(flat, at, index)}"
                if item in self._manifest.values:
                    self.found.values[item] = self._manifest.values[item]
            if reduced:
                self.found.grads.append((flat, reduced))
            local = self._of_flat(flat, own)
            if local:
                self.found.local_grads.append((flat, local))
        is_local = any("/" + names.GRADIENT in f"/{key}" and key.startswith("rank.") for key in self._manifest.tensors)
        return self.is_same_world or not is_local

    def _of_flat(self, flat: FlatState, index: Mapping[str, str]) -> dict[int, Entry]:
        found = {}
        for state in flat.params:
            key = next((index[name] for name in state.spec.names if name in index), None)
            entry = None if key is None else self._manifest.tensors[key]
            if entry is not None and entry.shape == state.spec.shape and can_hold(flat.precision.reduce, entry.dtype):
                found[state.index] = entry
        return found


def index_name(flat: FlatState, at: int, index: Mapping[str, str]) -> str:
    """The name under which the gradient of a parameter was saved."""
    key = next(index[name] for name in flat.params[at].spec.names if name in index)
    return key.removeprefix(names.GRADIENT)


def _by_identity(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in plain_tensors(model):
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _copy_into(target: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)


def _owned_line(flat: FlatState, state: ParamState) -> torch.Tensor:
    low = flat.bounds[0]
    if flat.line is not None:
        return torch.empty(state.piece.numel, dtype=flat.line.dtype)
    return flat.master[state.piece.start - low : state.piece.stop - low]


def state_tensor(held: Any, entry: Entry, state: ParamState, saved_dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor of a segment's form for an optimizer: the one that is there, if it fits, or a new one.

    It has the dtype that was saved; if that was the parameter's own, the parameter's own of today.
    """
    dtype = state.segment.dtype if entry.dtype == saved_dtype else entry.dtype
    shape, stride = (state.spec.shape, state.spec.stride) if state.piece.is_whole else ((state.piece.numel,), (1,))
    if (
        isinstance(held, torch.Tensor)
        and tuple(held.shape) == shape
        and held.stride() == stride
        and (held.dtype, held.device) == (dtype, state.segment.device)
    ):
        return held
    return torch.empty_strided(shape, stride, dtype=dtype, device=state.segment.device)


def state_slot(tensor: torch.Tensor, entry: Entry, state: ParamState) -> Slot:
    """What fills such a tensor."""
    offset = state.spec.offset
    return Slot(
        entry, state.spec.stride, state.piece.start - offset, state.piece.stop - offset, partial(line_of, tensor, state)
    )


def grad_slots(buffer: GradBuffer, flat: FlatState, entries: Mapping[int, Entry]) -> Iterator[Slot]:
    """What fills this rank's part of reduced gradients."""
    for index, entry in entries.items():
        piece, spec = flat.params[index].piece, flat.params[index].spec
        if piece.numel:
            line = buffer.values[piece.start - buffer.start : piece.stop - buffer.start]
            yield Slot(entry, spec.stride, piece.start - spec.offset, piece.stop - spec.offset, partial(_same, line))


def local_grad_slots(local: torch.Tensor, flat: FlatState, entries: Mapping[int, Entry]) -> Iterator[Slot]:
    """What fills the full local gradients."""
    for index, entry in entries.items():
        spec = flat.params[index].spec
        yield Slot(entry, spec.stride, 0, spec.numel, partial(_same, local[spec.offset : spec.stop]))


def _same(line: torch.Tensor) -> torch.Tensor:
    return line
