"""What every `Comm` promises, asked of a world of one, of threads, and of torch's process groups between processes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shardwise.core.errors import DesyncError, RankLostError
from shardwise.testing import World
from shardwise.wire.comm import Comm, Exchange, Lanes, gather_bytes
from shardwise.wire.host_comm import HostComm
from shardwise.wire.lanes import torch_lanes
from shardwise.wire.local_comm import ThreadWorld, solo_lanes
from shardwise.wire.torch_comm import TorchComm

pytestmark = pytest.mark.dist
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def cuts_of(sizes: list[int]) -> list[int]:
    return [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]


def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's own values."""
    generator = torch.Generator().manual_seed(100 * rank + numel)
    values = torch.randint(0, 100, (numel,), generator=generator)
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def all_sizes(size: int) -> list[list[int]]:
    """Even shards, uneven ones, and such where some ranks own nothing."""
    return [[4] * size, [3 + 2 * rank for rank in range(size)], [0] * (size - 1) + [5], [7] + [0] * (size - 1), [0] * size]


# ---------------------------------------------------------------- the contract


def all_gather(comm: Comm) -> None:
    for sizes in all_sizes(comm.size):
        cuts = cuts_of(sizes)
        for dtype in DTYPES:
            buffer = torch.zeros(cuts[-1], dtype=dtype)
            low, high = cuts[comm.rank], cuts[comm.rank + 1]
            buffer[low:high] = numbers(comm.rank, cuts[-1], dtype)[low:high]
            handle = comm.all_gather(buffer, cuts, label="values")
            handle.wait()
            parts = [numbers(rank, cuts[-1], dtype)[a:b] for rank, (a, b) in enumerate(pairwise(cuts))]
            assert torch.equal(buffer, torch.cat(parts)), f"{dtype}, {sizes}"
            assert handle.result is buffer
            assert handle.wire_bytes == (cuts[-1] - (high - low)) * buffer.element_size()


def exchange(comm: Comm) -> None:
    for sizes in all_sizes(comm.size):
        cuts = cuts_of(sizes)
        low, high = cuts[comm.rank], cuts[comm.rank + 1]
        for dtype in DTYPES:
            source = numbers(comm.rank, cuts[-1], dtype)
            handle = comm.exchange(source, cuts, label="values")
            handle.wait()
            expected = torch.cat([numbers(rank, cuts[-1], dtype)[low:high] for rank in range(comm.size)])
            assert torch.equal(all_parts(handle, comm, high - low), expected), f"{dtype}, {sizes}"
            assert handle.wire_bytes == (cuts[-1] - (high - low)) * source.element_size()
            handle.receipt.wait()
            assert handle.receipt.is_read


