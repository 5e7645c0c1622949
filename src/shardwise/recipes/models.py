"""A small byte-level GPT in plain PyTorch. Knows nothing of sharding, data or training."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from shardwise.core.errors import UsageError
from shardwise.recipes.config import GPTConfig


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        # (batch, length, 3 * width) -> three of (batch, heads, length, head width)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(approximate="tanh"), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One layer."""
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A pre-norm decoder with learned positions and a head of its own.

    >>> model = GPT(GPTConfig(context=8, width=16, num_blocks=1, num_heads=2))
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> model(tokens).shape, model(tokens, tokens).shape
    (torch.Size([1, 3, 256]), torch.Size([]))
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """Called for children before their parents. Tokens begin large and blocks as nothing: else noise of the blocks drowns the
        tokens, and learning begins late."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Block):
            for last in (module.attention.out, module.mlp[2]):
                nn.init.zeros_(last.get_parameter("weight"))
        elif isinstance(module, GPT):
            nn.init.normal_(module.tokens.weight)
            nn.init.normal_(module.positions.weight, std=0.1)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of shape ``(batch, length, vocab)``, or the mean loss where targets are given."""
        length = tokens.shape[1]
        if length > self.config.context:
            raise UsageError(f"A sequence has {length} tokens but the context is {self.config.context}.")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, num_bytes: int, *, temperature: float = 0.7, seed: int = 0) -> bytes:
    """Continue a prompt. Under sharded parameters all ranks call it alike, and get the same text."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.config.context :])[:, -1]
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], dim=1)
    return bytes(tokens[0].tolist())
