"""The lanes of an engine: which comms it talks through, and how they are used again when it is gone."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.devices import torch_private
from shardwise.wire.comm import Lanes, gather_bytes
from shardwise.wire.host_comm import HostComm, host_comms
from shardwise.wire.notices import StoreNotices
from shardwise.wire.postmortem import PostMortem
from shardwise.wire.torch_comm import TorchComm


@dataclass
class _Set:
    """Three lanes that one engine after the other may use."""

    comms: list[TorchComm] | list[HostComm]
    hosts: tuple[str, ...]
    is_free: bool = False

    def release(self) -> None:
        """Nobody uses these lanes any more. Those that have failed are not used again."""
        self.is_free = not any(comm.has_failed for comm in self.comms)


class _Sets:
    """All lanes that were made over the process group in force. Groups cost threads and sockets, so they are used again."""

    def __init__(self) -> None:
        self._world: object = None
        self._sets: dict[tuple[object, ...], list[_Set]] = {}

    def of(self, key: tuple[object, ...]) -> list[_Set]:
        """The lanes over certain ranks with a certain deadline; none of them outlives the default process group."""
        if self._world is not dist.group.WORLD:
            self._world = dist.group.WORLD
            self._sets.clear()
        return self._sets.setdefault(key, [])


_SETS = _Sets()


def torch_lanes(group: dist.ProcessGroup | None, device: torch.device, deadline: timedelta | None, path: str = "auto") -> Lanes:
    """The lanes of one engine over the ranks of ``group`` (all ranks, if None). Called by all of these ranks.

    Args:
        path: ``auto``: ranks of one host read each other's memory where they can; ``network``: the process group in any case.
    """
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    timeout = deadline or torch_private.group_timeout(group)
    sets = _SETS.of((tuple(ranks), timeout, device.type, path))
    chosen = _agree_on_free(sets, group, device)
    if chosen is None:
        chosen = _new_set(group, ranks, device, timeout, path)
        sets.append(chosen)
    chosen.is_free = False
    gather, reduce, regather = chosen.comms
    notices = StoreNotices(torch_private.default_store(), _group_key(ranks))
    return Lanes(gather, reduce, regather, chosen.hosts, chosen.release, notices, timeout.total_seconds())


def _agree_on_free(sets: list[_Set], group: dist.ProcessGroup | None, device: torch.device) -> _Set | None:
    """The first lanes that are free on every rank: garbage is collected at different times."""
    if not sets:
        return None
    free = torch.tensor([int(each.is_free) for each in sets], device=device)
    dist.all_reduce(free, dist.ReduceOp.MIN, group=group)
    return next((each for each, is_free in zip(sets, free.tolist(), strict=True) if is_free), None)


def _new_set(group: dist.ProcessGroup | None, ranks: list[int], device: torch.device, timeout: timedelta, path: str) -> _Set:
    comms = []
    for _ in range(3):
        lane = dist.new_group(ranks, timeout=timeout, backend=dist.get_backend(group), use_local_synchronization=True)
        post_mortem = PostMortem(torch_private.default_store(), dist.get_rank(lane), len(ranks), timeout, _group_key(ranks))
        comms.append(TorchComm(lane, device, post_mortem))
    names = gather_bytes(comms[0], socket.gethostname().encode(), label="host names")
    hosts = tuple(name.decode() for name in names)
    if path == "auto" and device.type == "cpu" and dist.get_backend(group) == "gloo" and len(set(hosts)) == 1:
        return _Set(host_comms(comms, timeout) or comms, hosts)
    return _Set(comms, hosts)


def _group_key(ranks: Sequence[int]) -> str:
    return "-".join(map(str, ranks)) if len(ranks) <= 16 else f"{ranks[0]}..{ranks[-1]}"
