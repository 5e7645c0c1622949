"""Lines of records: what was written is read back, and of a damaged file all that is whole."""

from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.core.records import SCHEMA, DiskUse
from shardwise.telemetry.files import JsonLines, read_log
from tests.unit.report.made import header, record, trace


def written(path: Path, num_steps: int = 3) -> Path:
    log = JsonLines(path / "0.jsonl")
    log.start(header(0, 1))
    for step in range(1, num_steps + 1):
        log.step(record(step, 0))
    log.trace(trace(num_steps, 0))
    log.close()
    return path / "0.jsonl"


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    log = read_log(written(tmp_path))
    assert log.header == header(0, 1) and log.problems == []
    assert log.steps == [record(step, 0) for step in (1, 2, 3)]
    assert log.traces == [trace(3, 0)]


@pytest.mark.parametrize("num_lost", [1, 7, 40])
def test_a_file_that_was_cut_off_keeps_all_whole_lines(tmp_path: Path, num_lost: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-num_lost])
    log = read_log(path)
    assert [record.step for record in log.steps] == [1, 2, 3]
    assert len(log.traces) + len(log.problems) == 1
    if num_lost > 1:
        assert "was ended while it was written" in log.problems[0]


def test_foreign_lines_are_named_and_left_out(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(
            [
                lines[0],
                "not json",
                '{"is": "step"}',
                '{"is": "something new"}',
                "[1]",
                '{"is": "note", "leak": {}}',
                *lines[1:],
                "",
            ]
        )
    )
    log = read_log(path)
    assert [record.step for record in log.steps] == [1, 2, 3]
    assert [problem.split(" of ")[0] for problem in log.problems] == ["line 2", "line 3", "line 5", "line 6"]


def test_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "0.jsonl")
    log.start(header(0, 1, schema=SCHEMA + 1))
    log.close()
    with pytest.raises(UsageError, match=f"schema {SCHEMA + 1}"):
        read_log(tmp_path / "0.jsonl")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        JsonLines(tmp_path / "file" / "0.jsonl")


def test_use_of_the_disk_comes_back_and_records_from_before_it_was_counted_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, num_steps=1)
    assert '"disk":null' in path.read_text()
    lines = path.read_text()
    path.write_text(lines.replace('"disk":null', '"disk":{"read_bytes":3,"written_bytes":4}'))
    assert read_log(path).steps == [record(1, 0, disk=DiskUse(3, 4))]
    path.write_text(lines.replace(',"disk":null', "").replace('"waiting for the disk":0.0,', ""))
    (older,) = read_log(path).steps
    assert older.disk is None and older.disk_seconds == 0.0


def test_unknown_keys_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, num_steps=1)
    path.write_text(path.read_text().replace('"is":"step",', '"is":"step","added later":1,'))
    assert read_log(path).steps == [record(1, 0)]
