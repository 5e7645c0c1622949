"""Layouts: every element has one owner, cuts are aligned, and what moves between two layouts is everything, once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import PlanError
from shardwise.core.layout import ALIGNMENT, Layout, align

numels = st.integers(0, 5000)
ranks = st.integers(1, 9)
weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda ws: sum(ws) > 0)
cuts = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(lambda cs: (0, *(ALIGNMENT * c for c in sorted(cs))))


@given(st.integers(0, 10**9))
def test_align_rounds_up_to_a_multiple(numel: int) -> None:
    assert align(numel) % ALIGNMENT == 0
    assert numel <= align(numel) < numel + ALIGNMENT


@given(numels, ranks)
def test_even_shards_have_one_size_and_little_padding(numel: int, num_ranks: int) -> None:
    layout = Layout.even(numel, num_ranks=num_ranks)
    assert layout.num_ranks == num_ranks and layout.is_even and len(set(layout.sizes)) == 1
    assert numel <= layout.numel < numel + num_ranks * ALIGNMENT
    assert [layout.bounds(rank) for rank in range(num_ranks)] == list(zip(layout.cuts, layout.cuts[1:], strict=False))


@given(numels, weights)
def test_weighted_shards_follow_the_weights_to_a_block(numel: int, weights: list[float]) -> None:
    layout = Layout.weighted(numel, weights=weights)
    assert layout.num_ranks == len(weights) and layout.numel == align(numel)
    for size, weight in zip(layout.sizes, weights, strict=True):
        assert abs(size - layout.numel * weight / sum(weights)) <= ALIGNMENT + 1e-6 * layout.numel


def test_rank_without_weight_owns_nothing() -> None:
    assert Layout.weighted(640, weights=[1, 0, 3]).sizes == (128, 0, 512)  # 160 is nearest to 128 by round-half-even
    assert Layout.weighted(640, weights=[0, 1, 0]).sizes == (0, 640, 0)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), ranks)
def test_whole_shards_end_where_parameters_end(numels: list[int], num_ranks: int) -> None:
    boundaries = [0]
    for numel in numels:
        boundaries.append(boundaries[-1] + align(numel))
    layout = Layout.whole(boundaries, num_ranks=num_ranks)
    assert set(layout.cuts) <= set(boundaries)
    assert layout.numel == boundaries[-1] and layout.num_ranks == num_ranks
    # No parameter that lies nearer to a fair cut was passed over.
    for rank, cut in enumerate(layout.cuts[1:-1], start=1):
        ideal = layout.numel * rank / num_ranks
        assert abs(cut - ideal) == min(abs(boundary - ideal) for boundary in boundaries)


@given(cuts, cuts)
def test_overlaps_move_every_common_element_once(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    one, other = Layout(first), Layout(second)
    pieces = list(one.overlaps(other))
    owners = {}
    for piece in pieces:
        assert piece.start < piece.stop
        assert one.cuts[piece.source] <= piece.start and piece.stop <= one.cuts[piece.source + 1]
        assert other.cuts[piece.target] <= piece.start and piece.stop <= other.cuts[piece.target + 1]
        for block in range(piece.start, piece.stop, ALIGNMENT):
            assert owners.setdefault(block, piece) is piece, "moved twice"
    assert sorted(owners) == list(range(0, min(one.numel, other.numel), ALIGNMENT))
    back = {(piece.target, piece.source, piece.start, piece.stop) for piece in other.overlaps(one)}
    assert back == {(piece.source, piece.target, piece.start, piece.stop) for piece in pieces}


@pytest.mark.parametrize("bad", [(), (0,), (64, 128), (0, 128, 64), (0, 63), (0, 64, 100)])
def test_bad_cuts_are_refused(bad: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="cuts of a layout"):
        Layout(bad)
