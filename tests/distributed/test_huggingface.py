"""Models of transformers and peft, built small from their configs: every stage trains them to the same bits as stage 0.

Each architecture is one job: three AdamW steps with clipping at stages 0 to 3 on two ranks with data of their own. Some are
compared with torch's DDP as well. Released memory is filled with NaN throughout, so that a late read cannot go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.devices.pool import Poison
from shardwise.runtime.parameter import Face
from shardwise.testing import World

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]

STAGES = (0, 1, 2, 3)
NUM_STEPS = 3
MAX_NORM = 0.05
"""Below every norm that comes up, so that clipping always acts."""
VOCAB = 96
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """How to build one architecture, what to feed it, and what more is tried with it."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    is_like_ddp: bool = False
    shard_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """What one training run has shown on one rank."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, Tensor] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    generated: list[Tensor] = field(default_factory=list)


# Data


def tokens(generator: torch.Generator, length: int = 12, rows: int = 2) -> Tensor:
    return torch.randint(5, VOCAB, (rows, length), generator=generator)


def causal_batch(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unmasked_batch(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def masked_lm_batch(generator: torch.Generator) -> Batch:
    batch = causal_batch(generator)
    hidden = torch.rand(batch["labels"].shape, generator=generator) < 0.4
    hidden[:, 0] = True
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(hidden, 4),
        "labels": batch["labels"].masked_fill(~hidden, -100),
    }


def seq2seq_batch(generator: torch.Generator) -> Batch:
    batch = causal_batch(generator)
    return {**batch, "labels": tokens(generator, 7)}


def class_batch(generator: torch.Generator) -> Batch:
    batch = causal_batch(generator)
    return {**batch, "labels": torch.randint(0, 3, (2,), generator=generator)}


def image_batch(generator: torch.Generator) -> Batch:
    pixels = torch.randn(4, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 3, (4,), generator=generator)}


def clip_batch(generator: torch.Generator) -> Batch:
    ids = tokens(generator, rows=3)
    ids[:, -1] = 3
    pixels = torch.randn(3, 3, 16, 16, generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "return_loss": True}


def sound_batch(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 800, generator=generator), "labels": tokens(generator, 4)}


def speech_batch(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": tokens(generator, 6)}


# Architectures

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    **SPECIAL,
}
GROUPED = {**DECODER, "num_key_value_heads": 2}
ENCODER = {**DECODER, "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=False))


def llama_checkpointed(*, use_reentrant: bool) -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, attention_dropout=0.1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    return model


def llama_checkpointed_reentrant() -> nn.Module:
    return llama_checkpointed(use_reentrant=True)


def llama_checkpointed_nonreentrant() -> nn.Module:
    return llama_checkpointed(use_reentrant=False)


def llama_lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
    )
    return peft.get_peft_model(llama(), config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=32, **SPECIAL)
    return transformers.GPT2LMHeadModel(config)  # With the dropout of its defaults: 0.1.


def gpt2_checkpointed() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=8, tie_word_embeddings=True))


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=8, query_pre_attn_scalar=8)
    return transformers.Gemma2ForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**GROUPED, **sizes, norm_topk_prob=True))


def deepseek_v3() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **{**GROUPED, "num_key_value_heads": 4},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    )
    return transformers.DeepseekV3ForCausalLM(config)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=3, time_step_rank=4, **SPECIAL
    )
    return transformers.MambaForCausalLM(config)


def mamba2() -> nn.Module:
    sizes = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}
    config = transformers.Mamba2Config(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, **sizes, **SPECIAL)
    return transformers.Mamba2ForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def switch() -> nn.Module:
    """Experts that are idle on some ranks, and a router that casts its own weights in its forward."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
        num_experts=4, expert_capacity=8, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0, decoder_start_token_id=2,
        forced_eos_token_id=None, **SPECIAL,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**ENCODER, "hidden_dropout_prob": 0.1}))


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(**{**ENCODER, "pad_token_id": 1, "bos_token_id": 0}, num_labels=3)
    return transformers.RobertaForSequenceClassification(config)


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=32, hidden_dim=64, n_layers=3, n_heads=4, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return transformers.DistilBertForSequenceClassification(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 24],
        depths=[1, 2, 1],
        layer_type="basic",
        num_labels=3,
        downsample_in_first_stage=False,
    )
    return transformers.ResNetForImageClassification(config)


