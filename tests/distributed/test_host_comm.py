"""Ranks that read each other's memory: what was brought stays until it was read, and whoever is gone is named."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.cli.jobs import Job, call_on_ranks
from shardwise.devices import cross_memory
from shardwise.testing import World
from shardwise.wire import board
from shardwise.wire.host_comm import HostComm
from shardwise.wire.lanes import torch_lanes
from shardwise.wire.torch_comm import TorchComm

pytestmark = pytest.mark.dist
CPU = torch.device("cpu")


def brought_and_forgotten() -> list[float]:
    """Rank 0 lets go of what it brought, and fills the heap with other values, long before rank 1 reads it."""
    comm = torch_lanes(None, CPU, None).gather
    numel = 100_000
    buffer = torch.full((2 * numel,), float(comm.rank + 1))
    handle = comm.all_gather(buffer, (0, numel, 2 * numel), label="values")
    if comm.rank == 0:
        handle.wait()
        del buffer, handle
        gc.collect()
        trash = [torch.full((2 * numel,), -1.0) for _ in range(20)]
        return [float(len(trash))]
    time.sleep(1.0)
    handle.wait()
    return sorted(set(buffer.tolist()))


def test_what_was_brought_stays_until_it_was_read(world: World) -> None:
    assert world.run(brought_and_forgotten, ranks=2)[1] == [1.0, 2.0]


def receipts() -> tuple[bool, bool]:
    """Rank 0 asks whether its bytes were read: not before rank 1 has read them."""
    comm = torch_lanes(None, CPU, None).reduce
    source = torch.arange(256.0)
    handle = comm.exchange(source, (0, 128, 256), label="gradients")
    handle.wait()
    if comm.rank == 1:
        time.sleep(0.5)
        parts = [handle.part(rank, 0, 128).tolist() for rank in range(2)]
        assert parts == [list(range(128, 256))] * 2
        handle.close()
        return True, True
    was_read = handle.receipt.is_read
    handle.close()
    handle.receipt.wait()
    return was_read, handle.receipt.is_read


def test_receipts(world: World) -> None:
    assert world.run(receipts, ranks=2)[0] == (False, True)


def unread() -> str:
    """Without permission to read each other, ranks take the process group, all of them."""
    with mock.patch.object(cross_memory, "is_available", lambda: dist.get_rank() != 1):
        lanes = torch_lanes(None, CPU, timedelta(seconds=77))
    assert isinstance(lanes.gather, TorchComm)
    return type(torch_lanes(None, CPU, timedelta(seconds=78)).gather).__name__


def test_all_ranks_take_the_network_if_one_cannot_read(world: World) -> None:
    assert world.run(unread, ranks=3) == ["HostComm"] * 3


def far_ahead() -> list[float]:
    """A rank may be ahead by no more than the board has rows."""
    with mock.patch.object(board, "NUM_ROWS", 8):
        comm = torch_lanes(None, CPU, timedelta(seconds=30)).gather
        assert isinstance(comm, HostComm)
        handles = []
        for number in range(40):
            if comm.rank == 1 and number % 10 == 0:
                time.sleep(0.05)
            handles.append(comm.gather_small(torch.tensor([float(number)]), label="values"))
            if comm.rank == 1 or number >= 6:
                handles[0].wait()
                assert handles.pop(0).result.flatten().tolist()[0] >= 0
        for handle in handles:
            handle.wait()
        return [float(len(handles))]


def test_rows_are_not_overwritten_before_they_were_read(world: World) -> None:
    world.run(far_ahead, ranks=2)


def killed_in_gather(victim: int) -> str:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    shardwise.shard(model, stage=3, units=["0", "1", "2"], deadline_seconds=20.0)
    model(torch.ones(1, 16))
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model(torch.ones(1, 16))
    except shardwise.ShardwiseError as error:
        return str(error)
    return "nothing was noticed"


def test_a_dead_peer_is_named(world: World) -> None:
    answers = world.run(killed_in_gather, 2, ranks=3, expect_deaths=[2])
    for rank in (0, 1):
        assert "Rank 2 did not take part in all_gather for parameters of" in answers[rank]


SCRIPT = """
    import time
    import torch, torch.distributed as dist
    import shardwise

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    shardwise.shard(model, stage=3, units=["0", "1", "2", "3"])
    if rank == 1:
        for layer in model:
            layer.register_forward_hook(lambda *args: time.sleep(0.3))
    with torch.no_grad():
        print("sum", rank, float(model(torch.ones(2, 64)).sum()), flush=True)
"""


def test_a_rank_that_ends_early_waits_for_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "shardwise", "run", "--ranks", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    sums = [line.split()[-1] for line in done.stdout.split("\n") if line.startswith("sum")]
    assert len(sums) == 2 and len(set(sums)) == 1


def read_late() -> list[int]:
    """Rank 0 reads what rank 1 brought when that one has long returned."""
    comm = torch_lanes(None, CPU, None).gather
    handle = comm.gather_small(torch.tensor([comm.rank + 1]), label="ranks")
    if comm.rank == 0:
        time.sleep(2.0)
    handle.wait()
    return [] if handle.result is None else handle.result.flatten().tolist()


def test_a_rank_whose_job_is_done_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    assert call_on_ranks(Job(f"{__name__}:read_late", {}), 2) == [1, 2]


def read_when_the_other_leaves(rank: int, store: str, answers: Any) -> None:
    """Rank 0 reads what rank 1 brought when that one says that it goes, or has gone without a word."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    comm = torch_lanes(None, CPU, None).gather
    assert isinstance(comm, HostComm)
    handle = comm.gather_small(torch.tensor([rank + 1]), label="ranks")
    with suppress(OSError):
        while rank == 0 and comm._peers[1].is_there() and not comm._peers[1].is_leaving:
            time.sleep(0.001)
    handle.wait()
    answers.put([] if handle.result is None else handle.result.flatten().tolist())
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_a_rank_of_multiprocessing_waits_for_the_others(tmp_path: Path, way: str) -> None:
    """However Python starts it: not all ways end with what was left for the end."""
    context = multiprocessing.get_context(way)
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=read_when_the_other_leaves, args=(rank, str(tmp_path / "store"), answers)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [answers.get(), answers.get()] == [[1, 2], [1, 2]]


def _train_once_and_count_groups() -> int:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    shardwise.shard(model, optimizer, stage=3)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name.startswith("gloo_tcp") for name in names)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked up under /proc")
def test_lanes_of_earlier_process_groups_are_let_go(world: World) -> None:
    counts = [max(world.run(_train_once_and_count_groups, ranks=2)) for _ in range(6)]
    # The first runs may find left-overs of other tests.
    assert counts[-1] <= counts[2], counts
