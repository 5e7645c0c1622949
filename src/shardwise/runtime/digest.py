"""The step's digest: one small exchange from which every rank draws the same norms and the same verdict on inf and nan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from types import MappingProxyType

import torch

from shardwise.core.layout import ALIGNMENT, align
from shardwise.runtime import exact
from shardwise.runtime.executor import Executor
from shardwise.runtime.flat import FlatState, ParamState
from shardwise.runtime.grads import GradFace
from shardwise.wire.comm import Comm

_NUM_COUNTS = 3
"""Counts behind the windows of a sum: non-finite values, NaN, and blocks that overflow."""


Piece = tuple[int, int, int]
"""A parameter of which a rank owns a part: index, first element, one past the last."""


@dataclass(frozen=True)
class Summary:
    """What all ranks know of one reduced gradient."""

    power_sum: float
    num_nonfinite: int
    num_nan: int

    def norm(self, power: float) -> float:
        """The norm that belongs to the sum of powers."""
        if self.num_nan:
            return math.nan
        if self.num_nonfinite or math.isinf(self.power_sum):
            return math.inf
        return math.sqrt(self.power_sum) if power == 2.0 else self.power_sum ** (1.0 / power)


_NONE = Summary(0.0, 0, 0)


@dataclass
class Summaries:
    """Summaries of all reduced gradients, by the identity of the parameter's state.

    Norms are worked out when the first of them is asked for: every step needs the verdict, but not every loop clips or logs.
    """

    flats: Sequence[FlatState]
    pieces: Sequence[Sequence[tuple[FlatState, Sequence[Piece]]]]
    integers: torch.Tensor
    """Rank by rank, buffer by buffer, a row for each piece."""

    def of(self, state: ParamState) -> Summary:
        """What all ranks know of a parameter's gradient."""
        return self._by_state.get(id(state), _NONE)

    @property
    def nonfinite(self) -> frozenset[int]:
        """Parameters with inf or nan, by the identity of their states."""
        widths = {_width(flat) for flat in self.flats}
        if len(widths) == 1 and not bool(self.integers.view(-1, *widths)[:, -_NUM_COUNTS].any()):
            return frozenset()
        return frozenset(key for key, summary in self._by_state.items() if summary.num_nonfinite)

    @cached_property
    def _by_state(self) -> dict[int, Summary]:
        rows: dict[int, list[Sequence[int]]] = {}
        integers, at = self.integers.tolist(), 0
        for flat, held in chain.from_iterable(self.pieces):
            width = _width(flat)
            for index, _, _ in held:
                rows.setdefault(id(flat.params[index]), []).append(integers[at : at + width])
                at += width
        return {
            id(state): _summary(rows.get(id(state), []), flat.precision.reduce) for flat in self.flats for state in flat.params
        }


