"""Reductions: both paths give the sum along the tree, bit for bit, for any tree and layout, in few messages."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.layout import ALIGNMENT, Layout
from shardwise.core.tree import Tree, balanced_tree, host_tree, leaves
from shardwise.runtime import reduce
from shardwise.runtime.exact import block_sums
from shardwise.wire.comm import Lanes
from shardwise.wire.local_comm import ThreadWorld, solo_lanes


@st.composite
def trees(draw: st.DrawFn, min_ranks: int = 1, max_ranks: int = 7) -> Tree:
    """Any shape, over ranks in any order."""
    parts: list[Tree] = list(draw(st.permutations(range(draw(st.integers(min_ranks, max_ranks))))))
    while len(parts) > 1:
        place = draw(st.integers(0, len(parts) - 2))
        parts[place : place + 2] = [(parts[place], parts[place + 1])]
    return parts[0]


def locals_of(num_ranks: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers of very different sizes, so that every order of adding gives another sum."""
    generator = torch.Generator().manual_seed(num_ranks * 1000 + numel)
    parts = torch.randn(num_ranks, numel, dtype=torch.float64, generator=generator)
    return list((parts * 10.0 ** torch.randint(-3, 4, parts.shape, generator=generator)).to(dtype))


def evaluated(tree: Tree, parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[tree] if isinstance(tree, int) else evaluated(tree[0], parts) + evaluated(tree[1], parts)


@settings(max_examples=40)
@given(trees(), st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_both_paths_follow_the_tree(tree: Tree, data: st.DataObject, dtype: torch.dtype) -> None:
    num_ranks = len(leaves(tree))
    cuts = data.draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    layout = Layout((0, *(ALIGNMENT * cut for cut in sorted(cuts))))
    parts = locals_of(num_ranks, layout.numel, dtype)
    expected = evaluated(tree, parts)

    def main(lanes: Lanes) -> list[torch.Tensor]:
        comm = lanes.reduce
        sums = []
        for begin in (reduce.begin_reduction, reduce._reduce_by_halving):
            local = parts[comm.rank].clone()
            reduction = begin(local, layout, tree, comm, label="gradients")
            reduction.wait()
            assert reduction.waited_seconds >= 0
            total = torch.empty(layout.sizes[comm.rank], dtype=dtype)
            squares = reduction.add_up(total)
            assert torch.equal(squares, block_sums(total, 2.0))
            sums.append(total)
        return sums

    for rank, sums in enumerate(ThreadWorld(num_ranks).run(main)):
        low, high = layout.bounds(rank)
        for total in sums:
            assert total.dtype == dtype and torch.equal(total, expected[low:high])


def test_order_of_adding_matters_here() -> None:
    parts = locals_of(4, 256, torch.float32)
    assert not torch.equal(evaluated(((0, 1), (2, 3)), parts), evaluated((((0, 1), 2), 3), parts))


def test_limit_chooses_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(lanes: Lanes) -> str:
        layout = Layout.even(256, num_ranks=3)
        return reduce.begin_reduction(torch.ones(layout.numel), layout, ((0, 1), 2), lanes.reduce, label="x").handle.op

    assert ThreadWorld(3).run(main) == ["exchange"] * 3
    monkeypatch.setattr(reduce, "EXCHANGE_LIMIT", 2)
    assert ThreadWorld(3).run(main) == ["reduce"] * 3


def test_world_of_one_keeps_its_gradients() -> None:
    local = torch.arange(128.0)
    reduction = reduce.begin_reduction(local, Layout((0, 128)), 0, solo_lanes().reduce, label="x")
    total = torch.empty(128)
    reduction.add_up(total)
    assert torch.equal(total, local) and reduction.handle.wire_bytes == reduction.handle.num_messages == 0


TREES = {
    "64": balanced_tree(range(64)),
    "100": balanced_tree(range(100)),
    "257": balanced_tree(range(257)),
    "5 hosts of 8": host_tree([f"host{rank // 8}" for rank in range(40)]),
    "uneven hosts": host_tree(["a"] * 7 + ["b"] * 3 + ["c"] * 12 + ["d"]),
    "round robin": host_tree([f"host{rank % 4}" for rank in range(32)]),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_halving_sends_each_piece_to_who_expects_it_in_few_messages(tree: Tree) -> None:
    num_ranks = len(leaves(tree))
    merges = {rank: reduce.merges_of(tree, rank) for rank in range(num_ranks)}
    sent = Counter((rank, peer, tuple(owners)) for rank, ms in merges.items() for m in ms for peer, owners in m.sends.items())
    expected = Counter(
        (peer, rank, tuple(owners)) for rank, ms in merges.items() for m in ms for peer, owners in m.receives.items()
    )
    assert sent == expected
    # Every piece is added num_ranks - 1 times in all, so that much is sent and no more.
    assert sum(len(owners) * count for (_, _, owners), count in sent.items()) == num_ranks * (num_ranks - 1)
    for rank, own in merges.items():
        num_messages = sum(len(merge.sends) for merge in own)
        assert num_messages <= 2 * math.ceil(math.log2(num_ranks)) + 2, f"rank {rank} sends {num_messages} messages"


@pytest.mark.parametrize("tree", [TREES["64"], TREES["100"]], ids=["64", "100"])
def test_halving_has_the_volume_of_an_exchange(tree: Tree) -> None:
    num_ranks = len(leaves(tree))
    volumes = [sum(len(owners) for m in reduce.merges_of(tree, r) for owners in m.sends.values()) for r in range(num_ranks)]
    assert max(volumes) <= 1.5 * (num_ranks - 1), f"a rank sends {max(volumes)} pieces where an exchange sends {num_ranks - 1}"
