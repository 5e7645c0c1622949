"""Models of transformers and peft, built small from their configs: every stage trains them to the same bits as stage 0.

Each architecture is one job: three AdamW steps with clipping at stages 0 to 3 on two ranks with data of their own. Some are
compared with torch's DDP as well. Released memory is filled with NaN throughout, so that a late read cannot go unnoticed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.testing import World
from tests.distributed.architectures import CASES, Batch
from tests.distributed.huggingface import (
    STAGES,
    Run,
    assert_same,
    assert_same_run,
    assert_worth_comparing,
    plain_loss,
    poisoned,
    train,
    train_at_all_stages,
    train_like_ddp,
)

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", CASES)
def test_stages_train_to_the_same_bits(world: World, name: str) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    by_rank = world.run(train_at_all_stages, name, ranks=2)
    assert_worth_comparing([runs[0] for runs in by_rank])
    for rank, runs in enumerate(by_rank):
        for stage in STAGES[1:]:
            assert_same_run(runs[0], runs[stage], f"{name}, rank {rank}, stages 0 and {stage}")
    ours, theirs = (runs[0] for runs in by_rank)
    params = ours.grads.keys()  # Module buffers are updated by each rank from its own data, as with DDP.
    assert_same({key: ours.weights[key] for key in params}, {key: theirs.weights[key] for key in params}, f"{name}, both ranks")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_like_ddp])
def test_trains_to_the_bits_of_ddp(world: World, name: str) -> None:
    for rank, (expected, runs) in enumerate(world.run(train_like_ddp, name, ranks=2)):
        for stage, run in runs.items():
            what = f"{name}, rank {rank}, DDP and stage {stage}"
            # torch sums squares in another order: norms are near, and all else is equal.
            torch.testing.assert_close(
                run.norms, expected.norms, rtol=1e-5, atol=0, msg=lambda text, what=what: f"{what}: {text}"
            )
            assert_same_run(replace(expected, norms=run.norms), run, what)


# Other ways to a loss


def two_forwards(model: Any, batch: Batch) -> Tensor:
    flipped = {key: value.flip(0) for key, value in batch.items()}
    return plain_loss(model, batch) + 0.5 * plain_loss(model, {**flipped, "input_ids": batch["input_ids"].flip(1)})


def hidden_states(model: Any, batch: Batch) -> Tensor:
    made = model(**batch, output_hidden_states=True)
    return made.loss + sum(states.pow(2).mean() for states in made.hidden_states)


def body_then_head(model: Any, batch: Batch) -> Tensor:
    """Modules that are called one by one from outside, the head in pieces."""
    states = model.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
    pieces = zip(states.chunk(3, 1), batch["input_ids"].chunk(3, 1), strict=True)
    return sum((F.cross_entropy(model.lm_head(part).flatten(0, 1), ids.flatten()) for part, ids in pieces), torch.tensor(0.0))


def own_embeddings(model: Any, batch: Batch) -> Tensor:
    embedded = model.get_input_embeddings()(batch["input_ids"])
    rest = {key: value for key, value in batch.items() if key != "input_ids"}
    return plain_loss(model, {**rest, "inputs_embeds": embedded * 1.5})


def evaluated_before(model: Any, batch: Batch) -> Tensor:
    model.eval()
    with torch.inference_mode():
        weight = float(model(**batch).loss)
    model.train()
    return weight * plain_loss(model, batch)


def autocast(model: Any, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain_loss(model, batch)


def preferred_to_reference(model: Any, batch: Batch) -> Tensor:
    """As in preference training: the model without its adapters is the reference."""
    with torch.no_grad(), model.disable_adapter():
        reference = plain_loss(model, batch)
    loss = plain_loss(model, batch)
    return loss - F.logsigmoid(reference - loss)


def gradient_penalty(model: Any, batch: Batch) -> Tensor:
    embedded = torch.randn(*batch["labels"].shape, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):  # The others cannot be differentiated twice.
        loss = plain_loss(model, {"inputs_embeds": embedded, "labels": batch["labels"]})
        (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + slope.pow(2).sum()


WAYS = [
    ("gpt2", two_forwards),
    ("gpt2_checkpointed", two_forwards),
    ("bert", hidden_states),
    ("llama", body_then_head),
    ("gpt2", body_then_head),
    ("llama", own_embeddings),
    ("gpt2", own_embeddings),
    ("llama", evaluated_before),
    ("t5", autocast),
    ("llama_lora", preferred_to_reference),
    ("llama", gradient_penalty),
]


def train_in_a_way(index: int) -> dict[int, Run]:
    name, loss_of = WAYS[index]
    with poisoned():
        return {stage: train(CASES[name], stage, loss_of=loss_of) for stage in (0, 3)}


@pytest.mark.parametrize("index", range(len(WAYS)), ids=[f"{name}-{loss_of.__name__}" for name, loss_of in WAYS])
def test_other_ways_to_a_loss(world: World, index: int) -> None:
    by_rank = world.run(train_in_a_way, index, ranks=2)
    assert_worth_comparing([runs[0] for runs in by_rank])
    for rank, runs in enumerate(by_rank):
        assert_same_run(runs[0], runs[3], f"rank {rank}")
