"""Sums of the ranks' gradients in the order of the plan's tree. Two paths, one result: all adds are explicit and pairwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from shardwise.core.layout import Layout
from shardwise.core.tree import Tree, leaves
from shardwise.wire.comm import Comm, Handle

EXCHANGE_LIMIT = 16
"""Up to so many ranks one all-to-all is faster; beyond, recursive halving needs log N messages for the same volume."""


@dataclass
class Reduction:
    """A reduction under way."""

    handle: Handle
    layout: Layout
    tree: Tree
    rank: int
    size: int
    sum: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether ``finish`` would not wait."""
        return self.sum is not None or self.handle.is_done

    def finish(self) -> tuple[torch.Tensor, float]:
        """The sum over all ranks of the elements that this rank owns, and the seconds waited."""
        waited_seconds = self.handle.wait()
        if self.sum is None:
            if self.handle.result is None:
                raise RuntimeError("A reduction ended without a result.")
            own = self.layout.sizes[self.rank]
            parts = [self.handle.result[rank * own : (rank + 1) * own] for rank in range(self.size)]
            self.sum = add_along(self.tree, parts)
        return self.sum, waited_seconds


def begin_reduction(local: torch.Tensor, layout: Layout, tree: Tree, comm: Comm, *, label: str) -> Reduction:
    """Start to sum ``local`` over all ranks; each rank gets the part that it owns."""
    if comm.size <= EXCHANGE_LIMIT:
        handle = comm.exchange(local, layout.cuts, label=label)
        return Reduction(handle, layout, tree, comm.rank, comm.size)
    return _reduce_by_halving(local, layout, tree, comm, label=label)


def add_along(tree: Tree, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add ``parts[rank]`` over the leaves of a tree, overwriting the leftmost part of each sum."""
    if isinstance(tree, int):
        return parts[tree]
    return add_along(tree[0], parts).add_(add_along(tree[1], parts))


@dataclass
class _Merge:
    """What this rank does where two subtrees meet: pieces (by owner) that it sends, and those that it receives and adds."""

    sends: dict[int, list[int]] = field(default_factory=dict)
    receives: dict[int, list[int]] = field(default_factory=dict)
    is_left: bool = True


def merges_of(tree: Tree, rank: int) -> list[_Merge]:
    """The merges of a rank from the leaves up.

    In a subtree, the partial sum of every owner's piece rests with one member, its holder: the owner itself if it is a member,
    else the member at the same relative place. Where two subtrees meet, the holder outside sends to the holder inside.
    """
    everyone = leaves(tree)
    holders = {owner: owner for owner in everyone}
    merges: list[_Merge] = []
    node = tree
    while not isinstance(node, int):
        left, right = leaves(node[0]), leaves(node[1])
        in_left, in_right = set(left), set(right)
        merge = _Merge(is_left=rank in in_left)
        below: dict[int, int] = {}
        for owner, holder in holders.items():
            inside_left = holder in in_left
            mine, theirs = (left, right) if inside_left else (right, left)
            proxy = theirs[mine.index(holder) * len(theirs) // len(mine)]
            if proxy == rank:
                merge.sends.setdefault(holder, []).append(owner)
            if holder == rank:
                merge.receives.setdefault(proxy, []).append(owner)
            mine_set = in_left if inside_left else in_right
            below[owner] = holder if rank in mine_set else proxy
        merges.append(merge)
        holders = below
        node = node[0] if rank in in_left else node[1]
    return merges[::-1]


def _reduce_by_halving(local: torch.Tensor, layout: Layout, tree: Tree, comm: Comm, *, label: str) -> Reduction:
    """Recursive halving along the tree: at each merge a rank sends the pieces that others hold, and adds those it holds."""
    sizes = layout.sizes
    pieces = {owner: local[slice(*layout.bounds(owner))] for owner in range(comm.size)}
    wire_bytes, num_messages = 0, 0
    for merge in merges_of(tree, comm.rank):
        sends = [(peer, torch.cat([pieces[owner] for owner in owners])) for peer, owners in merge.sends.items()]
        receives = []
        for peer, owners in merge.receives.items():
            receives.append((peer, local.new_empty(sum(sizes[owner] for owner in owners))))
        handle = comm.swap(sends, receives, label=label)
        handle.wait()
        wire_bytes, num_messages = wire_bytes + handle.wire_bytes, num_messages + handle.num_messages
        for (_, arrived), owners in zip(receives, merge.receives.values(), strict=True):
            for owner, theirs in zip(owners, arrived.split([sizes[owner] for owner in owners]), strict=True):
                pieces[owner] = pieces[owner] + theirs if merge.is_left else theirs + pieces[owner]
        for owners in merge.sends.values():
            for owner in owners:
                del pieces[owner]
    finished = Handle("reduce", wire_bytes, num_messages)
    return Reduction(finished, layout, tree, comm.rank, comm.size, pieces[comm.rank])
