"""Recipes are found by name and by path, and every value of them is checked."""

from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.recipes.catalog import load_recipe, recipe_names
from shardwise.recipes.config import RECIPE_OF_TASK, GPTRecipe
from shardwise.recipes.schema import keys_of


def test_there_is_a_recipe_for_every_task() -> None:
    assert recipe_names() == sorted(RECIPE_OF_TASK)
    for name in recipe_names():
        recipe = load_recipe(name)
        assert type(recipe) is RECIPE_OF_TASK[name]
        assert recipe.about


@pytest.mark.parametrize("name", ["digits", "embeddings", "gpt"])
def test_saved_values_repeat_the_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name, {"seed": "7", "train.learning_rate": "0.25"})
    (tmp_path / "config.toml").write_text(recipe.to_toml())
    again = load_recipe(str(tmp_path / "config.toml"))
    assert again == recipe
    assert again.hash == recipe.hash != load_recipe(name).hash


def test_every_key_can_be_set_on_the_command_line() -> None:
    """Each to the value that it has: none is forgotten by the parser of values."""
    for name, kind in RECIPE_OF_TASK.items():
        recipe, settings = load_recipe(name), {}
        for key in keys_of(kind):
            value: object = recipe
            for part in key.split("."):
                value = getattr(value, part)
            settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
        assert load_recipe(name, settings) == recipe


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gtp", ["no recipe 'gtp'", "'gpt'"]),
        ("digit", ["no recipe 'digit'", "'digits'"]),
        ("transformer-xl", ["no recipe 'transformer-xl'", "digits, embeddings, gpt", ".toml"]),
        ("nowhere.toml", ["nowhere.toml cannot be read", "No such file"]),
    ],
)
def test_recipe_that_does_not_exist_is_told_with_the_nearest(name: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(name)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = ", ["not valid TOML"]),
        ("seed = 1", ["'task' must be one of gpt, digits, embeddings", "None"]),
        ("task = 'gtp'", ["'task' must be one of", "'gtp'"]),
        ("task = 'gpt'\n[train]\nstpes = 3", ["own.toml", "no key 'train.stpes'", "'train.steps'"]),
        ("task = 'gpt'\n[train]\nsteps = '3'", ["own.toml", "train.steps must be a whole number, 1 or more, but is '3'"]),
        ("task = 'gpt'\ntrain = 3", ["train must be a table", "3"]),
        ("task = 'gpt'\n[model]\nwidth = 31", ["width must be a multiple of num_heads", "31"]),
        ("task = 'gpt'\n[sample]\nprompt = ''", ["sample.prompt", "empty"]),
    ],
    ids=["no-toml", "no-task", "unknown-task", "unknown-key", "ill-typed", "no-table", "width", "no-prompt"],
)
def test_mistake_in_a_file_is_named(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_recipe(str(path))
    assert all(word in str(caught.value) for word in words), caught.value


def test_binary_file_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_recipe(str(tmp_path / "own.toml"))


def test_default_gpt_is_the_first_run_that_documents_promise() -> None:
    recipe = load_recipe("gpt")
    assert isinstance(recipe, GPTRecipe)
    assert (recipe.plan.stage, recipe.ranks, recipe.data.path) == (3, 2, "")
