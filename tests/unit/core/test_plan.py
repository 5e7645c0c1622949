"""Plans: what is written is read back, unknown and contradictory fields are refused, and equal plans have equal hashes."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import PlanError
from shardwise.core.ledger import Tier
from shardwise.core.plan import SHARDED_AT_STAGE, Plan, StateKind
from shardwise.core.tree import balanced_tree

dtypes = st.sampled_from([None, "float16", "bfloat16", "float32", "float64"])
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layout = draw(st.sampled_from(["auto", "even", "weighted", "whole"]))
    weights = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=4)
    return Plan(
        stage=draw(st.integers(0, 3)),
        layout=layout,
        weights=draw(weights) if layout == "weighted" else None,
        prefetch=draw(st.integers(0, 100)),
        tree=draw(st.none() | st.integers(1, 9).map(lambda n: balanced_tree(range(n)))),
        param_dtype=draw(dtypes),
        reduce_dtype=draw(dtypes),
        output_dtype=draw(dtypes),
        cast_forward_inputs=draw(st.booleans()),
        reshard_after_forward=draw(st.booleans()),
        buffers=draw(st.sampled_from(["broadcast", "average", "local"])),
        initial=draw(st.sampled_from(["rank0", "local"])),
        nonfinite=draw(st.sampled_from(["skip", "raise", "keep"])),
        unused=draw(st.sampled_from(["raise", "zero"])),
        units=draw(st.none() | st.lists(names, max_size=3)),
        deadline_seconds=draw(st.none() | st.floats(1e-3, 1e6) | st.integers(1, 1000)),
        init_seed=draw(st.integers(-(2**40), 2**40)),
        path=draw(st.sampled_from(["auto", "network"])),
    )


@given(plans())
def test_what_is_written_is_read_back(plan: Plan) -> None:
    for read in (Plan.from_json(plan.to_json()), Plan.from_toml(plan.to_toml()), Plan.from_dict(plan.to_dict())):
        assert read == plan
        assert read.hash == plan.hash


@given(plans())
def test_hash_is_short_and_covers_every_field(plan: Plan) -> None:
    assert len(plan.hash) == 12 and set(plan.hash) <= set("0123456789abcdef")
    assert plan.replace().hash == plan.hash
    for change in ({"stage": (plan.stage + 1) % 4}, {"prefetch": plan.prefetch + 1}, {"init_seed": plan.init_seed + 1}):
        assert plan.replace(**change).hash != plan.hash


def test_every_field_enters_the_hash() -> None:
    others: dict[str, Any] = {
        "stage": 1, "layout": "even", "weights": (1.0,), "prefetch": 0, "tree": (0, 1), "param_dtype": "float16",
        "reduce_dtype": "float32", "output_dtype": "float32", "cast_forward_inputs": False, "reshard_after_forward": False,
        "buffers": "local", "initial": "local", "nonfinite": "keep", "unused": "zero", "units": ("a",),
        "deadline_seconds": 5.0, "init_seed": 1, "path": "network", "tiers": {"optim": "host"}, "fraction": 0.5,
        "activations": "host", "folder": "fast", "staging_bytes": 2**20, "adapt": True, "sync": "delayed", "delay_warmup": 3,
    }  # fmt: skip
    assert set(others) == {field.name for field in fields(Plan)}, "a new field needs a value here"
    assert len({Plan().hash, *(Plan(**{key: value}).hash for key, value in others.items())}) == len(others) + 1


def test_equal_plans_have_equal_hashes() -> None:
    for one, other in [
        (Plan(deadline_seconds=5), Plan(deadline_seconds=5.0)),
        (Plan(weights=(1, 2)), Plan(weights=[1.0, 2.0])),
        (Plan(tree=[[0, 1], 2]), Plan(tree=((0, 1), 2))),
        (Plan(units=["a"]), Plan(units=("a",))),
    ]:
        assert one == other and one.hash == other.hash, f"{one.to_json()} and {other.to_json()}"


def test_plan_is_read_from_files(tmp_path: Path) -> None:
    plan = Plan(stage=3, prefetch=2, weights=(1, 2))
    (tmp_path / "a.toml").write_text(plan.to_toml(), encoding="utf-8")
    (tmp_path / "a.json").write_text(plan.to_json(), encoding="utf-8")
    assert Plan.read(tmp_path / "a.toml") == Plan.read(str(tmp_path / "a.json")) == plan


def test_stages_add_up() -> None:
    assert [SHARDED_AT_STAGE[stage] for stage in range(4)] == [
        set(),
        {StateKind.OPTIM},
        {StateKind.OPTIM, StateKind.GRAD},
        {StateKind.OPTIM, StateKind.GRAD, StateKind.PARAM},
    ]


@pytest.mark.parametrize(("key", "hint"), [("prefetsch", "'prefetch'"), ("Stage", "'stage'"), ("xyz", "Known keys: stage")])
def test_unknown_keys_are_refused_with_the_nearest(key: str, hint: str) -> None:
    for make in (Plan.from_dict, lambda values: Plan().replace(**values)):
        with pytest.raises(PlanError, match=f"no key '{key}'.*{hint}"):
            make({key: 1})
    with pytest.raises(PlanError, match=f"no key '{key}'"):
        Plan.from_toml(f"{key} = 1\n")


@pytest.mark.parametrize("text", ["{", "[1, 2]", "3", ""])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)
    if text:
        with pytest.raises(PlanError):
            Plan.from_toml(text)


@pytest.mark.parametrize(
    "values",
    [
        {"stage": 4}, {"stage": -1}, {"stage": True}, {"stage": "3"}, {"stage": 1.0}, {"stage": None},
        {"prefetch": -1}, {"prefetch": 1.5}, {"prefetch": True}, {"init_seed": 0.5},
        {"layout": "odd"}, {"buffers": None}, {"initial": "rank1"}, {"nonfinite": True}, {"unused": "skip"},
        {"param_dtype": "fp32"}, {"reduce_dtype": "int8"}, {"output_dtype": 1},
        {"cast_forward_inputs": 1}, {"reshard_after_forward": "yes"},
        {"layout": "weighted"}, {"layout": "even", "weights": (1, 1)}, {"layout": "whole", "weights": (1, 1)},
        {"weights": ()}, {"weights": (-1, 2)}, {"weights": (0, 0)}, {"weights": (float("nan"), 1)},
        {"weights": (float("inf"), 1)}, {"weights": ("a", "b")}, {"weights": 3},
        {"deadline_seconds": 0}, {"deadline_seconds": -1.0}, {"deadline_seconds": float("nan")}, {"deadline_seconds": "soon"},
        {"tree": [0, 1, 2]}, {"tree": "0"}, {"units": "blocks.0"}, {"units": (1,)},
        {"sync": "late"}, {"sync": None}, {"delay_warmup": -1}, {"delay_warmup": 1.5}, {"delay_warmup": True},
        {"sync": "delayed", "tiers": {"grad": "disk"}}, {"sync": "delayed", "tiers": {"param": "disk", "optim": "disk"}},
        {"sync": "delayed", "tiers": {"optim": "disk"}, "activations": "disk"}, {"sync": "delayed", "adapt": True},
    ],
    ids=str,
)  # fmt: skip
def test_bad_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Plan(**values)


def test_plan_fits_its_number_of_ranks_only() -> None:
    Plan(weights=(1, 2), tree=(0, 1)).fit(2)
    Plan().fit(7)
    with pytest.raises(PlanError, match="2 entries but there are 3 ranks"):
        Plan(weights=(1, 2)).fit(3)
    with pytest.raises(PlanError, match="each of the 3 ranks once"):
        Plan(tree=(0, 1)).fit(3)


def test_activations_rest_somewhere_or_are_computed_again() -> None:
    for name in ("device", "host", "disk", "recompute"):
        plan = Plan(activations=name)
        assert Plan.from_toml(plan.to_toml()) == plan
        assert plan.uses_disk == (name == "disk")
        assert not plan.keeps_state_on_disk
        assert plan.without(Tier.DISK).activations == ("device" if name == "disk" else name)
    with pytest.raises(PlanError, match="activations must be one of 'device', 'host', 'disk', 'recompute' but is 'cpu'"):
        Plan(activations="cpu")
