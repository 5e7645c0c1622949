"""Files of stores: each is made under a lock that lasts as long as its process, and what dead processes left is removed.

A lock on a file goes when the process does, however it ends. Between the moments in which a file is made and locked it looks
like one of a dead process: so files are made and removed under a lock of the folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from shardwise.core.errors import UsageError
from shardwise.devices.files import alone_in

_PATTERN = re.compile(r"shardwise-offload-.+-[0-9]+-[0-9a-f]{16}\.bin")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems without locks say. There, nothing that was left is ever removed."""
_MARK = ".made-for-offload"
"""In a folder that goes with the last file in it: one that somebody else has made stays."""
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def check_name(name: str) -> None:
    """Refuse what cannot be a part of a file's name."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
        raise UsageError(f"A store's name is made of letters, digits, '.', '_' and '-', 100 at most, but got {name!r}.")


def make_folder(folder: Path, *, is_passing: bool = False) -> None:
    """Make a folder, for this user alone, unless it is there.

    Args:
        is_passing: Whether `remove_folder` may remove it, if it is made here.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        try:
            is_folder = stat.S_ISDIR(folder.stat().st_mode)
        except FileNotFoundError:
            if not folder.is_symlink():
                return make_folder(folder, is_passing=is_passing)  # Somebody has just removed it.
            is_folder = False
        if not is_folder:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    else:
        folder.chmod(0o700)  # Whatever the umask.
        if is_passing:
            (folder / _MARK).touch(mode=0o600)


def remove_folder(folder: Path) -> None:
    """Remove a folder that was made to pass, unless anything is in it."""
    with suppress(OSError), alone_in(folder):
        if os.listdir(folder) == [_MARK]:
            (folder / _MARK).unlink()
            folder.rmdir()


def make_file(folder: Path, name: str) -> tuple[Path, int]:
    """Make a file that is locked and empty, and remove what was left in its folder."""
    with alone_in(folder):
        # First make: where that is refused, nothing is removed.
        path, file = _make(folder, name)
        with suppress(OSError):
            remove_leftovers(folder)
    return path, file


def _make(folder: Path, name: str) -> tuple[Path, int]:
    while True:
        path = folder / f"shardwise-offload-{name}-{os.getpid()}-{os.urandom(8).hex()}.bin"
        file = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fchmod(file, 0o600)  # Whatever the umask.
            _lock(file)
            if os.fstat(file).st_nlink:
                return path, file
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        # The folder could not be locked (some network file systems), and another process has taken it for left over.
        os.close(file)


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove files of stores whose process is dead; says which. Those that cannot be removed stay."""
    removed = []
    for name in sorted(os.listdir(folder)):
        if _PATTERN.fullmatch(name):
            with suppress(OSError):
                if _remove_if_dead(folder / name):
                    removed.append(folder / name)
    return removed


def _remove_if_dead(path: Path) -> bool:
    # Without waiting: a pipe in the place of a file would keep us forever.
    file = os.open(path, _OPEN | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    finally:
        os.close(file)
