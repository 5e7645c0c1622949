"""A checkpoint brings back every bit, at any number of ranks and any stage; training goes on as if it had not been stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.testing import World
from tests.distributed.training import Training, differences

pytestmark = pytest.mark.dist
STAGES = range(4)
NOT_RESUMED = {"random"}
"""What a load at another number of ranks cannot bring back."""


def save_all(folder: str, stages: list[int], optimizer: str, plan: dict[str, Any]) -> dict[int, Any]:
    """Train and save at every stage; returns the states."""
    found = {}
    for stage in stages:
        training = Training(stage, optimizer=optimizer, **plan)
        training.steps(3)
        training.save(f"{folder}/stage-{stage}")
        found[stage] = training.everything()
    return found


def load_all(folder: str, saved: list[int], stages: list[int], optimizer: str, plan: dict[str, Any]) -> dict[Any, Any]:
    """Load each of them at every stage into a training that is somewhere else; returns the states."""
    found = {}
    for before in saved:
        for stage in stages:
            training = Training(stage, seed=7, optimizer=optimizer, **plan)
            training.steps(2 if stage % 2 else 0)
            loaded = training.load(f"{folder}/stage-{before}")
            assert loaded.step == 3 and not loaded.missing
            found[before, stage] = training.everything()
    return found


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
def test_all_stages_load_at_all_stages(world: World, tmp_path: Path, optimizer: str) -> None:
    expected = world.run(save_all, str(tmp_path), list(STAGES), optimizer, {}, ranks=2)
    found = world.run(load_all, str(tmp_path), list(STAGES), list(STAGES), optimizer, {}, ranks=2)
    for rank in range(2):
        assert len(found[rank]) == 16
        for (before, stage), state in found[rank].items():
            assert differences(expected[rank][before], state) == [], (before, stage)


@pytest.fixture(scope="module")
def large_world() -> Any:
    with World(num_ranks_max=8) as world:
        yield world


@pytest.fixture(scope="module")
def saved_by(large_world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints by 1 to 8 ranks, at a stage each, and what they hold."""
    folder, states = tmp_path_factory.mktemp("worlds"), {}
    for ranks in range(1, 9):
        found = large_world.run(save_all, str(folder / str(ranks)), [ranks % 4], "AdamW", {}, ranks=ranks)
        states[ranks] = [state[ranks % 4] for state in found]
    return folder, states


def load_from_worlds(folder: str, stage: int, saved_by: list[int]) -> dict[int, Any]:
    """Load what these numbers of ranks have saved."""
    found = {}
    for ranks in saved_by:
        training = Training(stage, seed=7)
        training.load(f"{folder}/{ranks}/stage-{ranks % 4}")
        found[ranks] = training.everything()
    return found


def check_worlds(world: World, saved_by: Any, ranks: int, sources: list[int]) -> None:
    folder, states = saved_by
    found = world.run(load_from_worlds, str(folder), (ranks + 1) % 4, sources, ranks=ranks)
    for rank in range(ranks):
        for before in sources:
            # Buffers of ranks differ until the next forward: where there was such a rank, it has its own again.
            expected = states[before][rank if before == ranks else 0]
            assert set(differences(expected, found[rank][before])) <= (set() if before == ranks else NOT_RESUMED), (
                before,
                rank,
            )


@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_ranks_loads_what_others_have_saved(large_world: World, saved_by: Any, ranks: int) -> None:
    check_worlds(large_world, saved_by, ranks, sorted({ranks, ranks % 8 + 1, 9 - ranks}))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_ranks_loads_what_any_other_has_saved(large_world: World, saved_by: Any, ranks: int) -> None:
    check_worlds(large_world, saved_by, ranks, list(range(1, 9)))


@pytest.mark.parametrize(("before", "after"), [
    ({"layout": "weighted", "weights": (1.0, 3.0)}, {}),
    ({}, {"layout": "whole"}),
    ({"layout": "whole"}, {"layout": "weighted", "weights": (5.0, 1.0)}),
    ({"units": ["body.0", "body.2"]}, {"units": ["conv", "body.1"]}),
])  # fmt: skip
def test_layouts_and_units_may_differ(world: World, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]) -> None:
    expected = world.run(save_all, str(tmp_path), [2], "AdamW", before, ranks=2)
    found = world.run(load_all, str(tmp_path), [2], [1, 3], "AdamW", after, ranks=2)
    for rank in range(2):
        for key in found[rank]:
            assert differences(expected[rank][2], found[rank][key]) == []


