"""Model states in closed form: against the ZeRO paper's tables, the engine's own figures and a real engine's ledger."""

from __future__ import annotations

import csv
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise
from shardwise.core.errors import PlanError, UsageError
from shardwise.core.footprint import footprint
from shardwise.core.layout import ALIGNMENT, Layout
from shardwise.core.ledger import Kind
from shardwise.core.plan import Plan, StateKind
from shardwise.core.sizes import parse_count
from shardwise.core.unit import Unit, find_units
from shardwise.planning.states import NUM_STATES, ZERO_PAPER, ElementBytes, largest_model, model_states
from shardwise.recipes.config import GPTConfig
from shardwise.recipes.models import GPT

DATA = Path(__file__).parents[2] / "data"
GB = 10**9
STAGES, RANKS = range(4), range(1, 9)


def rows_of(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ---------------------------------------------------------------- the paper
# ZeRO (arXiv 1910.02054v3), Tables 1 and 2. Columns `paper_*` are as printed; columns `formula*` are arithmetic on the same formula.

TABLE_1 = rows_of("zero_paper_table1.csv")
TABLE_2 = rows_of("zero_paper_table2.csv")
ROUNDING = {"7.5B": ROUND_HALF_UP, "128B": ROUND_DOWN, "1T": ROUND_DOWN}
"""How the paper prints its columns: 41.25 is 41.3 in the first, but 257.75 is 257 in the second and 2218.75 is 2218 in the third."""


def test_table_1_is_whole() -> None:
    cells = {(row["model"], row["zero_stage"], row["dp_degree"]) for row in TABLE_1}
    assert len(TABLE_1) == len(cells) == 54


@pytest.mark.parametrize("row", TABLE_1, ids=lambda row: f"{row['model']}-stage{row['zero_stage']}-{row['dp_degree']}")
def test_table_1_to_the_printed_digits(row: dict[str, str]) -> None:
    num_params = parse_count(row["model"])
    assert num_params == int(row["params"])
    stage, num_ranks = int(row["zero_stage"]), int(row["dp_degree"])
    found = Decimal(model_states(num_params, stage=stage, num_ranks=num_ranks, element=ZERO_PAPER).num_bytes) / GB
    printed = Decimal(row["paper_gb_per_device"])
    assert found.quantize(printed, rounding=ROUNDING[row["model"]]) == printed
    assert abs(found - Decimal(row["formula_gb_per_device"])) <= Decimal("0.00005")


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: f"mp{row['mp_degree']}")
def test_table_2_theory_to_the_printed_digits(row: dict[str, str]) -> None:
    """The paper works out one row, on devices of 32 GB, and prints that times the degree of model parallelism: 30.4 is 4 x 7.6, where
    4 x 7.642 would be 30.6. From half a trillion on, its last column has one digit: 0.5T, 1T, 2T."""
    degree, num_ranks = int(row["mp_degree"]), int(row["dp_degree"])
    assert int(row["gpus"]) == degree * num_ranks
    for stage, column in enumerate(("baseline", "pos", "pos_g", "pos_g_p")):
        largest = largest_model(32 * GB, stage=stage, num_ranks=num_ranks, element=ZERO_PAPER)
        first, printed = (Decimal(each[f"paper_max_{column}_b"]) for each in (TABLE_2[0], row))
        assert (Decimal(largest) / GB).quantize(first, rounding=ROUND_DOWN) == first
        product = first * degree
        assert printed == (
            product if product < 500 else product.quantize(Decimal("1e2" if product < 1000 else "1e3"), ROUND_DOWN)
        )
        assert abs(Decimal(largest) * degree / GB - Decimal(row[f"formula32gb_{column}_b"])) <= Decimal("0.0005")


# ---------------------------------------------------------------- the engine's own figures

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"param_dtype": "bfloat16"},
    "bf16-reduced-in-fp32": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
}


def element_of(changes: dict[str, Any], optimizer: str | int = "adam") -> ElementBytes:
    return ElementBytes.of(
        "float32", compute_dtype=changes.get("param_dtype"), grad_dtype=changes.get("reduce_dtype"), optimizer=optimizer
    )


def gpt_units() -> tuple[Unit, ...]:
    """Odd sizes throughout, so that there is padding everywhere."""
    return find_units(GPT(GPTConfig(num_blocks=3, width=36, num_heads=3, context=17)))


def even_units() -> tuple[Unit, ...]:
    """Sizes that 64 and every number of ranks up to 8 divide."""
    return find_units(nn.Sequential(*(nn.Linear(105, 64, bias=False) for _ in range(3))), units=[nn.Linear])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_without_padding_both_agree_to_the_byte(stage: int, precision: str) -> None:
    units, num_params, plan = even_units(), 3 * 105 * 64, Plan(stage=stage, **PRECISIONS[precision])
    for num_ranks in RANKS:
        for num_states in range(3):
            element = element_of(PRECISIONS[precision], num_states)
            expected = model_states(num_params, stage=stage, num_ranks=num_ranks, element=element).num_bytes
            assert footprint(units, plan, num_ranks, num_states).rest_bytes == expected


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_with_padding_they_differ_by_that_alone(stage: int, precision: str) -> None:
    """Parameters are padded to 64 elements. Of that many, both say the same but for the rounding of shares: the closed form rounds a
    kind of state up to a whole element, the engine's figures every buffer down to a whole byte."""
    units, plan, element = gpt_units(), Plan(stage=stage, **PRECISIONS[precision]), element_of(PRECISIONS[precision])
    params = [param for unit in units for param in unit.params]
    num_flats, num_params = sum(len(unit.flats) for unit in units), sum(param.numel for param in params)
    num_padded = sum(flat.numel for unit in units for flat in unit.flats)
    assert num_params < num_padded <= num_params + (ALIGNMENT - 1) * len(params)
    bytes_each = element.param + element.grad + element.master + element.optim
    for num_ranks in RANKS:
        engine = footprint(units, plan, num_ranks).rest_bytes
        bare, padded = (
            model_states(count, stage=stage, num_ranks=num_ranks, element=element).num_bytes
            for count in (num_params, num_padded)
        )
        assert bare < engine
        assert 0 <= padded - engine < bytes_each + len(StateKind) * num_flats + num_flats
        if num_ranks in (1, 2, 4, 8) or stage == 0:  # These divide 64.
            assert padded == engine


