"""Measures what one process can do on this machine: compute, memory, kernels, disk, copies to a device. Knows no other ranks.

Everything is measured through what training uses: torch's kernels, its fused AdamW, the disk tier's store. What is measured is a
median over rounds within a given time, with its spread: machines are noisy, and a mean would keep what disturbed one round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from shardwise.core.errors import OffloadError, UsageError
from shardwise.devices.host import empty_on_host
from shardwise.stores.direct_io import aligned_memory
from shardwise.stores.disk import DiskStore

MIB = 2**20
LEAST_ROUNDS, MOST_ROUNDS = 3, 200
DISK_ROUNDS = 5
ROUND_SECONDS = 2e-4
"""A round of calls that are shorter holds many of them: the clock itself takes a part of a microsecond."""
ADAMW_BYTES = 28
"""What an update moves for each fp32 element: parameter, gradient and two moments are read, all but the gradient written."""
LONGEST_CALL_SECONDS = 0.4
"""Larger sizes than one that takes this long are left out: a slow machine must be measured, too."""


@dataclass(frozen=True)
class Sample:
    """How long one thing took.

    Attributes:
        part: What was done: ``matmul``, ``elementwise``, ``adamw``, ``kernel``, ``disk_read``, ``to_device``, ``all_gather``, ...
        variant: In which way: a dtype, fresh or reused memory, a link.
        num_busy: How many ranks of the machine did it at once.
        size: Of one call, in what ``part`` is measured by: flops, kernels, or else bytes.
        seconds: The median of a call.
        spread: Half the distance between the quartiles, in parts of the median.
    """

    part: str
    variant: str
    num_busy: int
    size: float
    seconds: float
    spread: float

    @property
    def rate(self) -> float:
        """Of its size, per second."""
        return self.size / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """Read what `to_dict` wrote.

        Raises:
            UsageError: It is something else.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or sorted(values) != sorted(names):
            raise UsageError(f"Expected a sample with {', '.join(names)}, but got {values!r}.")
        numbers = [values[name] for name in ("num_busy", "size", "seconds", "spread")]
        if not all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers):
            raise UsageError(f"Expected a sample whose numbers are 0 or more, but got {values!r}.")
        if not values["seconds"] or not values["size"]:
            raise UsageError(f"Expected a sample that took some time for some size, but got {values!r}.")
        return cls(**values)


@dataclass(frozen=True)
class Timing:
    """The median of many rounds and its spread."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Budget:
    """How long each single measurement may take, and how large it may be."""

    call_seconds: float
    largest_matmul: int
    largest_bytes: int
    disk_bytes: int


FULL = Budget(call_seconds=0.3, largest_matmul=2048, largest_bytes=64 * MIB, disk_bytes=128 * MIB)
QUICK = Budget(call_seconds=0.04, largest_matmul=512, largest_bytes=4 * MIB, disk_bytes=8 * MIB)


def timing_of(rounds: list[float]) -> Timing:
    """The median of seconds, and half the distance between quartiles in parts of it."""
    middle = statistics.median(rounds)
    if len(rounds) < 2 or middle == 0:
        return Timing(middle, 0.0)
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return Timing(middle, (high - low) / 2 / middle)


def repeat(call: Callable[[], object], budget_seconds: float) -> Timing:
    """Call until the time is used up, but a few times at least. The first calls do not count: they warm up."""
    call()
    begin = time.perf_counter()
    call()
    once = time.perf_counter() - begin
    per_round = max(1, int(ROUND_SECONDS / max(once, 1e-9)))
    rounds: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(rounds) < LEAST_ROUNDS or (time.perf_counter() < end and len(rounds) < MOST_ROUNDS):
        begin = time.perf_counter()
        for _ in range(per_round):
            call()
        rounds.append((time.perf_counter() - begin) / per_round)
    # So that ranks which do the same at once stay busy until the end: the last ones must not have the machine to themselves.
    while time.perf_counter() < end:
        call()
    return timing_of(rounds)


def _wait_for(device: torch.device) -> None:
    """Kernels of accelerators are asynchronous."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _done(call: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """A call that returns when its kernels have ended."""

    def whole() -> None:
        call()
        _wait_for(device)

    return whole


def measure_matmul(device: torch.device, budget: Budget, num_busy: int) -> Iterator[Sample]:
    """Products of square matrices, in the dtypes that models compute in."""
    for dtype in (torch.float32, torch.bfloat16):
        size = 64
        while size <= budget.largest_matmul:
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            timing = repeat(_done(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device), budget.call_seconds)  # type: ignore[misc]
            yield Sample("matmul", _name(dtype), num_busy, 2.0 * size**3, timing.seconds, timing.spread)
            if timing.seconds * 8 > LONGEST_CALL_SECONDS:
                break
            size *= 2


def measure_elementwise(device: torch.device, budget: Budget, num_busy: int) -> Iterator[Sample]:
    """A kernel that reads and writes each element once; ``fresh`` with a result that is allocated, as in models."""
    moved = 64 * 1024
    while moved <= budget.largest_bytes:
        source = torch.randn(moved // 8, device=device)
        out = torch.empty_like(source)
        for variant, call in (
            ("reused", lambda source=source, out=out: torch.mul(source, 1.5, out=out)),
            ("fresh", lambda source=source: torch.mul(source, 1.5)),
        ):
            timing = repeat(_done(call, device), budget.call_seconds / 2)
            yield Sample("elementwise", variant, num_busy, float(moved), timing.seconds, timing.spread)
        moved *= 4


def measure_adamw(device: torch.device, budget: Budget, num_busy: int) -> Iterator[Sample]:
    """Torch's fused AdamW on one flat fp32 tensor: what an update of a shard is; on the host too, where offloaded state is updated."""
    yield from _measure_adamw("adamw", device, budget, num_busy)
    if device.type != "cpu":
        yield from _measure_adamw("adamw_host", torch.device("cpu"), budget, num_busy)


