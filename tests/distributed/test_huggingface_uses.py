"""Uses of transformers between steps: growing embeddings, generation, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise
from shardwise.testing import World
from tests.distributed.architectures import CASES, VOCAB, Batch, Case, llama
from tests.distributed.huggingface import (
    Run,
    assert_same,
    assert_same_run,
    batches,
    build,
    grads_of,
    plain_loss,
    poisoned,
    state_of,
)

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]


def resize_after_unshard(stage: int) -> Run:
    """Make a model plain again, give it more tokens, and shard it once more."""
    model, optimizer = build(CASES["qwen3"])
    shardwise.shard(model, optimizer, stage=stage)
    run = Run()
    for step, batch in enumerate(batches(CASES["qwen3"])):
        if step == 1:
            shardwise.unshard(model, optimizer)
            torch.manual_seed(3)
            model.resize_token_embeddings(VOCAB + 8)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            shardwise.shard(model, optimizer, stage=stage)
        loss = plain_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach().clone())
        del loss  # Its graph remembers the form of the embeddings, with plain models as well.
    with shardwise.gathered(model):
        run.weights = state_of(model)
    return run


def resize_at_both_ends() -> tuple[Run, Run]:
    with poisoned():
        return resize_after_unshard(0), resize_after_unshard(3)


def test_embeddings_can_grow_between_unshard_and_shard(world: World) -> None:
    for rank, (expected, found) in enumerate(world.run(resize_at_both_ends, ranks=2)):
        assert expected.weights["lm_head.weight"].shape[0] == VOCAB + 8
        assert_same_run(expected, found, f"rank {rank}")


# Generation between steps


def train_and_generate(name: str, stage: int) -> Run:
    """Greedy generation before every step, inside ``gathered`` as well, and at last from a plain copy of the weights."""
    case = CASES[name]
    model, optimizer = build(case)
    shardwise.shard(model, optimizer, stage=stage)
    run = Run()
    for batch in batches(case):
        run.generated.append(generate(model, batch))
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.detach().clone())
    with shardwise.gathered(model):
        run.weights = state_of(model)
        run.generated.append(generate(model, batch))
    run.generated.append(generate(model, batch))
    plain, _ = build(case)
    plain.load_state_dict(run.weights)
    run.generated.append(generate(plain, batch))
    return run


def generate(model: Any, batch: Batch) -> Tensor:
    """The logits of five new tokens: they show every bit, where tokens show the largest."""
    model.eval()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    wanted = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    made = model.generate(**inputs, **wanted)
    model.train()
    return torch.stack(made.logits)


def generate_at_both_ends(name: str) -> tuple[Run, Run]:
    with poisoned():
        return train_and_generate(name, 0), train_and_generate(name, 3)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generates_between_steps(world: World, name: str) -> None:
    by_rank = world.run(generate_at_both_ends, name, ranks=2)
    for rank, (expected, found) in enumerate(by_rank):
        assert_same_run(expected, found, f"{name}, rank {rank}")
        last, in_gathered, after, plain = expected.generated[-4:]
        assert torch.equal(in_gathered, plain) and torch.equal(after, plain)
        assert not torch.equal(last, plain), "training has changed nothing"
    assert not torch.equal(by_rank[0][0].generated[-1], by_rank[1][0].generated[-1])


# Files of transformers and peft


def save_inside_gathered(name: str, directory: str) -> str:
    """Train at stage 3, save on rank 0 as transformers does it, read it back on all ranks, and go on training what was read."""
    case = CASES[name]
    with poisoned():
        model, optimizer = build(case)
        shardwise.shard(model, optimizer, stage=3)
        first, second, third = batches(case)
        model(**first).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with shardwise.gathered(model):
            expected = state_of(model)
            if dist.get_rank() == 0:
                model.save_pretrained(directory)
        dist.barrier()
        loaded = read_back(case, directory)
        assert_same(expected, state_of(loaded), "saved and loaded")
        model.eval()
        with torch.no_grad():
            loss = model(**second).loss
            assert torch.equal(loss, loaded.eval()(**second).loss)
        shardwise.shard(loaded, stage=3)
        model(**third).loss.backward()
        loaded(**third).loss.backward()
        with shardwise.gathered(model), shardwise.gathered(loaded):
            assert_same(grads_of(model), grads_of(loaded), "gradients of saved and loaded")
        return type(loaded).__name__


def read_back(case: Case, directory: str) -> Any:
    model, _ = build(case)
    if "lora" not in case.build.__name__:
        return type(model).from_pretrained(directory)
    import peft

    torch.manual_seed(0)
    return peft.PeftModel.from_pretrained(llama(), directory, is_trainable=True)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_lora", "t5"])
def test_saves_full_weights_inside_gathered(world: World, tmp_path: Path, name: str) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    kinds = world.run(save_inside_gathered, name, str(tmp_path), ranks=2)
    assert kinds[0] == kinds[1]
    assert list(tmp_path.glob("*.safetensors"))


def save_without_gathering(directory: str) -> str:
    model, optimizer = build(CASES["llama"])
    shardwise.shard(model, optimizer, stage=3)
    with pytest.raises(shardwise.NotGatheredError) as caught:
        model.save_pretrained(directory)
    return str(caught.value)


def test_refuses_to_save_what_is_not_there(world: World, tmp_path: Path) -> None:
    for message in world.run(save_without_gathering, str(tmp_path), ranks=2):
        assert "shardwise.gathered" in message
    assert not list(tmp_path.glob("*.safetensors"))