def test_shares_of_real_layouts_are_never_below_the_closed_form() -> None:
    units = gpt_units()
    flats = [flat for unit in units for flat in unit.flats]
    num_tensors, num_params = (
        sum(len(flat.params) for flat in flats),
        sum(param.numel for flat in flats for param in flat.params),
    )
    for num_ranks in RANKS:
        held = sum(Layout.even(flat.numel, num_ranks=num_ranks).sizes[0] for flat in flats)
        assert -(-num_params // num_ranks) <= held
        assert held < (num_params + (ALIGNMENT - 1) * num_tensors) / num_ranks + ALIGNMENT * len(flats)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_real_engine_holds_as_much(stage: int, precision: str) -> None:
    """A world of one: the ledger after an update, by kind, where there is no padding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    handle = shardwise.shard(model, optimizer, stage=stage, units=[nn.Linear], **PRECISIONS[precision])
    model(torch.ones(2, 64)).float().sum().backward()
    optimizer.step()
    expected = model_states(2 * 64 * 64, stage=stage, num_ranks=1, element=element_of(PRECISIONS[precision]))
    live = handle.ledger.live
    num_counters = 2  # AdamW counts steps in a float for each tensor.
    assert live(Kind.PARAM) == expected.param_bytes
    assert live(Kind.GRAD) == expected.grad_bytes
    assert live(Kind.MASTER) + live(Kind.OPTIM) == expected.optim_bytes + 4 * num_counters


# ---------------------------------------------------------------- arithmetic


def test_kinds_are_told_apart() -> None:
    found = [model_states(1000, stage=stage, num_ranks=10, element=ZERO_PAPER) for stage in STAGES]
    assert [(each.param_bytes, each.grad_bytes, each.optim_bytes) for each in found] == [
        (2000, 2000, 12000),
        (2000, 2000, 1200),
        (2000, 200, 1200),
        (200, 200, 1200),
    ]
    engine = model_states(1000, stage=3, num_ranks=10, element=ElementBytes.of(compute_dtype="bfloat16"))
    assert (engine.param_bytes, engine.grad_bytes, engine.optim_bytes) == (0, 200, 1200)  # The master alone.


@given(st.integers(1, 10**6), st.sampled_from(STAGES), st.integers(1, 5000), st.booleans())
def test_largest_model_is_the_last_that_fits(limit_bytes: int, stage: int, num_ranks: int, is_mixed: bool) -> None:
    element = ElementBytes.of(compute_dtype="bfloat16" if is_mixed else None)
    largest = largest_model(limit_bytes, stage=stage, num_ranks=num_ranks, element=element)
    if largest:
        assert model_states(largest, stage=stage, num_ranks=num_ranks, element=element).num_bytes <= limit_bytes
    assert model_states(largest + 1, stage=stage, num_ranks=num_ranks, element=element).num_bytes > limit_bytes


TORCH_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
}


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_optimizers_keep_as_many_numbers_as_is_said(name: str) -> None:
    param = nn.Parameter(torch.ones(8, 8))
    optimizer = TORCH_OPTIMIZERS[name]([param])
    param.sum().backward()
    optimizer.step()
    held = [
        value for value in optimizer.state[param].values() if isinstance(value, torch.Tensor) and value.shape == param.shape
    ]
    assert len(held) == NUM_STATES[name]


def test_every_optimizer_of_torch_that_is_listed_was_tried() -> None:
    assert set(NUM_STATES) - set(TORCH_OPTIMIZERS) == {"lion"}  # It is not in torch.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_params": 0}, "num_params is 0"),
        ({"num_params": -1}, "num_params is -1"),
        ({"num_ranks": 0}, "num_ranks is 0"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, int], words: str) -> None:
    values: dict[str, Any] = {"num_params": 1, "stage": 0, "num_ranks": 1, "element": ZERO_PAPER, **changes}
    with pytest.raises(UsageError, match=words):
        model_states(**values)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(PlanError, match="stage must be 0, 1, 2 or 3 but is 4"):
        model_states(1, stage=4, num_ranks=1, element=ZERO_PAPER)
    with pytest.raises(UsageError, match="limit_bytes is 0"):
        largest_model(0, stage=0, num_ranks=1, element=ZERO_PAPER)
    with pytest.raises(UsageError, match="float16, bfloat16, float32, float64 but is 'int8'"):
        ElementBytes.of("int8")
    for optimizer in ("adafactor", -1, True):
        with pytest.raises(UsageError, match=r"^optimizer must be"):
            ElementBytes.of(optimizer=optimizer)
