"""The C library's allocator: memory that was freed goes back to the system on request, where it can (glibc)."""

from __future__ import annotations

import ctypes


def release_unused() -> None:
    """Give back what was freed. What was the whole model would else stay resident."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(ctypes.c_size_t(0))
