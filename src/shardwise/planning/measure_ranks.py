"""Measures what the ranks of a run can do together: each part with all of them busy, and collectives through the engine's lanes.

Called by every rank of a process group, in the same order. Results are the same on all of them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.core.layout import Layout
from shardwise.core.tree import host_tree
from shardwise.planning import measure
from shardwise.planning.facts import Facts
from shardwise.planning.machine import COLLECTIVES
from shardwise.planning.measure import LEAST_ROUNDS, MIB, Budget, Sample
from shardwise.runtime.reduce import begin_reduction, needs_room
from shardwise.wire.comm import Comm, Lanes, gather_bytes
from shardwise.wire.lanes import torch_lanes
from shardwise.wire.local_comm import solo_lanes

DEADLINE = timedelta(seconds=120)
SMALLEST_PAYLOAD = 64 * 1024
MOST_ROUNDS = 50
Tell = Callable[[str, list[Sample]], None]
"""Told on each rank what part is done, and what it gave."""


@dataclass(frozen=True)
class World:
    """The ranks that measure, and what they talk through."""

    lanes: Lanes
    network: Lanes | None
    """The same ranks through the process group, where the first read each other's memory."""
    device: torch.device

    @property
    def links(self) -> tuple[str, ...]:
        """What the ranks' collectives go over; empty for one rank."""
        return (self.lanes.gather.link,) if self.lanes.size > 1 else ()

    def meet(self) -> None:
        """Until all are here. Asleep: a rank that polls would disturb the one that measures alone."""
        if self.lanes.size > 1:
            dist.barrier()

    def release(self) -> None:
        """The lanes may be used by others."""
        for lanes in (self.lanes, self.network):
            if lanes is not None:
                lanes.release()


def open_world(device: torch.device) -> World:
    """The lanes of all ranks, as an engine would get them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(solo_lanes(), None, device)
    if device.type != "cpu":
        group = dist.new_group(backend=dist.get_default_backend_for_device(device), timeout=DEADLINE)
        return World(torch_lanes(group, device, DEADLINE), None, device)
    lanes = torch_lanes(None, device, DEADLINE)
    is_direct = lanes.gather.link == "host memory"
    return World(lanes, torch_lanes(None, device, DEADLINE, "network") if is_direct else None, device)


def share_facts(facts: Facts, world: World) -> list[Facts]:
    """Every rank's facts, on all ranks."""
    told = gather_bytes(world.lanes.gather, json.dumps(facts.to_dict()).encode(), label="facts of ranks")
    return [Facts.from_dict(json.loads(text)) for text in told]


def measure_all(world: World, folder: Path, budget: Budget, tell: Tell) -> list[Sample]:
    """Measure every part, first with one rank of the machine busy, then with all. A collective."""
    num_local = world.lanes.hosts.count(world.lanes.hosts[world.lanes.rank])
    found: list[Sample] = []
    for part, run in (
        ("matrix products", measure.measure_matmul),
        ("elementwise kernels", measure.measure_elementwise),
        ("AdamW", measure.measure_adamw),
        ("small kernels", measure.measure_kernels),
        ("copies between host and device", measure.measure_copies),
    ):
        samples: list[Sample] = []
        if num_local > 1:
            samples += _alone(world, lambda run=run: run(world.device, budget, 1))  # type: ignore[misc]
        samples += _together(world, run(world.device, budget, num_local))
        if samples:
            tell(part, samples)
        found += samples
    disk = _together(world, measure.measure_disk(folder, budget, num_local))
    if disk:
        tell("disk", disk)
    found += disk
    for lanes in (world.lanes, world.network):
        if lanes is not None and lanes.size > 1:
            samples = list(measure_collectives(lanes, budget, world.device))
            tell(f"collectives through {lanes.gather.link}", samples)
            found += samples
    return found


def _alone(world: World, run: Callable[[], Iterable[Sample]]) -> list[Sample]:
    """By the first rank of each host, while the others sleep."""
    hosts = world.lanes.hosts
    is_first = hosts.index(hosts[world.lanes.rank]) == world.lanes.rank
    world.meet()
    mine = list(run()) if is_first else []
    world.meet()
    return merge(_exchange(world, mine))


