"""The loop of `shardwise train`: learns, comes out the same at every stage, and tells the truth about memory."""

from typing import Any

import pytest

from shardwise.recipes.catalog import load_recipe
from shardwise.recipes.train import TrainResult, train
from shardwise.testing import World

pytestmark = pytest.mark.dist

TINY = {
    "gpt": {
        "train.steps": "6",
        "train.batch_size": "4",
        "model.context": "32",
        "model.width": "32",
        "model.num_blocks": "2",
        "model.num_heads": "2",
        "sample.num_bytes": "20",
        "data.max_bytes": "1000000",
    },
    "digits": {"train.steps": "6"},
    "embeddings": {"train.steps": "6", "data.num_users": "500", "data.num_items": "50", "train.batch_size": "256"},
}
MEASURED = ("seconds", "items_per_second", "ranks", "plain_ddp", "plan", "recipe")


def run_recipe(name: str, settings: dict[str, str]) -> TrainResult:
    return train(load_recipe(name, {**TINY[name], **settings}))


def run_for_numbers(name: str, settings: dict[str, str]) -> dict[str, Any]:
    return {key: value for key, value in run_recipe(name, settings).to_dict().items() if key not in MEASURED}


@pytest.mark.parametrize("name", TINY)
def test_recipe_gives_the_same_at_every_stage_and_rank(world: World, name: str) -> None:
    plain = world.run(run_for_numbers, name, {"plan.stage": "0"})
    assert plain[0]["last_loss"] < plain[0]["first_loss"]
    for stage in ("1", "2", "3"):
        sharded = world.run(run_for_numbers, name, {"plan.stage": stage})
        assert plain[0] == plain[1] == sharded[0] == sharded[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_compute_learns_as_well(world: World, precision: str) -> None:
    wide, narrow = (world.run(run_recipe, "gpt", {"plan.precision": each})[0] for each in ("fp32", precision))
    assert narrow.plan != wide.plan
    assert narrow.last_loss < narrow.first_loss
    assert narrow.last_loss == pytest.approx(wide.last_loss, abs=0.1)


def test_recipe_trains_on_one_rank(world: World) -> None:
    result = world.run(run_recipe, "gpt", {}, ranks=1)[0]
    assert result.last_loss < result.first_loss
    assert result.sample.startswith("def ")
    assert result.ranks[0].sent_bytes == {}


def test_another_seed_is_another_run(world: World) -> None:
    first, second = (world.run(run_recipe, "gpt", {"seed": seed, "train.steps": "2"})[0] for seed in ("0", "1"))
    assert first.first_loss != second.first_loss
    assert first.sample != second.sample


def test_plain_ddp_computed_at_any_stage_is_what_stage_0_holds(world: World) -> None:
    """The column that is marked as computed agrees with an engine that really held it all."""
    results = {stage: world.run(run_recipe, "gpt", {"plan.stage": str(stage)})[0] for stage in range(4)}
    held, sent = results[0].plain_ddp.held_bytes, results[0].plain_ddp.sent_bytes
    for result in results.values():
        # A parameter that is cut has a step counter on each rank that holds a part.
        assert result.plain_ddp.held_bytes == {**held, "optimizer state": pytest.approx(held["optimizer state"], rel=1e-3)}
        assert result.plain_ddp.sent_bytes == sent
    for use in results[0].ranks:
        assert use.held_bytes["parameter shards"] == held["parameters"]
        assert use.held_bytes["gradient shards"] == held["gradients"]
        assert use.held_bytes["optimizer state"] == held["optimizer state"]
    for use in results[3].ranks:
        assert use.held_bytes["parameter shards"] * 2 == held["parameters"]
        # Forward and backward, but for head, root and tables; evaluations do not count.
        assert 1.5 * use.sent_bytes["reduce"] < use.sent_bytes["gather"] < 2 * use.sent_bytes["reduce"]
        assert use.num_steps == 6
