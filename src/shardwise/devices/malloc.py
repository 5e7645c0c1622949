"""The C library's allocator: memory that was freed goes back to the system on request, where it can (glibc on Linux)."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

_IDLE_BYTES = 64 * 2**20
_IDLE_PART = 0.08
"""What may lie idle when more is resident than ever before: so many bytes, or this part of all if that is more."""
_TIME_PART = 0.01
"""How much of the time may go into giving back, and into the faults when pages are needed again."""
_SCARCE_IDLE_BYTES, _SCARCE_TIME_PART = 16 * 2**20, 0.05
"""The same where memory goes before time."""
_FAULT_SECONDS = 2.3e-6
"""What a fresh page costs, measured."""


class _Account(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


def _function(name: str, arguments: tuple[Any, ...], result: Any) -> Any:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = arguments, result
    return function


_malloc_trim = _function("malloc_trim", (ctypes.c_size_t,), ctypes.c_int)
_mallinfo2 = _function("mallinfo2", (), _Account)


def release_unused() -> None:
    """Give back what was freed. What was the whole model would else stay resident."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class Heap:
    """Keeps what is resident near what is in use.

    Blocks of many sizes that come and go leave holes, and in each step some of the next blocks fit into none of them. Pages
    given back cost time when they are needed again: it is done only where resident memory rises above all that was ever
    needed and much of it lies idle, and not more often than its share of time allows; a rise that comes too soon for that counts
    as needed. A run that has settled pays for nothing but the look at one number.

    Args:
        is_scarce: Whether memory goes before time: less of it may lie idle, and more time may be spent on that.
    """

    def __init__(self, *, is_scarce: bool = False) -> None:
        self._idle_bytes = _SCARCE_IDLE_BYTES if is_scarce else _IDLE_BYTES
        self._time_part = _SCARCE_TIME_PART if is_scarce else _TIME_PART
        self._needed_bytes = 0
        self._other_bytes = 0
        self._resume_at = 0.0

    def keep_lean(self) -> None:
        """Give idle memory back if there is much of it and the process is about to grow."""
        resident = resident_bytes()
        if resident <= self._needed_bytes or _mallinfo2 is None:
            return
        begin = time.perf_counter()
        idle = resident - self._other_bytes - used_bytes()
        if begin < self._resume_at or idle <= max(self._idle_bytes, int(resident * _IDLE_PART)):
            self._needed_bytes = resident
            return
        release_unused()
        left = resident_bytes()
        self._other_bytes = max(0, left - used_bytes())  # What never was this allocator's.
        end = time.perf_counter()
        cost = end - begin + (resident - left) / _PAGE_BYTES * _FAULT_SECONDS
        self._resume_at = end + cost / self._time_part


def resident_bytes() -> int:
    """Memory of this process alone, without files; 0 where the system does not tell."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return 0
    try:
        _, resident, shared, *_ = os.read(file, 256).split()
    finally:
        os.close(file)
    return (int(resident) - int(shared)) * _PAGE_BYTES


_PAGE_BYTES = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096


def used_bytes() -> int:
    """What was taken from the allocator and not freed; 0 where it does not tell."""
    if _mallinfo2 is None:
        return 0
    account = _mallinfo2()
    return int(account.uordblks + account.hblkhd)
