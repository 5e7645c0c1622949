"""Profiles of transformers in closed form: for bare sizes, and for published runs of models that nobody has at hand.

Knows neither ranks nor hardware, and allocates nothing. What is assumed, of a decoder with learned positions:

- A block is two layer norms, attention and two layers of a feed-forward, without dropout; biases are counted as parameters alone.
- ``attention="fused"``: one kernel that keeps no scores and, since later tokens are masked, computes half of them (flash attention); it
  computes them again in the backward. ``"plain"``: matrix products over all pairs, whose scores are masked, normalised and kept.
- The loss is computed from logits in float32, which are kept with those in the dtype of compute.
- Checkpointing keeps the inputs of blocks alone and runs their forwards again in the backward.
- Kernels are those of eager PyTorch, without `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from shardwise.core.errors import UsageError
from shardwise.core.layout import align
from shardwise.core.sizes import parse_count
from shardwise.core.trace import Moment, Point, Trace, mirror
from shardwise.core.unit import ROOT, FlatSpec, ParamSpec, Unit
from shardwise.planning.profile import Profile, Span

ATTENTIONS = ("fused", "plain")
USUAL_VOCABULARY = 50_257
"""Of GPT-2 and its like."""
_HEAD_WIDTH = 128
_INDEX_BYTES = 8
_LOSS_BYTES = 4

_USUAL_WIDTHS = (
    (125e6, 768),
    (350e6, 1024),
    (760e6, 1536),
    (1.3e9, 2048),
    (2.7e9, 2560),
    (6.7e9, 4096),
    (13e9, 5120),
    (30e9, 7168),
    (70e9, 8192),
    (175e9, 12288),
    (530e9, 20480),
    (1e12, 25600),
)
"""Widths that models of so many parameters usually have: the GPT-3 paper's, and of larger ones Megatron's."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer. ``is_tied``: whether the head is the embedding."""

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int = USUAL_VOCABULARY
    ffn_expansion: float = 4.0
    is_tied: bool = True

    def __post_init__(self) -> None:
        for key in ("num_layers", "width", "num_heads", "vocab_size", "ffn_expansion"):
            if not getattr(self, key) > 0:
                raise UsageError(f"A transformer's {key} must be above 0 but is {getattr(self, key)!r}.")

    @property
    def ffn_width(self) -> int:
        """Between the two layers of the feed-forward."""
        return round(self.width * self.ffn_expansion)

    def num_params(self, seq_len: int = 2048) -> int:
        """Elements of all parameters, with learned positions."""
        block = sum(prod(shape) for _, shape in _block_params(self))
        tables = self.vocab_size * (1 if self.is_tied else 2) + seq_len
        return self.num_layers * block + tables * self.width + 2 * self.width

    def __str__(self) -> str:
        return f"{self.num_layers} layers of width {self.width}, {self.num_heads} heads, a vocabulary of {self.vocab_size}"


def bare_model(
    size: str | int, *, num_layers: int | None = None, width: int | None = None, vocab_size: int = USUAL_VOCABULARY
) -> Shape:
    """A shape for a number of parameters: what is not given is as it usually is, which ``str()`` of the result tells.

    Args:
        size: ``"7.5B"``, or a number.

    >>> str(bare_model("7.5B"))
    '36 layers of width 4096, 32 heads, a vocabulary of 50257'
    >>> round(bare_model("1T").num_params() / 1e12, 3)
    1.0
    """
    count = parse_count(size)
    if width is None:
        width = _usual_width(count) if num_layers is None else _fitting_width(count, num_layers, vocab_size)
    heads = max(1, round(width / _HEAD_WIDTH))
    one, two = (Shape(layers, width, heads, vocab_size).num_params() for layers in (1, 2))
    if num_layers is None:
        num_layers = max(1, 1 + round((count - one) / (two - one)))
    return Shape(num_layers, width, heads, vocab_size)


def _usual_width(count: int) -> int:
    return min(_USUAL_WIDTHS, key=lambda row: max(row[0] / count, count / row[0]))[1]


