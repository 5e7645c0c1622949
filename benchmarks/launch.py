"""Starts ranks for one measurement and brings their results back. Every measurement has processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ANSWER = "answer: "
"""How lines begin in which a rank says what it measured."""

MALLOC_SETTINGS: dict[str, dict[str, str]] = {"default": {}, "mmap": {"MALLOC_MMAP_THRESHOLD_": "65536"}}
"""glibc's own behaviour, and one that gives every larger block back to the kernel at once."""


class MeasurementError(RuntimeError):
    """A rank of a measurement failed; its last words are the message."""


def measure(
    what: str, arguments: Mapping[str, Any], *, ranks: int, malloc: str = "default", timeout_seconds: float = 1800.0
) -> list[dict[str, Any]]:
    """Call ``benchmarks.ranks.<what>(**arguments)`` on fresh ranks; returns what each of them measured."""
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"what": what, "arguments": dict(arguments)}))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **MALLOC_SETTINGS[malloc]}
        processes = [_start(folder, rank, ranks, environment) for rank in range(ranks)]
        try:
            _wait(processes, folder, timeout_seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()
        return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(ranks)]


class Serving:
    """A system in processes of its own, which does a step when it is told to and rests in between."""

    def __init__(self, workload: str, system: str, *, ranks: int) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="shardwise-bench-")
        self._folder = Path(self._temporary.name)
        job = {"what": "serve", "arguments": {"workload": workload, "system": system}}
        (self._folder / "job.json").write_text(json.dumps(job))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._processes = [_start(self._folder, rank, ranks, environment, subprocess.PIPE) for rank in range(ranks)]

    def step(self, number: int) -> dict[str, Any]:
        """One step on all ranks; returns what rank 0 measured."""
        for rank, process in enumerate(self._processes):
            try:
                if process.stdin is not None:
                    process.stdin.write(f"{number}\n".encode())
                    process.stdin.flush()
            except BrokenPipeError:
                raise self._failed(rank) from None
        answers = [self._answer_of(rank) for rank in range(len(self._processes))]
        return answers[0]

    def _answer_of(self, rank: int) -> dict[str, Any]:
        stdout = self._processes[rank].stdout
        for line in stdout if stdout is not None else ():
            text = line.decode(errors="replace")
            if text.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(text.removeprefix(ANSWER))
                return answer
        raise self._failed(rank)

    def _failed(self, rank: int) -> MeasurementError:
        code = self._processes[rank].wait()
        killed = " (killed: perhaps memory has run out)" if code == -signal.SIGKILL else ""
        return MeasurementError(f"Rank {rank} failed{killed}: {_last_words(self._folder, rank)}")

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._temporary.cleanup()


def _start(
    folder: Path, rank: int, ranks: int, environment: dict[str, str], pipe: int | None = None
) -> subprocess.Popen[bytes]:
    own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    with (folder / f"log-{rank}.txt").open("wb") as log:
        command = [sys.executable, "-m", "benchmarks.ranks", str(folder)]
        return subprocess.Popen(command, env=own, stdin=pipe, stdout=pipe or log, stderr=log)


def _last_words(folder: Path, rank: int) -> str:
    words = (folder / f"log-{rank}.txt").read_text(errors="replace").strip().split("\n")
    return "\n".join(words[-15:])


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    wrong = [rank for rank, process in enumerate(processes) if process.poll() != 0]
    if wrong:
        raise MeasurementError(f"Rank {wrong[0]} failed: {_last_words(folder, wrong[0])}")
