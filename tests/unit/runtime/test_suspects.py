"""Who holds what has gathered is named: the user's variable rather than the part of Shardwise that it holds."""

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.core.ledger import Ledger
from shardwise.devices.pool import Pool
from shardwise.runtime.grad_buffer import GradBuffer
from shardwise.runtime.suspects import Suspects


def test_nobody_holds_anything_where_nothing_has_come() -> None:
    suspects = Suspects()
    suspects.look()
    assert suspects.owner(0) is None


def test_the_variable_is_named_also_where_parts_of_shardwise_hold_more() -> None:
    pool = Pool(Ledger())
    suspects = Suspects()
    suspects.look()
    kept: list[Any] = []
    for _ in range(8):
        kept.append((GradBuffer(torch.zeros(1000), 0, pool), None))
    kept.extend(torch.zeros(30) for _ in range(5))
    owner = suspects.owner(0)
    assert owner is not None and "'kept' in test_the_variable_is_named" in owner and "shape (30,)" in owner


def test_a_part_of_shardwise_is_named_where_nothing_else_is_found() -> None:
    pool = Pool(Ledger())
    suspects = Suspects()
    suspects.look()
    kept = [GradBuffer(torch.zeros(1000), 0, pool) for _ in range(8)]
    owner = suspects.owner(0)
    assert owner is not None and "attribute 'held' of a GradBuffer" in owner
    kept.clear()


# ---------------------------------------------------------------- behind whatever it is held

LOSSES: list[Any] = []
BY_NAME: dict[str, list[Any]] = defaultdict(list)


class Trainer:
    everything: list[Any] = []  # noqa: RUF012 - which is the mistake that is to be found

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.logs: dict[str, list[Any]] = {"loss": []}
        self.recent: deque[Any] = deque()


@dataclass(slots=True)
class Row:
    loss: torch.Tensor


def loss_with_graph() -> torch.Tensor:
    return (torch.ones(3, requires_grad=True) * 2).sum()


def into(find: Callable[[], Any]) -> Callable[[torch.Tensor], object]:
    """Adds to a container, which is found anew each time: a variable of the test's own machinery would hold it as well."""
    return lambda loss: find().append(loss)


def owner_after(put: Callable[[torch.Tensor], object]) -> str:
    suspects = Suspects()
    suspects.look()
    for _ in range(10):
        put(loss_with_graph())
    return suspects.owner(0) or ""


def test_global_variables_are_named() -> None:
    assert "held by 'LOSSES' of module tests.unit.runtime.test_suspects" in owner_after(LOSSES.append)
    LOSSES.clear()
    assert "held by 'BY_NAME' of module" in owner_after(into(lambda: BY_NAME["loss"]))
    BY_NAME.clear()


def test_local_variables_are_named_behind_whatever_container() -> None:
    pairs: list[Any] = []
    table: dict[Any, Any] = {}
    rows: list[Row] = []
    where = "in test_local_variables_are_named_behind_whatever_container (test_suspects.py, line "
    assert f"held by 'pairs' {where}" in owner_after(lambda loss: pairs.append((1, {"loss": [loss]})))
    assert f"held by 'table' {where}" in owner_after(lambda loss: table.setdefault(len(table), loss))
    found = owner_after(lambda loss: rows.append(Row(loss)))
    assert f"held by attribute 'loss' of a Row, reached through 'rows' {where}" in found


def test_attributes_are_named_behind_whatever_container() -> None:
    trainer = Trainer()
    reached = ", reached through 'trainer' in test_attributes_are_named_behind_whatever_container"
    assert f"held by attribute 'losses' of a Trainer{reached}" in owner_after(into(lambda: trainer.losses))
    assert f"held by attribute 'logs' of a Trainer{reached}" in owner_after(into(lambda: trainer.logs["loss"]))
    assert f"held by attribute 'recent' of a Trainer{reached}" in owner_after(into(lambda: trainer.recent))
    assert "held by attribute 'everything' of the class Trainer" in owner_after(Trainer.everything.append)
    Trainer.everything.clear()


def test_variables_of_functions_that_do_not_run_are_named() -> None:
    def default(loss: torch.Tensor, kept: list[Any] = []) -> None:  # noqa: B006 - which is the mistake that is to be found
        kept.append(loss)

    def collector() -> Iterator[None]:
        collected = []
        while True:
            collected.append((yield))  # type: ignore[func-returns-value]

    assert "held by a default argument of test_variables" in owner_after(default)
    collecting: Any = collector()
    next(collecting)
    assert "held by 'collected' in test_variables" in owner_after(collecting.send)


def test_tensors_of_many_shapes_are_one_group() -> None:
    suspects = Suspects()
    suspects.look()
    outputs = [torch.zeros(length, 3) for length in range(5, 12)]
    owner = suspects.owner(0)
    assert len(outputs) == 7
    assert owner is not None and "tensors have gathered" in owner and "held by 'outputs'" in owner


# ---------------------------------------------------------------- what takes another's place, and what grows


def test_tensors_that_take_the_place_of_others_have_not_gathered() -> None:
    outputs = [torch.zeros(50, 3) for _ in range(8)]
    suspects = Suspects()
    suspects.look()
    outputs = [torch.zeros(50, 3) for _ in range(8)] + outputs[:0]
    assert suspects.owner(0) is None
    assert len(outputs) == 8


def test_tensors_of_the_step_under_way_have_not_gathered() -> None:
    suspects = Suspects()
    suspects.look()
    kept = [torch.zeros(30) for _ in range(5)]
    batch = [torch.zeros(50, 3) for _ in range(8)]
    suspects.look_again()
    batch = [torch.zeros(50, 3) for _ in batch]
    owner = suspects.owner(0)
    assert owner is not None and "5 tensors have gathered" in owner and "held by 'kept'" in owner
    assert len(kept) + len(batch) == 13


def test_tensors_that_are_far_less_than_what_has_come_are_not_the_ones() -> None:
    for num_bytes, is_named in ((8 * 600, True), (10**6, False)):
        suspects = Suspects()
        suspects.look()
        batch = [torch.zeros(50, 3) for _ in range(8)]
        assert (suspects.owner(num_bytes) is not None) == is_named
        del batch


def test_to_look_keeps_nothing_alive() -> None:
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    taken = locals()
    suspects = Suspects()
    suspects.look()
    suspects.owner(0)
    assert taken["suspects"] is suspects  # What somebody has taken for themselves is left to them.
    del taken
    suspects.look()
    suspects.owner(0)
    del big
    assert gone() is None


def test_a_buffer_that_grows_is_named_with_its_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("history", torch.zeros(10))
    suspects = Suspects(model)
    suspects.look()
    model[1].history = torch.zeros(1000)
    assert suspects.owner(3960) == "A tensor has grown by 3.867 KiB: 'history' of the module '1'."
    suspects.look()
    model[1].history = torch.zeros(1010)
    assert suspects.owner(3960) is None  # Something else has grown.


@pytest.mark.parametrize("place", ["variable", "attribute"])
def test_a_tensor_of_ones_own_that_grows_is_named(place: str) -> None:
    trainer = Trainer()
    history = torch.zeros(10)
    trainer.history = torch.zeros(10)  # type: ignore[attr-defined]
    suspects = Suspects()
    suspects.look()
    if place == "variable":
        history = torch.zeros(1000)
    else:
        trainer.history = torch.zeros(1000)  # type: ignore[attr-defined]
    owner = suspects.owner(3960)
    assert owner is not None and ("'history' in test_a_tensor" if place == "variable" else "'history' of 'trainer'") in owner
    assert len(history) in (10, 1000)