def _summary(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> Summary:
    """What ranks found of one parameter: the windows of a sum and counts, from each that has a part of it."""
    nonfinite = nan = overflow = 0
    for row in rows:
        nonfinite, nan, overflow = nonfinite + row[-3], nan + row[-2], overflow + row[-1]
    windows = [row[:-_NUM_COUNTS] for row in rows]
    return Summary(math.inf if overflow else exact.from_windows(windows, dtype), nonfinite, nan)


@dataclass
class Digest:
    """Summaries by power, valid until gradients change; and the largest absolute values, by the identity of the parameter's state."""

    by_power: dict[float, Summaries] = field(default_factory=dict)
    largest: dict[int, float] | None = None
    is_stale: bool = False

    def norm(self, state: ParamState, power: float, executor: Executor) -> float:
        """The norm of one reduced gradient over all ranks. A collective, the first time that a power is asked for."""
        if math.isinf(power):
            if self.largest is None:
                self.largest = largest(executor)
            return self.largest.get(id(state), 0.0)
        if power not in self.by_power:
            self.by_power[power] = summarize(executor, power)
        return self.by_power[power].of(state).norm(power)


def live_flats(executor: Executor) -> list[FlatState]:
    """Buffers with reduced gradients, in the order of the units: the same on all ranks."""
    return [flat for flat in executor.flats if any(_is_reduced(state.segment.grad) for state in flat.params)]


def _is_reduced(held: torch.Tensor | None) -> bool:
    return isinstance(held, GradFace) and held.buffer is not None


def _reduced(state: ParamState) -> torch.Tensor | None:
    held = state.segment.grad
    return held.part if isinstance(held, GradFace) else None


def summarize(executor: Executor, power: float, squares: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Summaries:
    """Summaries of all reduced gradients. A collective.

    Args:
        squares: Sums of squares of the blocks of this rank's parts, by the identity of the buffer's state, where they are known.
    """
    comm = executor.lanes.gather
    flats = live_flats(executor)
    pieces = [[(flat, _pieces_on(flat, rank)) for flat in flats] for rank in range(comm.size)]
    sizes = [sum(len(held) * _width(flat) for flat, held in row) for row in pieces]
    cuts = [0, *accumulate(sizes)]
    parts = [_local_part(flat, comm.rank, held, power, squares.get(id(flat))) for flat, held in pieces[comm.rank]]
    buffer = torch.zeros(cuts[-1], dtype=torch.int64)
    if parts:
        buffer[cuts[comm.rank] : cuts[comm.rank + 1]] = torch.cat([rows.flatten().cpu() for rows in _rows_of(parts)])
    if comm.size > 1 and cuts[-1]:
        buffer = _gather_integers(buffer, cuts, comm, executor, flats)
    return Summaries(flats, pieces, buffer)


def _gather_integers(
    buffer: torch.Tensor, cuts: Sequence[int], comm: Comm, executor: Executor, flats: Sequence[FlatState]
) -> torch.Tensor:
    on_device = buffer.to(flats[0].device)
    executor.gather_log.add("digest")
    handle = comm.all_gather(on_device, cuts, label="the digest of gradients")
    executor.wait(handle, "digest", "")
    return on_device.cpu()


def _pieces_on(flat: FlatState, rank: int) -> list[Piece]:
    pieces = flat.spec.segments(flat.layout.bounds(rank))
    return [(index, piece.start, piece.stop) for index, piece in enumerate(pieces) if piece.start < piece.stop]


def _width(flat: FlatState) -> int:
    """Integers for each parameter of a buffer."""
    return exact.num_windows(flat.precision.reduce) + _NUM_COUNTS


@dataclass(frozen=True)
class _Part:
    """What one rank has of one buffer: sums of blocks, how many each parameter has of them, and a row of counts for each."""

    sums: torch.Tensor
    lengths: list[int]
    counts: torch.Tensor


def _rows_of(parts: Sequence[_Part]) -> list[torch.Tensor]:
    """A row for each parameter with a part on this rank, buffer by buffer: windows of the sum, then counts."""
    rows: dict[int, torch.Tensor] = {}
    alike: dict[tuple[torch.dtype, torch.device], list[_Part]] = {}
    for part in parts:
        alike.setdefault((part.sums.dtype, part.sums.device), []).append(part)
    for group in alike.values():
        lengths = [length for part in group for length in part.lengths]
        windows = exact.to_windows(torch.cat([part.sums for part in group]), lengths)
        for part, own in zip(group, windows.split([len(part.lengths) for part in group]), strict=True):
            rows[id(part)] = torch.cat([own, part.counts], 1)
    return [rows[id(part)] for part in parts]


def _local_part(flat: FlatState, rank: int, segments: Sequence[Piece], power: float, squares: torch.Tensor | None) -> _Part:
    if not segments:
        sums = torch.zeros(0, dtype=exact.accumulation_dtype(flat.precision.reduce), device=flat.device)
        return _Part(sums, [], torch.zeros((0, _NUM_COUNTS), dtype=torch.int64, device=flat.device))
    low = segments[0][1]
    high = align(segments[-1][2] - low) + low
    lengths = [align(stop - start) // ALIGNMENT for _, start, stop in segments]
    if squares is not None and power == 2.0:
        first = low - flat.layout.bounds(rank)[0]
        sums = squares[first // ALIGNMENT : (first + high - low) // ALIGNMENT]
    else:
        sums = exact.block_sums(_owned_values(flat, low, high), power)
    counts = torch.zeros((len(segments), _NUM_COUNTS), dtype=torch.int64, device=sums.device)
    finite = torch.isfinite(sums)
    if not bool(finite.all()):
        values = _owned_values(flat, low, high)
        bad = values.view(-1, ALIGNMENT)[~finite.to(values.device)].to(sums.device)
        keys = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(lengths)).to(sums.device)
        per_block = torch.stack([(~torch.isfinite(bad)).sum(1), torch.isnan(bad).sum(1)], 1)
        # The third count is of blocks that overflow though their values are finite: the norm is infinite, as torch's would be.
        per_block = torch.cat([per_block, (per_block[:, :1] == 0).to(torch.int64)], 1)
        counts.index_add_(0, keys[~finite], per_block)
        sums = torch.where(finite, sums, 0.0)
    return _Part(sums, lengths, counts)


def _owned_values(flat: FlatState, low: int, high: int) -> torch.Tensor:
    """Reduced gradients from ``low`` to ``high``, zero where a parameter has none."""
    held = [state.segment.grad for state in flat.params]
    buffers = {id(face.buffer): face.buffer for face in held if isinstance(face, GradFace)}
    if len(buffers) == 1 and all(isinstance(face, GradFace) for face in held):
        (buffer,) = buffers.values()
        if buffer is not None:
            return buffer.read(low, high)
    values = torch.zeros(high - low, dtype=flat.precision.reduce, device=flat.grad_device)
    for state, face in zip(flat.params, held, strict=True):
        if isinstance(face, GradFace) and face.buffer is not None:
            start, stop = max(low, state.spec.offset), min(high, state.spec.stop)
            if start < stop:
                values[start - low : stop - low] = face.buffer.read(start, stop)
    return values


def largest(executor: Executor) -> dict[int, float]:
    """The largest absolute value of each reduced gradient. A collective."""
    comm = executor.lanes.gather
    states = [state for flat in live_flats(executor) for state in flat.params]
    mine = torch.zeros(len(states), dtype=torch.float64)
    for position, state in enumerate(states):
        reduced = _reduced(state)
        if reduced is not None and reduced.numel():
            mine[position] = reduced.abs().max().to(torch.float64)
    executor.gather_log.add("largest")
    handle = comm.gather_small(mine, label="the largest gradients")
    executor.wait(handle, "digest", "")
    rows = mine[None] if handle.result is None else handle.result.cpu()
    return {id(state): float(value) for state, value in zip(states, rows.max(dim=0).values, strict=True)}
