"""What one step of a model computes and holds, moment by moment: the common ground of predicted memory and predicted time.

Knows nothing of ranks, stages, tiers and hardware. A profile comes from a run of the user's module on fake tensors, or, for a bare
size, from formulas; whoever reads it need not care which.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from shardwise.core.trace import Point, Trace
from shardwise.core.unit import Unit


@dataclass(frozen=True)
class Span:
    """What happens after one moment of the trace and before the next.

    ``flops`` counts a multiplication and an addition as two; ``matmul_flops`` is the part of them in matrix products and convolutions,
    which run at the rate that devices are sold by. ``moved_bytes`` is what its kernels read and write. ``live_bytes`` are the
    activations that are held when it ends; ``peak_bytes`` the most that were held inside it, with temporary results. Neither has
    parameters, gradients of parameters, or what the model was given.
    """

    flops: float = 0.0
    matmul_flops: float = 0.0
    moved_bytes: float = 0.0
    num_kernels: int = 0
    live_bytes: int = 0
    peak_bytes: int = 0
    matmul_bytes: float = 0.0
    """The part of ``moved_bytes`` that those products move: it is hidden behind their arithmetic, unless they are small."""
    attention_flops: float = 0.0
    """The part of ``matmul_flops`` in fused attention, which runs at a lower rate."""


class Cause(Enum):
    """What the engine is told of in a step."""

    OPEN = "a call begins that uses a unit"
    CLOSE = "it has returned"
    DIFFERENTIATE = "gradients reach what it returned"
    DIFFERENTIATED = "all that it was given has gradients"
    AGAIN = "it is computed again in the backward"
    GRAD = "a parameter has its gradient"


@dataclass(frozen=True)
class Beat:
    """One of these, and what happens until the next: finer than moments, since the engine takes gradients one by one.

    ``param`` is the name of a parameter, for a gradient; ``grad_bytes`` what that takes; ``is_own`` whether it has memory of its own,
    dense and in the parameter's own order, which the engine may take over. ``start_bytes`` are the activations that are held when it
    comes, with the gradient. ``away_bytes`` rest elsewhere, at most, until the next.
    """

    cause: Cause
    unit: str
    span: Span
    start_bytes: int = 0
    param: str = ""
    grad_bytes: int = 0
    is_own: bool = False
    away_bytes: int = 0


@dataclass(frozen=True)
class Profile:
    """A step of one micro-batch: units, the order of moments, and a span after each: those of the forward, then of the backward.

    ``param_dtype`` is the dtype in which it was computed (``"float32"``, ``"bfloat16"``, ...), ``num_tokens`` and ``num_samples`` what
    one micro-batch holds. ``input_bytes`` is what the model is given, ``buffer_bytes`` what its modules' buffers take; ``source`` says
    how it was found: ``"fake"`` or ``"closed form"``. ``beats`` say more exactly what happens when, where that is known.
    """

    units: tuple[Unit, ...]
    trace: Trace
    spans: tuple[Span, ...]
    param_dtype: str
    num_samples: int
    num_tokens: int
    input_bytes: int
    source: str
    buffer_bytes: int = 0
    beats: tuple[Beat, ...] = ()
    recomputed_flops: float = 0.0
    """The part of the spans' flops that computes anew what was computed before."""

    @property
    def forward(self) -> tuple[Span, ...]:
        """The spans of the forward."""
        return self.spans[: len(self.trace.forward)]

    @property
    def backward(self) -> tuple[Span, ...]:
        """The spans of the backward."""
        return self.spans[len(self.trace.forward) :]

    @cached_property
    def num_params(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel for unit in self.units for param in unit.params)

    @cached_property
    def flops(self) -> float:
        """Of the whole step."""
        return sum(span.flops for span in self.spans)

    @cached_property
    def peak_activation_bytes(self) -> int:
        """The most activations that are held at once."""
        return max((span.peak_bytes for span in self.spans), default=0)


_CAUSES = {Point.PRE_FORWARD: Cause.OPEN, Point.POST_FORWARD: Cause.CLOSE, Point.PRE_BACKWARD: Cause.DIFFERENTIATE}


def beats_of(profile: Profile) -> tuple[Beat, ...]:
    """The beats of a profile; where these are not known, its moments, with all gradients of a unit at the last of them."""
    if profile.beats:
        return profile.beats
    beats: list[Beat] = []
    units = {unit.name: unit for unit in profile.units}
    item_bytes = 2 if profile.param_dtype in ("bfloat16", "float16") else 4
    for moment, span in zip((*profile.trace.forward, *profile.trace.backward), profile.spans, strict=True):
        if moment.point in _CAUSES:
            beats.append(Beat(_CAUSES[moment.point], moment.unit, span, span.live_bytes))
            continue
        trained = [param for param in units[moment.unit].params if param.trainable]
        for param in trained:
            grad_bytes = param.numel * item_bytes
            beats.append(Beat(Cause.GRAD, moment.unit, span, span.live_bytes, param.name, grad_bytes))
    return tuple(beats)
