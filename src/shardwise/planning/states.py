"""Bytes of model states on each rank, in closed form: parameters, gradients and optimizer state at every stage.

This is the arithmetic of the ZeRO paper (arXiv 1910.02054), for any dtypes and optimizers. A device needs more than it says:

- It leaves out activations, buffers of modules, what is gathered to compute with, gradients on their way, fragments of memory,
  counters of the optimizer (such as Adam's number of steps, 4 bytes a tensor), and what the framework itself takes.
- It leaves out padding. The engine rounds every parameter up to 64 elements, and then a rank's share of every flat buffer
  (``core/layout.py``).

All parameters are taken to be trained and of one dtype. Units, frozen parameters and tiers are the matter of ``core/footprint.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

from shardwise.core.errors import PlanError, UsageError
from shardwise.core.plan import SHARDED_AT_STAGE, StateKind

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

NUM_STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "adam": 2, "adamw": 2, "nadam": 2, "adamax": 2}
"""Numbers that optimizers keep for each parameter, by their default settings. Those that keep something of another shape, such as
Adafactor, have no such number."""


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of each kind of state that one trained parameter takes, before anything is sharded.

    Args:
        param: Of the value that is computed with.
        grad: Of its gradient.
        master: Of the value that the optimizer updates, where that is another one; else 0. It goes with the optimizer's state.
        optim: Of the optimizer's own numbers.
        is_single_when_sharded: Whether a rank that owns shards of parameters keeps the master value alone, and casts it when it is
            gathered. The engine does; the ZeRO paper counts both.
    """

    param: int
    grad: int
    master: int
    optim: int
    is_single_when_sharded: bool = True

    @classmethod
    def of(
        cls,
        dtype: str = "float32",
        *,
        compute_dtype: str | None = None,
        grad_dtype: str | None = None,
        optimizer: str | int = "adam",
    ) -> ElementBytes:
        """As the engine keeps them.

        Args:
            dtype: Of the parameters that the optimizer updates, and of its own numbers.
            compute_dtype: ``Plan.param_dtype``: that of the parameters, if None.
            grad_dtype: ``Plan.reduce_dtype``: that of compute, if None.
            optimizer: A name of ``NUM_STATES``, or how many numbers it keeps for each parameter.

        >>> ElementBytes.of("float32", compute_dtype="bfloat16")
        ElementBytes(param=2, grad=2, master=4, optim=8, is_single_when_sharded=True)
        """
        compute_dtype = compute_dtype or dtype
        full, computed, gradient = (_item_bytes(each) for each in (dtype, compute_dtype, grad_dtype or compute_dtype))
        return cls(computed, gradient, full if compute_dtype != dtype else 0, _num_states(optimizer) * full)


ZERO_PAPER = ElementBytes(param=2, grad=2, master=4, optim=8, is_single_when_sharded=False)
"""Adam in mixed precision as the ZeRO paper counts it: 2 + 2 + K, where K = 12."""


@dataclass(frozen=True)
class ModelStates:
    """Bytes that the rank with the largest share holds at rest, without activations and padding."""

    param_bytes: int
    """0, where the values that the optimizer updates are kept alone."""
    grad_bytes: int
    optim_bytes: int
    """With the values that the optimizer updates, where these are not the parameters themselves."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.param_bytes + self.grad_bytes + self.optim_bytes


def model_states(num_params: int, *, stage: int, num_ranks: int, element: ElementBytes) -> ModelStates:
    """What a rank holds of a model.

    Raises:
        UsageError: A number is out of range.

    >>> states = model_states(7_500_000_000, stage=2, num_ranks=64, element=ZERO_PAPER)
    >>> states.num_bytes / 1e9
    16.640625
    """
    if num_params < 1:
        raise UsageError(f"A model has 1 parameter or more, but num_params is {num_params}.")
    return _states(num_params, stage, num_ranks, element)


def _states(num_params: int, stage: int, num_ranks: int, element: ElementBytes) -> ModelStates:
    held = {kind: -(-num_params // over) for kind, over in _divisors(stage, num_ranks).items()}
    kept = _kept(stage, element)
    return ModelStates(*(held[kind] * kept[kind] for kind in (StateKind.PARAM, StateKind.GRAD, StateKind.OPTIM)))


def largest_model(limit_bytes: int, *, stage: int, num_ranks: int, element: ElementBytes) -> int:
    """The most parameters whose states fit into so many bytes on each rank: an upper bound, since more than these must fit.

    Returns:
        The number; 0, if not even one fits.

    >>> round(largest_model(32 * 10**9, stage=1, num_ranks=64, element=ZERO_PAPER) / 1e9, 1)
    7.6
    """
    if limit_bytes < 1:
        raise UsageError(f"A limit of memory is 1 byte or more, but limit_bytes is {limit_bytes}.")
    divisors, kept = _divisors(stage, num_ranks), _kept(stage, element)
    bytes_each = sum(Fraction(kept[kind], over) for kind, over in divisors.items())
    most = int(limit_bytes / bytes_each)
    # Shares are whole elements: up to one more than the even part, for which `num_ranks` parameters fewer make room.
    candidates = range(max(0, most - num_ranks), most + 1)
    fitting = bisect_right(candidates, limit_bytes, key=lambda count: _states(count, stage, num_ranks, element).num_bytes)
    return candidates[fitting - 1]


def _divisors(stage: int, num_ranks: int) -> dict[StateKind, int]:
    """Over how many ranks each kind of state is spread."""
    if stage not in SHARDED_AT_STAGE:
        raise PlanError(f"stage must be 0, 1, 2 or 3 but is {stage!r}.")
    if num_ranks < 1:
        raise UsageError(f"There are 1 rank or more, but num_ranks is {num_ranks}.")
    return {kind: num_ranks if kind in SHARDED_AT_STAGE[stage] else 1 for kind in StateKind}


def _kept(stage: int, element: ElementBytes) -> dict[StateKind, int]:
    """Bytes of each kind that are kept of a parameter, on all ranks that share it together."""
    is_single = element.is_single_when_sharded and element.master > 0 and StateKind.PARAM in SHARDED_AT_STAGE[stage]
    param = 0 if is_single else element.param
    return {StateKind.PARAM: param, StateKind.GRAD: element.grad, StateKind.OPTIM: element.master + element.optim}


def _item_bytes(dtype: str) -> int:
    if dtype not in _ITEM_BYTES:
        raise UsageError(f"A dtype must be one of {', '.join(_ITEM_BYTES)} but is {dtype!r}.")
    return _ITEM_BYTES[dtype]


def _num_states(optimizer: str | int) -> int:
    if isinstance(optimizer, str):
        if optimizer.lower() not in NUM_STATES:
            known = ", ".join(NUM_STATES)
            raise UsageError(
                f"optimizer must be one of {known}, or how many numbers it keeps a parameter, but is {optimizer!r}."
            )
        return NUM_STATES[optimizer.lower()]
    if isinstance(optimizer, bool) or not isinstance(optimizer, int) or optimizer < 0:
        raise UsageError(f"optimizer must be a name, or a whole number of 0 or more numbers a parameter, but is {optimizer!r}.")
    return optimizer
