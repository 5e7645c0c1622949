"""Bytes sent and bytes held: counted where they move and on live tensors, against the formulas and the ledger."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.core.ledger import Kind
from shardwise.devices import cross_memory
from shardwise.devices.pool import Poison
from shardwise.testing import World
from shardwise.wire.board import PeerBoard

pytestmark = pytest.mark.dist
WIDTH, DEPTH = 387, 7


class Wide(nn.Module):
    """A bit more than a million parameters in layers of odd sizes, without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(DEPTH)
        )
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.gain).float().square().mean()


NUM_PARAMS = DEPTH * (WIDTH * WIDTH + 3 * WIDTH) + 1
assert NUM_PARAMS > 1_000_000


def new_run(stage: int, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, shardwise.Sharded]:
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, shardwise.shard(model, optimizer, stage=stage, **changes)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, WIDTH)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# ---------------------------------------------------------------- a world of one


def test_world_of_one_needs_no_process_group_and_issues_nothing() -> None:
    assert not dist.is_initialized()
    for stage in range(4):
        model, optimizer, handle = new_run(stage)
        for _ in range(2):
            train_step(model, optimizer)
            optimizer.zero_grad()
        with shardwise.gathered(model):
            pass
        totals = handle.engine.executor.totals
        assert not totals.num_collectives and not totals.num_messages and not totals.wire_bytes, totals
    assert not dist.is_initialized()


def collectives_of_one(stage: int) -> tuple[int, int]:
    """Groups that were made, and collectives that were issued, where a process group of one rank exists."""
    num_groups = len(dist.distributed_c10d._world.pg_map)
    model, optimizer, handle = new_run(stage)
    with counted() as calls:
        train_step(model, optimizer)
    return len(dist.distributed_c10d._world.pg_map) - num_groups, len(calls) + len(handle.engine.executor.totals.wire_bytes)


@pytest.mark.parametrize("stage", range(4))
def test_group_of_one_is_left_alone(world: World, stage: int) -> None:
    assert world.run(collectives_of_one, stage, ranks=1) == [(0, 0)]


# ---------------------------------------------------------------- bytes on the wire


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Every collective that torch is asked for, and every read of a peer's memory: the bytes that reach this rank from others."""
    calls: list[tuple[str, int]] = []
    rank = dist.get_rank()

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def received(name: str, args: Any) -> int:
        if name == "broadcast":
            return 0 if args[1] == rank else size(args[0])
        if name == "all_gather_single":
            return size(args[0]) - size(args[1])
        if name == "all_to_all_single":
            return size(args[0]) - args[2][rank] * args[0].element_size()
        return sum(size(op.tensor) for op in args[0] if op.op is dist.irecv)

    def wrap(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, received(name, args)))
            return original(*args, **kwargs)

        return call

    is_looking = False

    def read(process: int, address: int, target: torch.Tensor) -> None:
        if not is_looking:
            calls.append(("read", size(target)))
        original_read(process, address, target)

    def looking(original: Any) -> Any:
        """Looks at boards are no payload."""

        def look(*args: Any) -> Any:
            nonlocal is_looking
            is_looking = True
            try:
                return original(*args)
            finally:
                is_looking = False

        return look

    original_read = cross_memory.read
    boards = {name: looking(getattr(PeerBoard, name)) for name in ("is_there", "find", "has_finished")}
    names = ("broadcast", "all_gather_single", "all_to_all_single", "batch_isend_irecv")
    others = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "gather", "send")
    refused = {name: mock.Mock(side_effect=AssertionError(f"{name} is not counted here")) for name in others}
    with (
        mock.patch.multiple(dist, **{name: wrap(name, getattr(dist, name)) for name in names}, **refused),
        mock.patch.object(cross_memory, "read", read),
        mock.patch.multiple(PeerBoard, **boards),
    ):
        yield calls


