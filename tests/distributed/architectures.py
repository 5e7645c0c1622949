"""Models of transformers and peft, built small from their configs, with data for each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

VOCAB = 96
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """How to build one architecture, what to feed it, and what more is tried with it."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    is_like_ddp: bool = False
    shard_options: dict[str, Any] = field(default_factory=dict)


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
