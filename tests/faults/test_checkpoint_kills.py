"""Ranks are killed at any moment of saves: the newest complete checkpoint always loads, and training ends in the same bits."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.folders import find_checkpoints, place_of, read_manifest
from shardwise.checkpoint.reader import Reader
from tests.distributed.training import Training
from tests.faults.savers import NUM_STEPS, digest_of, digests, save_without_end

pytestmark = pytest.mark.fault
NUM_KILLS = 40
NUM_RANKS = 2


@pytest.fixture
def ranks() -> Any:
    """Starts ranks, from a process that has imported everything; none of them outlives the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.savers"])
    started: list[BaseProcess] = []

    def start(function: Any, *args: Any) -> list[BaseProcess]:
        found = [context.Process(target=function, args=(rank, NUM_RANKS, *args)) for rank in range(NUM_RANKS)]
        for process in found:
            process.start()
        started.extend(found)
        return found

    yield start
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Progress:
    """What a life of the ranks has brought about in their folder, so that each is ended after it has done something."""

    def __init__(self, folder: Path, processes: list[BaseProcess]) -> None:
        self._folder = folder
        self._processes = processes
        self._left = set(self._unpublished())
        self._published = self._newest()

    def _unpublished(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if ".partial-" in name]

    def _newest(self) -> int:
        return max(
            (int(name.removeprefix("step-")) for name in os.listdir(self._folder) if name.startswith("step-")), default=0
        )

    def is_saving(self) -> bool:
        """Whether a save has begun that has not ended; what earlier lives have left is none."""
        return any(name not in self._left for name in self._unpublished())

    def has_saved(self) -> bool:
        """Whether a step was published that was not there before."""
        return self._newest() > self._published

    def wait_for(self, event: Callable[[], bool]) -> None:
        """However long it takes: the machine may be busy."""
        while not event():
            assert all(process.is_alive() for process in self._processes), "a rank has ended by itself"
            time.sleep(0.0005)


def kill(processes: list[BaseProcess], draw: random.Random) -> None:
    """One rank, and a little later the rest; or all at once."""
    first = draw.choice([None, *range(NUM_RANKS)])
    for rank, process in enumerate(processes):
        if first in (None, rank):
            os.kill(process.pid or 0, signal.SIGKILL)
    if first is not None:
        time.sleep(draw.uniform(0.0, 0.15))
    for process in processes:
        process.kill()
        process.join()


def check_all(folder: Path) -> int:
    """Every complete checkpoint is whole; returns the newest one's step."""
    found = find_checkpoints(place_of(folder))
    assert found
    for each in found:
        with Reader(each.place, read_manifest(each.place)) as reader:
            reader.check_all()
    return found[0].summary.step


def test_kills_lose_nothing_that_was_saved(ranks: Any, tmp_path: Path) -> None:
    draw = random.Random(20)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    training, seen = Training(2, seed=9, num_steps=NUM_STEPS), {}
    newest = num_during_saves = 0
    for number in range(NUM_KILLS):
        processes = ranks(save_without_end, str(tmp_path / f"store-{number}"), str(folder), number % 4)
        progress = Progress(folder, processes)
        # In turns: in the middle of a save, or at any moment of the steps after one.
        progress.wait_for(progress.is_saving if number % 2 else progress.has_saved)
        time.sleep(draw.uniform(0.0, 0.01 if number % 2 else 0.2))
        kill(processes, draw)
        num_during_saves += progress.is_saving()
        step = check_all(folder)
        assert step >= newest, "a checkpoint that was there is gone"
        newest = step
        loaded = training.load(str(folder))
        assert loaded.step == step == training.sharded.num_updates
        seen[step] = digest_of(training)
    assert len(seen) >= NUM_KILLS // 2 and num_during_saves > NUM_KILLS // 8
    answer = tmp_path / "digests"
    for process in ranks(digests, str(tmp_path / "store"), str(answer), newest):
        process.join()
    expected = dict(enumerate(map(int, answer.read_text().split()), start=1))
    assert seen == {step: expected[step] for step in seen}
    training.save(str(folder / "last"))
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
