"""Updates beside the next step: exactly one step late, at every stage and tier, whatever the threads do."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.devices.pool import Poison
from shardwise.testing import World
from tests.distributed.matrix import FACTORS, Case, Outcome, covering, difference, train
from tests.distributed.reference import reference

pytestmark = pytest.mark.dist
WARMUP = 4
PLAN = {"sync": "delayed", "delay_warmup": WARMUP}
FOLDER = str(Path(tempfile.gettempdir()) / "shardwise-test-delayed")


def _cases() -> list[Case]:
    """Few cases in which every pair of choices occurs."""
    factors = {
        **FACTORS,
        "ranks": (1, 2),
        "compute": ("fp32", "bf16", "fp16"),
        "optimizer": ("AdamW", "SGD", "Muon"),
        "prefetch": (1,),
    }
    factors["layout"] = ("even", "whole")
    product = itertools.starmap(Case, itertools.product(*(factors[name] for name in FACTORS)))
    return covering([case for case in product if case.is_legal])


CASES = _cases()


def _train(cases: list[Case], **plan: Any) -> list[Outcome | str]:
    Poison.enabled = True
    outcomes: list[Outcome | str] = []
    for case in cases:
        try:
            outcomes.append(train(case, **PLAN, **plan))
        except (shardwise.ShardwiseError, AssertionError, ValueError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_are_seen_exactly_one_step_late(world: World, ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    by_rank = world.run(_train, cases, ranks=ranks, timeout_seconds=250)
    expected = {group: reference(group, WARMUP) for group in {case.group for case in cases}}
    wrong = []
    for rank, outcomes in enumerate(by_rank):
        for case, found in zip(cases, outcomes, strict=True):
            facts = expected[case.group].items()
            mine = {name: value for name, value in facts if not name.startswith("loss") or name.endswith(f"rank {rank}")}
            differs = found if isinstance(found, str) else difference(found, mine)
            if differs:
                wrong.append(f"rank {rank}, {case}: {differs}")
    assert not wrong, "\n".join([f"{len(wrong)} of {ranks * len(cases)}", *wrong[:10]])
