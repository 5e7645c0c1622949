"""Folders of this machine: a checkpoint is written aside, brought to the disk, and published by one rename."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.manifest import MANIFEST_NAME
from shardwise.checkpoint.places import explaining
from shardwise.core.errors import CheckpointError
from shardwise.devices.files import alone_in, exchange

_PARTIAL, _DELETING = "partial", "deleting"
_LOCK_NAME = "lock"


class LocalPlace:
    """A folder on disk, or on a file system that is mounted."""

    def __init__(self, path: Path, *, follows_links: bool = False) -> None:
        self._follows_links = follows_links
        self._path = Path(os.path.abspath(path))
        self.path = str(path)
        self._lock: int | None = None

    @property
    def parent(self) -> LocalPlace:
        """The folder that it stands in."""
        return LocalPlace(self._path.parent)

    def child(self, name: str) -> LocalPlace:
        """A folder in this one."""
        return LocalPlace(Path(self.path) / name)

    def names(self) -> list[str]:
        """What the folder holds, in order."""
        with explaining(self.path, "looked into"):
            try:
                return sorted(os.listdir(self._path))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def exists(self) -> bool:
        """Whether anything stands there."""
        return os.path.lexists(self._path)

    def is_file(self) -> bool:
        """Whether a file stands there, or in the way to it."""
        return any(os.path.isfile(path) for path in (self._path, *self._path.parents))

    @property
    def is_link(self) -> bool:
        """Whether it stands for another folder."""
        return os.path.islink(self._path)

    def is_free(self) -> bool:
        """Whether nothing is there, or an empty folder."""
        with explaining(self.path, "reached"):
            is_folder = self._path.is_dir() and not self._path.is_symlink()
        return not self.exists() or (is_folder and not self.names())

    def open(self, name: str) -> LocalSource:
        """Read a file of it."""
        return LocalSource(self._path / name, follows_links=self._follows_links)

    def following_links(self) -> LocalPlace:
        """The same, but files of it may be links."""
        return LocalPlace(Path(self.path), follows_links=True)

    def _aside(self, id: str, what: str = _PARTIAL) -> Path:
        return self._path.parent / f".{self._path.name}.{what}-{id}"

    def begin(self, id: str) -> None:
        """Make the folder aside. Its lock tells others that someone is at work there, and goes when the process does."""
        aside = self._aside(id)
        with explaining(self.path, "made"):
            if os.path.isfile(self._path.parent):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with alone_in(self._path.parent):
                aside.mkdir()
                self._lock = os.open(aside / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
                fcntl.flock(self._lock, fcntl.LOCK_EX)

    def create(self, id: str, name: str) -> LocalWriter:
        """A new file in the folder aside."""
        return LocalWriter(self._aside(id) / name)

    def publish(self, id: str, *, overwrite: bool) -> None:
        """One rename. What stood there goes aside first."""
        aside = self._aside(id)
        with explaining(self.path, "published"):
            _sync_folder(aside)
            is_replaced = overwrite and self.exists()
            old = self._aside(id, _DELETING) if is_replaced else None
            if old is None:
                os.rename(aside, self._path)
            elif exchange(aside, self._path):
                with suppress(FileNotFoundError):  # Somebody has cleaned up after us already.
                    os.rename(aside, old)
            else:  # Two renames: if the process dies between them, the next save brings the old one back.
                os.rename(self._path, old)
                os.rename(aside, self._path)
        # It is published: what follows is housekeeping. The lock went along, so that nobody took the folder for a left-over.
        with suppress(OSError):
            (self._path / _LOCK_NAME).unlink()
            _sync_folder(self._path.parent)
        self._unlock()
        if old is not None:
            _remove_tree(old)

    def abandon(self, id: str) -> None:
        """Remove the folder aside."""
        shutil.rmtree(self._aside(id), ignore_errors=True)
        self._unlock()

    def remove(self) -> None:
        """Rename it, so that no half of it is ever taken for a whole, and remove it."""
        aside = self._aside(os.urandom(8).hex(), _DELETING)
        with explaining(self.path, "removed"):
            os.rename(self._path, aside)
        _remove_tree(aside)

    def clean(self) -> list[str]:
        """Remove folders aside at which nobody works any more."""
        if not os.path.isdir(self._path.parent):
            return []
        with explaining(self._path.parent, "cleaned"), alone_in(self._path.parent):
            return self._clean()

    def _clean(self) -> list[str]:
        removed = []
        for name in self.parent.names():
            is_partial, is_deleting = (name.startswith(".") and f".{what}-" in name for what in (_PARTIAL, _DELETING))
            path = self._path.parent / name
            if not path.is_dir() or path.is_symlink():
                continue
            before = self._path.parent / name[1:].partition(f".{_DELETING}-")[0]
            if is_deleting and (path / MANIFEST_NAME).exists() and not before.exists():
                os.rename(path, before)  # Put aside for one that did not come.
            elif is_deleting or (is_partial and not _is_at_work(path)):
                _remove_tree(path)
                removed.append(str(path))
        return removed

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_tree(path: Path) -> None:
    """Remove a folder, the manifest first: what has one is whole. Of a link, the link alone."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
            return
        (path / MANIFEST_NAME).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _is_at_work(aside: Path) -> bool:
    """Whether the process that writes there is alive."""
    try:
        lock = os.open(aside / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class LocalWriter:
    """Writes a file of its own, and brings it to the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explaining(path, "written"):
            self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: memoryview) -> None:
        """Add bytes."""
        with explaining(self._path, "written"):
            while data and self._file is not None:
                data = data[os.write(self._file, data) :]

    def finish(self) -> None:
        """Bring it to the disk, and close it."""
        with explaining(self._path, "written"):
            if self._file is not None:
                os.fsync(self._file)
        self.close()

    def close(self) -> None:
        """Close it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class LocalSource:
    """Reads a plain file."""

    def __init__(self, path: Path, *, follows_links: bool = False) -> None:
        self._path = path
        self._file: int | None = None
        with explaining(path, "read"):
            # Without waiting: a pipe in the place of a file would keep the reader forever.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._file = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
        facts = os.fstat(self._file)
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise CheckpointError(f"{path} cannot be read: it is no plain file.")
        self.num_bytes = facts.st_size

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill memory."""
        with explaining(self._path, "read"):
            while target and self._file is not None:
                count = os.preadv(self._file, [target], offset)
                if count == 0:
                    raise CheckpointError(f"{self._path} ends before it should: it was cut off.")
                target, offset = target[count:], offset + count

    def close(self) -> None:
        """Close it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
