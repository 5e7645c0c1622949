"""``shardwise doctor``: what it writes, where it keeps the profile, and that nothing stays behind."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from shardwise.planning.machine import COLLECTIVES
from shardwise.planning.machine_file import load_machine
from tests.e2e.commands import Answer, descendants, finish, is_running, shardwise, start

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answer, Path]:
    """One quick measurement, looked at by several tests."""
    folder = tmp_path_factory.mktemp("doctor")
    return shardwise("doctor", "--quick", "--json", "--output", "machine.json", folder=folder), folder


def test_json_is_all_of_standard_output(measured: tuple[Answer, Path]) -> None:
    answer, folder = measured
    assert answer.exit_code == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert set(told) == {"findings", "facts", "profile", "path"}
    assert [facts["rank"] for facts in told["facts"]] == [0, 1]
    assert all(finding["remedy"] for finding in told["findings"])
    assert (folder / told["path"]).read_text()


def test_the_profile_is_what_the_planner_reads(measured: tuple[Answer, Path]) -> None:
    _, folder = measured
    machine = load_machine(folder / "machine.json")
    assert machine.is_measured
    assert machine.peak("float32") > 1e8
    assert machine.memory_bytes_per_second > 1e8
    assert machine.disk_read_bytes_per_second is not None
    assert {each.name for each in machine.collectives if each.num_ranks == 2} == set(COLLECTIVES)


def test_files_for_the_disk_are_gone(measured: tuple[Answer, Path]) -> None:
    _, folder = measured
    assert sorted(path.name for path in folder.iterdir()) == ["machine.json", "stderr", "stdout"]


def test_an_output_that_is_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    answer = shardwise("doctor", "--output", ".", folder=tmp_path)
    assert answer.exit_code == 2
    assert "--output . is a folder. Give the path of a file." in answer.stderr


def test_an_interrupt_ends_all_ranks_and_leaves_nothing(tmp_path: Path) -> None:
    process = start("doctor", "--output", "machine.json", folder=tmp_path)
    deadline = time.monotonic() + 120
    # It has begun to measure when the first part is told of.
    while ":" not in (tmp_path / "stderr").read_text() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    ranks = descendants(process.pid)
    is_heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    process.send_signal(signal.SIGINT if is_heard else signal.SIGTERM)
    answer = finish(process, tmp_path)
    assert answer.exit_code == 128 + (signal.SIGINT if is_heard else signal.SIGTERM), answer.stderr
    assert len(ranks) >= 2
    assert not [pid for pid in ranks if is_running(pid)]
    assert sorted(os.listdir(tmp_path)) == ["stderr", "stdout"]
