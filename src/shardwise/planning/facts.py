"""What this machine says of itself, gathered in one place for the checks. Reads the system; judges nothing.

Environment variables are handed in: only the command line reads them.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import OffloadError, ShardwiseError
from shardwise.devices import cross_memory
from shardwise.devices.memory import room_on_host
from shardwise.stores.disk import DiskStore

COMPILERS = ("c++", "g++", "clang++")
MALLOC_SETTINGS = ("MALLOC_CHECK_", "MALLOC_PERTURB_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "LD_PRELOAD")
"""Settings of the C library's allocator, and what replaces it."""
_PROBE_BYTES, _PROBES = 16 * 2**20, 3
_UNLIMITED = 2**62


@dataclass(frozen=True)
class Facts:
    """What one rank found. Counts are 0 and texts empty where the system does not tell; None stands for no limit."""

    rank: int
    host: str
    python: str
    torch: str
    shardwise: str
    device: str
    cpu_model: str
    num_cores: int
    """That this process may use."""
    cpu_quota: float | None
    """Cores' worth of time that its control group may have."""
    governor: str
    num_threads: int
    omp_setting: str | None
    """OMP_NUM_THREADS as the user has it, before a launcher sets it."""
    malloc_settings: dict[str, str]
    memory_bytes: int
    free_memory_bytes: int
    group_limit_bytes: int | None
    swap_used_bytes: int
    commit_room_bytes: int | None
    """What may still be allocated, where the system refuses more than it has."""
    shared_bytes: int
    """Size of /dev/shm."""
    shared_free_bytes: int
    shared_write_rate: float
    """Bytes per second."""
    temp_folder: str
    temp_free_bytes: int
    can_read_peers: bool
    """Whether the system can read other processes' memory at all, and lets this one."""
    ptrace_scope: int | None
    num_files: int | None
    """The most files and sockets that a process may have open."""
    compiler: str
    has_python_headers: bool
    folder: str
    folder_free_bytes: int
    folder_error: str
    """Why no file can be made there."""
    is_direct: bool
    """Whether files there can be read and written past the page cache."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Facts:
        """What another rank has sent; ranks of another version may know other facts."""
        names = {field.name for field in fields(cls)}
        missing = sorted(names - set(values))
        if missing:
            raise ShardwiseError(
                f"Rank {values.get('rank', '?')} did not tell {', '.join(missing)}: it runs shardwise "
                f"{values.get('shardwise', 'of another version')}, which is not this rank's. Install one version everywhere."
            )
        return cls(**{name: values[name] for name in names})


def gather_facts(folder: Path, environment: Mapping[str, str], *, version: str, rank: int = 0, root: Path = Path("/")) -> Facts:
    """Ask the system. Makes and removes small files in ``folder``, in /dev/shm and nowhere else.

    Args:
        folder: Where offloaded state would go.
        environment: As the user has it.
        version: Of this package.
        root: Where the system tells of itself.
    """
    memory, (folder_error, is_direct) = _numbers(root / "proc/meminfo"), _try_folder(folder)
    room, shared = room_on_host(), root / "dev/shm"
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return Facts(
        rank=rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=torch.__version__,
        shardwise=version,
        device=str(accelerator or "cpu"),
        cpu_model=cpu_model(root),
        num_cores=num_cores(),
        cpu_quota=_cpu_quota(root / "sys/fs/cgroup"),
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        num_threads=torch.get_num_threads(),
        omp_setting=environment.get("OMP_NUM_THREADS"),
        malloc_settings={name: environment[name] for name in MALLOC_SETTINGS if environment.get(name)},
        memory_bytes=memory.get("MemTotal", 0),
        free_memory_bytes=room.free_bytes,
        group_limit_bytes=_group_limit(root / "sys/fs/cgroup"),
        swap_used_bytes=max(0, memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)),
        commit_room_bytes=_commit_room(root, memory),
        shared_bytes=_disk_usage(shared)[0] if shared.is_dir() else 0,
        shared_free_bytes=_disk_usage(shared)[1] if shared.is_dir() else 0,
        shared_write_rate=_write_rate(shared),
        temp_folder=tempfile.gettempdir(),
        temp_free_bytes=_disk_usage(Path(tempfile.gettempdir()))[1],
        can_read_peers=_can_read_processes(),
        ptrace_scope=_whole(_text(root / "proc/sys/kernel/yama/ptrace_scope")),
        num_files=_file_limit(),
        compiler=next((path for path in map(shutil.which, COMPILERS) if path), ""),
        has_python_headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
        folder=str(folder),
        folder_free_bytes=_disk_usage(folder)[1],
        folder_error=folder_error,
        is_direct=is_direct,
    )


def num_cores() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model(root: Path = Path("/")) -> str:
    """What the processor is sold as, or its architecture where the system does not tell."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _cpu_quota(groups: Path) -> float | None:
    """Of the second version of control groups, or of the first."""
    words = _text(groups / "cpu.max").split()
    words = words or [_text(groups / "cpu" / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    limit, period = (_whole(word) for word in words) if len(words) == 2 else (None, None)
    return limit / period if limit is not None and limit > 0 and period else None


def _group_limit(groups: Path) -> int | None:
    limits = [_whole(_text(path)) for path in (groups / "memory.max", groups / "memory" / "memory.limit_in_bytes")]
    return next((limit for limit in limits if limit is not None and limit < _UNLIMITED), None)


def _commit_room(root: Path, memory: Mapping[str, int]) -> int | None:
    if _text(root / "proc/sys/vm/overcommit_memory") != "2" or "CommitLimit" not in memory:
        return None
    return max(0, memory["CommitLimit"] - memory.get("Committed_AS", 0))


def _file_limit() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _can_read_processes() -> bool:
    """By reading this process as peers would be read; whether peers may be read shows between ranks."""
    source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    try:
        cross_memory.read(os.getpid(), source.data_ptr(), target)
    except OSError:
        return False
    return bool((source == target).all())


def _try_folder(folder: Path) -> tuple[str, bool]:
    """Why the disk tier cannot make its file there, if so, and whether the file can be accessed directly."""
    try:
        store = DiskStore(folder, name="doctor", num_workers=1, is_passing=True)
    except OffloadError as error:
        return str(error), False
    is_direct = store.is_direct
    store.close()
    return "", is_direct


def _write_rate(folder: Path) -> float:
    """Bytes per second into a new file in memory that processes share; 0 where there is none, or too little room."""
    if not folder.is_dir() or _disk_usage(folder)[1] < 2 * _PROBE_BYTES:
        return 0.0
    payload, best = bytes(_PROBE_BYTES), 0.0
    # The best of a few: whoever else is busy makes memory slow for a moment, not for good.
    for _ in range(_PROBES):
        with suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            num_bytes = file.write(payload)
            best = max(best, num_bytes / (time.perf_counter() - begin))
    return best


def _disk_usage(path: Path) -> tuple[int, int]:
    """Size and room of the file system of a path, of which the last parts may not be there."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            usage = shutil.disk_usage(place)
            return usage.total, usage.free
    return 0, 0


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number of KiB, in bytes."""
    rows = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) * 1024 for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
