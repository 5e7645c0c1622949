"""The recipe's model: sizes, causality and generation."""

import math

import pytest
import torch

from shardwise.core.errors import UsageError
from shardwise.recipes.catalog import load_recipe
from shardwise.recipes.config import GPTConfig, GPTRecipe
from shardwise.recipes.models import GPT, generate

SMALL = GPTConfig(context=16, width=32, num_blocks=2, num_heads=4)


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def test_model_of_the_recipe_has_about_ten_million_parameters() -> None:
    recipe = load_recipe("gpt")
    assert isinstance(recipe, GPTRecipe)
    with torch.device("meta"):
        model = GPT(recipe.model)
    assert 9e6 < sum(param.numel() for param in model.parameters()) < 11e6


def test_new_model_knows_nothing() -> None:
    tokens = torch.randint(256, (4, 16))
    assert make_model()(tokens, tokens.roll(1)).item() == pytest.approx(math.log(256), abs=0.2)


def test_position_sees_nothing_that_follows_it() -> None:
    model = make_model()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = model(tokens), model(changed % 256)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_generation_repeats_itself_and_goes_beyond_the_context() -> None:
    model = make_model()
    text = generate(model, b"def ", 40, seed=3)
    assert text.startswith(b"def ")
    assert len(text) == 44
    assert text == generate(model, b"def ", 40, seed=3) != generate(model, b"def ", 40, seed=4)


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple of num_heads"):
        GPTConfig(width=30, num_heads=4)
    with pytest.raises(UsageError, match="context is 16"):
        make_model()(torch.zeros(1, 17, dtype=torch.long))
