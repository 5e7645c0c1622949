"""What the system can do with files, and Python's standard library does not offer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@cache
def _call(*names: str) -> Any:
    """The first of these that the C library has, or None."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)


def exchange(a: Path, b: Path) -> bool:
    """Let two folders change places at once; says whether this system and file system can do that."""
    call = _call("renameat2")
    return call is not None and call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0


def allocate(file: int, offset: int, num_bytes: int) -> bool:
    """Give room on the disk to bytes of a file; says whether this system and file system can do that.

    ``os.posix_fallocate`` does it anyhow: where the file system cannot, it writes to every block, through the page cache.

    Raises:
        OSError: There is no room.
    """
    call = _call("fallocate64", "fallocate")
    if call is None:
        return False
    while call(file, 0, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)) != 0:
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Nobody else makes or cleans anything in a folder meanwhile, where the file system has locks."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
