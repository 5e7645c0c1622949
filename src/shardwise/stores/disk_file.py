"""The one file of a disk store: made, grown, read, written and removed. Knows offsets and labels; every failure is explained here."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NoReturn
from weakref import WeakSet

from shardwise.core.errors import OffloadError, UsageError
from shardwise.core.sizes import format_bytes
from shardwise.devices.files import allocate
from shardwise.stores.direct_io import (
    Bounce,
    Piece,
    can_go_directly,
    read_buffered,
    read_directly,
    write_buffered,
    write_directly,
)
from shardwise.stores.leftovers import make_file, make_folder, remove_folder

_REMEDIES = {
    errno.ENOSPC: "Make room, or let the folder for offload be on another disk.",
    errno.EDQUOT: "The quota is used up: make room, or let the folder for offload be on another disk.",
    errno.EFBIG: "Files may not grow so large here: look at `ulimit -f`, or let the folder for offload be on another disk.",
    errno.EIO: "The disk has failed: the system's log says more. Let the folder for offload be on another disk.",
}
_MOST_TRIES = 100
_NEEDS_FOLDER = "Offload needs a folder on this machine in which this user may make files."


class _Life(Enum):
    """Whose the file is."""

    OPEN = "open"
    REMOVED = "closed"
    PARENTS = "the parent process's"
    """This process was forked from the one that made it."""


class DiskFile:
    """A file that is there as long as its process, which alone reads and writes it."""

    def __init__(self, folder: Path, name: str, *, direct: bool, is_passing: bool = False) -> None:
        folder = Path(os.path.abspath(folder))
        self.path = folder
        self._is_passing = is_passing
        try:
            self.path, self._file = self._make(folder, name)
        except OSError as error:
            raise _explained(error, f"{folder}: no file for offload could be made", _NEEDS_FOLDER) from error
        self._life = _Life.OPEN
        self._facts = os.fstat(self._file)
        self._direct = _open_directly(self.path) if direct else None
        self.num_bytes = 0
        _OPEN_FILES.add(self)

    def _make(self, folder: Path, name: str) -> tuple[Path, int]:
        for _ in range(_MOST_TRIES if self._is_passing else 0):
            make_folder(folder, is_passing=True)
            with suppress(FileNotFoundError):  # Another process has just removed the folder with its own file.
                return make_file(folder, name)
        make_folder(folder)
        return make_file(folder, name)

    @property
    def is_direct(self) -> bool:
        """Whether bytes go past the page cache."""
        return self._direct is not None

    def check_open(self) -> None:
        """Refuse to go on with a file that is gone, or another process's."""
        if self._life is _Life.PARENTS:
            raise UsageError(f"{self.path} belongs to the process that this one was forked from. Make a store of its own here.")
        if self._life is _Life.REMOVED:
            self.raise_closed()

    def raise_closed(self) -> NoReturn:
        """Refuse to go on."""
        raise UsageError(f"{self.path} is closed: nothing can be kept there any more. Make a new store.")

    @property
    def is_open(self) -> bool:
        """Whether this process made it and has not closed it."""
        return self._life is _Life.OPEN

    def grow(self, num_bytes: int, label: str) -> None:
        """Take more room on the disk, so that a full one is found now and not in the middle of a step."""
        what = f"{self.path}: {format_bytes(num_bytes)} could not be reserved for {label}"
        self._check_presence(what)
        try:
            self._allocate(num_bytes)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self.num_bytes)  # Some of it may have been allocated.
            raise self._failure(error, what) from error
        self.num_bytes += num_bytes

    def _allocate(self, num_bytes: int) -> None:
        if allocate(self._file, self.num_bytes, num_bytes):
            return
        if num_bytes > self._room_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._file, self.num_bytes + num_bytes)

    def read(self, piece: Piece, label: str, bounce: Bounce) -> None:
        """Fill memory."""
        what = f"{self.path}: {format_bytes(piece.num_bytes)} of {label} could not be read at byte {piece.offset}"
        self._check_presence(what)
        try:
            if self._direct is None:
                read_buffered(self._file, piece)
            else:
                read_directly(self._direct, piece, bounce)
        except (OSError, EOFError) as error:
            raise self._failure(error, what) from error

    def write(self, piece: Piece, label: str, bounce: Bounce) -> None:
        """Write memory."""
        what = f"{self.path}: {format_bytes(piece.num_bytes)} of {label} could not be written at byte {piece.offset}"
        self._check_presence(what)
        try:
            if self._direct is None:
                write_buffered(self._file, piece)
            else:
                write_directly(self._direct, piece, bounce)
        except (OSError, EOFError) as error:
            raise self._failure(error, what) from error

    def _check_presence(self, what: str) -> None:
        """Refuse a file that others have meddled with.

        One that was deleted still takes bytes, on a disk where nobody sees what they fill; one that was cut off would take new
        bytes, and give zeros for those that are lost.
        """
        expected_bytes = self.num_bytes  # Before the look: another thread may let the file grow meanwhile.
        facts = os.fstat(self._file)
        if facts.st_nlink == 0:
            raise OffloadError(
                f"{what}: the file should be there as long as this process, but somebody has deleted it. "
                "Start again from a checkpoint, and keep others out of the folder."
            )
        if facts.st_size < expected_bytes:
            raise OffloadError(
                f"{what}: the file should have {expected_bytes} bytes, but somebody has cut it to {facts.st_size}. "
                "Start again from a checkpoint, and keep others out of the folder."
            )

    def _failure(self, error: OSError | EOFError, what: str) -> OffloadError:
        self._check_presence(what)  # It may have been cut off since the last look.
        if isinstance(error, EOFError):
            return OffloadError(f"{what}: {error}, before {self.num_bytes}. The file system has lost some: use another disk.")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"{what} ({format_bytes(self._room_bytes())} are free there)"
        return _explained(error, what, "Start again from a checkpoint, with the folder for offload on another disk.")

    def _room_bytes(self) -> int:
        room = os.fstatvfs(self._file)
        return room.f_bavail * room.f_frsize

    def remove(self) -> None:
        """Delete it, and close it. In a process that was forked, and where others have put another file in its place: close it."""
        if self._life is not _Life.OPEN:
            return
        self._life = _Life.REMOVED
        # Somebody may have deleted it, or the folder cannot be changed any more: then the next store there will remove it.
        with suppress(OSError):
            if os.path.samestat(os.lstat(self.path), self._facts):
                os.unlink(self.path)
                if self._is_passing:
                    remove_folder(self.path.parent)
        self._close()

    def leave_to_parent(self) -> None:
        """This process was forked from the one that made it. An open file would keep the lock when the parent is killed."""
        if self._life is _Life.OPEN:
            self._life = _Life.PARENTS
            self._close()

    def _close(self) -> None:
        for file in (self._direct, self._file):
            if file is not None:
                os.close(file)


def _open_directly(path: Path) -> int | None:
    """Open an empty file for access past the page cache, or not, where the file system does not allow it."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flag)
    except OSError:
        return None
    if can_go_directly(file):
        return file
    os.close(file)
    return None


def _explained(error: OSError, what: str, otherwise: str) -> OffloadError:
    explained = OffloadError(f"{what}: {error.strerror or error}. {_REMEDIES.get(error.errno or 0, otherwise)}")
    explained.errno = error.errno
    return explained


_OPEN_FILES: WeakSet[DiskFile] = WeakSet()
"""What a process that is forked must let go."""


def _after_fork() -> None:
    for file in list(_OPEN_FILES):
        file.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
