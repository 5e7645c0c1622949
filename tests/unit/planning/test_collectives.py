"""Predicted collectives, against published measurements and against what must hold."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import UsageError
from shardwise.planning.catalogue import load_catalogue
from shardwise.planning.collectives import collective_seconds, sent_bytes
from shardwise.planning.fleet import parse_fleet
from shardwise.planning.machine import COLLECTIVES, LinkRate, Machine, MeasuredCollective, machine_of

DATA = Path(__file__).parents[2] / "data" / "planning"
CATALOGUE = load_catalogue()
A100, V100 = (machine_of(parse_fleet(f"{name}:8", CATALOGUE)) for name in ("a100-40gb", "v100-32gb"))


def rows_of(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_all_reduces_in_a_node_are_within_ten_percent_of_those_measured() -> None:
    errors: dict[str, list[float]] = {"a100": [], "v100": []}
    for row in rows_of("allreduce_in_node.csv"):
        machine = A100 if row["gpu"] == "a100" else V100
        found = collective_seconds("all_reduce", int(row["bytes"]), int(row["n_gpus"]), machine)
        errors[row["gpu"]].append(abs(found / (float(row["time_us"]) * 1e-6) - 1))
    print({gpu: f"{mean(each):.1%}" for gpu, each in errors.items()})
    assert len(errors["a100"]) == len(errors["v100"]) == 77
    assert all(mean(each) < 0.1 for each in errors.values())


def test_rates_by_payload_are_within_ten_percent_of_those_measured() -> None:
    errors = []
    for row in rows_of("collective_bandwidth.csv"):
        payload = int(row["payload_bytes"])
        found = payload / collective_seconds("all_reduce", payload, int(row["n_gpus"]), A100)
        errors.append(abs(found / (float(row["algbw_gbs"]) * 1e9) - 1))
    print(f"{mean(errors):.1%}")
    assert len(errors) == 20
    assert mean(errors) < 0.1


@pytest.mark.parametrize("name", COLLECTIVES)
@given(payload=st.integers(1, 2**36), num_nodes=st.integers(1, 512))
def test_more_takes_longer(name: str, payload: int, num_nodes: int) -> None:
    seconds = collective_seconds(name, payload, 8 * num_nodes, A100)
    assert seconds > 0
    assert collective_seconds(name, 2 * payload, 8 * num_nodes, A100) >= seconds
    assert collective_seconds(name, payload, 8 * num_nodes + 8, A100) > seconds


def test_the_slowest_link_decides() -> None:
    slow = A100.replace(between_nodes=LinkRate(1.25e9))
    assert collective_seconds("all_gather", 2**30, 8, slow) == collective_seconds("all_gather", 2**30, 8, A100)
    across, inside = (collective_seconds("all_gather", 2**30, 16, machine) for machine in (slow, A100))
    assert across > 10 * inside
    # Half of a gigabyte comes into each node over eight links of 1.25 GB/s.
    assert across == pytest.approx(2**29 / (8 * 1.25e9), rel=0.05)


def test_an_all_reduce_takes_as_long_as_its_halves() -> None:
    halves = sum(collective_seconds(name, 2**28, 16, A100) for name in ("reduce_scatter", "all_gather"))
    assert collective_seconds("all_reduce", 2**28, 16, A100) == pytest.approx(halves)
    assert sent_bytes("all_reduce", 800, 8) == 1400 == 2 * sent_bytes("all_gather", 800, 8)


def test_one_rank_takes_no_time() -> None:
    assert collective_seconds("all_reduce", 2**30, 1, A100) == 0.0


def test_a_link_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(UsageError, match=r"between nodes is not known.*Give between_nodes"):
        collective_seconds("all_reduce", 2**30, 16, A100.replace(between_nodes=None))


def test_measured_points_go_before_links() -> None:
    points = ((1000, 1e-3), (100_000, 1e-2))
    machine: Machine = A100.replace(collectives=(MeasuredCollective("all_gather", 4, points),))
    at = {payload: collective_seconds("all_gather", payload, 4, machine) for payload in (10, 1000, 10_000, 100_000, 1_000_000)}
    assert at[10] == at[1000] == 1e-3
    assert at[10_000] == pytest.approx(10**-2.5)
    assert at[100_000] == pytest.approx(1e-2)
    assert at[1_000_000] == pytest.approx(1e-1)
    assert collective_seconds("all_gather", 1000, 8, machine) == collective_seconds("all_gather", 1000, 8, A100)
