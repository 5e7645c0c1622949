"""The order of moments of one step, assumed from the modules' order or recorded in a step. Knows no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import nn


class Point(Enum):
    """Where in a step a moment is."""

    __hash__ = object.__hash__  # In C: enum's own is Python, and members are looked up all through a step.

    PRE_FORWARD = "before forward"
    POST_FORWARD = "after forward"
    PRE_BACKWARD = "before backward"
    POST_BACKWARD = "after backward"
    END_BACKWARD = "end of backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Moment:
    """A point of a step, at a unit."""

    point: Point
    unit: str


@dataclass(frozen=True)
class Trace:
    """Units in the order in which one step visits them, forward and backward.

    ``forward`` and ``backward`` are moments; ``source`` says where the order comes from: ``assumed`` (modules in the order of
    their definition), ``fake`` (a run on fake tensors) or ``recorded`` (a step on every rank).
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    source: str

    def visits(self, point: Point) -> tuple[str, ...]:
        """Units at one kind of moment, in order."""
        return tuple(moment.unit for moment in (*self.forward, *self.backward) if moment.point is point)


def mirror(forward: Sequence[Moment]) -> tuple[Moment, ...]:
    """The backward that belongs to a forward if every unit is differentiated in reverse order."""
    turned = {Point.POST_FORWARD: Point.PRE_BACKWARD, Point.PRE_FORWARD: Point.POST_BACKWARD}
    seen: set[Moment] = set()
    backward = []
    for moment in reversed(forward):
        backward.append(Moment(turned[moment.point], moment.unit))
    # A unit that is called several times is reduced once, after its first call is differentiated.
    result = []
    for moment in reversed(backward):
        if moment.point is Point.POST_BACKWARD and moment in seen:
            continue
        seen.add(moment)
        result.append(moment)
    return tuple(reversed(result))


def assumed_trace(entry: nn.Module, entry_name: str, units: Sequence[str]) -> Trace:
    """Suppose that a call of ``entry`` calls its modules once each, in the order of their definition."""
    forward: list[Moment] = []
    seen: set[int] = set()
    wanted = set(units)

    def walk(module: nn.Module, name: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if name in wanted:
            forward.append(Moment(Point.PRE_FORWARD, name))
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name)
        if name in wanted:
            forward.append(Moment(Point.POST_FORWARD, name))

    walk(entry, entry_name)
    return Trace(tuple(forward), mirror(forward), "assumed")
