"""Every stage, prefetch depth and layout gives plain torch's bits: cases in which all pairs of values of two factors occur."""

import itertools
from collections import defaultdict
from dataclasses import make_dataclass

import pytest

from shardwise.testing import World
from tests.distributed.matrix import FACTORS, all_cases, covering, difference, pairs_of
from tests.distributed.reference import compare

pytestmark = pytest.mark.dist
CASES = covering(all_cases())


@pytest.mark.parametrize("ranks", FACTORS["ranks"])
def test_bits_do_not_depend_on_stage_prefetch_and_layout(world: World, ranks: int) -> None:
    wrong = compare(world, [case for case in CASES if case.ranks == ranks])
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("as_large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_network_has_the_same_bits_also_in_the_ways_of_large_worlds(world: World, ranks: int, as_large: bool) -> None:
    cases = {case.stage: case for case in CASES if case.ranks == ranks}
    assert len(cases) == 4
    wrong = compare(world, list(cases.values()), path="network", as_large=as_large)
    assert not wrong, "\n" + "\n".join(wrong)


def test_all_legal_pairs_are_covered() -> None:
    covered = set().union(*map(pairs_of, CASES))
    for (first, second), case in itertools.product(itertools.combinations(FACTORS, 2), all_cases()):
        pair = (first, getattr(case, first)), (second, getattr(case, second))
        assert pair in covered, f"{pair} occurs in {case} but in none of the {len(CASES)} chosen cases"
    assert len(CASES) <= 32


def test_covering_is_small_and_takes_legal_cases_only() -> None:
    Bits = make_dataclass("Bits", ["a", "b", "c"], frozen=True)
    product = [Bits(*bits) for bits in itertools.product((0, 1), repeat=3)]
    chosen = covering(product)
    assert len(chosen) in (4, 5)
    legal = [bits for bits in product if not (bits.a and bits.b)]
    chosen = covering(legal)
    assert set(chosen) <= set(legal)
    assert {(bits.a, bits.b) for bits in chosen} == {(0, 0), (0, 1), (1, 0)}
    assert {(bits.a, bits.c) for bits in chosen} == {(bits.b, bits.c) for bits in chosen} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_illegal_cases_are_left_out() -> None:
    layouts: dict[str, set[str]] = defaultdict(set)
    for case in all_cases():
        layouts[case.optimizer].add(case.layout)
    assert layouts["Muon"] == layouts["Adafactor"] == {"whole", "auto"}
    assert layouts["AdamW"] == layouts["SGD"] == layouts["Adagrad"] == {"even", "weighted", "whole"}


def test_difference_names_the_first_fact() -> None:
    assert difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) is None
    assert difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b: 2 where 3 was expected"
    assert difference({"a": "1"}, {"a": "1", "b": "3"}) == "b: None where 3 was expected"
    assert difference({"a": "1", "c": "2"}, {"a": "1"}) == "c: 2 where None was expected"
