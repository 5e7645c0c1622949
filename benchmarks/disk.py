"""State on disk: the update against a plain program that moves the same bytes, and steps against compute and I/O; all in turns."""

from __future__ import annotations

import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workloads import WORKLOADS, Workload

_PIECE_BYTES = 8 * 2**20


class Plain:
    """A file that is read and written from one end to the other, past the page cache: what the disk can do.

    The same bytes in three ways, of which the fastest counts: all reads before all writes, by turns, and side by side.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._num_pieces = max(1, round(num_bytes / _PIECE_BYTES))
        self._file = os.open(folder / f"plain-{dist.get_rank()}", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._pages = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(2)]
        self.num_bytes = 2 * self._num_pieces * _PIECE_BYTES
        self._ways: tuple[Callable[[], None], ...] = (self._one_after_the_other, self._by_turns, self._side_by_side)
        self._seconds: list[list[float]] = [[] for _ in self._ways]
        self._write_all()

    def run(self) -> None:
        """Move all bytes in and out once, in every way."""
        for way, seconds in zip(self._ways, self._seconds, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            way()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)

    @property
    def seconds(self) -> float:
        """Of the fastest way. The first round of each is not counted."""
        return min(statistics.median(seconds[1:]) for seconds in self._seconds)

    def _read(self, number: int) -> None:
        if os.preadv(self._file, [self._pages[0]], number * _PIECE_BYTES) != _PIECE_BYTES:
            raise RuntimeError("A plain read of the benchmark was short.")

    def _write(self, number: int) -> None:
        if os.pwritev(self._file, [self._pages[1]], number * _PIECE_BYTES) != _PIECE_BYTES:
            raise RuntimeError("A plain write of the benchmark was short.")

    def _read_all(self) -> None:
        for number in range(self._num_pieces):
            self._read(number)

    def _write_all(self) -> None:
        for number in range(self._num_pieces):
            self._write(number)

    def _one_after_the_other(self) -> None:
        self._read_all()
        self._write_all()

    def _by_turns(self) -> None:
        for number in range(self._num_pieces):
            self._read(number)
            self._write(number)

    def _side_by_side(self) -> None:
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(self._read_all), threads.submit(self._write_all)]:
                done.result()

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)


class _Training:
    """A model that is trained with its optimizer's state in some place."""

    def __init__(self, load: Workload, **plan: Any) -> None:
        import shardwise

        self.load = load
        self.model = load.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.handle = shardwise.shard(self.model, self.optimizer, stage=3, **plan)

    @property
    def num_state_bytes(self) -> int:
        """Of Adam's two moments, this rank's part."""
        return 8 * sum(param.numel() for group in self.optimizer.param_groups for param in group["params"])

    def backward(self, number: int) -> None:
        tokens, targets = self.load.batch(number, dist.get_rank())
        self.model(tokens, targets).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        """Until all that was written is on disk."""
        disk = self.handle.engine.disk
        if disk is not None:
            disk.settle()


def update(workload: str, num_rounds: int) -> dict[str, float]:
    """Bytes a second that an update moves to and from disk, until all is written, and of the plain program."""
    folder = _shared_folder()
    try:
        training = _Training(WORKLOADS[workload], tiers={"optim": "disk"}, folder=str(folder / "state"))
        plain = Plain(folder, training.num_state_bytes)
        seconds, moved = [], []
        for number in range(num_rounds + 2):
            training.backward(number)
            disk: Any = training.handle.engine.disk
            before = disk.read_bytes + disk.written_bytes
            dist.barrier()
            begin = time.perf_counter()
            training.update()
            training.settle()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
            moved.append(disk.read_bytes + disk.written_bytes - before)
            plain.run()
        ours = moved[-1] / statistics.median(seconds[2:])
        limit = plain.num_bytes / plain.seconds
        plain.close()
        return {"part_of_limit": ours / limit, "gigabytes_per_second": ours / 1e9, "limit_gigabytes_per_second": limit / 1e9}
    finally:
        _remove(folder)


def steps(workload: str, num_tokens: int, num_rounds: int, num_steps: int, plan: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step with the optimizer on disk; of one with all in memory; and of a plain program for the same bytes."""
    folder = _shared_folder()
    try:
        load = replace(WORKLOADS[workload], num_tokens=num_tokens)
        memory = _Training(load)
        on_disk = _Training(load, tiers={"optim": "disk"}, folder=str(folder / "state"), **plan)
        plain = Plain(folder, on_disk.num_state_bytes)
        seconds: dict[str, list[float]] = {"memory": [], "disk": []}
        for number in range(num_rounds + 1):
            for name, training in (("memory", memory), ("disk", on_disk)):
                dist.barrier()
                begin = time.perf_counter()
                for step in range(num_steps):
                    training.backward(number * num_steps + step)
                    training.update()
                training.settle()
                dist.barrier()
                seconds[name].append((time.perf_counter() - begin) / num_steps)
            plain.run()
        found = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        staging_bytes = on_disk.handle.engine.disk.report.budget_bytes
        result = {
            "step_seconds": found["disk"],
            "compute_seconds": found["memory"],
            "io_seconds": plain.seconds,
            "ratio": found["disk"] / max(found["memory"], plain.seconds),
            "staging_part": staging_bytes / on_disk.num_state_bytes,
        }
        plain.close()
        return result
    finally:
        _remove(folder)


def _shared_folder() -> Path:
    """A folder that rank 0 makes for all."""
    names = [tempfile.mkdtemp(prefix="shardwise-bench-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, 0)
    return Path(str(names[0]))


def _remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
