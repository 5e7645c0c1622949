"""What the machine says of the memory of this process: its allocator, and the system."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from shardwise.devices import malloc, sim, torch_private

_STATUS = Path("/proc/self/status")


def allocated_bytes(device: torch.device) -> int:
    """What the allocator of a device has given out to this process and not got back; 0 where it does not tell."""
    if device.type == "cpu":
        return malloc.used_bytes()
    return torch_private.allocated_bytes(device)[0]


def advise(device: torch.device, advice: Callable[[int], str]) -> None:
    """Let a device that runs out of memory say more, if it can: what is advised for its capacity."""
    if sim.is_enabled() and device.type == sim.DEVICE_TYPE:
        index = device.index or 0
        sim.set_advice(index, advice(sim.memory(index).capacity_bytes))


def free_host_bytes(*, root: Path = Path("/")) -> int | None:
    """What of the host's memory is free for this process: by the system, by its control group, and as far as it may be pinned.

    Args:
        root: Where the system tells of itself.

    Returns:
        None where nobody tells.
    """
    found = [_available_bytes(root / "proc/meminfo"), _free_in_group(root)]
    if sim.is_enabled():
        found.append(sim.pinned_room_bytes())
    return min((num_bytes for num_bytes in found if num_bytes is not None), default=None)


def _available_bytes(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_in_group(root: Path) -> int | None:
    """What the control group of this process may take: of the second version, or of the first."""
    base = root / "sys/fs/cgroup"
    for folder, limit, used in ((base, "memory.max", "memory.current"), (base / "memory", *_FIRST_VERSION)):
        texts = [next(iter(_lines(folder / name)), "") for name in (limit, used)]
        if all(text.isdigit() for text in texts):
            return max(0, int(texts[0]) - int(texts[1]))
    return None


_FIRST_VERSION = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def resident_bytes() -> int:
    """Memory that this process alone has on the host, without files; 0 where the system does not tell."""
    return malloc.resident_bytes()


def peak_resident_bytes() -> int:
    """The most memory that this process ever had on the host."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Elsewhere the kernel's own count, which macOS gives in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
