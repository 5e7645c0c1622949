"""Finds and reads text: a file, a folder, or Python's standard library. Bytes only; knows nothing of tensors or models."""

from __future__ import annotations

import os
import stat
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import UsageError

HELD_OUT_ONE_IN = 20
_SNIFFED_BYTES = 8192
_SKIPPED_IN_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_CONTROL = bytes(code for code in range(32) if code not in b"\t\n\r\f\b\x1b")


@dataclass(frozen=True)
class Source:
    """Files of text, in the order of their names below a folder.

    Args:
        folder: What names are relative to.
        files: Paths of the files.
        num_bytes: How much they hold together.
    """

    folder: Path
    files: tuple[Path, ...]
    num_bytes: int


@dataclass(frozen=True)
class Text:
    """Two runs of bytes: one to train on, one held out."""

    train: bytes
    held_out: bytes


def find_text(path: str) -> Source:
    """The text at a path that a user gave, or Python's standard library for the empty one. Nothing is read but beginnings.

    Raises:
        UsageError: It is missing, empty, binary or unreadable.
    """
    if not path:
        return standard_library()
    place = Path(path)
    try:
        mode = place.stat().st_mode
        if stat.S_ISDIR(mode):
            return _find_in_folder(place)
        if not stat.S_ISREG(mode):
            raise UsageError(f"The data {path} is neither a file nor a folder. Give the path of text.")
        if place.stat().st_size == 0:
            raise UsageError(f"The data {path} is an empty file. Give a file with text in it, or a folder of such files.")
        if is_binary(place):
            raise UsageError(
                f"The data {path} is binary, not text. Give plain text such as UTF-8; UTF-16 and archives must be converted first."
            )
        return Source(place.parent, (place,), place.stat().st_size)
    except FileNotFoundError as error:
        raise UsageError(f"The data {path} does not exist. Give the path of a text file or of a folder.") from error
    except OSError as error:
        raise UsageError(f"The data {path} cannot be read: {error.strerror}. Check its permissions.") from error


def standard_library() -> Source:
    """The source of the running Python's standard library, without its tests and without installed packages."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in _walk(folder, _SKIPPED_IN_LIBRARY) if path.suffix == ".py"]
    return Source(folder, tuple(files), sum(path.stat().st_size for path in files))


def is_binary(path: Path) -> bool:
    """Whether a file begins as no text does: with zero bytes, or with many control characters."""
    with path.open("rb") as file:
        head = file.read(_SNIFFED_BYTES)
    num_control = len(head) - len(head.translate(None, _CONTROL))
    return b"\0" in head or num_control * 10 > len(head)


def read_text(source: Source, max_bytes: int) -> Text:
    """Read no more than so many bytes. Where there are many files, some are held out whole, by a checksum of their names;
    else the end of the text is held out."""
    contents, num_left = [], max_bytes
    for path in source.files:
        if num_left <= 0:
            break
        contents.append((path.relative_to(source.folder).as_posix(), path.read_bytes()[:num_left]))
        num_left -= len(contents[-1][1])
    held_out = b"".join(text for name, text in contents if _is_held_out(name))
    train = b"".join(text for name, text in contents if not _is_held_out(name))
    whole = train + held_out
    if len(whole) // (4 * HELD_OUT_ONE_IN) <= len(held_out) <= len(whole) // 4:
        return Text(train, held_out)
    # Too few files, or of too different sizes.
    whole = b"".join(text for _, text in contents)
    cut = len(whole) - len(whole) // HELD_OUT_ONE_IN
    return Text(whole[:cut], whole[cut:])


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode("utf-8", "surrogateescape")) % HELD_OUT_ONE_IN == 0


def _find_in_folder(folder: Path) -> Source:
    found = _walk(folder, frozenset({"__pycache__"}))
    files = [path for path in found if path.stat().st_size and not is_binary(path)]
    if not files:
        seen = f"{len(found)} files, all of them empty or binary" if found else "no files"
        raise UsageError(f"The data folder {folder} holds {seen}. Give a folder with text files in it.")
    return Source(folder, tuple(files), sum(path.stat().st_size for path in files))


def _walk(folder: Path, skipped: frozenset[str]) -> list[Path]:
    """Regular files below a folder, sorted by their names; hidden ones and some folders are left out."""
    found = []
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        paths = [Path(parent, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _refuse(error: OSError) -> None:
    raise error
