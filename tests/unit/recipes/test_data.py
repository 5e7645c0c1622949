"""Text and batches are the same wherever and whenever they are drawn."""

from pathlib import Path

import pytest
import torch

from shardwise.core.errors import UsageError
from shardwise.recipes.data import Corpus, Sampler, find_sources


def plant(folder: Path) -> None:
    for name in [f"module_{index}.py" for index in range(60)]:
        (folder / name).write_text(f"# {name}\n")
    for place in ("test", "site-packages", "package/__pycache__"):
        (folder / place).mkdir(parents=True)
        (folder / place / "skipped.py").write_text("skipped")
    (folder / "package" / "inner.py").write_text("# inner\n")
    (folder / "notes.txt").write_text("skipped")


def test_sources_are_sorted_and_leave_out_tests_and_packages(tmp_path: Path) -> None:
    plant(tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in find_sources(tmp_path)]
    assert names == sorted(names)
    assert len(names) == 61
    assert "package/inner.py" in names


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    plant(tmp_path)
    corpus = Corpus.from_folder(tmp_path)
    train, held_out = (bytes(text.tolist()).splitlines() for text in (corpus.train, corpus.held_out))
    assert len(train) > len(held_out) > 0
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 61


def test_standard_library_is_large_enough() -> None:
    corpus = Corpus.standard_library()
    assert len(corpus.train) > 1_000_000
    assert len(corpus.held_out) > 100_000


def test_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too few Python files"):
        Corpus.from_folder(tmp_path)


def test_batch_depends_on_seed_step_and_rank_alone() -> None:
    text = torch.arange(10_000).to(torch.uint8)
    drawn = {
        (seed, step, rank): Sampler(text, 3, 16, seed).draw(step, rank).tokens
        for seed in (0, 1)
        for step in (0, 1, 10)
        for rank in (0, 1, 11)
    }
    state = torch.get_rng_state()
    again = Sampler(text, 3, 16, seed=1).draw(10, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(again.tokens, drawn[1, 10, 1])
    assert len({tuple(tokens.flatten().tolist()) for tokens in drawn.values()}) == len(drawn)


def test_targets_are_the_next_tokens_up_to_the_end_of_the_text() -> None:
    text = torch.arange(9, dtype=torch.uint8)
    batch = Sampler(text, num_sequences=50, length=8, seed=0).draw(0, 0)
    assert torch.equal(batch.tokens, torch.arange(8).expand(50, 8))
    assert torch.equal(batch.targets, batch.tokens + 1)
    with pytest.raises(UsageError, match="too short"):
        Sampler(text, num_sequences=1, length=9, seed=0)
