"""``python -m shardwise.cli.rank DIRECTORY``: the inside of one rank of a job. The launcher starts it, people do not."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.save import wait_for_all
from shardwise.cli.exits import exit_code_of
from shardwise.cli.jobs import Job, Outcome, outcome_path, read_job, write_json
from shardwise.core.errors import ShardwiseError
from shardwise.wire.host_comm import farewell


def main(directory: Path) -> int:
    """Do the job of a directory as the rank that the environment names."""
    rank = int(os.environ["RANK"])
    outcome = _perform(read_job(directory))
    write_json(outcome_path(directory, rank), outcome)
    return outcome.exit_code


def _perform(job: Job) -> Outcome:
    try:
        dist.init_process_group("gloo")
        result = _find_function(job.function)(**job.arguments)
        wait_for_all()
        dist.destroy_process_group()
    except Exception as error:
        is_expected = isinstance(error, ShardwiseError)
        text = str(error) if is_expected else f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return Outcome(None, text, exit_code_of(error), trace, is_expected, time.time_ns())
    return Outcome(result)


def _find_function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


if __name__ == "__main__":
    exit_code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    if not exit_code:
        farewell()
    # Not sys.exit: after an error, threads that wait in a collective would keep the process alive; without one, a thread of gloo
    # that lets go of a tensor while the interpreter ends would abort it.
    os._exit(exit_code)
