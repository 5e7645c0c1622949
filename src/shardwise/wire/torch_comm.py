"""Collectives through ``torch.distributed``, between processes and hosts, with deadlines and post-mortems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from shardwise.core.errors import ShardwiseError
from shardwise.wire.comm import Exchange, Handle, Room, part_of, put_in_place
from shardwise.wire.postmortem import PostMortem

BROADCAST_LIMIT = 8
"""Up to so many ranks, gloo gathers fastest as one broadcast a rank, straight into place; beyond, as one all-gather."""


@dataclass
class _Call:
    """The works of one collective, and what to do when they have ended."""

    works: list[dist.Work]
    finish: Callable[[], None] | None = None


class TorchComm:
    """One lane over a process group of its own, so that it needs no common order with other lanes."""

    is_staged = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, post_mortem: PostMortem) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.link = str(dist.get_backend(group))
        self._group = group
        self._device = device
        self._post_mortem = post_mortem
        self.has_failed = False
        self._ranks = dist.get_process_group_ranks(group)
        self._broadcasts = dist.get_backend(group) == "gloo" and self.size <= BROADCAST_LIMIT

    def gather_parts(self, source: torch.Tensor, cuts: Sequence[int], room: Room, *, label: str) -> Handle:
        """From a buffer that holds one's own part."""
        return self.all_gather(put_in_place(source, cuts, room, self.rank), cuts, label=label)

    def all_gather(self, buffer: torch.Tensor, cuts: Sequence[int], *, label: str) -> Handle:
        """Broadcast slices straight into place, or one all-gather, padded where shards differ in size."""
        own = cuts[self.rank + 1] - cuts[self.rank]
        wire_bytes = (cuts[-1] - own) * buffer.element_size()
        raw = raw_bytes(buffer)
        edges = [cut * buffer.element_size() for cut in cuts]
        even = len({b - a for a, b in pairwise(edges)}) == 1
        if self._broadcasts:
            begin = self._gather_by_broadcasts
        elif even:
            begin = self._gather_even
        else:
            begin = self._gather_padded
        return self._handle("all_gather", label, wire_bytes, self.size - 1, buffer, lambda: begin(raw, edges))

    def exchange(self, source: torch.Tensor, cuts: Sequence[int], *, room: torch.Tensor | None = None, label: str) -> Exchange:
        """One all-to-all with uneven splits."""
        own = cuts[self.rank + 1] - cuts[self.rank]
        parts = source.new_empty(self.size * own) if room is None else room
        item = source.element_size()
        sizes = [(b - a) * item for a, b in pairwise(cuts)]

        def begin() -> _Call:
            received, sent = raw_bytes(parts), raw_bytes(source)
            work = dist.all_to_all_single(received, sent, [own * item] * self.size, sizes, group=self._group, async_op=True)
            return _Call([work])

        handle = self._handle("exchange", label, (cuts[-1] - own) * item, self.size - 1, parts, begin, keep=source)
        return Exchange(**vars(handle), _part=part_of(parts, own))

    def swap(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]], *, label: str
    ) -> Handle:
        """Point-to-point messages, issued together."""

        def begin() -> _Call:
            ops = [dist.P2POp(dist.isend, raw_bytes(t), self._ranks[peer], group=self._group) for peer, t in sends]
            ops += [dist.P2POp(dist.irecv, raw_bytes(t), self._ranks[peer], group=self._group) for peer, t in receives]
            return _Call(dist.batch_isend_irecv(ops) if ops else [])

        sent_bytes = sum(t.numel() * t.element_size() for _, t in sends)
        return self._handle("swap", label, sent_bytes, len(sends), None, begin)

    def broadcast(self, buffer: torch.Tensor, source: int, *, label: str) -> Handle:
        """One broadcast."""

        def begin() -> _Call:
            return _Call([dist.broadcast(raw_bytes(buffer), self._ranks[source], group=self._group, async_op=True)])

        return self._handle("broadcast", label, buffer.numel() * buffer.element_size(), 1, buffer, begin)

    def gather_small(self, values: torch.Tensor, *, label: str) -> Handle:
        """One all-gather of rows."""
        mine = values.to(self._device).contiguous()
        rows = mine.new_empty((self.size, *mine.shape))

        def begin() -> _Call:
            flat = rows.view(-1)
            return _Call([dist.all_gather_single(raw_bytes(flat), raw_bytes(mine.view(-1)), group=self._group, async_op=True)])

        wire_bytes = mine.numel() * mine.element_size() * (self.size - 1)
        return self._handle("gather_small", label, wire_bytes, self.size - 1, rows, begin, keep=mine)

    def _gather_by_broadcasts(self, raw: torch.Tensor, edges: Sequence[int]) -> _Call:
        works = []
        for peer in range(self.size):
            part = raw[edges[peer] : edges[peer + 1]]
            if part.numel():
                works.append(dist.broadcast(part, self._ranks[peer], group=self._group, async_op=True))
        return _Call(works)

    def _gather_even(self, raw: torch.Tensor, edges: Sequence[int]) -> _Call:
        own = raw[edges[self.rank] : edges[self.rank + 1]]
        return _Call([dist.all_gather_single(raw, own, group=self._group, async_op=True)])

    def _gather_padded(self, raw: torch.Tensor, edges: Sequence[int]) -> _Call:
        widest = max(b - a for a, b in pairwise(edges))
        rows = raw.new_empty((self.size, widest))
        own = raw[edges[self.rank] : edges[self.rank + 1]]
        mine = raw.new_empty(widest)
        mine[: own.numel()] = own

        def unpack() -> None:
            for peer in range(self.size):
                raw[edges[peer] : edges[peer + 1]] = rows[peer, : edges[peer + 1] - edges[peer]]

        return _Call([dist.all_gather_single(rows.view(-1), mine, group=self._group, async_op=True)], unpack)

    def failed(self, where: str, error: BaseException) -> ShardwiseError:
        """Take the lane out of use, and explain what went wrong with a collective on it."""
        self.has_failed = True
        return self._post_mortem.explain(where, error)

    def _handle(  # noqa: PLR0913
        self,
        op: str,
        label: str,
        wire_bytes: int,
        num_messages: int,
        result: torch.Tensor | None,
        begin: Callable[[], _Call],
        *,
        keep: torch.Tensor | None = None,
    ) -> Handle:
        """Issue a collective; whatever goes wrong with it is turned into an error that names rank, unit and op."""
        where = f"{op} for {label}"
        try:
            call = begin()
        except RuntimeError as error:
            raise self.failed(where, error) from error

        def finish() -> None:
            try:
                for work in call.works:
                    work.wait()
            except RuntimeError as error:
                raise self.failed(where, error) from error
            if call.finish is not None:
                call.finish()

        def poll() -> bool:
            return all(work.is_completed() for work in call.works)

        kept = () if keep is None else (keep,)
        return Handle(op, wire_bytes, num_messages, result, finish, poll, kept, link=self.link)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: backends differ in the dtypes that they take, and all of them take bytes."""
    return tensor.view(-1).view(torch.uint8)
