"""The reduction tree: in which order the ranks' gradients are added. Data, part of the plan and of its hash.

A tree is a rank, or a pair of trees: ``((0, 1), (2, 3))`` means ``(g0 + g1) + (g2 + g3)``. Floating-point sums depend on
their order, so every path that reduces must evaluate the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from shardwise.core.errors import PlanError

Tree: TypeAlias = "int | tuple[Tree, Tree]"


def balanced_tree(ranks: Sequence[int]) -> Tree:
    """Halve the ranks again and again.

    >>> balanced_tree([0, 1, 2])
    ((0, 1), 2)
    """
    if len(ranks) == 1:
        return ranks[0]
    middle = (len(ranks) + 1) // 2
    return balanced_tree(ranks[:middle]), balanced_tree(ranks[middle:])


def host_tree(hosts: Sequence[str]) -> Tree:
    """Add inside each host first, then across hosts. ``hosts[r]`` is the host of rank ``r``.

    >>> host_tree(["a", "b", "a", "b"])
    ((0, 2), (1, 3))
    """
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return _join([balanced_tree(ranks) for ranks in members.values()])


def _join(trees: Sequence[Tree]) -> Tree:
    if len(trees) == 1:
        return trees[0]
    middle = (len(trees) + 1) // 2
    return _join(trees[:middle]), _join(trees[middle:])


def leaves(tree: Tree) -> tuple[int, ...]:
    """The ranks of a tree from left to right."""
    if isinstance(tree, int):
        return (tree,)
    return leaves(tree[0]) + leaves(tree[1])


def parse_tree(value: Any) -> Tree:
    """Read a tree from nested lists or tuples, as TOML and JSON give it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)) and len(value) == 2:
        return parse_tree(value[0]), parse_tree(value[1])
    raise PlanError(f"A reduction tree is a rank or a pair of trees, such as [[0, 1], 2], but got {value!r}.")


def check_tree(tree: Tree, num_ranks: int) -> None:
    """Refuse a tree that does not hold every rank exactly once."""
    found = sorted(leaves(tree))
    if found != list(range(num_ranks)):
        raise PlanError(f"The reduction tree must hold each of the {num_ranks} ranks once, but it holds {found}.")