def all_parts(handle: Exchange, comm: Comm, own: int) -> torch.Tensor:
    """What all ranks brought, read in pieces."""
    cuts = sorted({0, own // 3, own})
    pieces = list(pairwise(cuts)) or [(0, 0)]
    parts = [handle.part(rank, low, high).clone() for rank in range(comm.size) for low, high in pieces]
    handle.close()
    return torch.cat(parts)


def swap(comm: Comm) -> None:
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for dtype in DTYPES:
        sends = [(peer, numbers(comm.rank, 3 + peer, dtype)) for peer in others]
        receives = [(peer, torch.zeros(3 + comm.rank, dtype=dtype)) for peer in others]
        handle = comm.swap(sends, receives, label="values")
        handle.wait()
        for peer, arrived in receives:
            assert torch.equal(arrived, numbers(peer, 3 + comm.rank, dtype)), f"{dtype} from {peer}"
        assert handle.wire_bytes == sum(t.numel() * t.element_size() for _, t in sends)
        assert handle.num_messages == len(others)
    # Along a ring, where each talks to two others only; and with nobody.
    if comm.size > 2:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        target = torch.zeros(2)
        comm.swap([(after, torch.full((2,), float(comm.rank)))], [(before, target)], label="ring").wait()
        assert target.tolist() == [before] * 2
    assert comm.swap([], [], label="nothing").wire_bytes == 0


def broadcast(comm: Comm) -> None:
    for source in range(comm.size):
        for dtype in DTYPES:
            buffer = numbers(comm.rank, 9, dtype)
            comm.broadcast(buffer, source, label="values").wait()
            assert torch.equal(buffer, numbers(source, 9, dtype)), f"{dtype} from {source}"


def gather_small(comm: Comm) -> None:
    for dtype in DTYPES:
        for shape in [(5,), (2, 3)]:
            mine = numbers(comm.rank, 6, dtype)[: 5 if len(shape) == 1 else 6].view(shape)
            handle = comm.gather_small(mine, label="values")
            handle.wait()
            rows = [numbers(rank, 6, dtype)[: mine.numel()].view(shape) for rank in range(comm.size)]
            assert handle.result is not None and torch.equal(handle.result, torch.stack(rows)), f"{dtype}, {shape}"
            assert handle.wire_bytes == (comm.size - 1) * mine.numel() * mine.element_size()


def texts(comm: Comm) -> None:
    for texts in ([f"rank {rank}" * rank for rank in range(comm.size)], [""] * comm.size, ["é" * 300] * comm.size):
        assert [part.decode() for part in gather_bytes(comm, texts[comm.rank].encode(), label="texts")] == texts


def handles(comm: Comm) -> None:
    """A handle is waited for once; a second wait costs nothing. Several may be under way, and be waited for in any order."""
    cuts = cuts_of([2] * comm.size)
    buffers = [torch.full((cuts[-1],), float(comm.rank + number)) for number in range(4)]
    under_way = [comm.all_gather(buffer, cuts, label=f"number {number}") for number, buffer in enumerate(buffers)]
    for handle in reversed(under_way):
        assert handle.wait() >= 0.0
        assert handle.wait() == 0.0 and handle.is_done
    for number, buffer in enumerate(buffers):
        assert buffer.view(-1, 2)[:, 0].tolist() == [rank + number for rank in range(comm.size)]
    sent = torch.full((2 * comm.size,), float(comm.rank))
    handle = comm.exchange(sent, cuts, label="values")
    del sent
    torch.full((2 * comm.size,), -1.0)  # would get the memory of what is being sent, if nobody kept it
    handle.wait()
    assert all_parts(handle, comm, 2).view(-1, 2)[:, 0].tolist() == list(range(comm.size))


CONTRACT = {fn.__name__: fn for fn in (all_gather, exchange, swap, broadcast, gather_small, texts, handles)}


def lanes_do_not_wait_for_each_other(lanes: Lanes) -> None:
    """Ranks may issue the collectives of different lanes in different orders."""
    assert lanes.size == lanes.gather.size == lanes.reduce.size == lanes.regather.size == len(lanes.hosts)
    order: list[Comm] = [lanes.gather, lanes.reduce, lanes.regather]
    under_way = []
    for comm in order[lanes.rank % 3 :] + order[: lanes.rank % 3]:
        under_way.append(comm.gather_small(torch.tensor([comm.rank + 10 * order.index(comm)]), label="values"))
    for handle in under_way:
        handle.wait()
    found = sorted(tuple(handle.result.flatten().tolist()) for handle in under_way)
    assert found == [tuple(rank + 10 * place for rank in range(lanes.size)) for place in range(3)]


# ---------------------------------------------------------------- who must keep it


def run_torch(name: str, way: str) -> None:
    lanes = torch_lanes(None, torch.device("cpu"), None, "auto" if way == "memory" else "network")
    for comm in (lanes.gather, lanes.reduce, lanes.regather):
        if way == "memory":
            assert isinstance(comm, HostComm)
            continue
        assert isinstance(comm, TorchComm)
        comm._broadcasts = way == "broadcasts"  # not on large worlds and on other backends
    if name in CONTRACT:
        CONTRACT[name](lanes.gather)
    else:
        lanes_do_not_wait_for_each_other(lanes)


NAMES = [*CONTRACT, "lanes"]


@pytest.mark.parametrize("name", NAMES)
def test_world_of_one(name: str) -> None:
    lanes = solo_lanes()
    CONTRACT[name](lanes.gather) if name in CONTRACT else lanes_do_not_wait_for_each_other(lanes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_threads(size: int, name: str) -> None:
    world = ThreadWorld(size, timeout_seconds=10)
    world.run(lambda lanes: CONTRACT[name](lanes.gather) if name in CONTRACT else lanes_do_not_wait_for_each_other(lanes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["memory", "broadcasts", "one-gather"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes(world: World, ranks: int, way: str, name: str) -> None:
    world.run(run_torch, name, way, ranks=ranks, timeout_seconds=60)


# ---------------------------------------------------------------- threads that fail


def test_threads_notice_a_rank_that_failed() -> None:
    def main(lanes: Lanes) -> None:
        if lanes.rank == 1:
            raise KeyError("planted")
        lanes.gather.gather_small(torch.zeros(1), label="values").wait()

    with pytest.raises((KeyError, RankLostError)) as caught:
        ThreadWorld(3, timeout_seconds=20).run(main)
    assert "world of 3 threads" in caught.value.__notes__[0]


def test_threads_notice_a_rank_that_does_not_come() -> None:
    def main(lanes: Lanes) -> None:
        if lanes.rank != 2:
            lanes.gather.gather_small(torch.zeros(1), label="values").wait()

    with pytest.raises(RankLostError, match=r"Ranks \[2\] did not arrive at .*values"):
        ThreadWorld(3, timeout_seconds=0.5).run(main)


def test_threads_notice_different_collectives() -> None:
    def main(lanes: Lanes) -> None:
        values = torch.zeros(1 + lanes.rank)
        lanes.gather.gather_small(values, label="values").wait()

    with pytest.raises((DesyncError, RankLostError), match="gather_small"):
        ThreadWorld(2, timeout_seconds=20).run(main)
