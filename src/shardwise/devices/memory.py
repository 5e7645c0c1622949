"""What the machine says of the memory of this process: its allocator, and the system."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.devices import malloc, sim, torch_private

_STATUS = Path("/proc/self/status")
_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """What a device holds, and what of it is free; 0, where nobody tells."""

    capacity_bytes: int
    free_bytes: int


def room_on(device: torch.device) -> Room:
    """The memory of a device, for all processes that use it."""
    if device.type == "cpu":
        return room_on_host()
    if sim.is_enabled() and device.type == sim.DEVICE_TYPE:
        held = sim.memory(device.index or 0)
        return Room(held.capacity_bytes, held.capacity_bytes - held.live_bytes)
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return Room(0, 0)
    free_bytes, capacity_bytes = module.mem_get_info(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return Room(capacity_bytes, free_bytes + cached)


def room_on_host() -> Room:
    """The memory of this machine, or what its control group may have of it."""
    found = _numbers(_MEMORY)
    rooms = [Room(found.get("MemTotal", 0) * 1024, found.get("MemAvailable", 0) * 1024), *_group_rooms()]
    known = [room for room in rooms if room.capacity_bytes]
    return min(known, key=lambda room: room.free_bytes, default=Room(0, 0))


def _group_rooms() -> Iterator[Room]:
    """What control groups allow, of either version."""
    for folder, limit, used in (
        (_GROUPS, "memory.max", "memory.current"),
        (_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most, now = (int((folder / name).read_text()) for name in (limit, used))
        except (OSError, ValueError):
            continue  # There is none, or no limit.
        idle = _numbers(folder / "memory.stat").get("inactive_file", 0)  # Pages of files that can go.
        yield Room(most, max(0, most - now + idle))


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    except OSError:
        return {}


def allocated_bytes(device: torch.device) -> int:
    """What the allocator of a device has given out to this process and not got back; 0 where it does not tell."""
    if device.type == "cpu":
        return malloc.used_bytes()
    return torch_private.allocated_bytes(device)[0]


def take_peak(device: torch.device) -> int:
    """What an accelerator's allocator had given out at most since this was last asked, beyond what it has given out now.

    Its own statistics begin to look for a peak anew: one that is never reset tells nothing of what is held below it.
    """
    if device.type == "cpu":
        return 0
    now, most = torch_private.allocated_bytes(device)
    torch.accelerator.reset_peak_memory_stats(device.index)
    return most - now


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
