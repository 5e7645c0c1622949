"""Seconds of collectives, by payload, ranks and links. Knows no models and no plans.

A ring: each rank sends all parts but its own, once for a gather or a reduce-scatter and twice for an all-reduce. A payload takes

- the time of its bytes on the slowest link of the way, at the listed rate: inside a node, each rank's link carries the part of all
  other ranks; between nodes, the links of a node together carry the part of all other nodes;
- and three passes over the memory of the device for an all-reduce (two reads, a write), half of that for each half of it;
- and a latency, that grows with the ranks of a node, and with the logarithm of nodes.

Small payloads are sent another way, with less latency and at a fraction of the rate, where that is faster. What was measured goes
before all of this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, exp, log, log2

from shardwise.core.errors import UsageError
from shardwise.planning.constants import WIRE_CONSTANTS, WireConstants
from shardwise.planning.machine import COLLECTIVES, LinkRate, Machine

_PASSES = 3.0
"""Over the memory of the device, in an all-reduce: what came and what is there are read, and their sum is written."""
_NODE_HOPS = 2.0
"""Between nodes, in hops inside a node: a network card and a switch on the way."""

_MESH = "NVLink2"
"""The link of nodes of eight whose links are wired pair by pair, a cube with diagonals, without a switch."""
_MESH_LINKS = 6
_MESH_RINGS = {2: 1, 3: 2, 4: 4, 6: 2, 7: 4, 8: 6}
"""Rings that visit the first ranks of such a node, each on links of its own. The first five have none: one tree joins them."""


def collective_seconds(
    name: str, payload_bytes: float, num_ranks: int, machine: Machine, constants: WireConstants = WIRE_CONSTANTS
) -> float:
    """How long a collective takes, if nothing else is on the wire.

    Args:
        name: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        payload_bytes: Of the full buffer, as it travels.
        num_ranks: All of the machine's kind, node by node.

    Raises:
        UsageError: The machine has no link that they need.

    >>> from shardwise.planning.catalogue import load_catalogue
    >>> from shardwise.planning.fleet import parse_fleet
    >>> from shardwise.planning.machine import machine_of
    >>> machine = machine_of(parse_fleet("a100-80gb:8", load_catalogue()))
    >>> small, large = (collective_seconds("all_reduce", payload, 8, machine) for payload in (2**24, 2**34))
    >>> round(large / small)
    632
    """
    if name not in COLLECTIVES:
        raise UsageError(f"A collective is one of {', '.join(COLLECTIVES)} but is {name!r}.")
    if num_ranks == 1 or payload_bytes <= 0:
        return 0.0
    measured = _measured(name, payload_bytes, num_ranks, machine)
    if measured is not None:
        return measured
    in_node = min(num_ranks, machine.num_per_node)
    num_nodes = ceil(num_ranks / machine.num_per_node)
    share = 1.0 if name == "all_reduce" else 0.5
    latency = _latency(in_node, num_nodes, machine, constants)
    on_wire = 2 * _wire_seconds(payload_bytes, num_ranks, machine)
    memory = _PASSES * payload_bytes / machine.memory_bytes_per_second
    quick = latency * constants.quick_latency_part + on_wire / constants.quick_rate_part
    return share * min(latency + on_wire + memory, quick)


def sent_bytes(name: str, payload_bytes: float, num_ranks: int) -> float:
    """What each rank sends in a collective."""
    return payload_bytes * (num_ranks - 1) / num_ranks * (2 if name == "all_reduce" else 1)


def _latency(in_node: int, num_nodes: int, machine: Machine, constants: WireConstants) -> float:
    link = machine.inside_node if num_nodes == 1 else machine.between_nodes
    first = constants.latency_seconds
    if link is not None and link.latency_seconds is not None:
        first = link.latency_seconds
    return first + constants.hop_seconds * (in_node - 1 + _NODE_HOPS * in_node * log2(num_nodes))


def _wire_seconds(payload_bytes: float, num_ranks: int, machine: Machine) -> float:
    """Of one direction: all parts but the own reach each rank, and those of other nodes each node."""
    in_node = min(num_ranks, machine.num_per_node)
    num_nodes = ceil(num_ranks / machine.num_per_node)
    seconds = 0.0
    if in_node > 1:
        inside = _needed(machine.inside_node, "inside_node", machine)
        seconds = payload_bytes * (num_ranks - 1) / num_ranks / _ring_rate(inside, in_node)
    if num_nodes > 1:
        between = _needed(machine.between_nodes, "between_nodes", machine)
        seconds = max(seconds, payload_bytes * (num_nodes - 1) / num_nodes / (between.bytes_per_second * in_node))
    return seconds


def _ring_rate(link: LinkRate, in_node: int) -> float:
    """Bytes a second around the ring or rings of a node."""
    if link.kind == _MESH and in_node in (*_MESH_RINGS, 5):
        one = link.bytes_per_second / _MESH_LINKS
        # A tree sends the whole payload up and down, where a ring sends all parts but one.
        return one * (_MESH_RINGS[in_node] if in_node in _MESH_RINGS else 2 * (in_node - 1) / in_node)
    if link.pair_bytes_per_second is None:
        return link.bytes_per_second
    return min(link.bytes_per_second, link.pair_bytes_per_second * (in_node - 1))


def _needed(link: LinkRate | None, key: str, machine: Machine) -> LinkRate:
    if link is None:
        where = "inside a node" if key == "inside_node" else "between nodes"
        raise UsageError(
            f"The rate of {machine.name}'s link {where} is not known, but its ranks need it. Give {key}, or a file of your own with it."
        )
    return link


# ---------------------------------------------------------------- measured


def _measured(name: str, payload_bytes: float, num_ranks: int, machine: Machine) -> float | None:
    """From points measured at this number of ranks, on straight lines between logarithms; a rate goes on as it ended."""
    for each in machine.collectives:
        if each.name == name and each.num_ranks == num_ranks:
            return _interpolated(payload_bytes, each.points)
    return None


def _interpolated(payload_bytes: float, points: Sequence[tuple[int, float]]) -> float:
    payloads = [payload for payload, _ in points]
    at = bisect_left(payloads, payload_bytes)
    if at == 0:
        return points[0][1]  # It is latency that is left.
    if at == len(points):
        return points[-1][1] * payload_bytes / payloads[-1]
    (low, low_seconds), (high, high_seconds) = points[at - 1], points[at]
    part = log(payload_bytes / low) / log(high / low)
    return exp(log(low_seconds) + part * log(high_seconds / low_seconds))
