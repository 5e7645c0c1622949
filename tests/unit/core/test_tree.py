"""Reduction trees: every rank once, inside hosts first, and as shallow as can be."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import PlanError
from shardwise.core.tree import Tree, balanced_tree, check_tree, host_tree, leaves, parse_tree


def depth(tree: Tree) -> int:
    return 0 if isinstance(tree, int) else 1 + max(depth(tree[0]), depth(tree[1]))


def as_lists(tree: Tree) -> Any:
    return tree if isinstance(tree, int) else [as_lists(tree[0]), as_lists(tree[1])]


@given(st.integers(1, 300))
def test_balanced_tree_holds_ranks_in_order_at_least_depth(num_ranks: int) -> None:
    tree = balanced_tree(range(num_ranks))
    assert leaves(tree) == tuple(range(num_ranks))
    assert depth(tree) == math.ceil(math.log2(num_ranks))
    check_tree(tree, num_ranks)


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=40))
def test_host_tree_adds_inside_hosts_first(hosts: list[str]) -> None:
    tree = host_tree(hosts)
    check_tree(tree, len(hosts))

    def crossings(node: Tree) -> int:
        """Hosts below a node, where every host must be one subtree."""
        names = {hosts[rank] for rank in leaves(node)}
        if len(names) == 1:
            return 1
        assert not isinstance(node, int)
        sides = [{hosts[rank] for rank in leaves(side)} for side in node]
        assert not sides[0] & sides[1], f"{sides[0] & sides[1]} is on both sides of a sum across hosts"
        return crossings(node[0]) + crossings(node[1])

    assert crossings(tree) == len(set(hosts))


@given(st.integers(1, 40))
def test_tree_survives_lists(num_ranks: int) -> None:
    tree = balanced_tree(range(num_ranks))
    assert parse_tree(as_lists(tree)) == tree


@pytest.mark.parametrize("bad", [[0], [0, 1, 2], "01", [0, "1"], True, None, [[0, 1], 2.0], {}])
def test_what_is_no_tree_is_refused(bad: Any) -> None:
    with pytest.raises(PlanError, match="reduction tree"):
        parse_tree(bad)


@pytest.mark.parametrize("bad", [((0, 1), 1), (0, 2), ((0, 1), (2, 3)), 1])
def test_tree_for_other_ranks_is_refused(bad: Tree) -> None:
    with pytest.raises(PlanError, match="must hold each of the 3 ranks once"):
        check_tree(bad, 3)
