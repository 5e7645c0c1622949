"""What all tests share: one thread per process, one pool of ranks per session, and no process left behind."""

import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch

from shardwise.devices.pool import Poison
from shardwise.testing import World


def pytest_configure() -> None:
    # The ranks of a test share the cores of one machine; workers inherit the environment.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    Poison.enabled = True  # Workers do the same: released memory is filled with NaN in every test.


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """The session's pool of ranks: `world.run(fn, *args, ranks=2)`."""
    with World(num_ranks_max=4) as world:
        yield world


@pytest.fixture(scope="session")
def sim_world() -> Iterator[World]:
    """The same on simulated devices: processes of their own, since a device cannot be taken away again."""
    with World(num_ranks_max=4, num_devices=4) as world:
        yield world


@pytest.hookimpl(trylast=True)  # after the teardown of session fixtures, which an aborted session does at its finish
def pytest_sessionfinish(session: pytest.Session) -> None:
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join()
    if left:
        names = ", ".join(f"{process.name} (pid {process.pid})" for process in left)
        pytest.exit(f"Worker processes outlived the session: {names}", returncode=pytest.ExitCode.TESTS_FAILED)
