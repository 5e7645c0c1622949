"""Machines: what a rank computes on, and what connects it with others, the host and the disk. From the catalogue, or measured.

Knows no model, and neither measures nor predicts: ``shardwise doctor`` measures, ``collectives.py`` and ``simulate.py`` predict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from shardwise.core.errors import UsageError
from shardwise.planning.catalogue import Accelerator, Link
from shardwise.planning.fleet import Fleet

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
"""Those whose times are predicted, and may be measured."""

_NO_LINK = (None, "none")


@dataclass(frozen=True)
class LinkRate:
    """What ranks are connected with: bytes a second in one direction, for each rank, to all others together.

    ``pair_bytes_per_second`` is to one other alone, where that is less. ``latency_seconds`` is None where it is not known: what is
    usual is then taken.
    """

    bytes_per_second: float
    pair_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    kind: str | None = None


@dataclass(frozen=True)
class MeasuredCollective:
    """Seconds of a collective among so many ranks, by payload: the bytes of the full buffer, which a rank has before or afterwards.

    ``points`` are pairs of (payload bytes, seconds), by rising payload.
    """

    name: str
    num_ranks: int
    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((int(payload), float(seconds)) for payload, seconds in self.points))
        payloads = [payload for payload, _ in self.points]
        if self.name not in COLLECTIVES:
            raise UsageError(f"A measured collective is one of {', '.join(COLLECTIVES)} but is {self.name!r}.")
        if not self.points or payloads != sorted(set(payloads)) or min(min(point) for point in self.points) <= 0:
            raise UsageError(
                f"{self.name} needs points (payload bytes, seconds), all above 0 and by rising payload, but has {self.points}."
            )


@dataclass(frozen=True)
class Machine:
    """One rank's accelerator, with its links. What is None is not known.

    Args:
        name: For people.
        peak_flops: Operations a second at most, by dtype (``"bfloat16"``).
        memory_bytes: Of the accelerator.
        memory_bytes_per_second: Between the accelerator and its memory.
        num_per_node: Ranks in a node.
        inside_node: Its link to ranks of its node.
        between_nodes: Its part of the link to other nodes.
        to_host_bytes_per_second: Copies from the device to the host; all ranks of a node copying at once.
        from_host_bytes_per_second: And back.
        host_memory_bytes: Of a whole node.
        host_memory_bytes_per_second: What updates on the host move, for each rank.
        disk_read_bytes_per_second: For each rank, all of a node reading at once.
        disk_write_bytes_per_second: For each rank, all of a node writing at once.
        kernel_seconds: What a kernel takes in any case; what is usual, if None.
        collectives: Measured ones, which go before what the links would give.
        is_measured: Whether rates of compute and memory were measured in programs. If not, they are what is sold, of which programs
            reach a part.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_second: float
    num_per_node: int = 1
    inside_node: LinkRate | None = None
    between_nodes: LinkRate | None = None
    to_host_bytes_per_second: float | None = None
    from_host_bytes_per_second: float | None = None
    host_memory_bytes: int | None = None
    host_memory_bytes_per_second: float | None = None
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    kernel_seconds: float | None = None
    collectives: tuple[MeasuredCollective, ...] = ()
    is_measured: bool = False

    def peak(self, dtype: str) -> float:
        """Operations a second at most in a dtype.

        Raises:
            UsageError: It is not known.
        """
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops) or "no dtype"
            raise UsageError(
                f"{self.name} has no rate for {dtype}; it has one for {known}. Compute in one of these, or give the rate in a "
                "file of your own."
            )
        return self.peak_flops[dtype]

    def replace(self, **changes: Any) -> Machine:
        """The same machine with some figures changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, for JSON."""
        return {**asdict(self), "peak_flops": dict(self.peak_flops)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Machine:
        """Read a machine from plain values.

        Raises:
            UsageError: A field is unknown or missing.
        """
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UsageError(f"A machine has no field {unknown[0]!r}. It has {', '.join(sorted(known))}.")
        links = {key: LinkRate(**values[key]) for key in ("inside_node", "between_nodes") if values.get(key) is not None}
        measured = tuple(MeasuredCollective(**each) for each in values.get("collectives", ()))
        try:
            return cls(**{**values, **links, "collectives": measured})
        except TypeError as error:
            raise UsageError(f"A machine needs more than this: {error}.") from error


def machines_of(
    fleet: Fleet,
    *,
    between_nodes: LinkRate | None = None,
    inside_node: LinkRate | None = None,
    num_per_node: int | None = None,
) -> tuple[Machine, ...]:
    """The machine of each group of a fleet, by the catalogue.

    Args:
        between_nodes: What is used instead of the catalogue's usual one.
        inside_node: Likewise.
        num_per_node: Likewise. Where the catalogue does not say either, all of a group are in one node.
    """
    machines = []
    for group in fleet.groups:
        machine = _from_catalogue(group.accelerator)
        machines.append(
            machine.replace(
                num_per_node=num_per_node or group.accelerator.num_per_node or group.count,
                between_nodes=between_nodes or machine.between_nodes,
                inside_node=inside_node or machine.inside_node,
            )
        )
    return tuple(machines)


def machine_of(
    fleet: Fleet,
    *,
    between_nodes: LinkRate | None = None,
    inside_node: LinkRate | None = None,
    num_per_node: int | None = None,
) -> Machine:
    """The machine that decides for a fleet of equal shares: that of `machines_of`, or the slowest in each respect.

    >>> from shardwise.planning.catalogue import load_catalogue
    >>> from shardwise.planning.fleet import parse_fleet
    >>> machine = machine_of(parse_fleet("h100:8 + a100-80gb:8", load_catalogue()))
    >>> machine.peak("bfloat16") / 1e12, machine.num_per_node
    (312.0, 8)
    """
    return slowest(
        machines_of(fleet, between_nodes=between_nodes, inside_node=inside_node, num_per_node=num_per_node),
    )


def slowest(machines: Sequence[Machine]) -> Machine:
    """What a step of equal shares runs as fast as: ranks wait for each other at every collective, so the slowest decides each part."""
    if len(machines) == 1:
        return machines[0]
    shared = set.intersection(*(set(machine.peak_flops) for machine in machines))
    least: dict[str, Any] = {}
    for key in ("memory_bytes", "memory_bytes_per_second", "num_per_node"):
        least[key] = min(getattr(machine, key) for machine in machines)
    for key in _OPTIONAL_RATES:
        least[key] = _least([getattr(machine, key) for machine in machines], min)
    kernels = [machine.kernel_seconds for machine in machines if machine.kernel_seconds is not None]
    return Machine(
        name=" + ".join(machine.name for machine in machines),
        peak_flops={dtype: min(machine.peak_flops[dtype] for machine in machines) for dtype in sorted(shared)},
        inside_node=_least([machine.inside_node for machine in machines], _slower),
        between_nodes=_least([machine.between_nodes for machine in machines], _slower),
        kernel_seconds=max(kernels, default=None),
        is_measured=all(machine.is_measured for machine in machines),
        **least,
    )


_OPTIONAL_RATES = (
    "to_host_bytes_per_second",
    "from_host_bytes_per_second",
    "host_memory_bytes",
    "host_memory_bytes_per_second",
    "disk_read_bytes_per_second",
    "disk_write_bytes_per_second",
)


def _least(values: Sequence[Any], choose: Callable[[Sequence[Any]], Any]) -> Any:
    """The least of the values; None if any of them is not known, since that one may be the least."""
    return None if any(value is None for value in values) else choose(values)


def _slower(links: Sequence[LinkRate]) -> LinkRate:
    return min(links, key=lambda link: link.bytes_per_second)


def _from_catalogue(entry: Accelerator) -> Machine:
    if entry.memory_bytes_per_second is None or not entry.peak_flops:
        raise UsageError(
            f"A predicted time needs the rates of {entry.name}, but the catalogue has not all of them ({entry.place}). Give "
            "mem_bw_gbs and bf16_dense_tflops or fp16_dense_tflops in a file of your own."
        )
    host = entry.to_host.measured_bytes_per_second or entry.to_host.bytes_per_second
    return Machine(
        name=entry.name,
        peak_flops=dict(entry.peak_flops),
        memory_bytes=entry.memory_bytes,
        memory_bytes_per_second=entry.memory_bytes_per_second,
        inside_node=_inside(entry.inside_node, entry.to_host),
        between_nodes=_rate(entry.between_nodes),
        to_host_bytes_per_second=host,
        from_host_bytes_per_second=host,
    )


def _inside(link: Link, to_host: Link) -> LinkRate | None:
    """Where accelerators have no link of their own, they reach each other over the host's bus; bridges join two alone."""
    is_bridge = link.kind is not None and "bridge" in link.kind
    return _rate(to_host if link.kind in _NO_LINK or is_bridge else link)


def _rate(link: Link) -> LinkRate | None:
    rate = link.measured_bytes_per_second or link.bytes_per_second
    return None if rate is None else LinkRate(rate, link.pair_bytes_per_second, kind=link.kind)
