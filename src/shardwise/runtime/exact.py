"""Sums that do not depend on how a buffer is cut: the same bits at every stage, layout and number of ranks that share it.

Floating-point sums depend on their order, so a norm over shards differs from a norm over the whole. Here, blocks of one
alignment unit (which no cut divides) are summed in one order; the block sums are then added as integers, which is exact in any
order: each is split into its mantissa and a window of its exponent, and mantissas are added window by window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from shardwise.core.layout import ALIGNMENT

_WINDOW_BITS = 4
_MOST_BLOCKS = 2**20
CHUNK = 2**18
"""Elements that are worked on at a time, so that what is read twice is read from the cache."""


@dataclass(frozen=True)
class _Format:
    """How mantissas are split. A piece, shifted within its window, leaves room for 2 ** 22 blocks in 63 bits."""

    mantissa_bits: int
    lowest_exponent: int
    highest_exponent: int
    piece_bits: int

    @property
    def num_pieces(self) -> int:
        return -(-self.mantissa_bits // self.piece_bits)

    @property
    def num_windows(self) -> int:
        highest = self.highest_exponent - self.lowest_exponent + (self.num_pieces - 1) * self.piece_bits
        return (highest >> _WINDOW_BITS) + 1


_FORMATS = {
    torch.float32: _Format(mantissa_bits=24, lowest_exponent=-149, highest_exponent=128, piece_bits=24),
    torch.float64: _Format(mantissa_bits=53, lowest_exponent=-1074, highest_exponent=1024, piece_bits=18),
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype powers of a tensor's elements are taken."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


@cache
def num_windows(dtype: torch.dtype) -> int:
    """Integers that hold one exact sum of elements of a dtype."""
    return _FORMATS[accumulation_dtype(dtype)].num_windows


def block_sums(values: torch.Tensor, power: float) -> torch.Tensor:
    """Sum of ``|x| ** power`` over each aligned block. A block's sum does not depend on the blocks around it."""
    dtype = accumulation_dtype(values.dtype)
    sums = torch.empty(values.numel() // ALIGNMENT, dtype=dtype, device=values.device)
    scratch = torch.empty(min(values.numel(), CHUNK), dtype=dtype, device=values.device)
    for low in range(0, values.numel(), CHUNK):
        part = values[low : low + CHUNK]
        part = part.abs() if values.is_complex() else part.to(dtype)
        terms = scratch[: part.numel()]
        if power == 2.0:
            torch.mul(part, part, out=terms)
        else:
            torch.abs(part, out=terms)
            if power != 1.0:
                terms.pow_(power)
        sum_blocks(terms, sums[low // ALIGNMENT : (low + part.numel()) // ALIGNMENT])
    return sums


def sum_blocks(terms: torch.Tensor, out: torch.Tensor) -> None:
    """Add up each aligned block, row by row: torch sums a row in an order that depends on its length alone."""
    torch.sum(terms.view(-1, ALIGNMENT), 1, out=out)


def to_windows(sums: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Add finite, non-negative block sums exactly, run by run of these lengths: an int64 matrix of (run, window)."""
    form = _FORMATS[sums.dtype]
    # Runs are cut so that no window overflows.
    cut = [(run, min(_MOST_BLOCKS, length - at)) for run, length in enumerate(lengths) for at in range(0, length, _MOST_BLOCKS)]
    runs = torch.tensor([run for run, _ in cut], dtype=torch.int64, device=sums.device)
    pieces = torch.tensor([length for _, length in cut], dtype=torch.int64, device=sums.device)
    rows = torch.zeros((len(lengths), form.num_windows), dtype=torch.int64, device=sums.device)
    if cut:
        add = _add_floats if sums.dtype == torch.float32 else _add_integers
        add(sums, pieces, runs, rows)
    return rows


def _add_floats(sums: torch.Tensor, pieces: torch.Tensor, runs: torch.Tensor, rows: torch.Tensor) -> None:
    """Half a window at a time, in float64: 24 bits, 8 of exponent and 20 of count fit into its 53, so every order is exact."""
    form = _FORMATS[torch.float32]
    half_bits = _WINDOW_BITS - 1
    halves = sums.view(torch.int32).bitwise_right_shift(23).add_(23).bitwise_right_shift_(half_bits)
    for half in torch.bincount(halves, minlength=1).nonzero().flatten().tolist():
        chosen = torch.where(torch.eq(halves, half), sums, 0.0).to(torch.float64)
        totals = torch.segment_reduce(chosen, "sum", lengths=pieces, unsafe=True)
        unit = 2.0 ** (form.mantissa_bits - form.lowest_exponent - (half << half_bits))
        digits = torch.mul(totals, unit).to(torch.int64).bitwise_left_shift_((half & 1) << half_bits)
        rows[:, half >> 1].index_add_(0, runs, digits)


def _add_integers(sums: torch.Tensor, pieces: torch.Tensor, runs: torch.Tensor, rows: torch.Tensor) -> None:
    """Mantissas in pieces, as integers."""
    form = _FORMATS[sums.dtype]
    mantissa, exponent = torch.frexp(sums)
    digits = (mantissa * 2.0**form.mantissa_bits).to(torch.int64)
    place = exponent.to(torch.int64) - form.lowest_exponent
    keys = torch.repeat_interleave(runs, pieces)
    for piece in range(form.num_pieces):
        part = (digits >> (piece * form.piece_bits)) & ((1 << form.piece_bits) - 1)
        at = place + piece * form.piece_bits
        index = keys * form.num_windows + (at >> _WINDOW_BITS)
        rows.view(-1).index_add_(0, index, part << (at & ((1 << _WINDOW_BITS) - 1)))


def from_windows(rows: Iterable[Iterable[int]], dtype: torch.dtype) -> float:
    """The sum over several rows of windows, correctly rounded."""
    form = _FORMATS[accumulation_dtype(dtype)]
    total = 0
    for row in rows:
        for window, count in enumerate(row):
            if count:
                total += count << (window << _WINDOW_BITS)
    try:
        return math.ldexp(float(total), form.lowest_exponent - form.mantissa_bits)
    except OverflowError:
        # A sum in float64 may pass its range only after scaling; scale first where the integer is too long.
        shift = max(0, total.bit_length() - 1000)
        try:
            return math.ldexp(float(total >> shift), form.lowest_exponent - form.mantissa_bits + shift)
        except OverflowError:
            return math.inf
