"""The few numbers of predicted times that no data sheet lists. ``benchmarks/calibration.py`` fits them; a test holds that.

Those of compute are fitted to ``throughput_calibration.csv``, together; those of collectives to tables of single all-reduces, before
that. All are meant for any hardware: parts of what is sold, and times of the host.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Of compute: what programs reach of what is sold. Machines whose rates were measured have no use for the first three."""

    matmul_part: float = 0.8
    """Of the listed rate, in large matrix products."""
    attention_part: float = 0.5
    """Of the listed rate, in fused attention."""
    memory_part: float = 0.8
    """Of the listed rate of memory, in kernels that do little else than read and write."""
    launch_seconds: float = 2e-5
    """That the host takes to start a kernel, with all that leads to it. A device that is faster waits for the host."""
    slowdown: float = 0.2
    """The part of the time of a collective that is lost to computation beside it: they share cores and memory."""


@dataclass(frozen=True)
class WireConstants:
    """Of collectives: an all-reduce's time before the first byte, and what small ones do."""

    latency_seconds: float = 32e-6
    """Of an all-reduce, in any case."""
    hop_seconds: float = 6.3e-6
    """More for each further rank of a node."""
    quick_latency_part: float = 0.55
    """Of these, in the way of sending that small payloads take."""
    quick_rate_part: float = 0.08
    """Of the link's rate, in that way."""


CONSTANTS = Constants()
WIRE_CONSTANTS = WireConstants()
