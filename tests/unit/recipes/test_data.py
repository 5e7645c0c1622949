"""Batches are the same wherever and whenever they are drawn."""

import pytest
import torch

from shardwise.core.errors import UsageError
from shardwise.recipes.catalog import load_recipe
from shardwise.recipes.data import Corpus, Sampler
from shardwise.recipes.task import make_task
from shardwise.recipes.text import Text

SMALL = {
    "gpt": {"model.context": "8"},
    "digits": {},
    "embeddings": {"data.num_users": "100", "data.num_items": "50"},
}


def test_corpus_holds_the_bytes_of_the_text() -> None:
    corpus = Corpus.of(Text(b"to train on", b"held out"))
    assert bytes(corpus.train.tolist()) == b"to train on"
    assert bytes(corpus.held_out.tolist()) == b"held out"


def test_batch_depends_on_seed_step_and_rank_alone() -> None:
    text = torch.arange(10_000).to(torch.uint8)
    drawn = {
        (seed, step, rank): Sampler(text, 3, 16, seed).draw(step, rank).inputs
        for seed in (0, 1)
        for step in (0, 1, 10)
        for rank in (0, 1, 11)
    }
    state = torch.get_rng_state()
    again = Sampler(text, 3, 16, seed=1).draw(10, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again.inputs, drawn[1, 10, 1])
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn.values()}) == len(drawn)


def test_targets_are_the_next_tokens_up_to_the_end_of_the_text() -> None:
    text = torch.arange(9, dtype=torch.uint8)
    batch = Sampler(text, num_sequences=50, length=8, seed=0).draw(0, 0)
    assert torch.equal(batch.inputs, torch.arange(8).expand(50, 8))
    assert torch.equal(batch.targets, batch.inputs + 1)
    with pytest.raises(UsageError, match=r"too short.*--set model\.context"):
        Sampler(text, num_sequences=1, length=9, seed=0)


@pytest.mark.parametrize("name", SMALL)
def test_data_of_every_task_goes_on_at_any_step(name: str) -> None:
    """A task that is made anew draws at step 7 what the first one did, whatever was drawn before."""
    first, again = (make_task(load_recipe(name, {"seed": "5", "train.batch_size": "4", **SMALL[name]})) for _ in range(2))
    batches = [first.draw(step, rank=1) for step in range(8)]
    assert torch.equal(again.draw(7, rank=1).inputs, batches[7].inputs)
    assert torch.equal(again.draw(7, rank=1).targets, batches[7].targets)
    assert not torch.equal(again.draw(7, rank=0).inputs, batches[7].inputs)
    assert not torch.equal(batches[6].inputs, batches[7].inputs)


@pytest.mark.parametrize("name", SMALL)
def test_ranks_share_the_held_out_data_without_overlap_and_no_seed_changes_it(name: str) -> None:
    tasks = [make_task(load_recipe(name, {"seed": seed, "train.batch_size": "4", **SMALL[name]})) for seed in ("0", "1")]
    parts = [tasks[0].held_out(rank, 2) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    assert not torch.equal(parts[0][0].inputs, parts[1][0].inputs)
    assert torch.equal(parts[0][0].inputs, tasks[1].held_out(0, 2)[0].inputs)


def test_digits_of_the_test_are_not_trained_on() -> None:
    task = make_task(load_recipe("digits", {"train.batch_size": "500"}))
    test = {tuple(image.flatten().tolist()) for image in task.held_out(0, 1)[0].inputs}
    assert len(test) == 359
    trained = {tuple(image.flatten().tolist()) for step in range(30) for image in task.draw(step, 0).inputs}
    assert len(trained) == 1797 - 359
    assert not test & trained


def test_ratings_follow_the_pair_and_are_of_both_kinds() -> None:
    task = make_task(load_recipe("embeddings", {"train.batch_size": "5000", **SMALL["embeddings"]}))
    batch = task.draw(0, 0)
    assert 0.2 < batch.targets.mean().item() < 0.8
    pairs: dict[tuple[int, ...], float] = {}
    for pair, like in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert pairs.setdefault(tuple(pair), like) == like
    assert batch.inputs.max(0).values.tolist() <= [99, 49]
