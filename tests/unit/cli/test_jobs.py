"""Which of several failing ranks a command blames."""

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise.cli import jobs
from shardwise.cli.exits import CommandError
from shardwise.cli.jobs import Job, Outcome, call_on_ranks, outcome_path, write_json
from shardwise.cli.launch import RanksFailedError


def failure(rank: int, exit_code: int) -> ProcessFailure:
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exit_code, error_file="nowhere")


def test_rank_that_failed_is_named_not_those_that_were_ended_with_it() -> None:
    error = RanksFailedError({0: failure(0, -signal.SIGTERM), 1: failure(1, 3)}, num_ranks=2)
    assert str(error) == "rank 1 of 2 failed with exit code 3."
    assert not error.is_killed


def test_rank_that_was_killed_is_the_cause_of_errors_elsewhere() -> None:
    error = RanksFailedError({0: failure(0, 1), 1: failure(1, -signal.SIGKILL), 2: failure(2, 1)}, num_ranks=3)
    assert str(error) == "rank 1 of 3 was killed by SIGKILL."
    assert error.is_killed


def test_rank_that_was_terminated_from_outside_is_named() -> None:
    assert str(RanksFailedError({1: failure(1, -signal.SIGTERM)}, 2)) == "rank 1 of 2 was killed by SIGTERM."


def run_job(monkeypatch: pytest.MonkeyPatch, outcomes: dict[int, Outcome], exit_codes: dict[int, int]) -> object:
    def launch(command: list[str], num_ranks: int, **options: object) -> None:
        for rank, outcome in outcomes.items():
            write_json(outcome_path(Path(command[-1]), rank), outcome)
        if any(exit_codes.values()):
            raise RanksFailedError({rank: failure(rank, code) for rank, code in exit_codes.items() if code}, num_ranks)

    monkeypatch.setattr(jobs, "launch", launch)
    return call_on_ranks(Job("module:function", {"x": 1}), num_ranks=2)


def test_result_is_that_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_job(monkeypatch, {0: Outcome({"a": [1]}), 1: Outcome("other")}, {0: 0, 1: 0}) == {"a": [1]}


@pytest.mark.parametrize("is_expected", [True, False])
def test_earliest_error_is_reported(monkeypatch: pytest.MonkeyPatch, is_expected: bool) -> None:
    outcomes = {
        0: Outcome(error="lost a peer", exit_code=1, time_ns=20),
        1: Outcome(error="bad plan", exit_code=2, traceback="Traceback", is_expected=is_expected, time_ns=10),
    }
    with pytest.raises(CommandError, match=r"^rank 1: bad plan$") as caught:
        run_job(monkeypatch, outcomes, {0: 1, 1: 2})
    assert caught.value.exit_code == 2
    assert caught.value.detail == ("" if is_expected else "Traceback")


def test_killed_rank_comes_before_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RanksFailedError, match="rank 1 of 2 was killed by SIGKILL"):
        run_job(monkeypatch, {0: Outcome(error="lost a peer", exit_code=1, time_ns=5)}, {0: 1, 1: -signal.SIGKILL})


def test_rank_that_left_no_word_is_reported_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RanksFailedError, match="rank 0 of 2 failed with exit code 7"):
        run_job(monkeypatch, {}, {0: 7, 1: 0})
