"""A simulated accelerator: the torch device ``sim``, with memory of its own that is counted, limited and reached by copies.

Its memory is the host's and its kernels are the CPU's, so it computes the same numbers on any machine; what differs is what an
accelerator has and the CPU has not: a capacity, and a way in and out. Memory that a kernel takes for itself while it runs is not
counted. Attention takes torch's own composed path, which holds more than the CPU's fused kernel and may give other bits.
"""

from shardwise.devices.sim.device import (
    Memory,
    Traffic,
    configure,
    enable,
    is_enabled,
    memory,
    num_devices,
    pinned_room_bytes,
    reset_peak,
    reset_traffic,
    set_advice,
    set_pinned_capacity,
    traffic,
)
from shardwise.devices.sim.module import DEVICE_TYPE

__all__ = [
    "DEVICE_TYPE",
    "Memory",
    "Traffic",
    "configure",
    "enable",
    "is_enabled",
    "memory",
    "num_devices",
    "pinned_room_bytes",
    "reset_peak",
    "reset_traffic",
    "set_advice",
    "set_pinned_capacity",
    "traffic",
]
