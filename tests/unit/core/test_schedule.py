"""Schedules of small models, written out at each stage and depth; and what holds for any trace."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.core.plan import Plan
from shardwise.core.schedule import Schedule, Verb, build_schedule
from shardwise.core.trace import Moment, Point, Trace, assumed_trace, mirror
from shardwise.core.unit import FlatSpec, ParamSpec, Unit

SHORT = {
    Verb.GATHER: "gather", Verb.RELEASE: "release", Verb.REDUCE: "reduce", Verb.GATHER_GRAD: "regather",
    Verb.DIGEST: "digest", Verb.UPDATE: "update", Verb.FETCH: "fetch",
}  # fmt: skip
POINTS = {Point.PRE_FORWARD: "<", Point.POST_FORWARD: ">", Point.PRE_BACKWARD: "(", Point.POST_BACKWARD: ")"}


def unit(name: str, *, trained: bool = True, numel: int = 64) -> Unit:
    spec = ParamSpec((f"{name}.weight",), (numel,), (1,), torch.float32, trained, 0)
    return Unit(name, (FlatSpec(name, torch.float32, trained, (spec,)),))


def trace_of(text: str) -> Trace:
    """A trace from names with `<` before and `>` after a call: `<a <b >b >a`."""
    points = {"<": Point.PRE_FORWARD, ">": Point.POST_FORWARD}
    forward = tuple(Moment(points[word[0]], word[1:]) for word in text.split())
    return Trace(forward, mirror(forward), "assumed")


def written(schedule: Schedule) -> list[str]:
    """One line for each moment at which something is done."""
    lines = []
    for entry in schedule.entries:
        ops = ", ".join(f"{SHORT[op.verb]} {op.unit}".strip() for op in entry.ops)
        if ops:
            lines.append(f"{POINTS.get(entry.moment.point, '')}{entry.moment.unit}: {ops}")
    return lines


FLAT = trace_of("<a >a <b >b <c >c")
UNITS = [unit("a"), unit("b"), unit("c")]
UPDATES = [": digest", "a: update a", "b: update b", "c: update c"]


def schedule_at(stage: int, prefetch: int = 0, **changes: Any) -> list[str]:
    return written(build_schedule(UNITS, Plan(stage=stage, prefetch=prefetch, **changes), FLAT))


def test_stage_0_reduces_and_brings_gradients_back() -> None:
    reductions = [f"){name}: reduce {name}, regather {name}" for name in "cba"]
    assert schedule_at(0) == schedule_at(0, prefetch=3) == [*reductions, *UPDATES]


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_what_was_updated(stage: int) -> None:
    updates = [": digest", *(f"{name}: update {name}, gather {name}" for name in "abc")]
    assert schedule_at(stage) == schedule_at(stage, prefetch=2) == [*(f"){name}: reduce {name}" for name in "cba"), *updates]


def test_stage_3_gathers_around_each_use() -> None:
    assert schedule_at(3) == [
        "<a: gather a", ">a: release a", "<b: gather b", ">b: release b", "<c: gather c",
        ")c: reduce c, release c", "(b: gather b", ")b: reduce b, release b",
        "(a: gather a", ")a: reduce a, release a", *UPDATES,
    ]  # fmt: skip


def test_prefetch_gathers_ahead_once() -> None:
    assert schedule_at(3, prefetch=1) == [
        "<a: gather a, gather b", ">a: release a", "<b: gather c", ">b: release b",
        "(c: gather b", ")c: reduce c, release c", "(b: gather a", ")b: reduce b, release b",
        ")a: reduce a, release a", *UPDATES,
    ]  # fmt: skip
    assert (
        schedule_at(3, prefetch=2)[:2]
        == schedule_at(3, prefetch=9)[:2]
        == ["<a: gather a, gather b, gather c", ">a: release a"]
    )


def test_what_is_on_disk_is_read_one_opening_before_its_gather() -> None:
    tiers = {"param": "disk"}
    assert schedule_at(3, tiers=tiers) == [
        "<a: gather a, fetch b", ">a: release a", "<b: gather b, fetch c", ">b: release b", "<c: gather c",
        "(c: fetch b", ")c: reduce c, release c", "(b: gather b, fetch a", ")b: reduce b, release b",
        "(a: gather a", ")a: reduce a, release a", *UPDATES,
    ]  # fmt: skip
    assert schedule_at(3, prefetch=1, tiers=tiers)[:3] == ["<a: gather a, gather b, fetch c", ">a: release a", "<b: gather c"]
    kept = [build_schedule(UNITS, Plan(stage=3, prefetch=0, tiers=held), FLAT).kept_units for held in (tiers, {})]
    assert kept[0] == kept[1] == {"c"}
    # Gathers are the same at stage 0, where this rank alone reads; of a fraction, only what rests there is read.
    assert schedule_at(0, tiers=tiers)[0] == "<a: gather a, fetch b"
    assert schedule_at(3, tiers=tiers, fraction=0.4)[0] == "<a: gather a, fetch b"
    assert schedule_at(3, tiers={"optim": "disk"}) == schedule_at(3)


def test_what_stays_gathered_is_not_gathered_again() -> None:
    assert schedule_at(3, reshard_after_forward=False) == [
        "<a: gather a", "<b: gather b", "<c: gather c",
        ")c: reduce c, release c", ")b: reduce b, release b", ")a: reduce a, release a", *UPDATES,
    ]  # fmt: skip


def test_root_stays_open_around_its_children() -> None:
    units = [unit(""), unit("a"), unit("b")]
    schedule = build_schedule(units, Plan(stage=3, prefetch=0), trace_of("< <a >a <b >b >"))
    assert written(schedule)[:6] == [
        "<: gather", "<a: gather a", ">a: release a", "<b: gather b",
        ")b: reduce b, release b", "(a: gather a",
    ]  # fmt: skip


def kept(calls: str, backward: Sequence[Moment] | None = None) -> frozenset[str]:
    trace = trace_of(calls)
    units = [unit(name) for name in sorted({moment.unit for moment in trace.forward})]
    trace = trace if backward is None else replace(trace, backward=tuple(backward))
    return build_schedule(units, Plan(stage=3, prefetch=0), trace).kept_units


def test_what_the_forward_closes_last_and_the_backward_opens_first_is_kept() -> None:
    assert kept("<a >a <b >b") == {"b"}
    assert kept("< <a >a <b >b >") == {"", "b"}
    assert kept("< <a >a <b <c >c >b >") == {"", "b", "c"}
    # Another order in the backward: what it opens only later is released in between.
    turned = [Moment(Point.PRE_BACKWARD, "a"), Moment(Point.POST_BACKWARD, "a"), Moment(Point.PRE_BACKWARD, "b")]
    assert kept("<a >a <b >b", turned) == set()
    # Earlier calls of the same unit release it.
    trace = trace_of("<a >a <b >b <a >a")
    lines = written(build_schedule([unit("a"), unit("b")], Plan(stage=3, prefetch=0), trace))
    assert lines[:6] == ["<a: gather a", ">a: release a", "<b: gather b", ">b: release b", "<a: gather a", "(b: gather b"]


def test_frozen_units_are_gathered_but_neither_reduced_nor_updated() -> None:
    units = [unit("a", trained=False), unit("b")]
    lines = written(build_schedule(units, Plan(stage=3, prefetch=0), trace_of("<a >a <b >b")))
    assert "(a: gather a" in lines and ")a: release a" in lines
    assert not any("reduce a" in line or "update a" in line for line in lines)
    assert build_schedule(units, Plan(stage=1), trace_of("<a >a <b >b")).reduced_units == ("b",)


def test_unit_that_is_called_twice_is_reduced_once() -> None:
    schedule = build_schedule([unit("a"), unit("b")], Plan(stage=3, prefetch=0), trace_of("<a >a <b >b <a >a"))
    lines = written(schedule)
    assert lines[:5] == ["<a: gather a", ">a: release a", "<b: gather b", ">b: release b", "<a: gather a"]
    assert schedule.reduced_units == ("b", "a")


def test_bytes_are_those_of_whole_buffers() -> None:
    schedule = build_schedule([unit("a", numel=100)], Plan(stage=3), trace_of("<a >a"))
    assert {op.num_bytes for entry in schedule.entries for op in entry.ops} == {128 * 4}


def test_table_shows_every_op() -> None:
    schedule = build_schedule(UNITS, Plan(stage=3), FLAT)
    rows = str(schedule).splitlines()
    assert len(rows) == 1 + sum(len(entry.ops) for entry in schedule.entries)
    assert rows[1].split() == ["before", "forward", "a", "gather", "parameters", "a", "256", "B"]


def test_assumed_trace_follows_definition() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)), nn.ReLU())
    trace = assumed_trace(model, "", ["", "0", "1"])
    assert [f"{POINTS[m.point]}{m.unit}" for m in trace.forward] == ["<", "<0", ">0", "<1", ">1", ">"]
    assert [f"{POINTS[m.point]}{m.unit}" for m in trace.backward] == ["(", "(1", ")1", "(0", ")0", ")"]
    assert trace.visits(Point.PRE_FORWARD) == ("", "0", "1")


# ---------------------------------------------------------------- any trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Nested and repeated calls, as modules make them."""
    moments: list[Moment] = []

    def call(name: str, depth: int) -> None:
        moments.append(Moment(Point.PRE_FORWARD, name))
        for inner in draw(st.lists(st.sampled_from("abcd"), max_size=2)) if depth < 2 else ():
            if inner != name:
                call(inner, depth + 1)
        moments.append(Moment(Point.POST_FORWARD, name))

    for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5)):
        call(name, 0)
    return Trace(tuple(moments), mirror(moments), "assumed")


