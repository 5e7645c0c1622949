"""ZeRO checkpoints that DeepSpeed has written become checkpoints of Shardwise; what their pickles name is never run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardwise
from shardwise.checkpoint.convert import import_checkpoint
from shardwise.checkpoint.folders import place_of
from tests.data.deepspeed.make import Net

DATA = Path(__file__).parents[2] / "data" / "deepspeed"
NUM_TRAINED = 5


def new_training() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.5)
    shardwise.shard(model, optimizer, stage=3)
    return model, optimizer


def loaded(stage: int, folder: Path) -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    import_checkpoint(DATA / f"stage{stage}", place_of(folder / str(stage)), lambda num_bytes: None, {})
    model, optimizer = new_training()
    result = shardwise.load(folder / str(stage), model, optimizer)
    assert result.step == 3 and not result.missing and not result.unexpected
    with shardwise.gathered(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, optimizer


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_those_that_deepspeed_itself_makes_of_it(tmp_path: Path, stage: int) -> None:
    weights, optimizer = loaded(stage, tmp_path)
    expected = load_file(DATA / f"stage{stage}" / "expected.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name
    assert len(optimizer.state) == NUM_TRAINED and optimizer.param_groups[0]["lr"] == 0.01
    for param, state in optimizer.state.items():
        assert state["step"] == 3 and state["exp_avg"].shape == state["exp_avg_sq"].shape == param.shape
        assert bool((state["exp_avg_sq"] > 0).any())


def test_moments_of_all_stages_are_nearly_alike(tmp_path: Path) -> None:
    """DeepSpeed's stages differ in their last bits, but not in which element is whose."""
    optimizers = [loaded(stage, tmp_path)[1] for stage in (1, 2, 3)]
    for states in zip(*(optimizer.state.values() for optimizer in optimizers), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[0][key], states[1][key])
            assert torch.allclose(states[0][key], states[2][key], rtol=1e-3, atol=1e-7), key


class Bomb:
    def __reduce__(self) -> Any:
        return (open, ("exploded", "w"))


@pytest.mark.parametrize("where", ["instead", "inside"])
def test_what_a_pickle_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bad"
    folder.mkdir()
    content = Bomb() if where == "instead" else {"optimizer_state_dict": {"fp32_flat_groups": Bomb()}}
    torch.save(content, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": [], "module": Bomb(), "buffer_names": []}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(shardwise.CheckpointError):
        import_checkpoint(folder, place_of(tmp_path / "x"), lambda num_bytes: None, {})
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "x").exists()


def test_missing_ranks_and_split_models_are_refused(tmp_path: Path) -> None:
    files = {"not complete": "zero_pp_rank_1_mp_rank_00_optim_states.pt", "split": "zero_pp_rank_0_mp_rank_01_optim_states.pt"}
    for why, name in files.items():
        folder = tmp_path / why.replace(" ", "-")
        folder.mkdir()
        torch.save({}, folder / name)
        with pytest.raises(shardwise.CheckpointError, match=why):
            import_checkpoint(folder, place_of(tmp_path / "x"), lambda num_bytes: None, {})
