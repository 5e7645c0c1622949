"""Calls a function of this package on every rank of a fresh process group, and brings rank 0's result back.

Job and results cross as JSON files in a private directory. What happens inside a rank is in `rank`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.cli.exits import CommandError
from shardwise.cli.launch import RanksFailedError, launch


@dataclass(frozen=True)
class Job:
    """A function as ``package.module:function`` and its keyword arguments."""

    function: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a job on one rank: a result, or an error and the moment at which it was raised."""

    result: Any = None
    error: str = ""
    exit_code: int = 0
    traceback: str = ""
    is_expected: bool = True
    time_ns: int = 0


def write_json(path: Path, value: Job | Outcome) -> None:
    """Write a job or an outcome to a file."""
    path.write_text(json.dumps(asdict(value)), encoding="utf-8")


def read_job(directory: Path) -> Job:
    """The job of a directory."""
    return Job(**json.loads(job_path(directory).read_text(encoding="utf-8")))


def job_path(directory: Path) -> Path:
    """Where the job is written."""
    return directory / "job.json"


def outcome_path(directory: Path, rank: int) -> Path:
    """Where a rank writes its outcome."""
    return directory / f"rank-{rank}.json"


def call_on_ranks(job: Job, num_ranks: int, *, port: int = 0, is_debug: bool = False) -> Any:
    """Call a function on all ranks and return what it returned on rank 0.

    Raises:
        CommandError: It raised on a rank: the message names the first one.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as name:
        directory = Path(name)
        write_json(job_path(directory), job)
        command = [sys.executable, "-u", "-m", "shardwise.cli.rank", name]
        try:
            launch(command, num_ranks, pass_signal=False, port=port, is_debug=is_debug)
        except RanksFailedError as error:
            first = None if error.is_killed else _first_error(directory, num_ranks, is_debug)
            raise first or error from error
        return _read_outcome(outcome_path(directory, 0)).result


def _first_error(directory: Path, num_ranks: int, is_debug: bool) -> CommandError | None:
    """The error that came first: the others may be its consequences. None if no rank could say."""
    paths = {rank: outcome_path(directory, rank) for rank in range(num_ranks)}
    outcomes = {rank: _read_outcome(path) for rank, path in paths.items() if path.exists()}
    errors = {rank: outcome for rank, outcome in outcomes.items() if outcome.error}
    if not errors:
        return None
    rank, outcome = min(errors.items(), key=lambda item: item[1].time_ns)
    is_traced = is_debug or not outcome.is_expected
    return CommandError(f"rank {rank}: {outcome.error}", outcome.exit_code, outcome.traceback if is_traced else "")


def _read_outcome(path: Path) -> Outcome:
    return Outcome(**json.loads(path.read_text(encoding="utf-8")))
