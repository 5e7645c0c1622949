"""Every legal combination of stage, ranks, precision, optimizer, accumulation, prefetch and layout gives plain torch's bits."""

import itertools

import pytest

from shardwise.testing import World
from tests.distributed.matrix import FACTORS, all_cases
from tests.distributed.reference import compare

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(7200)]
ROWS = list(itertools.product(FACTORS["ranks"], FACTORS["compute"], FACTORS["optimizer"]))
COMPARED: list[int] = []


@pytest.mark.parametrize(("ranks", "compute", "optimizer"), ROWS)
def test_row_of_the_product(world: World, ranks: int, compute: str, optimizer: str) -> None:
    cases = [case for case in all_cases() if (case.ranks, case.compute, case.optimizer) == (ranks, compute, optimizer)]
    wrong = compare(world, cases, timeout_seconds=1800.0)
    COMPARED.append(len(cases))
    assert not wrong, "\n" + "\n".join(wrong)


def test_product_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{sum(COMPARED)} of {len(all_cases())} combinations were compared with plain torch")
    rows = {(case.ranks, case.compute, case.optimizer) for case in all_cases()}
    assert rows == set(ROWS)
    # 3 ways to accumulate, 4 stages, 4 depths; 3 layouts for each of 3 optimizers, 2 for each of the other 2.
    assert len(all_cases()) == 4 * 4 * 3 * 4 * 4 * (3 * 3 + 2 * 2)