def _together(world: World, run: Iterable[Sample]) -> list[Sample]:
    """By all ranks at once: each size begins when all are there."""
    mine: list[Sample] = []
    samples = iter(run)
    while True:
        world.meet()
        sample = next(samples, None)
        # Ranks may leave out what is too slow for them, or have no disk: all go on until nobody has anything left.
        if not any(rank for rank in _exchange(world, [] if sample is None else [sample])):
            return merge(_exchange(world, mine))
        mine += [] if sample is None else [sample]


def _exchange(world: World, mine: list[Sample]) -> list[list[Sample]]:
    payload = json.dumps([sample.to_dict() for sample in mine]).encode()
    told = gather_bytes(world.lanes.gather, payload, label="what ranks measured")
    return [[Sample.from_dict(values) for values in json.loads(text)] for text in told]


def merge(ranks: Iterable[list[Sample]]) -> list[Sample]:
    """One sample for each thing that ranks have measured: the median of theirs, in the order in which they came."""
    groups: dict[tuple[str, str, int, float], list[Sample]] = {}
    for sample in (sample for samples in ranks for sample in samples):
        groups.setdefault((sample.part, sample.variant, sample.num_busy, sample.size), []).append(sample)
    return [
        Sample(*key, statistics.median(each.seconds for each in group), max(each.spread for each in group))
        for key, group in groups.items()
    ]


def measure_collectives(lanes: Lanes, budget: Budget, device: torch.device) -> Iterator[Sample]:
    """By payload, which is the whole buffer that a gather fills or a reduction adds up."""
    payload = SMALLEST_PAYLOAD
    while payload <= max(budget.largest_bytes, MIB):
        for op in COLLECTIVES:
            call = _collective(op, lanes, payload, device)
            rounds = [_agree(lanes.gather, _timed(call)) for _ in range(LEAST_ROUNDS)]
            # The same number on every rank: they have agreed on how long one takes.
            num_rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(budget.call_seconds / max(statistics.median(rounds), 1e-6))))
            timing = measure.timing_of([_agree(lanes.gather, _timed(call)) for _ in range(num_rounds)])
            yield Sample(op, lanes.gather.link, lanes.size, float(payload), timing.seconds, timing.spread)
        payload *= 4


def _collective(op: str, lanes: Lanes, payload: int, device: torch.device) -> Callable[[], None]:
    """What the engine does: a gather, an exchange with the sum of what came, or, at stage 0, that and a gather of the sums."""
    layout = Layout.even(payload // 4, num_ranks=lanes.size)
    buffer, tree, comm = torch.ones(layout.numel, device=device), host_tree(lanes.hosts), lanes.reduce
    out = torch.empty(layout.sizes[lanes.rank], device=device)
    room = torch.empty(out.numel() * lanes.size, device=device) if needs_room(comm) else None

    def gather(lane: Comm) -> None:
        handle = lane.all_gather(buffer, layout.cuts, label="doctor")
        handle.wait()
        handle.receipt.wait()

    def reduce() -> None:
        reduction = begin_reduction(buffer, layout, tree, comm, label="doctor", room=room)
        reduction.wait()
        reduction.add_up(out)
        reduction.handle.receipt.wait()

    def reduce_and_gather() -> None:
        reduce()
        buffer[slice(*layout.bounds(lanes.rank))].copy_(out)
        gather(lanes.regather)

    return {"all_gather": lambda: gather(lanes.gather), "reduce_scatter": reduce, "all_reduce": reduce_and_gather}[op]


def _timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def _agree(comm: Comm, seconds: float) -> float:
    """What the slowest rank took. It also lets all begin the next round together."""
    handle = comm.gather_small(torch.tensor([seconds], dtype=torch.float64), label="seconds of ranks")
    handle.wait()
    return seconds if handle.result is None else float(handle.result.max())
