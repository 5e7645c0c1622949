"""What ranks held and sent, beside what plain data parallelism would have."""

import io
import re

import pytest
from rich.console import Console

from shardwise.core.ledger import Kind, Ledger, Tier
from shardwise.core.plan import Plan
from shardwise.recipes.usage import (
    RankUse,
    describe_held,
    held_bytes,
    plain_data_parallelism,
    usage_table,
)

NUM_STEPS = 10
PARAMS = 4_000  # bytes of a model in fp32; Adam keeps twice as much


def use_at(stage: int, rank: int, *, is_mixed: bool = False, num_ranks: int = 4) -> RankUse:
    """What an exact engine books for such a model."""
    weights = Kind.MASTER if is_mixed else Kind.PARAM
    held = {
        weights.value: PARAMS // num_ranks if stage == 3 or (is_mixed and stage) else PARAMS,
        Kind.GRAD.value: PARAMS // num_ranks if stage >= 2 else PARAMS,
        Kind.OPTIM.value: 2 * PARAMS // num_ranks if stage >= 1 else 2 * PARAMS,
    }
    if is_mixed and stage < 3:
        held[Kind.PARAM.value] = PARAMS // 2
    return RankUse(rank, held, sum(held.values()), 10**6, {"gather": 60_000, "reduce": 30_000, "digest": 10}, NUM_STEPS)


@pytest.mark.parametrize("is_mixed", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_plain_data_parallelism_is_the_same_whatever_stage_it_is_computed_from(stage: int, is_mixed: bool) -> None:
    uses = [use_at(stage, rank, is_mixed=is_mixed) for rank in range(4)]
    computed = plain_data_parallelism(uses, Plan(stage=stage))
    assert computed.held_bytes == {"parameters": PARAMS, "gradients": PARAMS, "optimizer state": 2 * PARAMS}
    assert computed.peak_bytes == 4 * PARAMS
    assert computed.sent_bytes == {"gradients": NUM_STEPS * 2 * PARAMS * 3 // 4}


def show(uses: list[RankUse], stage: int) -> str:
    screen = io.StringIO()
    Console(file=screen, width=120).print(usage_table(uses, plain_data_parallelism(uses, Plan(stage=stage))))
    return screen.getvalue()


def test_table_has_a_column_for_each_rank_and_marks_what_is_computed() -> None:
    shown = show([use_at(3, rank) for rank in range(4)], 3)
    assert "plain DDP (computed)" in shown
    rows = {line.split("  ")[0].strip(): line for line in shown.splitlines()}
    assert rows["optimizer state"].count("1.953 KiB") == 4
    assert rows["optimizer state"].rstrip().endswith("7.812 KiB")
    assert rows["parameters"].count("5.859 KiB") == 4  # 60,000 bytes in 10 steps
    assert rows["agreement and norms"].count("1 B") == 4


def test_of_many_ranks_the_first_and_last_are_shown() -> None:
    shown = show([use_at(3, rank, num_ranks=40) for rank in range(40)], 3).splitlines()[0]
    assert re.findall(r"rank (\d+)", shown) == ["0", "1", "2", "37", "38", "39"]


def test_largest_items_come_first() -> None:
    ledger = Ledger()
    for kind, num_bytes in ((Kind.PARAM, 10), (Kind.OPTIM, 2048), (Kind.GRAD, 30)):
        ledger.add(kind, num_bytes)
        ledger.add(kind, -num_bytes)
    held = held_bytes(ledger)
    assert describe_held(held, limit=2) == "optimizer state 2 KiB, gradient shards 30 B"
    assert describe_held({}) == "nothing yet"


def test_what_is_held_is_counted_in_all_tiers() -> None:
    ledger = Ledger()
    ledger.add(Kind.OPTIM, 10)
    ledger.add(Kind.OPTIM, 20, Tier.HOST)
    ledger.add(Kind.SNAPSHOT, 40, Tier.HOST)
    assert held_bytes(ledger) == {"optimizer state": 30, "copies for checkpoints": 40}
