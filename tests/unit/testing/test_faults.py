"""Faults strike the rank and the step that they were planted at, once."""

import pickle
import time

import pytest
import torch.distributed as dist

from shardwise.testing import Fault, InjectedFault, RankError, World, fail_at


def loop(fault: Fault, num_steps: int = 4) -> int:
    num_done = 0
    for step in range(num_steps):
        fault(step)
        num_done += 1
    return num_done


def loop_and_retry(fault: Fault) -> tuple[int, int]:
    num_failures = 0
    try:
        loop(fault)
    except InjectedFault:
        num_failures += 1
    return num_failures, loop(fault)


def time_of_loop(fault: Fault) -> float:
    start = time.monotonic()
    loop(fault)
    seconds = time.monotonic() - start
    dist.barrier()
    return seconds


def test_fault_survives_pickling() -> None:
    fault = fail_at(rank=1, step=2, action="stall", seconds=3.0)
    assert pickle.loads(pickle.dumps(fault)) == fault


def test_without_a_process_group_the_rank_is_zero() -> None:
    assert loop(fail_at(rank=1, step=2, action="raise")) == 4
    with pytest.raises(InjectedFault, match="rank 0 at step 2"):
        loop(fail_at(rank=0, step=2, action="raise"))


def test_unknown_action_is_refused() -> None:
    with pytest.raises(ValueError, match="kill, raise, stall, not 'explode'"):
        fail_at(rank=0, step=0, action="explode")  # type: ignore[arg-type]


@pytest.mark.dist
def test_raise_strikes_its_rank_and_step(world: World) -> None:
    with pytest.raises(RankError) as caught:
        world.run(loop, fail_at(rank=1, step=2, action="raise"))
    assert list(caught.value.errors) == [1]
    assert caught.value.errors[1].type_name == "InjectedFault"
    assert "rank 1 at step 2" in caught.value.errors[1].message


@pytest.mark.dist
def test_fault_strikes_once(world: World) -> None:
    assert world.run(loop_and_retry, fail_at(rank=1, step=2, action="raise")) == [(0, 4), (1, 4)]


@pytest.mark.dist
def test_kill_ends_its_rank(world: World) -> None:
    assert world.run(loop, fail_at(rank=1, step=2), expect_deaths={1}) == [4, None]


@pytest.mark.dist
def test_stall_delays_its_rank(world: World) -> None:
    first, second = world.run(time_of_loop, fail_at(rank=1, step=2, action="stall", seconds=0.5))
    assert first < 0.5 <= second
