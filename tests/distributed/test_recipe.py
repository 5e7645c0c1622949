"""The recipe of `shardwise train`: learns, and comes out the same at every stage."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from shardwise.recipes.models import GPTConfig
from shardwise.recipes.train import TrainConfig, train
from shardwise.testing import World

pytestmark = pytest.mark.dist

TINY = TrainConfig(steps=6, num_sequences=4, sample_bytes=20, model=GPTConfig(context=32, width=32, num_blocks=2, num_heads=2))
MEASURED = ("seconds", "tokens_per_second", "peak_bytes")


def run_recipe(config: TrainConfig) -> dict[str, Any]:
    result = asdict(train(config))
    return {key: value for key, value in result.items() if key not in MEASURED}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_recipe_gives_the_same_at_every_stage_and_rank(world: World, stage: int) -> None:
    plain = world.run(run_recipe, replace(TINY, stage=0))
    sharded = world.run(run_recipe, replace(TINY, stage=stage))
    assert plain[0] == plain[1] == sharded[0] == sharded[1]
    assert plain[0]["last_loss"] < plain[0]["first_loss"]


def test_recipe_trains_on_one_rank(world: World) -> None:
    result = world.run(run_recipe, TINY, ranks=1)[0]
    assert result["last_loss"] < result["first_loss"]
    assert result["sample"].startswith("def ")


def test_another_seed_is_another_run(world: World) -> None:
    first, second = (world.run(run_recipe, replace(TINY, seed=seed, steps=2)) for seed in (0, 1))
    assert first[0]["first_loss"] != second[0]["first_loss"]
    assert first[0]["sample"] != second[0]["sample"]
