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