def _measure_adamw(part: str, device: torch.device, budget: Budget, num_busy: int) -> Iterator[Sample]:
    for numel in (budget.largest_bytes // 64, budget.largest_bytes // 8):
        weight = torch.zeros(numel, device=device, requires_grad=True)
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)
        timing = repeat(_done(optimizer.step, device), budget.call_seconds)
        yield Sample(part, "fused", num_busy, float(numel * ADAMW_BYTES), timing.seconds, timing.spread)


def measure_kernels(device: torch.device, budget: Budget, num_busy: int) -> Iterator[Sample]:
    """What a kernel costs that has next to nothing to do: alone, and in a graph with its backward."""
    num_kernels, small = 32, torch.ones(16, device=device)
    leaf = torch.ones(16, device=device, requires_grad=True)

    def forward_only() -> None:
        values = small
        for _ in range(num_kernels):
            values = values.mul(small)

    def with_backward() -> None:
        values = leaf
        for _ in range(num_kernels):
            values = values.mul(small)
        torch.autograd.grad(values, leaf, small)

    for variant, call, count in (("plain", forward_only, num_kernels), ("autograd", with_backward, 2 * num_kernels)):
        timing = repeat(_done(call, device), budget.call_seconds)
        yield Sample("kernel", variant, num_busy, float(count), timing.seconds, timing.spread)


def measure_disk(folder: Path, budget: Budget, num_busy: int) -> Iterator[Sample]:
    """The disk tier's own file, in loads as it makes them. Yields nothing where no file can be made.

    Numbers are random: some disks compress, and zeros would flatter them.
    """
    try:
        store = DiskStore(folder, name="doctor", is_passing=True)
    except OffloadError:
        return
    try:
        slot = store.reserve(budget.disk_bytes, "what doctor writes")
        memory = aligned_memory(budget.disk_bytes)
        memory.view(torch.int64).random_()
        variant = "direct" if store.is_direct else "buffered"
        # Not as many rounds as there is time for: disks wear, and the first write makes the blocks.
        store.write(slot, memory).wait()
        for part, move in (("disk_write", store.write), ("disk_read", store.read)):
            rounds = [_seconds_of(lambda move=move: move(slot, memory).wait()) for _ in range(DISK_ROUNDS)]  # type: ignore[misc]
            timing = timing_of(rounds)
            yield Sample(part, variant, num_busy, float(budget.disk_bytes), timing.seconds, timing.spread)
    except OffloadError:
        return  # The disk is full: the checks say so.
    finally:
        store.close()


def measure_copies(device: torch.device, budget: Budget, num_busy: int) -> Iterator[Sample]:
    """Between the host's pinned memory and a device. Yields nothing where the host is what computes."""
    if device.type == "cpu":
        return
    num_bytes = MIB
    while num_bytes <= budget.largest_bytes:
        host = empty_on_host(num_bytes // 4, torch.float32, "what doctor copies").zero_()
        there = torch.zeros_like(host, device=device)
        for part, call in (
            ("to_device", lambda host=host, there=there: there.copy_(host, non_blocking=True)),
            ("to_host", lambda host=host, there=there: host.copy_(there, non_blocking=True)),
        ):
            timing = repeat(_done(call, device), budget.call_seconds)
            yield Sample(part, "pinned", num_busy, float(num_bytes), timing.seconds, timing.spread)
        num_bytes *= 8


def _seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
