"""Worlds run jobs on real processes: results, errors, deaths, hangs, and a pool that is whole again afterwards."""

import functools
import gc
import glob
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.testing import RankError, World

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def hasty() -> Iterator[World]:
    """A pool of its own that does not wait long for the other ranks once one has failed."""
    with World(num_ranks_max=2, grace_seconds=0.5) as world:
        yield world


# ---------------------------------------------------------------- jobs


def describe(*args: object, **kwargs: object) -> tuple[object, ...]:
    return dist.get_rank(), dist.get_world_size(), args, kwargs


def summed(value: float) -> torch.Tensor:
    tensor = torch.full((3,), value * (dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return tensor


def doubled(model: torch.nn.Module, tensor: torch.Tensor) -> dict[str, object]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    view = tensor[1:]
    return {
        "model": model,
        "double": tensor.double() * 2,
        "bf16": view.bfloat16(),
        "graph": (tensor.requires_grad_() * 2).sum(),
    }


class LeavesSlowly:
    """Holds its process up when it is collected, as the threads of many process groups do on a busy machine."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.itself = self

    def __del__(self) -> None:
        time.sleep(self.seconds)


def leave_slowly(seconds: float) -> int:
    LeavesSlowly(seconds)
    return os.getpid()


def process_id() -> int:
    return os.getpid()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"planted on {rank}")
    dist.barrier()


def fail_while_other_sleeps(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("planted")
    time.sleep(600)


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        time.sleep(1.0)  # longer than the grace of `hasty`
        return "survived"
    return "met"


def exit_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        {"sys.exit": sys.exit, "os._exit": os._exit}[how](3)


def die_after_return(rank: int) -> str:
    if dist.get_rank() == rank:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(0.6)
    return "returned"


def wait_for_godot() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def block_in_collective() -> None:
    if dist.get_rank() == 1:
        dist.barrier()


def return_unpicklable() -> object:
    return lambda: None


def is_initialized() -> bool:
    return dist.is_initialized()


def make_own_group(path: str) -> int:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    return dist.get_world_size()


def disturb() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    os.environ["LEFT_BEHIND"] = "1"
    loop: list[object] = [Residue()]
    loop.append(loop)


class Residue:
    """An object that only the garbage collector frees."""


def read_state() -> tuple[torch.dtype, int, str | None, bool]:
    gc_found = any(isinstance(thing, Residue) for thing in gc.get_objects())
    return torch.get_default_dtype(), torch.get_num_threads(), os.environ.get("LEFT_BEHIND"), gc_found


# ---------------------------------------------------------------- results


def test_results_come_by_rank(world: World) -> None:
    assert world.run(describe, 1, "two", ranks=2, three=3) == [(rank, 2, (1, "two"), {"three": 3}) for rank in range(2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives_span_the_ranks_asked_for(world: World, ranks: int) -> None:
    expected = torch.full((3,), 2.0 * sum(range(1, ranks + 1)))
    results = world.run(summed, 2.0, ranks=ranks)
    assert len(results) == ranks
    for result in results:
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_tensors_and_modules_travel_by_value(world: World) -> None:
    model, tensor = torch.nn.Linear(3, 2), torch.arange(4.0)
    first, second = world.run(doubled, model, tensor)
    for result in (first, second):
        torch.testing.assert_close(result["model"].weight, model.weight * 2)
        torch.testing.assert_close(result["double"], torch.arange(4.0, dtype=torch.float64) * 2)
        torch.testing.assert_close(result["bf16"], torch.arange(1.0, 4.0).bfloat16())
        assert result["graph"].item() == 12.0
        assert not result["double"].is_shared()


def test_large_arguments_and_results_leave_no_shared_memory(world: World) -> None:
    before = set(glob.glob("/dev/shm/*"))
    tensor = torch.zeros(2_000_000)
    results = world.run(doubled, torch.nn.Identity(), tensor)
    assert all(result["double"].numel() == tensor.numel() for result in results)
    assert set(glob.glob("/dev/shm/*")) <= before


def test_partial_is_a_job(world: World) -> None:
    assert [result[2] for result in world.run(functools.partial(describe, 7), 8)] == [(7, 8), (7, 8)]


def test_workers_are_reused(world: World) -> None:
    first = world.run(process_id)
    assert world.run(process_id) == first
    assert os.getpid() not in first


def test_job_may_make_its_own_group(world: World, tmp_path: Path) -> None:
    assert world.run(is_initialized, process_group=False) == [False, False]
    assert world.run(make_own_group, str(tmp_path / "store"), ranks=1, process_group=False) == [1]
    assert world.run(is_initialized, process_group=False) == [False, False]


def test_state_is_reset_between_jobs(world: World) -> None:
    world.run(disturb)
    assert world.run(read_state) == [(torch.float32, 1, None, False)] * 2


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("rank", [0, 1])
def test_error_names_rank_and_carries_traceback(world: World, rank: int) -> None:
    before = world.run(process_id)
    with pytest.raises(RankError, match=f"rank {rank}: KeyError") as caught:
        world.run(fail_on, rank)
    failed, *others = caught.value.errors
    assert failed == rank
    assert caught.value.errors[rank].type_name == "KeyError"
    assert f"planted on {rank}" in caught.value.errors[rank].message
    assert "in fail_on" in caught.value.errors[rank].traceback_text
    assert "in fail_on" in str(caught.value)
    assert all(caught.value.errors[other].type_name == "RuntimeError" for other in others)
    assert world.run(process_id) == before, "a rank that raised, and its peers, need no new process"


def test_peers_of_failed_rank_are_released_at_once(world: World) -> None:
    start = time.monotonic()
    with pytest.raises(RankError):
        world.run(fail_on, 1, ranks=4)
    assert time.monotonic() - start < world.grace_seconds
    assert len(world.run(summed, 1.0, ranks=4)) == 4


def test_a_rank_that_leaves_slowly_is_not_stuck(hasty: World) -> None:
    assert hasty.run(leave_slowly, 2 * hasty.grace_seconds) == hasty.run(process_id)


def test_hanging_peer_of_failed_rank_is_killed_after_grace(hasty: World) -> None:
    before = hasty.run(process_id)
    with pytest.raises(RankError, match="ranks 0, 1 of 2") as caught:
        hasty.run(fail_while_other_sleeps, 0)
    assert caught.value.errors[0].type_name == "KeyError"
    assert caught.value.errors[1].type_name == "Stuck"
    assert "0.5 s after rank 0 failed" in caught.value.errors[1].message
    assert "in fail_while_other_sleeps" in caught.value.errors[1].traceback_text
    after = hasty.run(process_id)
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.parametrize(("job", "stuck"), [(wait_for_godot, 1), (block_in_collective, 1)])
def test_timeout_names_stuck_rank_and_shows_its_stack(hasty: World, job: object, stuck: int) -> None:
    hasty.run(process_id)
    with pytest.raises(RankError, match=rf"rank {stuck} of 2") as caught:
        hasty.run(job, timeout_seconds=1.0)
    assert list(caught.value.errors) == [stuck]
    assert caught.value.errors[stuck].type_name == "Stuck"
    assert "timeout of 1 s" in caught.value.errors[stuck].message
    assert f"in {job.__name__}" in caught.value.errors[stuck].traceback_text
    assert len(hasty.run(summed, 1.0)) == 2


def test_result_that_cannot_be_pickled_is_a_failure(world: World) -> None:
    with pytest.raises(RankError, match="return_unpicklable"):
        world.run(return_unpicklable)
    assert len(world.run(summed, 1.0)) == 2


class Alarm(BaseException):
    """What interrupts a run: stands for Ctrl-C and for the timeout of a test."""


def test_interrupted_run_leaves_no_worker_behind() -> None:
    def raise_alarm(signum: int, frame: object) -> None:
        raise Alarm

    with World(num_ranks_max=1) as world:
        before = world.run(process_id, ranks=1)
        previous = signal.signal(signal.SIGALRM, raise_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(Alarm):
                world.run(time.sleep, 600, ranks=1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert not is_running(before[0])


# ---------------------------------------------------------------- deaths


def test_unexpected_death_is_reported_and_the_rank_replaced(world: World) -> None:
    before = world.run(process_id)
    with pytest.raises(RankError, match=r"rank 1: ProcessDied: exit code -9 \(SIGKILL\)") as caught:
        world.run(die_on, 1)
    assert next(iter(caught.value.errors)) == 1
    after = world.run(process_id)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_survivors_of_expected_death_return(hasty: World) -> None:
    assert hasty.run(die_on, 1, expect_deaths={1}) == ["survived", None]
    assert hasty.run(die_on, 0, expect_deaths={0}) == [None, "survived"]


def test_expected_death_must_happen(hasty: World) -> None:
    with pytest.raises(RankError, match="rank 0: DidNotDie"):
        hasty.run(die_on, -1, expect_deaths={0})


def test_death_after_return_is_a_death(hasty: World) -> None:
    with pytest.raises(RankError, match="rank 1 of 2") as caught:
        hasty.run(die_after_return, 1)
    assert caught.value.errors[1].type_name == "ProcessDied"
    assert len(hasty.run(summed, 1.0)) == 2


def test_exit_is_reported(hasty: World) -> None:
    with pytest.raises(RankError, match="rank 0: SystemExit: 3"):
        hasty.run(exit_on, 0, "sys.exit")
    with pytest.raises(RankError, match="rank 0: ProcessDied: exit code 3"):
        hasty.run(exit_on, 0, "os._exit")


def test_worker_that_died_while_idle_is_replaced(hasty: World) -> None:
    before = hasty.run(process_id)
    os.kill(before[0], signal.SIGKILL)
    os.waitid(os.P_PID, before[0], os.WEXITED | os.WNOWAIT)
    after = hasty.run(process_id)
    assert after[0] != before[0]
    assert after[1] == before[1]


# ---------------------------------------------------------------- wrong use, and the end


def test_wrong_use_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="1 to 4 ranks, not 5"):
        world.run(process_id, ranks=5)
    with pytest.raises(ValueError, match="top level of its module"):
        world.run(lambda: None)
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        world.run(process_id, expect_deaths={2})


def test_closed_world_has_no_processes_and_runs_nothing() -> None:
    world = World(num_ranks_max=1)
    (worker,) = world.run(process_id, ranks=1)
    world.close()
    world.close()
    assert not is_running(worker)
    with pytest.raises(RuntimeError, match="closed"):
        world.run(process_id, ranks=1)


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_workers_end_with_their_parent(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed parent leaves its temporary directory
    parent = subprocess.run(
        [sys.executable, str(script), ending], env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    worker = int(parent.stdout)
    assert parent.returncode == (0 if ending == "exit" else -signal.SIGKILL)
    wait_until_gone(worker)


PARENT = """
import os, signal, sys, threading, time
from shardwise.testing import World

if __name__ == "__main__":
    world = World(num_ranks_max=1)
    print(*world.run(os.getpid, ranks=1), flush=True)
    if sys.argv[1] == "kill":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        world.run(time.sleep, 600, ranks=1)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)
