"""Every legal combination of stage, ranks, precision, optimizer, accumulation, prefetch and layout gives plain torch's bits.

The depth of prefetch acts through the schedule alone. Combinations that differ in nothing but a depth which changes nothing in
the schedule are one program, and it is trained once; where a depth comes to matter, the program is another and is trained too.
"""

import itertools
from collections.abc import Sequence
from functools import cache

import pytest

import shardwise
from shardwise.testing import World
from tests.distributed.matrix import FACTORS, Case, all_cases, make_batch, make_model
from tests.distributed.reference import compare

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(7200)]
ROWS = list(itertools.product(FACTORS["ranks"], FACTORS["compute"], FACTORS["optimizer"]))
COMPARED: list[tuple[int, int]] = []


@cache
def schedule_at(stage: int, prefetch: int) -> str:
    """What a step of the model does, from its forward on fake tensors."""
    return str(shardwise.shard(make_model(seed=0), stage=stage, prefetch=prefetch, example=make_batch(0, 0, 0)).schedule)


def programs_of(cases: Sequence[Case]) -> list[Case]:
    """One case of each program."""
    first: dict[tuple[object, ...], Case] = {}
    for case in cases:
        first.setdefault((case.group, case.stage, case.layout, schedule_at(case.stage, case.prefetch)), case)
    return list(first.values())


@pytest.mark.parametrize(("ranks", "compute", "optimizer"), ROWS)
def test_row_of_the_product(world: World, ranks: int, compute: str, optimizer: str) -> None:
    cases = [case for case in all_cases() if (case.ranks, case.compute, case.optimizer) == (ranks, compute, optimizer)]
    programs = programs_of(cases)
    wrong = compare(world, programs, timeout_seconds=1800.0)
    COMPARED.append((len(cases), len(programs)))
    assert not wrong, "\n" + "\n".join(wrong)


def test_product_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    num_cases, num_programs = (sum(counts) for counts in zip(*COMPARED, strict=True)) if COMPARED else (0, 0)
    with capsys.disabled():
        print(f"\n{num_cases} of {len(all_cases())} combinations, {num_programs} programs, were compared with plain torch")
    rows = {(case.ranks, case.compute, case.optimizer) for case in all_cases()}
    assert rows == set(ROWS)
    # 3 ways to accumulate, 4 stages, 4 depths; 3 layouts for each of 3 optimizers, 2 for each of the other 2.
    assert len(all_cases()) == 4 * 4 * 3 * 4 * 4 * (3 * 3 + 2 * 2)
    # At stage 3 every depth is a program of its own; below it there is nothing to gather ahead.
    assert [len({schedule_at(stage, depth) for depth in FACTORS["prefetch"]}) for stage in FACTORS["stage"]] == [1, 1, 1, 4]
