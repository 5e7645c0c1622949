"""Who holds what has gathered is named: the user's variable rather than the part of Shardwise that it holds."""

from typing import Any

import torch

from shardwise.core.ledger import Ledger
from shardwise.devices.pool import Pool
from shardwise.runtime.grad_buffer import GradBuffer
from shardwise.runtime.suspects import Suspects


def test_nobody_holds_anything_where_nothing_has_come() -> None:
    suspects = Suspects()
    suspects.look()
    assert suspects.owner() is None


def test_the_variable_is_named_also_where_parts_of_shardwise_hold_more() -> None:
    pool = Pool(Ledger())
    suspects = Suspects()
    suspects.look()
    kept: list[Any] = []
    for _ in range(8):
        kept.append((GradBuffer(torch.zeros(1000), 0, pool), None))
    kept.extend(torch.zeros(30) for _ in range(5))
    owner = suspects.owner()
    assert owner is not None and "'kept' in test_the_variable_is_named" in owner and "shape (30,)" in owner


def test_a_part_of_shardwise_is_named_where_nothing_else_is_found() -> None:
    pool = Pool(Ledger())
    suspects = Suspects()
    suspects.look()
    kept = [GradBuffer(torch.zeros(1000), 0, pool) for _ in range(8)]
    owner = suspects.owner()
    assert owner is not None and "attribute 'held' of a GradBuffer" in owner
    kept.clear()
