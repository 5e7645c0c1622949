"""Where state rests, and what that leaves on the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.core.errors import PlanError
from shardwise.core.footprint import advice, footprint
from shardwise.core.ledger import Tier
from shardwise.core.plan import GRAD, OPTIM, PARAM, Plan, StateKind
from shardwise.core.rest import rests_of
from shardwise.core.unit import Unit, find_units

NUM_PARAMS = 8 * 64 * 64


def units_of(widths: list[int]) -> tuple[Unit, ...]:
    return find_units(nn.Sequential(*(nn.Linear(64, width, bias=False) for width in widths)), units=[nn.Linear])


UNITS = units_of([64] * 8)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.floats(0, 1))
def test_a_fraction_is_met_as_closely_as_buffers_allow(widths: list[int], fraction: float) -> None:
    units = units_of(widths)
    rests = rests_of(units, Plan(tiers={OPTIM: "host"}, fraction=fraction))
    sizes = {flat.name: flat.numel for unit in units for flat in unit.flats}
    taken = sum(sizes[name] for name, rest in rests.items() if rest.optim is Tier.HOST)
    assert abs(taken - fraction * sum(sizes.values())) <= max(sizes.values()) + 1e-6


def test_all_and_nothing() -> None:
    for fraction, tier in ((0.0, Tier.DEVICE), (1.0, Tier.HOST)):
        rests = rests_of(UNITS, Plan(tiers={PARAM: "host"}, fraction=fraction))
        assert {rest.param for rest in rests.values()} == {tier}


def test_an_optimizer_off_the_device_keeps_the_values_that_it_updates() -> None:
    def master(tiers: dict[StateKind, str], *, is_on_host: bool = False) -> set[Tier]:
        return {rest.master for rest in rests_of(UNITS, Plan(tiers=tiers), is_on_host=is_on_host).values()}

    assert master({OPTIM: "host"}) == {Tier.HOST}
    assert master({PARAM: "host"}) == {Tier.HOST}
    assert master({GRAD: "host"}) == {Tier.DEVICE}
    assert master({OPTIM: "disk"}) == {Tier.DISK}
    assert master({OPTIM: "host", PARAM: "disk"}) == {Tier.DISK}


def test_on_the_cpu_an_optimizer_on_disk_reaches_the_parameters_where_they_are() -> None:
    for param in ("device", "disk"):
        rests = rests_of(UNITS, Plan(tiers={OPTIM: "disk", PARAM: param}), is_on_host=True)
        assert {rest.master.value for rest in rests.values()} == {param}


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_bytes_at_rest_are_those_of_the_published_analysis(num_ranks: int) -> None:
    for stage, expected in enumerate((16, 8 + 8 / num_ranks, 4 + 12 / num_ranks, 16 / num_ranks)):
        assert footprint(UNITS, Plan(stage=stage), num_ranks).rest_bytes == expected * NUM_PARAMS
    off = Plan(stage=3, tiers={OPTIM: "host"})
    assert footprint(UNITS, off, num_ranks).rest_bytes == 8 / num_ranks * NUM_PARAMS
    off = off.replace(tiers={OPTIM: "host", GRAD: "host", PARAM: "host"})
    assert footprint(UNITS, off, num_ranks).rest_bytes == 0
    mixed = Plan(stage=0, param_dtype="bfloat16", reduce_dtype="float32", tiers={OPTIM: "host"})
    assert footprint(UNITS, mixed, num_ranks).rest_bytes == (2 + 4) * NUM_PARAMS


def test_advice_names_the_least_change_that_fits() -> None:
    plan = Plan(stage=0)
    needed = [footprint(UNITS, plan.replace(stage=stage), 4).num_bytes for stage in range(4)]
    assert "stage=1:" in advice(UNITS, plan, 4, needed[1] + 1)
    assert "stage=3:" in advice(UNITS, plan, 4, needed[3] + 1)
    assert "stage=3 and tiers={'optim': 'host'}:" in advice(UNITS, plan, 4, needed[3] - 1)
    assert "with tiers={'optim': 'host'}:" in advice(UNITS, plan.replace(stage=3), 4, needed[3] - 1)
    assert "more ranks are needed" in advice(UNITS, plan, 4, 1000)


def test_advice_knows_what_the_host_has_and_then_the_disk() -> None:
    plan = Plan(stage=3)
    sizes = [footprint(UNITS, plan.replace(tiers=tiers), 4) for tiers in ({OPTIM: "host"}, {OPTIM: "disk"}, {})]
    assert [found.host_bytes for found in sizes] == [12 * NUM_PARAMS // 4, 3 * 12 * NUM_PARAMS // 8 // 4, 0]
    assert sizes[1].disk_bytes == sizes[0].host_bytes
    capacity = sizes[2].num_bytes - 1
    assert "with tiers={'optim': 'host'}: " in advice(UNITS, plan, 4, capacity, 2, sizes[0].host_bytes)
    told = advice(UNITS, plan, 4, capacity, 2, sizes[0].host_bytes - 1)
    assert (
        "It would fit with tiers={'optim': 'disk'}: 112 KiB on the device, 36 KiB in the host's memory, 96 KiB on disk." in told
    )
    assert "tiers={'optim': 'host'} would take 96 KiB of it, and 96 KiB are free for a rank" in told
    assert "No other stage or tier would fit" in advice(UNITS, plan, 4, capacity, 2, 1000)


def test_advice_on_activations_says_what_is_left_for_them_and_only_what_a_plan_takes() -> None:
    told = advice(UNITS, Plan(stage=3), 4, 2**20)
    assert "leave 848 KiB for activations" in told and "activations='host'" in told
    assert "activations='host'" not in advice(UNITS, Plan(stage=3, activations="host"), 4, 2**20)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tiers": {"weights": "host"}}, "There are optim, grad, param"),
        ({"tiers": {"optim": "tape"}}, "Choose from 'device', 'host'"),
        ({"tiers": "host"}, "such as"),
        ({"fraction": 1.5}, "from 0 to 1"),
        ({"fraction": "half"}, "must be a number"),
        ({"staging_bytes": 0}, "1 or more"),
        ({"folder": 3}, "path of a folder"),
    ],
)
def test_wrong_tiers_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**wrong)  # type: ignore[arg-type]


def test_tiers_are_written_and_read() -> None:
    plan = Plan(stage=2, tiers={PARAM: "host", OPTIM: "host", GRAD: "device"}, fraction=0.25)
    assert plan.tiers == (("optim", "host"), ("param", "host"))
    assert Plan.from_toml(plan.to_toml()) == Plan.from_json(plan.to_json()) == plan
    assert Plan(tiers={"grad": "device"}).hash == Plan().hash
