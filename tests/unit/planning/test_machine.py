"""Machines: from the catalogue, from measurements, and the slowest of several."""

from __future__ import annotations

import json

import pytest

from shardwise.core.errors import UsageError
from shardwise.planning.catalogue import load_catalogue
from shardwise.planning.fleet import parse_fleet
from shardwise.planning.machine import LinkRate, Machine, MeasuredCollective, machine_of, machines_of

CATALOGUE = load_catalogue()


def test_a_machine_survives_json() -> None:
    machine = Machine(
        "here",
        {"float32": 5e10},
        memory_bytes=2**34,
        memory_bytes_per_second=2e10,
        num_per_node=2,
        inside_node=LinkRate(1e9, latency_seconds=1e-4),
        collectives=(MeasuredCollective("all_gather", 2, ((1024, 1e-4), (2**20, 1e-3))),),
        is_measured=True,
    )
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(UsageError, match="no field 'speed'"):
        Machine.from_dict({"speed": 3})
    with pytest.raises(UsageError, match="memory_bytes"):
        Machine.from_dict({"name": "x", "peak_flops": {}})


@pytest.mark.parametrize("points", [(), ((2, 1.0), (1, 2.0)), ((1, 0.0),)])
def test_points_must_rise(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UsageError, match="rising payload"):
        MeasuredCollective("all_gather", 2, points)


def test_the_catalogue_gives_links_and_the_cluster_overrides_them() -> None:
    fleet = parse_fleet("a100-40gb:16", CATALOGUE)
    usual, own = machine_of(fleet), machine_of(fleet, between_nodes=LinkRate(1.25e9), num_per_node=4)
    assert usual.inside_node is not None and usual.inside_node.bytes_per_second == 300e9
    assert usual.between_nodes is not None and usual.between_nodes.bytes_per_second == 25e9
    assert (usual.num_per_node, own.num_per_node) == (8, 4)
    assert own.between_nodes == LinkRate(1.25e9)


def test_accelerators_without_a_link_meet_on_the_bus() -> None:
    machine = machine_of(parse_fleet("t4:4", CATALOGUE))
    assert machine.inside_node is not None and machine.inside_node.bytes_per_second == 15.75e9
    assert machine.num_per_node == 4
    assert machine.between_nodes is None


def test_the_slowest_of_a_mixed_fleet_decides_each_part() -> None:
    fleet = parse_fleet("h100:8 + l4:4", CATALOGUE)
    fast, slow = machines_of(fleet)
    both = machine_of(fleet)
    assert both.peak("bfloat16") == slow.peak("bfloat16") < fast.peak("bfloat16")
    assert both.memory_bytes == slow.memory_bytes
    assert both.inside_node == slow.inside_node
    assert both.between_nodes is None, "what is not known of one may be the least"


def test_a_dtype_without_a_rate_is_refused() -> None:
    machine = machine_of(parse_fleet("v100-32gb:8", CATALOGUE))
    with pytest.raises(UsageError, match="no rate for bfloat16; it has one for float16"):
        machine.peak("bfloat16")


def test_entries_without_rates_are_refused() -> None:
    with pytest.raises(UsageError, match="needs the rates of"):
        machine_of(parse_fleet("H100-SXM-96GB-HBM2e-500W:8", CATALOGUE))