def clip() -> nn.Module:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        **tower,
        "vocab_size": VOCAB,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    vision = {**tower, "image_size": 16, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=16, max_target_positions=16,
        dropout=0.0, decoder_start_token_id=1, **SPECIAL,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> nn.Module:
    """Weight norm as a parametrization, and an embedding that nothing reads while nothing is masked."""
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def albert() -> nn.Module:
    """Four calls of two layers: each is differentiated twice."""
    sizes = {"num_hidden_layers": 4, "num_hidden_groups": 2, "embedding_size": 16}
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**{**ENCODER, **sizes}))


HALF = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
CASES = {
    "albert": Case(albert, masked_lm_batch, is_like_ddp=True),
    "bart": Case(bart, seq2seq_batch),
    "bert": Case(bert, masked_lm_batch, is_like_ddp=True),
    "clip": Case(clip, clip_batch, is_like_ddp=True),
    "deepseek_v3": Case(deepseek_v3, causal_batch),
    "distilbert": Case(distilbert, class_batch),
    "gemma2": Case(gemma2, causal_batch),
    "gpt2": Case(gpt2, causal_batch, is_like_ddp=True),
    "gpt2_checkpointed": Case(gpt2_checkpointed, causal_batch),
    "llama": Case(llama, causal_batch, is_like_ddp=True),
    "llama_bfloat16": Case(llama, causal_batch, shard_options=HALF),
    "llama_checkpointed_nonreentrant": Case(llama_checkpointed_nonreentrant, causal_batch, is_like_ddp=True),
    "llama_checkpointed_reentrant": Case(llama_checkpointed_reentrant, causal_batch),
    "llama_lora": Case(llama_lora, causal_batch),
    "mamba": Case(mamba, unmasked_batch),
    "mamba2": Case(mamba2, unmasked_batch),
    "mixtral": Case(mixtral, causal_batch, is_like_ddp=True),
    "qwen3": Case(qwen3, causal_batch),
    "qwen3_moe": Case(qwen3_moe, causal_batch),
    "resnet": Case(resnet, image_batch, is_like_ddp=True),
    "roberta": Case(roberta, class_batch),
    "switch": Case(switch, seq2seq_batch, shard_options={"unused": "zero"}),
    "switch_bfloat16": Case(switch, seq2seq_batch, shard_options={"unused": "zero", **HALF}),
    "t5": Case(t5, seq2seq_batch, is_like_ddp=True),
    "vit": Case(vit, image_batch),
    "wav2vec2": Case(wav2vec2, sound_batch),
    "whisper": Case(whisper, speech_batch),
}


# What runs on the ranks


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill released memory with NaN. Workers serve other tests as well, so it is turned off again."""
    Poison.enabled = True
    try:
        yield
    finally:
        Poison.enabled = False


def build(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on every rank with the weights of rank 0's seed, dropout drawn by rank, and an optimizer of its trained weights."""
    torch.manual_seed(0)
    model = case.build().train()
    assert sum(param.numel() for param in model.parameters()) < 500_000
    torch.manual_seed(100 + dist.get_rank())
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1)


def batches(case: Case) -> list[Batch]:
    """Data that differ between ranks and steps."""
    generators = [torch.Generator().manual_seed(1000 * step + dist.get_rank()) for step in range(NUM_STEPS)]
    return [case.batch(generator) for generator in generators]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def optimizer_state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(param): name for name, param in model.named_parameters()}
    held = {(names[id(param)], key): value for param, state in optimizer.state.items() for key, value in state.items()}
    return {f"{name}.{key}": value.clone() for (name, key), value in held.items()}


