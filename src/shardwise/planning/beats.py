"""What the engine would be told of in a run on fake tensors, in order, with what is computed and held in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from shardwise.core.trace import Moment, Point
from shardwise.core.unit import ParamSpec, Unit
from shardwise.devices import torch_private
from shardwise.devices.live import Live, Work
from shardwise.planning.away import Away
from shardwise.planning.profile import Beat, Cause, Span
from shardwise.runtime.rehearsal import Recorder

_CAUSES = {Point.PRE_FORWARD: Cause.OPEN, Point.POST_FORWARD: Cause.CLOSE}


class Beats(Recorder):
    """The beats of one run, cut where something comes."""

    def __init__(
        self, units: Sequence[Unit], live: Live, away: Away | None, also_opened: Sequence[tuple[str, str]], tables: set[str]
    ) -> None:
        super().__init__({unit.name for unit in units}, also_opened=list(also_opened))
        self._live = live
        self._away = away
        self._specs = {name: (unit.name, param) for unit in units for param in unit.params for name in param.names}
        self._last_grad: dict[str, int] = {}
        self._tables = tables
        self.beats: list[Beat] = []
        self._moments_at: dict[int, Moment] = {}

    @property
    def is_backward(self) -> bool:
        """Whether the backward has begun."""
        return torch_private.graph_task() != -1

    # What comes

    def enter(self, name: str) -> None:
        """A call of a module begins."""
        if not self.is_backward:
            return super().enter(name)
        self.open_calls.append(name)
        self.open_units.append([])
        for unit in [name] * (name in self.units) + [unit for module, unit in self.also_opened if module == name]:
            self.again(unit)
        return None

    def note(self, moment: Moment) -> None:
        """A moment of the forward."""
        if not self.is_backward:
            self._cut(Beat(_CAUSES[moment.point], moment.unit, Span()), moment)

    def read(self, unit: str) -> None:
        """A parameter of a unit is read."""
        if not self.is_backward:
            super().read(unit)

    def differentiate(self, units: Sequence[str]) -> None:
        """Gradients reach what a call has returned."""
        for unit in units:
            self._cut(
                Beat(Cause.DIFFERENTIATE, unit, Span()), Moment(Point.PRE_BACKWARD, unit) if unit not in self._tables else None
            )

    def differentiated(self, units: Sequence[str]) -> None:
        """All that a call was given has gradients."""
        for unit in units:
            self._cut(Beat(Cause.DIFFERENTIATED, unit, Span()))

    def again(self, unit: str) -> None:
        """A call is made again in the backward."""
        self._cut(Beat(Cause.AGAIN, unit, Span()))

    def taker(self, name: str) -> Callable[[torch.Tensor], None]:
        """What takes the gradient of a parameter away, as the engine does."""
        unit, spec = self._specs[name]

        def take(param: torch.Tensor) -> None:
            grad = param.grad
            if grad is None:
                return
            is_own = _is_own(grad, spec)
            grad_bytes = grad.nbytes
            self._last_grad[unit] = len(self.beats)
            self._cut(Beat(Cause.GRAD, unit, Span(), param=name, grad_bytes=grad_bytes, is_own=is_own))
            del grad
            param.grad = None
            self._live.cut()  # Its memory is gone before anything else is computed.

        return take

    def _cut(self, beat: Beat, moment: Moment | None = None) -> None:
        self._finish_last()
        away_bytes = 0 if self._away is None else self._away.cut()
        if moment is not None:
            self._moments_at[len(self.beats)] = moment
        self.beats.append(replace(beat, start_bytes=self._live.live_bytes, away_bytes=away_bytes))

    def _finish_last(self) -> None:
        work, peak_bytes = self._live.cut()
        if self.beats:
            away_bytes = self.beats[-1].away_bytes if self._away is None else self._away.peak_bytes
            span = _span(work, self._live.live_bytes, peak_bytes)
            self.beats[-1] = replace(self.beats[-1], span=span, away_bytes=away_bytes)

    def end(self) -> None:
        """The backward has ended."""
        self._finish_last()
        for unit, place in self._last_grad.items():
            self._moments_at[place] = Moment(Point.POST_BACKWARD, unit)

    # What it comes to

    @property
    def forward(self) -> list[Moment]:
        """Moments of the forward."""
        return [m for _, m in sorted(self._moments_at.items()) if m.point in _CAUSES]

    @property
    def backward(self) -> list[Moment]:
        """Moments of the backward."""
        return [m for _, m in sorted(self._moments_at.items()) if m.point not in _CAUSES]

    def spans(self) -> tuple[Span, ...]:
        """One for each moment: all until the next."""
        places = sorted(self._moments_at)
        ends = [*places[1:], len(self.beats)]
        return tuple(_joined([beat.span for beat in self.beats[at:end]]) for at, end in zip(places, ends, strict=True))


def _span(work: Work, live_bytes: int, peak_bytes: int) -> Span:
    held = (live_bytes, peak_bytes)
    return Span(
        work.flops, work.matmul_flops, work.moved_bytes, work.num_kernels, *held, work.matmul_bytes, work.attention_flops
    )


def _joined(spans: Sequence[Span]) -> Span:
    return Span(
        sum(span.flops for span in spans),
        sum(span.matmul_flops for span in spans),
        sum(span.moved_bytes for span in spans),
        sum(span.num_kernels for span in spans),
        spans[-1].live_bytes,
        max(span.peak_bytes for span in spans),
        sum(span.matmul_bytes for span in spans),
        sum(span.attention_flops for span in spans),
    )


def _is_own(grad: torch.Tensor, spec: ParamSpec) -> bool:
    """Whether the engine may take the memory of a gradient over."""
    is_dense = grad.layout is torch.strided and grad.stride() == spec.stride
    return is_dense and torch_private.is_nobody_elses(grad)


def tables_of(model: nn.Module, units: Sequence[Unit]) -> set[str]:
    """Units that hold nothing but tables of embeddings, which are differentiated without their values."""
    found = set()
    for unit in units:
        owners = [model.get_submodule(name.rpartition(".")[0]) for param in unit.params for name in param.names]
        if all(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in owners):
            found.add(unit.name)
    return found
