"""Which modules are run again in the backward."""

from torch import nn

from shardwise.core.unit import find_units
from shardwise.runtime.recompute import find_blocks


def _blocks(model: nn.Module, *units: type) -> list[str]:
    return find_blocks(find_units(model, units=units or None), dict(model.named_modules()))


def test_blocks_are_run_again_and_embeddings_heads_and_the_root_are_not() -> None:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32) for _ in range(4))
    model = nn.ModuleDict({"table": nn.Embedding(64, 16), "layers": layers, "head": nn.Linear(16, 64)})
    assert _blocks(model) == [f"layers.{number}" for number in range(4)]


def test_of_units_inside_each_other_the_inner_ones_are_run_again() -> None:
    layer = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model = nn.Sequential(layer, nn.Linear(8, 8))
    assert _blocks(model, nn.Sequential) == ["0.0", "0.1"]


def test_a_model_of_leaves_has_no_blocks() -> None:
    assert _blocks(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))) == []