def plain_loss(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def train(case: Case, stage: int, *, max_norm: float = MAX_NORM, loss_of: Callable[[Any, Batch], Tensor] = plain_loss) -> Run:
    """Three steps at one stage; then full values, gradients and optimizer state."""
    model, optimizer = build(case)
    before = state_of(model)
    handle = shardwise.shard(model, optimizer, stage=stage, **case.shard_options)
    assert len(handle.units) > 2, "a model of one unit would test little"
    has_faces = stage == 3 or "param_dtype" in case.shard_options
    run = Run()
    for step, batch in enumerate(batches(case)):
        assert all(isinstance(param, Face) == has_faces for param in model.parameters())
        loss = loss_of(model, batch)
        loss.backward()
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).clone())
        run.losses.append(loss.detach().clone())
        if step == NUM_STEPS - 1:
            with shardwise.gathered(model):
                run.grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    with shardwise.gathered(model):
        run.weights = state_of(model)
    run.moved = {name for name, value in run.weights.items() if not torch.equal(value, before[name])}
    shardwise.unshard(model, optimizer)
    assert_same(run.weights, state_of(model), "gathered and unshard")
    run.optimizer_state = optimizer_state_of(model, optimizer)
    return run


def train_with_ddp(case: Case) -> Run:
    """The same three steps with torch's own data parallelism, without clipping."""
    model, optimizer = build(case)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    run = Run()
    for batch in batches(case):
        loss = wrapped(**batch).loss
        loss.backward()
        run.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))
        run.losses.append(loss.detach().clone())
        run.grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
    run.weights, run.optimizer_state = state_of(model), optimizer_state_of(model, optimizer)
    return run


def train_at_all_stages(name: str) -> dict[int, Run]:
    with poisoned():
        return {stage: train(CASES[name], stage) for stage in STAGES}


def train_like_ddp(name: str) -> tuple[Run, dict[int, Run]]:
    with poisoned():
        return train_with_ddp(CASES[name]), {stage: train(CASES[name], stage, max_norm=math.inf) for stage in (0, 3)}


# What is demanded of them


def assert_same(expected: dict[str, Tensor | None], found: dict[str, Tensor | None], what: str) -> None:
    """Equal names, forms and bits; NaN is equal to nothing."""
    assert expected.keys() == found.keys(), what
    for name, value in expected.items():
        other = found[name]
        if value is None or other is None:
            assert value is other, f"{what}: '{name}' has a value on one side only"
            continue
        assert type(other) in (Tensor, nn.Parameter), f"{what}: '{name}' is a {type(other).__name__}"
        assert value.shape == other.shape and value.dtype == other.dtype, f"{what}: '{name}' has another form"
        num_different = int((value != other).sum())
        assert num_different == 0, f"{what}: '{name}' differs in {num_different} of {value.numel()} elements"


def assert_same_run(expected: Run, found: Run, what: str) -> None:
    """Losses and norms first: they tell in which step runs went apart."""
    for key in ("losses", "norms", "generated"):
        ours, theirs = ({str(step): value for step, value in enumerate(getattr(run, key))} for run in (expected, found))
        assert_same(ours, theirs, f"{what}, {key}")
    for key in ("grads", "weights", "optimizer_state"):
        assert_same(getattr(expected, key), getattr(found, key), f"{what}, {key}")


def assert_worth_comparing(runs: list[Run]) -> None:
    """The run has trained: ranks had other data, norms were clipped, and what has a gradient has moved."""
    first, second = runs
    assert all(torch.isfinite(loss) for run in runs for loss in run.losses)
    assert all(bool(ours != theirs) for ours, theirs in zip(first.losses, second.losses, strict=True))
    assert all(norm > MAX_NORM for norm in first.norms)
    squares = [grad.double().pow(2).sum() for grad in first.grads.values() if grad is not None]
    assert torch.stack(squares).sum().sqrt().item() == pytest.approx(MAX_NORM, rel=1e-3), "clipping has left something out"
    trained = {name for name, grad in first.grads.items() if grad is not None and bool(grad.any())}
    assert len(trained) > 4
    assert trained <= first.moved
    untouched = {name for name in first.grads if f"{name}.step" not in first.optimizer_state}
    assert untouched.isdisjoint(first.moved)


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
