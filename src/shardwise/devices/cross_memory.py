"""Reads the memory of other processes on one machine: one copy by the kernel, without sockets or shared segments.

Linux alone has it (``process_vm_readv``), between processes of one user. Nothing is left behind when a process is killed.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = ctypes.c_ulong(-1)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@cache
def _library() -> Any:
    """The C library, or None where it cannot read other processes."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        call = library.process_vm_readv
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_ssize_t
    span = ctypes.POINTER(_Span)
    call.argtypes = [ctypes.c_int, span, ctypes.c_ulong, span, ctypes.c_ulong, ctypes.c_ulong]
    return library


def is_available() -> bool:
    """Whether this system can do it at all; whether a certain process may be read shows when it is tried."""
    return _library() is not None and hasattr(os, "memfd_create")


def allow_reading() -> None:
    """Where processes may be read by their ancestors only (Yama), let those of the same user read this one."""
    library = _library()
    if library is not None and _YAMA.exists() and _YAMA.read_text().strip() == "1":
        library.prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)


def read(process: int, address: int, target: torch.Tensor) -> None:
    """Copy memory of another process into a contiguous tensor.

    Raises:
        OSError: The process is gone, or it may not be read.
    """
    library = _library()
    if library is None:
        raise OSError("This system cannot read the memory of other processes.")
    done, total, base = 0, target.nbytes, target.data_ptr()
    while done < total:
        mine, theirs = _Span(base + done, total - done), _Span(address + done, total - done)
        count = library.process_vm_readv(process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process {process} cannot be read: {os.strerror(number)}")
        done += count