# ---------------------------------------------------------------- going on


def straight(stage: int, num_steps: int, plan: dict[str, Any]) -> Any:
    training = Training(stage, **plan)
    training.steps(num_steps)
    return training.losses, training.everything()


def first_part(stage: int, num_steps: int, path: str, plan: dict[str, Any]) -> Any:
    training = Training(stage, **plan)
    training.steps(num_steps)
    training.save(path)
    return training.losses


def second_part(stage: int, num_steps: int, path: str, plan: dict[str, Any]) -> Any:
    training = Training(stage, seed=5, **plan)
    training.load(path)
    training.steps(num_steps)
    return training.losses, training.everything()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_training_that_was_stopped_ends_in_the_same_bits(world: World, tmp_path: Path, stage: int, precision: str) -> None:
    plan: dict[str, Any] = {} if precision == "float32" else {"param_dtype": precision, "reduce_dtype": "float32"}
    for (losses, state), (_, _), first, (second, found) in zip(
        world.run(straight, stage, 10, plan, ranks=2),
        world.run(straight, stage, 1, plan, ranks=2),
        world.run(first_part, stage, 4, str(tmp_path / "four"), plan, ranks=2),
        world.run(second_part, stage, 6, str(tmp_path / "four"), plan, ranks=2),
        strict=True,
    ):
        assert first + second == losses
        assert differences(state, found) == []


def accumulate(training: Training, num_backwards: int, is_synced: bool) -> None:
    for _ in range(num_backwards):
        if is_synced:
            training.backward()
        else:
            with shardwise.no_sync(training.model):
                training.backward()


def accumulated(stage: int, is_synced: bool, path: str | None) -> Any:
    """A step of three backwards, after one that was plain; stopped after two of them if there is a path."""
    training = Training(stage)
    training.steps(1)
    accumulate(training, 2, is_synced)
    if path is not None:
        training.save(path)
        training = Training(stage, seed=3)
        training.load(path)
    training.backward()
    training.update()
    return training.everything()


