"""A run folder is never overwritten unasked, and what is kept can be read."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.recipes.run_folder import check_folder, make_folder, name_folder
from tests.unit.privileges import as_nobody


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """A folder that its owner alone may write to, and others may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_new_and_empty_folders_can_be_used(tmp_path: Path) -> None:
    for path in (tmp_path / "new" / "deeper", tmp_path):
        check_folder(path, is_forced=False)
    assert list(tmp_path.iterdir()) == []


def test_old_run_is_replaced_only_when_forced(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", "seed = 1\n")
    folder.add_metrics({"step": 1})
    folder.write_result({"loss": 1})
    folder.write_rank(3, {"held_bytes": {}})
    (folder.path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds an earlier run or other files.*--force"):
        check_folder(folder.path, is_forced=False)
    check_folder(folder.path, is_forced=True)
    make_folder(folder.path, "seed = 2\n")
    left = sorted(path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*") if path.is_file())
    assert left == ["config.toml", "notes.txt"]
    assert folder.config.read_text() == "seed = 2\n"


def test_folder_that_is_no_run_is_not_replaced_even_when_forced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="no run"):
        check_folder(tmp_path, is_forced=True)


def test_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        check_folder(tmp_path / "file", is_forced=True)
    with pytest.raises(UsageError, match=r"cannot be made: .*file is a file|cannot be used: Not a directory"):
        check_folder(tmp_path / "file" / "run", is_forced=True)


def test_folder_without_permission_is_refused_before_anything_is_written(closed_folder: Path) -> None:
    with as_nobody(), pytest.raises(UsageError, match=f"no permission to write to {closed_folder}"):
        check_folder(closed_folder / "runs" / "new", is_forced=False)
    with as_nobody(), pytest.raises(UsageError, match="cannot be used: Permission denied"):
        make_folder(closed_folder / "run", "")


def test_names_are_new_each_time(tmp_path: Path) -> None:
    first = name_folder(tmp_path, "gpt")
    first.mkdir()
    second = name_folder(tmp_path, "gpt")
    assert first.name.startswith("gpt-")
    assert second != first


def test_last_step_is_read_from_the_metrics(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", "")
    assert folder.last_step() == 0
    for values in ({"step": 4, "loss": 2.5}, {"step": 5, "loss": 2.25}, {"step": 5, "validation_loss": 2.0}):
        folder.add_metrics(values)
    assert folder.last_step() == 5
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [4, 5, 5]


def test_rank_that_said_nothing_held_nothing_known(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", "")
    assert folder.read_rank(0) == {}
    folder.write_rank(0, {"held_bytes": {"optimizer state": 5}})
    assert folder.read_rank(0) == {"held_bytes": {"optimizer state": 5}}
