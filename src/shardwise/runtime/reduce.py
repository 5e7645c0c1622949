"""Sums of the ranks' gradients in the order of the plan's tree. Two paths, one result: all adds are explicit and pairwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from shardwise.core.layout import ALIGNMENT, Layout
from shardwise.core.tree import Tree, leaves
from shardwise.runtime.exact import CHUNK, accumulation_dtype, sum_blocks
from shardwise.wire.comm import Comm, Exchange, Handle, Moved

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
    waited_seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self.handle.is_done

    def wait(self) -> None:
        """Until all parts can be read."""
        self.waited_seconds += self.handle.wait()

    def add_up(self, out: torch.Tensor, *, with_squares: bool = True) -> torch.Tensor | None:
        """Write the sum over all ranks of the elements that this rank owns; returns the sums of squares of its blocks, if asked."""
        total = self.sum
        if total is not None:
            return add_into(out, self.rank, lambda rank, low, high: total[low:high], with_squares=with_squares)
        if not isinstance(self.handle, Exchange):
            raise RuntimeError("A reduction ended without a result.")
        squares = add_into(out, self.tree, self.handle.part, with_squares=with_squares)
        self.handle.close()
        if self.handle.moved is not None:
            self.waited_seconds += self.handle.moved.seconds
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


def add_into(out: torch.Tensor, tree: Tree, read: Read, *, with_squares: bool = True) -> torch.Tensor | None:
    """Add what ranks have over the leaves of a tree, in pieces that stay in the cache.

    What is read for the leftmost leaf of a sum is overwritten. Returns the sums of squares of the blocks of ``out``, if asked: while
    they are in the cache, they cost little time, but memory for one piece.
    """
    dtype = accumulation_dtype(out.dtype)
    squares = torch.empty(out.numel() // ALIGNMENT, dtype=dtype, device=out.device) if with_squares else None
    if out.numel() == 0:
        return squares
    scratch = torch.empty(min(out.numel(), CHUNK) if with_squares else 0, dtype=dtype, device=out.device)
    low = 0
    for target in out.split(CHUNK):
        high = low + target.numel()
        if isinstance(tree, int):
            values = read(tree, low, high)
            if values.data_ptr() != target.data_ptr():
                target.copy_(values)
        else:
            torch.add(_add_along(tree[0], read, low, high), _add_along(tree[1], read, low, high), out=target)
        if squares is not None:
            terms = target.abs() if target.is_complex() else target.to(dtype)
            room = scratch if high - low == scratch.numel() else scratch[: high - low]
            torch.mul(terms, terms, out=room)
            sum_blocks(room, squares[low // ALIGNMENT : high // ALIGNMENT])
        low = high
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
    wire_bytes, num_messages, waited_seconds, begin_seconds = 0, 0, 0.0, time.perf_counter()
    for merge in merges_of(tree, comm.rank):
        sends = [(peer, torch.cat([pieces[owner] for owner in owners])) for peer, owners in merge.sends.items()]
        receives = []
        for peer, owners in merge.receives.items():
            receives.append((peer, local.new_empty(sum(sizes[owner] for owner in owners))))
        handle = comm.swap(sends, receives, label=label)
        waited_seconds += handle.wait()
        wire_bytes, num_messages = wire_bytes + handle.wire_bytes, num_messages + handle.num_messages
        for (_, arrived), owners in zip(receives, merge.receives.values(), strict=True):
            for owner, theirs in zip(owners, arrived.split([sizes[owner] for owner in owners]), strict=True):
                pieces[owner] = pieces[owner] + theirs if merge.is_left else theirs + pieces[owner]
        for owners in merge.sends.values():
            for owner in owners:
                del pieces[owner]
    end_seconds = time.perf_counter()
    finished = Handle("reduce", wire_bytes, num_messages, link=comm.link, moved=Moved(waited_seconds))
    finished.begin_seconds, finished.end_seconds = begin_seconds, end_seconds
    return Reduction(finished, tree, comm.rank, sum=pieces[comm.rank], waited_seconds=waited_seconds)
