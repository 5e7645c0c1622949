"""Exact sums: the correctly rounded sum of the block sums, whatever the cuts, against fractions."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layout import ALIGNMENT
from shardwise.runtime import exact

DTYPES = (torch.float32, torch.float64)


@st.composite
def buffers(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    """A few blocks, of which most elements are of one scale: from the smallest subnormal to where squares overflow."""
    width = 32 if dtype == torch.float32 else 64
    numbers = st.floats(-(2.0**60), 2.0**60, width=width) | st.floats(width=width, allow_nan=False, allow_infinity=False)
    num_blocks = draw(st.integers(1, 7))
    scale = 2.0 ** draw(st.integers(-100, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(num_blocks * ALIGNMENT, dtype=dtype, generator=generator) * scale
    for place, number in draw(st.lists(st.tuples(st.integers(0, values.numel() - 1), numbers), max_size=6)):
        values[place] = number
    return values


def rows_of(values: torch.Tensor, power: float) -> list[list[int]]:
    sums = exact.block_sums(values, power)
    return exact.to_windows(sums, [sums.numel()]).tolist()


def correctly_rounded(sums: list[float]) -> float:
    total = sum(map(Fraction, sums))
    try:
        return float(total)
    except OverflowError:
        return math.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data(), power=st.sampled_from([1.0, 2.0, 3.0]))
def test_sum_is_exact_for_any_cuts(dtype: torch.dtype, data: st.DataObject, power: float) -> None:
    values = data.draw(buffers(dtype))
    sums = exact.block_sums(values, power)
    if not bool(torch.isfinite(sums).all()):
        return
    expected = correctly_rounded(sums.tolist())
    assert exact.from_windows(rows_of(values, power), dtype) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, values.numel() // ALIGNMENT), max_size=4)))
    edges = [0, *(cut * ALIGNMENT for cut in cuts), values.numel()]
    rows = [row for low, high in itertools.pairwise(edges) for row in rows_of(values[low:high], power)]
    assert exact.from_windows(data.draw(st.permutations(rows)), dtype) == expected


@given(st.data(), st.sampled_from(DTYPES), st.integers(0, 7))
def test_a_block_sum_does_not_depend_on_its_neighbours(data: st.DataObject, dtype: torch.dtype, shift: int) -> None:
    num_blocks = data.draw(st.sampled_from([1, 2, 3, 5, 8, 100, 2 * exact.CHUNK // ALIGNMENT + 3]))
    values = torch.randn(num_blocks * ALIGNMENT, dtype=dtype, generator=torch.Generator().manual_seed(num_blocks))
    sums = exact.block_sums(values, 2.0)
    for at in {0, num_blocks // 2, num_blocks - 1}:
        # Other memory, at another alignment.
        block = torch.empty(ALIGNMENT + shift, dtype=dtype)[shift:].copy_(values[at * ALIGNMENT : (at + 1) * ALIGNMENT])
        assert torch.equal(exact.block_sums(block, 2.0)[0], sums[at])
        assert sums[at].item() == pytest.approx(math.fsum(value * value for value in block.tolist()), rel=1e-5)


def test_runs_keep_parameters_apart() -> None:
    values = torch.arange(4 * ALIGNMENT, dtype=torch.float32)
    sums = exact.block_sums(values, 1.0)
    windows = exact.to_windows(sums, [1, 0, 3])
    found = [exact.from_windows([row], torch.float32) for row in windows.tolist()]
    assert found == [sums[0].item(), 0.0, (sums[1] + sums[2] + sums[3]).item()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    values = torch.full((ALIGNMENT,), 300.0, dtype=dtype)  # the square overflows in float16
    assert exact.block_sums(values, 2.0).tolist() == [ALIGNMENT * values[0].item() ** 2]
    assert exact.num_windows(dtype) == exact.num_windows(torch.float32)


def test_nothing_sums_to_zero() -> None:
    assert exact.from_windows([], torch.float32) == 0.0
    assert exact.from_windows(rows_of(torch.zeros(ALIGNMENT), 2.0), torch.float32) == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    for value in (smallest, info.tiny, info.max, 1.0, 1 - info.eps / 2):
        sums = torch.tensor([value], dtype=dtype)
        windows = exact.to_windows(sums, [1])
        assert exact.from_windows(windows.tolist(), dtype) == value


@pytest.mark.parametrize(("dtype", "exponent"), [(torch.float32, 9), (torch.float64, 1), (torch.float64, 12)])
def test_many_blocks_of_one_size_do_not_overflow(dtype: torch.dtype, exponent: int) -> None:
    # What a parameter of 2 ** 28 elements gives: the same mantissa, all ones, 2 ** 22 times at the upper end of a window.
    num_blocks = 2**22
    value = torch.tensor((2.0 - torch.finfo(dtype).eps) * 2.0**exponent, dtype=dtype)
    windows = exact.to_windows(value.repeat(num_blocks), [num_blocks])
    found = exact.from_windows(windows.tolist(), dtype)
    assert found == float(Fraction(value.item()) * num_blocks), f"{found} is the sum of {num_blocks} times {value.item()}"