def held_at(schedule: Schedule, opening: Point, others: Sequence[Point], is_open: set[str]) -> None:
    """In one phase: nothing is gathered that is open, and what computes is open."""
    for entry in schedule.phase(opening, *others):
        for op in entry.ops:
            if op.verb is Verb.GATHER:
                assert op.unit not in is_open, f"{op.unit} is gathered twice"
                is_open.add(op.unit)
        if entry.moment.point is opening:
            assert entry.moment.unit in is_open, f"{entry.moment.unit} computes without its parameters"
        for op in entry.ops:
            if op.verb is Verb.RELEASE:
                is_open.discard(op.unit)


@given(traces(), st.integers(0, 4))
def test_any_schedule_gathers_what_computes_once_and_releases_it(trace: Trace, prefetch: int) -> None:
    schedule = build_schedule([unit(name) for name in "abcd"], Plan(stage=3, prefetch=prefetch), trace)
    is_open: set[str] = set()
    held_at(schedule, Point.PRE_FORWARD, [Point.POST_FORWARD], is_open)
    assert is_open == schedule.kept_units
    held_at(schedule, Point.PRE_BACKWARD, [Point.POST_BACKWARD], is_open)
    assert not is_open, f"{is_open} is never released"
    used = {moment.unit for moment in trace.forward}
    assert sorted(schedule.reduced_units) == sorted(used)
