"""Sums of the ranks' gradients in the order of the plan's tree. Two paths, one result: all adds are explicit and pairwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shardwise.core.layout import ALIGNMENT, Layout
from shardwise.core.tree import Tree, leaves
from shardwise.runtime.exact import CHUNK, accumulation_dtype, sum_blocks
from shardwise.wire.comm import Comm, Exchange, Handle

EXCHANGE_LIMIT = 16
"""Up to so many ranks one all-to-all is faster; beyond, recursive halving needs log N messages for the same volume."""


Read = Callable[[int, int, int], torch.Tensor]
"""What a rank has of certain elements: rank, first, one past the last."""


@dataclass
class Reduction:
    """A reduction under way."""

    handle: Handle
    tree: Tree
    rank: int
    room: torch.Tensor | None = None
    sum: torch.Tensor | None = None

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.handle.is_done

    def wait(self) -> float:
        """Until all parts can be read; returns the seconds waited."""
        return self.handle.wait()

    def add_up(self, out: torch.Tensor) -> torch.Tensor:
        """Write the sum over all ranks of the elements that this rank owns; returns the sums of squares of its blocks."""
        total = self.sum
        if total is not None:
            return add_into(out, self.rank, lambda rank, low, high: total[low:high])
        if not isinstance(self.handle, Exchange):
            raise RuntimeError("A reduction ended without a result.")
        squares = add_into(out, self.tree, self.handle.part)
        self.handle.close()
        return squares


def needs_room(comm: Comm) -> bool:
    """Whether a reduction is an exchange that needs room for all ranks' parts."""
    return comm.is_staged and comm.size <= EXCHANGE_LIMIT


def begin_reduction(
    local: torch.Tensor, layout: Layout, tree: Tree, comm: Comm, *, label: str, room: torch.Tensor | None = None
) -> Reduction:
    """Start to sum ``local`` over all ranks; each rank gets the part that it owns.

    Args:
        room: Memory for all ranks' versions of one's own part, where `needs_room`.
    """
    if comm.is_staged and comm.size > EXCHANGE_LIMIT:
        return _reduce_by_halving(local, layout, tree, comm, label=label)
    handle = comm.exchange(local, layout.cuts, room=room, label=label)
    return Reduction(handle, tree, comm.rank, room)


def add_into(out: torch.Tensor, tree: Tree, read: Read) -> torch.Tensor:
    """Add what ranks have over the leaves of a tree, in pieces that stay in the cache.

    What is read for the leftmost leaf of a sum is overwritten. Returns the sums of squares of the blocks of ``out``.
    """
    dtype = accumulation_dtype(out.dtype)
    squares = torch.empty(out.numel() // ALIGNMENT, dtype=dtype, device=out.device)
    scratch = torch.empty(min(out.numel(), CHUNK), dtype=dtype, device=out.device)
    for low in range(0, out.numel(), CHUNK):
        high = min(low + CHUNK, out.numel())
        target = out[low:high]
        if isinstance(tree, int):
            values = read(tree, low, high)
            if values.data_ptr() != target.data_ptr():
                target.copy_(values)
        else:
            torch.add(_add_along(tree[0], read, low, high), _add_along(tree[1], read, low, high), out=target)
        terms = target.abs() if target.is_complex() else target.to(dtype)
        torch.mul(terms, terms, out=scratch[: high - low])
        sum_blocks(scratch[: high - low], squares[low // ALIGNMENT : high // ALIGNMENT])
    return squares


def _add_along(tree: Tree, read: Read, low: int, high: int) -> torch.Tensor:
    if isinstance(tree, int):
        return read(tree, low, high)
    return _add_along(tree[0], read, low, high).add_(_add_along(tree[1], read, low, high))


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
    return Reduction(finished, tree, comm.rank, sum=pieces[comm.rank])