def _fitting_width(count: int, num_layers: int, vocab_size: int) -> int:
    """The multiple of a head's width, or less for small models, that comes nearest to a number of parameters."""
    step = _HEAD_WIDTH if count > 10**9 else _HEAD_WIDTH // 2
    top = max(1, round((count / (12 * num_layers)) ** 0.5) // step + 1)
    return min(
        (step * index for index in range(1, top + 1)),
        key=lambda width: abs(Shape(num_layers, width, 1, vocab_size).num_params() - count),
    )


@dataclass(frozen=True)
class Work:
    """How a shape is computed with.

    Args:
        dtype: Of compute (``Plan.param_dtype``).
        stored_dtype: Of the parameters that the optimizer updates.
        attention: ``"fused"`` or ``"plain"``, see above.
        checkpointing: Whether blocks are computed again in the backward.
    """

    seq_len: int
    micro_batch: int = 1
    dtype: str = "bfloat16"
    stored_dtype: str = "float32"
    attention: str = "fused"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UsageError(f"attention must be one of {', '.join(map(repr, ATTENTIONS))} but is {self.attention!r}.")
        for key in ("seq_len", "micro_batch"):
            if getattr(self, key) < 1:
                raise UsageError(f"{key} must be 1 or more but is {getattr(self, key)!r}.")
        for key in ("dtype", "stored_dtype"):
            if not isinstance(getattr(torch, getattr(self, key), None), torch.dtype):
                raise UsageError(
                    f"{key} must be the name of a dtype of torch, such as 'bfloat16', but is {getattr(self, key)!r}."
                )

    @property
    def num_tokens(self) -> int:
        """Of one micro-batch."""
        return self.seq_len * self.micro_batch

    @property
    def item_bytes(self) -> int:
        """Of an activation."""
        return int(getattr(torch, self.dtype).itemsize)


def transformer_profile(shape: Shape, work: Work) -> Profile:
    """What one step of a micro-batch computes and holds.

    >>> profile = transformer_profile(bare_model("1T"), Work(seq_len=2048))
    >>> len(profile.units), round(profile.num_params / 1e12, 3)
    (128, 1.0)
    """
    units = _units(shape, work)
    forward = _forward_moments([unit.name for unit in units], is_tied=shape.is_tied)
    trace = Trace(forward, mirror(forward), "assumed")
    parts = _Parts(_embedding(shape, work), _block(shape, work), _head(shape, work))
    return Profile(
        units=units,
        trace=trace,
        spans=_spans(trace, parts, shape, work),
        param_dtype=work.dtype,
        num_samples=work.micro_batch,
        num_tokens=work.num_tokens,
        input_bytes=2 * work.num_tokens * _INDEX_BYTES,
        source="closed form",
        recomputed_flops=parts.block.forward.flops * shape.num_layers if work.checkpointing else 0.0,
    )


# ---------------------------------------------------------------- units and moments

_BLOCK, _EMBEDDING, _HEAD = "blocks", "embedding", "head"


def _block_params(shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    width, ffn = shape.width, shape.ffn_width
    layers = (
        ("attention.qkv", 3 * width, width),
        ("attention.out", width, width),
        ("ffn.up", ffn, width),
        ("ffn.down", width, ffn),
    )
    params: list[tuple[str, tuple[int, ...]]] = []
    for name, outputs, inputs in layers:
        params += [(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))]
    for norm in ("norm_1", "norm_2"):
        params += [(f"{norm}.weight", (width,)), (f"{norm}.bias", (width,))]
    return params


def _units(shape: Shape, work: Work) -> tuple[Unit, ...]:
    """In the order in which they are opened. A tied embedding is read at both ends, so it belongs to the whole model."""
    dtype = getattr(torch, work.stored_dtype)
    table, positions = (shape.vocab_size, shape.width), (work.seq_len, shape.width)
    ends: list[tuple[str, tuple[int, ...]]] = [("norm.weight", (shape.width,)), ("norm.bias", (shape.width,))]
    first: list[tuple[str, tuple[int, ...]]] = [("tokens.weight", table), ("positions.weight", positions)]
    blocks = [(f"{_BLOCK}.{index}", _block_params(shape)) for index in range(shape.num_layers)]
    if shape.is_tied:
        named = [(ROOT, first + ends), *blocks]
    else:
        named = [(_EMBEDDING, first), *blocks, (_HEAD, [*ends, ("out.weight", table)])]
    return tuple(_unit(name, params, dtype) for name, params in named)


def _unit(name: str, params: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> Unit:
    specs, offset = [], 0
    prefix = f"{name}." if name else ""
    for param, form in params:
        stride = tuple(prod(form[dim + 1 :]) for dim in range(len(form)))
        specs.append(ParamSpec((prefix + param,), form, stride, dtype, True, offset))
        offset += align(prod(form))
    return Unit(name, (FlatSpec(name, dtype, True, tuple(specs)),))


def _forward_moments(names: Sequence[str], *, is_tied: bool) -> tuple[Moment, ...]:
    inner = [Moment(point, name) for name in names[is_tied:] for point in (Point.PRE_FORWARD, Point.POST_FORWARD)]
    if not is_tied:
        return tuple(inner)
    return (Moment(Point.PRE_FORWARD, ROOT), *inner, Moment(Point.POST_FORWARD, ROOT))


# ---------------------------------------------------------------- what parts compute


@dataclass(frozen=True)
class _Part:
    """What one part computes in both directions, without what is held, which is in bytes: kept for the backward, and at most."""

    forward: Span
    backward: Span
    kept_bytes: int
    forward_bytes: int
    """The most that its forward holds, with what it keeps."""
    backward_bytes: int
    """The most that its backward holds beside what was kept: gradients of activations."""


@dataclass(frozen=True)
class _Parts:
    embedding: _Part
    block: _Part
    head: _Part


def _add(*spans: Span) -> Span:
    return Span(
        flops=sum(span.flops for span in spans),
        matmul_flops=sum(span.matmul_flops for span in spans),
        moved_bytes=sum(span.moved_bytes for span in spans),
        num_kernels=sum(span.num_kernels for span in spans),
        matmul_bytes=sum(span.matmul_bytes for span in spans),
        attention_flops=sum(span.attention_flops for span in spans),
    )


def _matmul(rows: float, inner: float, columns: float, item_bytes: int, *, count: float = 1, kernels: int = 1) -> Span:
    flops = 2.0 * rows * inner * columns * count
    moved = item_bytes * (rows * inner + inner * columns + rows * columns) * count
    return Span(flops, flops, moved, kernels, matmul_bytes=moved)


def _pointwise(elements: float, item_bytes: int, *, passes: float, kernels: int = 1) -> Span:
    """Kernels whose time is that of their reads and writes: ``passes`` of them over so many elements."""
    return Span(flops=elements * passes, moved_bytes=elements * passes * item_bytes, num_kernels=kernels)


def _block(shape: Shape, work: Work) -> _Part:
    tokens, width, ffn, item = work.num_tokens, shape.width, shape.ffn_width, work.item_bytes
    linears = [(width, 3 * width), (width, width), (width, ffn), (ffn, width)]
    dense = _add(*(_matmul(tokens, inputs, outputs, item) for inputs, outputs in linears))
    # The gradients of the input and of the weight are a product of the same size each.
    dense_backward = _add(dense, dense)
    # Two norms (read, write) and two sums with the residual (two reads, a write), and the nonlinearity (read, write).
    light = _add(
        _pointwise(tokens * width, item, passes=10, kernels=4),
        _pointwise(tokens * ffn, item, passes=2),
    )
    # Norms read two tensors and write one, residuals pass theirs on; weights and biases of norms are summed over tokens.
    light_backward = _add(
        _pointwise(tokens * width, item, passes=14, kernels=10),
        _pointwise(tokens * ffn, item, passes=3),
        _pointwise(tokens * (width * 5 + ffn), item, passes=1, kernels=4),
    )
    attention, attention_backward, score_bytes = _attention(shape, work)
    # In, its norm, q, k and v, what attention gives, the sum, its norm; before and after the nonlinearity.
    inside_bytes = tokens * (8 * width + 2 * ffn) * item + score_bytes
    forward, backward = _add(dense, light, attention), _add(dense_backward, light_backward, attention_backward)
    input_bytes = tokens * width * item
    gradient_bytes = tokens * (2 * width + 2 * ffn) * item + score_bytes
    if work.checkpointing:
        return _Part(forward, _add(forward, backward), input_bytes, inside_bytes, inside_bytes + gradient_bytes)
    return _Part(forward, backward, inside_bytes, inside_bytes, gradient_bytes)


def _attention(shape: Shape, work: Work) -> tuple[Span, Span, int]:
    """Forward, backward, and the bytes of scores that are kept."""
    tokens, seq_len, width, item = work.num_tokens, work.seq_len, shape.width, work.item_bytes
    all_pairs = 4.0 * tokens * seq_len * width  # Queries with keys, weights with values.
    if work.attention == "fused":
        flops, moved = all_pairs / 2, 4.0 * tokens * width * item
        forward = Span(flops, flops, moved, 1, attention_flops=flops)
        # Five products where the forward has two: the weights once more, and the gradients of four tensors.
        backward = Span(2.5 * flops, 2.5 * flops, 2 * moved, 3, attention_flops=2.5 * flops)
        return forward, backward, 0
    heads, scores = shape.num_heads * work.micro_batch, tokens * seq_len * shape.num_heads
    products = _add(*(_matmul(seq_len, width / shape.num_heads, seq_len, item, count=heads) for _ in range(2)))
    # Scale and mask, softmax: read and written each; and q, k, v and the result are laid out by heads.
    forward = _add(
        products, _pointwise(scores, item, passes=4, kernels=2), _pointwise(tokens * width, item, passes=8, kernels=4)
    )
    passed_back = _add(_pointwise(scores, item, passes=5, kernels=2), _pointwise(tokens * width, item, passes=8, kernels=4))
    return forward, _add(products, products, passed_back), 2 * scores * item


def _embedding(shape: Shape, work: Work) -> _Part:
    elements, item = work.num_tokens * shape.width, work.item_bytes
    num_bytes = elements * item
    return _Part(
        _pointwise(elements, item, passes=5, kernels=3),
        _pointwise(elements, item, passes=4, kernels=4),
        num_bytes,
        num_bytes,
        0,
    )


def _head(shape: Shape, work: Work) -> _Part:
    """The last norm, logits, and the loss in float32."""
    tokens, width, item, logits = work.num_tokens, shape.width, work.item_bytes, work.num_tokens * shape.vocab_size
    product = _matmul(tokens, width, shape.vocab_size, item)
    norm = _pointwise(tokens * width, item, passes=2)
    cast = Span(moved_bytes=logits * (item + _LOSS_BYTES), num_kernels=1)
    loss = _pointwise(logits, _LOSS_BYTES, passes=3, kernels=3)
    kept_bytes = 2 * tokens * width * item + logits * (item + 2 * _LOSS_BYTES)
    return _Part(
        _add(norm, product, cast, loss),
        _add(product, product, cast, loss, norm, norm),
        kept_bytes,
        kept_bytes,
        logits * (item + _LOSS_BYTES),
    )


# ---------------------------------------------------------------- spans


def _spans(trace: Trace, parts: _Parts, shape: Shape, work: Work) -> tuple[Span, ...]:
    """One for each moment: units compute after they are opened; a tied embedding is the first and the last to."""
    held = 0
    spans: list[Span] = []
    for part in _computed(trace.forward, parts, shape.is_tied):
        if part is None:
            spans.append(Span(live_bytes=held, peak_bytes=held))
            continue
        peak_bytes, held = held + part.forward_bytes, held + part.kept_bytes
        spans.append(replace(part.forward, live_bytes=held, peak_bytes=peak_bytes))
    passed_bytes = work.num_tokens * shape.width * work.item_bytes  # The gradient between two parts.
    for part in _computed(trace.backward, parts, shape.is_tied):
        if part is None:
            spans.append(Span(live_bytes=held + passed_bytes, peak_bytes=held + passed_bytes))
            continue
        peak_bytes, held = held + part.backward_bytes + passed_bytes, held - part.kept_bytes
        spans.append(replace(part.backward, live_bytes=held + passed_bytes, peak_bytes=peak_bytes))
    return tuple(spans)


def _computed(moments: Sequence[Moment], parts: _Parts, is_tied: bool) -> Iterator[_Part | None]:
    """What is computed after each moment."""
    names = {_EMBEDDING: parts.embedding, _HEAD: parts.head}
    opening = (Point.PRE_FORWARD, Point.PRE_BACKWARD)
    is_forward = moments[0].point is Point.PRE_FORWARD
    for index, moment in enumerate(moments):
        if moment.point in opening and moment.unit != ROOT:
            yield names.get(moment.unit, parts.block)
        elif is_tied and index == 0:
            yield parts.embedding if is_forward else parts.head
        elif is_tied and index == len(moments) - 2:
            yield parts.head if is_forward else parts.embedding
        else:
            yield None
