"""Text is found wherever it may be, and what is no text is refused with a reason."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.recipes.catalog import load_recipe
from shardwise.recipes.requirements import check_requirements
from shardwise.recipes.text import find_text, is_binary, read_text, standard_library
from tests.unit.privileges import as_nobody


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def plant(folder: Path, num_files: int = 60) -> None:
    for index in range(num_files):
        (folder / f"note_{index}.txt").write_text(f"note {index:02}\n")
    (folder / "deeper" / "__pycache__").mkdir(parents=True)
    (folder / "deeper" / "inner.md").write_text("# in it\n")
    (folder / "deeper" / "__pycache__" / "cache.txt").write_text("skipped")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("skipped")
    (folder / ".hidden").write_text("skipped")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (folder / "empty.txt").touch()


def test_folder_gives_its_text_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    plant(tmp_path)
    source = find_text(str(tmp_path))
    names = [path.relative_to(tmp_path).as_posix() for path in source.files]
    assert names == sorted(names)
    assert len(names) == 61
    assert "deeper/inner.md" in names
    assert source.num_bytes == 61 * 8


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    plant(tmp_path)
    text = read_text(find_text(str(tmp_path)), 10**6)
    train, held_out = text.train.splitlines(), text.held_out.splitlines()
    assert len(train) > len(held_out) > 0
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 61


def test_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    whole = bytes(range(32, 127)) * 100
    (tmp_path / "book.txt").write_bytes(whole)
    text = read_text(find_text(str(tmp_path / "book.txt")), 10**6)
    assert text.train + text.held_out == whole
    assert len(text.held_out) == len(whole) // 20


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    plant(tmp_path)
    text = read_text(find_text(str(tmp_path)), 100)
    assert len(text.train) + len(text.held_out) == 100


def test_standard_library_leaves_out_tests_and_packages() -> None:
    source = standard_library()
    parts = {part for path in source.files for part in path.relative_to(source.folder).parts}
    assert not parts & {"site-packages", "test", "tests", "__pycache__"}
    assert "argparse.py" in parts
    text = read_text(source, source.num_bytes)
    assert len(text.train) > 1_000_000
    assert 100_000 < len(text.held_out) < len(text.train) // 4


@pytest.mark.parametrize(
    "content", [b"\0\0text", "text".encode("utf-16"), bytes(range(1, 9)) * 50], ids=["zeros", "utf-16", "control"]
)
def test_binary_is_known_by_its_beginning(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert is_binary(tmp_path / "file")
    with pytest.raises(UsageError, match=r"file is binary, not text\. Give plain text"):
        find_text(str(tmp_path / "file"))


@pytest.mark.parametrize("content", ["Grüße, 世界\n".encode(), "Grüße".encode("latin-1"), b"a\tb\x1b[0m\r\n"])
def test_text_of_any_language_is_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert find_text(str(tmp_path / "file")).num_bytes == len(content)


def test_missing_and_empty_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "binaries").mkdir()
    (tmp_path / "binaries" / "a.bin").write_bytes(b"\0")
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "nowhere.txt": "does not exist",
        "empty.txt": "is an empty file",
        "folder": "holds no files",
        "binaries": "holds 1 files, all of them empty or binary",
        "pipe": "neither a file nor a folder",
    }.items():
        with pytest.raises(UsageError, match=message) as caught:
            find_text(str(tmp_path / name))
        assert name in str(caught.value)
        assert "Give " in str(caught.value)


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_data_without_permission_is_refused(open_folder: Path, is_folder: bool) -> None:
    secret = open_folder / "secret"
    if is_folder:
        secret.mkdir(mode=0o700)
    else:
        secret.write_text("text")
        secret.chmod(0)
    if is_folder and os.geteuid() != 0:
        secret.chmod(0)
    with as_nobody(), pytest.raises(UsageError, match=r"secret cannot be read: Permission denied"):
        find_text(str(secret))


def test_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="loop cannot be read"):
        find_text(str(tmp_path / "loop"))


def test_text_must_hold_a_sequence_to_hold_out(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    settings = {"data.path": str(path), "model.context": "8"}
    path.write_text("x" * 179)
    with pytest.raises(UsageError, match=r"holds 179 bytes but at least 180 are needed"):
        check_requirements(load_recipe("gpt", settings))
    path.write_text("x" * 180)
    check_requirements(load_recipe("gpt", settings))
