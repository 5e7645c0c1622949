"""An optimizer's state on disk: one line for each kind of it and flat buffer, laid out like the owned values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardwise.core.errors import OffloadError
from shardwise.core.ledger import Kind, Tier
from shardwise.runtime.flat import HOST, FlatState, ParamState, nothing_of, piece_shape
from shardwise.runtime.offload import DiskTier, Line, Load

_Key = tuple[str, torch.dtype]


def is_per_element(key: str, value: Any, state: ParamState) -> bool:
    """Whether a value that an optimizer holds for a segment has one number for each of its elements."""
    return isinstance(value, torch.Tensor) and value.shape == state.segment.shape and key != "step"


def is_form(value: torch.Tensor) -> bool:
    """Whether a tensor has a form alone, and its values are elsewhere."""
    return value.numel() > 0 and value.data_ptr() == nothing_of(tuple(value.shape), value.dtype, value.device).data_ptr()


def line_of(value: torch.Tensor, state: ParamState) -> torch.Tensor:
    """A tensor of a segment's form as a line in the order of the parameter's strides; a copy only where it lies otherwise."""
    value = value.detach()
    if not state.piece.is_whole:
        return value.contiguous()
    spec = state.spec
    if value.stride() != spec.stride:
        value = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((spec.numel,), (1,))


class StateLines:
    """The lines of one optimizer. Between updates its state holds tensors that have a form alone."""

    def __init__(self) -> None:
        self._lines: WeakKeyDictionary[FlatState, dict[_Key, Line]] = WeakKeyDictionary()

    @property
    def is_empty(self) -> bool:
        """Whether nothing rests on disk."""
        return not self._lines

    def of(self, flat: FlatState) -> list[Line]:
        """The lines of a flat buffer, in one order."""
        return list(self._lines.get(flat, {}).values())

    def bring(self, held: Mapping[str, Any], state: ParamState, load: Load) -> None:
        """Let the state of a segment have its values, as views of a load that has all lines of its buffer."""
        for key, value in _elements(held, state):
            if is_form(value):
                value.data = state.piece.view(load.view(self._line(key, value, state)), shift=state.flat.bounds[0])

    def put(self, held: Mapping[str, Any], state: ParamState, load: Load | None = None) -> None:
        """Let the state of a segment rest on disk: what does not lie in a load is written, and waited for.

        Raises:
            OffloadError: Some could not be written, which stays in memory.
        """
        failed: OffloadError | None = None
        for key, value in _elements(held, state):
            try:
                if not is_form(value):
                    self._put_one(self._line(key, value, state), value, state, load)
                    value.data = nothing_of(piece_shape(state.piece), value.dtype, HOST)
            except OffloadError as error:
                failed = error  # The others must not go on lying in a load.
        if failed is not None:
            raise failed

    def _put_one(self, line: Line, value: torch.Tensor, state: ParamState, load: Load | None) -> None:
        low = state.flat.bounds[0]
        if load is None or line not in load.lines:
            line.set(line_of(value, state), state.piece.start - low)
            return
        view = state.piece.view(load.view(line), shift=low)
        if view.data_ptr() != value.data_ptr() or view.stride() != value.stride():
            view.copy_(value)

    def read(self, key: str, value: torch.Tensor, state: ParamState, start: int, stop: int) -> torch.Tensor:
        """Elements of a tensor that has a form alone, counted in the flat buffer, as a line.

        Raises:
            OffloadError: They cannot be read.
        """
        low = state.flat.bounds[0]
        return self._line(key, value, state).get(start - low, stop - low)

    def whole(self, held: Mapping[str, Any], state: ParamState) -> dict[str, Any]:
        """The state of a segment with all of its values in memory.

        Raises:
            OffloadError: They cannot be read.
        """
        found = dict(held)
        for key, value in _elements(held, state):
            if is_form(value):
                values = self.read(key, value, state, state.piece.start, state.piece.stop)
                found[key] = state.piece.view(values, shift=state.piece.start)
        return found

    def write(self, key: str, value: torch.Tensor, state: ParamState) -> torch.Tensor:
        """Put a tensor of a segment's form on disk, and wait for it. Returns one that has the form alone.

        Raises:
            OffloadError: It cannot be written.
        """
        self._line(key, value, state).set(line_of(value, state), state.piece.start - state.flat.bounds[0])
        return nothing_of(piece_shape(state.piece), value.dtype, HOST).detach()

    def drop(self, flat: FlatState) -> None:
        """Nobody needs the lines of a buffer any more."""
        self._lines.pop(flat, None)

    def _line(self, key: str, value: torch.Tensor, state: ParamState) -> Line:
        lines = self._lines.setdefault(state.flat, {})
        if (key, value.dtype) not in lines:
            label = f"optimizer state '{key}' of {state.flat.spec.name}"
            lines[key, value.dtype] = Line(_disk_of(state), state.flat.master.numel(), value.dtype, label, Kind.OPTIM)
        return lines[key, value.dtype]


def _disk_of(state: ParamState) -> DiskTier:
    if state.host.disk is None:
        raise RuntimeError(f"The optimizer's state of '{state.spec.name}' should rest on disk, but there is no disk tier.")
    return state.host.disk


def _elements(held: Mapping[str, Any], state: ParamState) -> Iterator[tuple[str, torch.Tensor]]:
    """What of a segment's state rests on disk."""
    if state.flat.rest.optim is Tier.DISK and state.piece.numel:
        yield from ((key, value) for key, value in held.items() if is_per_element(key, value, state))