def wire_bytes(stage: int, changes: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """Of one step: bytes counted at torch's collectives, the engine's own count, and that by op."""
    Poison.enabled = True
    model, optimizer, handle = new_run(stage, **changes)
    for _ in range(2):
        train_step(model, optimizer)
        optimizer.zero_grad()
    totals = handle.engine.executor.totals
    totals.reset()
    with counted() as calls:
        train_step(model, optimizer)
    return sum(size for _, size in calls), sum(totals.wire_bytes.values()), dict(totals.wire_bytes)


@pytest.mark.parametrize("path", ["auto", "network"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire(world: World, ranks: int, stage: int, compute: str, path: str) -> None:
    precision = {"param_dtype": "bfloat16"} if compute == "bf16" else {}
    limit = (3 if stage == 3 else 2) * (ranks - 1) / ranks * NUM_PARAMS * (2 if precision else 4)
    found = world.run(wire_bytes, stage, {"path": path, **precision}, ranks=ranks)
    for rank, (counted_bytes, own_count, by_op) in enumerate(found):
        place = f"rank {rank}: {counted_bytes / limit:.4f} of the limit, by op {by_op}"
        print(place)
        assert counted_bytes <= 1.02 * limit, place
        assert counted_bytes >= 0.98 * limit, place  # less would mean that something is not counted
        assert own_count == counted_bytes, place


# ---------------------------------------------------------------- bytes between steps


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Looking at torch's modules warns of names that are going out of use.
        return [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]


def live_storages() -> dict[int, int]:
    """Sizes of all memory under live tensors, by its address."""
    storages = {}
    for tensor in live_tensors():
        if tensor.layout is torch.strided and tensor.device.type == "cpu":
            storage = torch._C._disabled_torch_function_impl(torch.Tensor.untyped_storage, (), (tensor,), {})
            with suppress(RuntimeError):  # Stand-ins and fake tensors have a form but no memory.
                storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)
    return storages


def held_bytes(stage: int, changes: dict[str, Any]) -> dict[str, tuple[int, int, str]]:
    """Bytes on live tensors and in the ledger: with gradients after a step, and after they are cleared."""
    Poison.enabled = True
    earlier = live_tensors()  # Held to the end, so that nothing new comes to lie at their addresses.
    before = set(live_storages())
    model, optimizer, handle = new_run(stage, **changes)
    train_step(model, optimizer)
    optimizer.zero_grad()
    train_step(model, optimizer)
    found = {}
    for moment in ("with gradients", "cleared"):
        measured = sum(size for address, size in live_storages().items() if address not in before)
        workspace = handle.ledger.live(Kind.POOL)
        assert workspace <= 3 * max(unit.num_bytes for unit in handle.units), str(handle.ledger)
        found[moment] = (measured, handle.ledger.live_bytes - workspace, str(handle.ledger))
        optimizer.zero_grad()
    del earlier
    return found


def expected_bytes(stage: int, ranks: int, *, compute: int, reduce: int, grads: bool) -> float:
    """Bytes a parameter. Masters are copies of their own where compute has another dtype."""
    per_param = 8.0 if stage == 0 else 8 / ranks
    if compute == 4:
        per_param += 4 if stage < 3 else 4 / ranks
    else:
        per_param += (4.0 if stage == 0 else 4 / ranks) + (compute if stage < 3 else 0)
    if grads:
        per_param += reduce if stage < 2 else reduce / ranks
    return per_param


def test_formulas() -> None:
    def of(stage: int, ranks: int, **kwargs: Any) -> float:
        return expected_bytes(stage, ranks, **{"compute": 4, "reduce": 4, "grads": True} | kwargs)

    for n in (2, 3, 4):
        assert of(1, n, grads=False) == 4 + 8 / n and of(1, n) == 4 + 8 / n + 4
        assert of(2, n, grads=False) == 4 + 8 / n and of(2, n) == pytest.approx(4 + 12 / n)
        assert of(3, n, grads=False) == pytest.approx(12 / n) and of(3, n) == pytest.approx(16 / n)
        for g in (2, 4):
            assert of(2, n, compute=2, reduce=g) == pytest.approx(2 + (12 + g) / n)
            assert of(3, n, compute=2, reduce=g) == pytest.approx((12 + g) / n)


PRECISIONS = {
    "fp32": ({}, 4, 4),
    "bf16": ({"param_dtype": "bfloat16", "reduce_dtype": "float32"}, 2, 4),
    "bf16-reduced": ({"param_dtype": "bfloat16"}, 2, 2),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_between_steps(world: World, ranks: int, stage: int, precision: str) -> None:
    changes, compute, reduce = PRECISIONS[precision]
    for rank, found in enumerate(world.run(held_bytes, stage, changes, ranks=ranks)):
        for moment, (measured, in_ledger, ledger) in found.items():
            per_param = expected_bytes(stage, ranks, compute=compute, reduce=reduce, grads=moment == "with gradients")
            place = f"rank {rank} {moment}: {measured / NUM_PARAMS:.4f} bytes a parameter where {per_param:.4f} were expected"
            print(place)
            assert measured <= 1.01 * per_param * NUM_PARAMS, f"{place}\n{ledger}"
            assert measured >= 0.99 * per_param * NUM_PARAMS, f"{place}\n{ledger}"
            # Scalars of optimizers, of released parameters' forms, and the digest that a peer may still read apart, the ledger
            # knows every byte.
            assert abs(in_ledger - measured) <= 16 * (4 * DEPTH + 1) + 8192, (
                f"{place}, {in_ledger - measured:+d} in the ledger\n{ledger}"
            )