@pytest.mark.parametrize("is_synced", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_goes_on(world: World, tmp_path: Path, stage: int, is_synced: bool) -> None:
    expected = world.run(accumulated, stage, is_synced, None, ranks=2)
    found = world.run(accumulated, stage, is_synced, str(tmp_path / "middle"), ranks=2)
    for rank in range(2):
        assert differences(expected[rank], found[rank]) == []


def load_accumulated(path: str) -> tuple[str, int]:
    training = Training(3, seed=3)
    with pytest.raises(shardwise.CheckpointError, match="no_sync") as error:
        training.load(path)
    return str(error.value), training.load(path, gradients=False).step


def test_local_gradients_belong_to_a_number_of_ranks(world: World, tmp_path: Path) -> None:
    world.run(accumulated, 3, False, str(tmp_path / "middle"), ranks=2)
    for message, step in world.run(load_accumulated, str(tmp_path / "middle"), ranks=3):
        assert "2 ranks" in message and "gradients=False" in message
        assert step == 1


# ---------------------------------------------------------------- data loaders of torchdata


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that tell which they are."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


def read_numbers(num_workers: int, path: str | None, num_batches: int) -> list[list[float]]:
    """Batches of a shuffled loader over several epochs, saved and loaded in the middle of one if there is a path."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def new() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(rank)
        loader = StatefulDataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=num_workers)
        model = torch.nn.Linear(8, 1)
        shardwise.shard(model, stage=2)
        return model, loader

    model, loader = new()
    seen: list[list[float]] = []
    while len(seen) < num_batches:
        for batch in loader:
            seen.append(batch[:, 0].tolist())
            if len(seen) == 11 and path is not None:
                shardwise.save(path, model, extra={"loader": loader})
                torch.manual_seed(99)
                model, loader = new()
                shardwise.load(path, model, extra={"loader": loader})
                break
            if len(seen) == num_batches:
                break
    return seen


def test_data_loaders_go_on_in_the_middle_of_an_epoch(world: World, tmp_path: Path) -> None:
    expected = world.run(read_numbers, 0, None, 20, ranks=2)
    found = world.run(read_numbers, 0, str(tmp_path / "middle"), 20, ranks=2)
    assert found == expected and expected[0] != expected[1]


def test_data_loaders_with_workers_go_on(tmp_path: Path) -> None:
    assert read_numbers(1, str(tmp_path / "middle"), 20) == read_numbers(1, None, 20)


# ---------------------------------------------------------------- beside the steps


def save_beside(stage: int, folder: str) -> Any:
    """Two saves without waiting, with steps that change everything in between."""
    training = Training(stage)
    training.steps(2)
    first = training.save(f"{folder}/first", wait=False)
    training.steps(2)
    second = training.save(f"{folder}/second", wait=False)
    training.steps(2)
    first.wait()
    second.wait()
    states = []
    for name in ("first", "second"):
        loaded = Training(stage, seed=9)
        loaded.load(f"{folder}/{name}")
        states.append(loaded.everything())
    return states


def stopped_at(stage: int, num_steps: int) -> Any:
    return straight(stage, num_steps, {})[1]


@pytest.mark.parametrize("stage", [0, 3])
def test_saves_beside_the_steps_hold_the_state_of_their_call(world: World, tmp_path: Path, stage: int) -> None:
    expected = [world.run(stopped_at, stage, steps, ranks=2) for steps in (2, 4)]
    for rank, states in enumerate(world.run(save_beside, stage, str(tmp_path), ranks=2)):
        for at, state in enumerate(states):
            assert differences(expected[at][rank], state) == []


# ---------------------------------------------------------------- precision


def save_wide(path: str) -> Any:
    training = Training(3)
    training.steps(2)
    training.save(path)
    with shardwise.gathered(training.model):
        return training.model.frozen.weight.detach().clone()


def load_narrow(path: str) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Linear(12, 12).to(torch.bfloat16)
    shardwise.shard(model, stage=3)
    loaded = shardwise.load(path, torch.nn.ModuleDict({"frozen": model})["frozen"], strict=False, weights_only=True)
    return loaded.missing


def load_frozen(path: str) -> Any:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Linear(12, 12).to(torch.bfloat16)

    model = Holder()
    shardwise.shard(model, stage=3)
    loaded = shardwise.load(path, model, strict=False, weights_only=True)
    with shardwise.gathered(model):
        return loaded, model.frozen.weight.detach().clone()


def test_weights_can_be_loaded_in_another_precision_and_in_part(world: World, tmp_path: Path) -> None:
    path = str(tmp_path / "wide")
    expected = world.run(save_wide, path, ranks=3)
    for wide, (loaded, narrow) in zip(expected, world.run(load_frozen, path, ranks=2), strict=False):
        assert torch.equal(wide.to(torch.bfloat16), narrow)
        assert not loaded.missing and "embed.weight" in loaded.unexpected and "norm.running_mean" in loaded.unexpected
    for missing in world.run(load_narrow, path, ranks=2):
        assert set(missing) == {"weight", "bias"}


# ---------------------------------------------------------------- how much is read and held


def wide_model() -> tuple[torch.nn.Module, torch.optim.Optimizer, shardwise.Sharded]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, shardwise.shard(model, optimizer, stage=3)


def save_wide_model(path: str) -> int:
    model, optimizer, _ = wide_model()
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return shardwise.save(path, model, optimizer).num_bytes


def load_wide_model(path: str) -> tuple[int, int]:
    model, optimizer, handle = wide_model()
    loaded = shardwise.load(path, model, optimizer)
    return loaded.num_bytes_read, handle.ledger.live_bytes


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_read_no_more_than_they_need(world: World, tmp_path: Path, ranks: int) -> None:
    written = world.run(save_wide_model, str(tmp_path / "wide"), ranks=4)
    assert max(written) < 1.05 * min(written), "every rank writes its own part"
    for num_bytes_read, own in world.run(load_wide_model, str(tmp_path / "wide"), ranks=ranks):
        # Once to test it and once to load it. Checksums cover 64 KiB each, in four files, of three kinds and six units.
        assert num_bytes_read < 2 * own + 4 * 6 * 3 * 2 * 64 * 1024 + 100_000
        assert num_bytes_read < 2.2 * sum(written) / ranks + 4 * 6 * 3 * 64 * 1024
