"""What this machine can start: how many ranks, and on which port. Asked before anything is started or written."""

from __future__ import annotations

import errno
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import UsageError
from shardwise.core.sizes import format_bytes

RANK_BYTES = 224 * 1024**2
"""What a rank takes for itself before it has a model: Python and torch, without what processes share."""
RANK_THREADS = 16
"""About how many threads a rank starts."""
LOCALHOST = "127.0.0.1"
_NO_LIMIT = 2**63


@dataclass(frozen=True)
class Room:
    """How many ranks one resource leaves room for, and why."""

    num_ranks: int
    reason: str


def check_ranks(num_ranks: int) -> None:
    """Refuse more ranks than this machine can start.

    Raises:
        UsageError: There is no room for so many; the message says how many there is room for, and why.
    """
    room = min((_memory_room(), _process_room()), key=lambda room: room.num_ranks)
    if num_ranks > max(1, room.num_ranks):
        raise UsageError(
            f"Asked for {num_ranks} ranks, but this machine can start about {room.num_ranks}: {room.reason}. "
            "Use fewer with --ranks, or start the job on several machines with torchrun."
        )


def check_port(port: int, option: str = "--port") -> None:
    """Refuse a port that is taken. 0 stands for any free one.

    Raises:
        UsageError: The port cannot be used.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            what = "is in use by another program" if is_taken else f"cannot be used: {error.strerror}"
            raise UsageError(f"Port {port} {what}. Give another {option}, or leave it out.") from error


def available_memory_bytes() -> int:
    """Memory that new processes could have, by the kernel's own estimate and the limits of this container."""
    counts = [_NO_LIMIT]
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            counts.append(int(line.split()[1]) * 1024)
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        counts.append(max(0, int(limit) - int(used)))
    return min(counts)


def _memory_room() -> Room:
    available = available_memory_bytes()
    taken = f"{format_bytes(available)} of memory are free and each rank takes {format_bytes(RANK_BYTES)} before it has a model"
    return Room(available // RANK_BYTES, taken)


def _process_room() -> Room:
    limits = [soft for soft, _ in (resource.getrlimit(resource.RLIMIT_NPROC),) if soft != resource.RLIM_INFINITY]
    group = _read("/sys/fs/cgroup/pids.max").strip()
    limits += [int(group)] if group.isdigit() else []
    limit = min(limits, default=_NO_LIMIT)
    return Room(limit // RANK_THREADS, f"it allows {limit} processes and threads, and each rank starts about {RANK_THREADS}")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
