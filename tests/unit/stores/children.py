"""Runs pieces of a test in processes of their own, with mounts of their own: what is done to them ends with them."""

import ctypes
import errno
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
SECONDS = 60
_LIBC = ctypes.CDLL(None, use_errno=True)


def run(function: Callable[[], None]) -> None:
    """In a forked process, until it ends; what fails there fails here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(SECONDS)
        text = ""
        try:
            function()
        except BaseException as error:
            text = f"skip:{error}" if isinstance(error, pytest.skip.Exception) else traceback.format_exc()
        os.write(writer, text.encode()[:60000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    if text.startswith("skip:"):
        pytest.skip(text.removeprefix("skip:"))
    if text or status:
        pytest.fail(f"In the child process (status {status}):\n{text}")


@contextmanager
def living(function: Callable[[], str]) -> Iterator[tuple[int, str]]:
    """A forked process that goes on living after a function has returned a text; gives its number and the text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.alarm(SECONDS)
        try:
            os.write(writer, f"{function()}\n".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            yield pid, pipe.readline().decode().strip()  # No more: what it has forked holds the other end.
    finally:
        kill(pid)


def kill(pid: int) -> None:
    """As the kernel does it when memory runs out; returns when the process is gone."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def mount_small(folder: Path, size: str = "1m") -> None:
    """In a child: a small file system of its own, which goes with the process. Skips where that is not permitted."""
    if _LIBC.unshare(CLONE_NEWNS) != 0:
        pytest.skip("mounts in a namespace of its own are not permitted here")
    _mount("none", Path("/"), None, MS_REC | MS_PRIVATE, None)
    _mount("tmpfs", folder, "tmpfs", 0, f"size={size}")


def make_read_only(folder: Path) -> None:
    """In a child, after `mount_small`."""
    _mount("tmpfs", folder, None, MS_REMOUNT | MS_RDONLY, None)


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (kind, options)]
    if _LIBC.mount(source.encode(), os.fsencode(target), texts[0], ctypes.c_ulong(flags), texts[1]) != 0:
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.EACCES):
            pytest.skip("mounts are not permitted here")
        raise OSError(number, os.strerror(number), str(target))
