"""Units: every parameter in one of them, at a gather point that spans all of its reads, at an aligned place."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.core.errors import PlanError
from shardwise.core.layout import ALIGNMENT
from shardwise.core.unit import FlatSpec, ParamSpec, Unit, dense_stride, find_units


def members(units: tuple[Unit, ...]) -> dict[str, list[str]]:
    return {unit.name: [param.name for param in unit.params] for unit in units}


class Scaled(nn.Module):
    """A root with a scalar of its own, equal layers, and a head."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.head = nn.Linear(16, 3)


def test_layers_are_units_and_the_root_keeps_the_rest() -> None:
    found = members(find_units(Scaled()))
    assert found[""] == ["scale"]
    for layer in range(4):
        assert found[f"layers.{layer}"] == [f"layers.{layer}.weight", f"layers.{layer}.bias"]
    assert found["head"] == ["head.weight", "head.bias"]


def test_small_modules_travel_with_their_parent() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(4), nn.Linear(64, 64))
    assert members(find_units(model)) == {
        "": ["1.weight", "1.bias"], "0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"],
    }  # fmt: skip


def test_tied_weight_is_one_parameter_where_both_places_are_inside() -> None:
    model = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 16), nn.Linear(16, 9, bias=False))
    model[2].weight = model[0].weight
    units = find_units(model)
    assert members(units) == {"": ["0.weight"], "1": ["1.weight", "1.bias"]}
    (spec,) = units[0].params
    assert spec.names == ("0.weight", "2.weight") and spec.name == "0.weight"


def test_module_at_two_places_is_its_own_unit() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.Linear(16, 16)), "b": nn.Sequential(nn.Linear(16, 16), shared)})
    holder = nn.Sequential()
    holder.add_module("inner", model)
    units = find_units(holder, units=["inner.a.0", "inner.a", "inner.b"])
    assert members(units)["inner.a.0"] == ["inner.a.0.weight", "inner.a.0.bias"]
    names = {spec.name: spec.names for unit in units for spec in unit.params}
    assert names["inner.a.0.weight"] == ("inner.a.0.weight", "inner.b.1.weight")


def test_units_by_name_and_by_class() -> None:
    assert members(find_units(Scaled(2), units=["layers.1"])) == {
        "": ["scale", "layers.0.weight", "layers.0.bias", "head.weight", "head.bias"],
        "layers.1": ["layers.1.weight", "layers.1.bias"],
    }
    assert set(members(find_units(Scaled(2), units=[nn.Linear]))) == {"", "layers.0", "layers.1", "head"}
    assert set(members(find_units(Scaled(2), units=[]))) == {""}


@pytest.mark.parametrize(
    ("units", "message"),
    [(["layer.1"], "none of that name"), ([3], "module names"), (["layers"], "never called"), ([int], "module names")],
)
def test_units_that_cannot_be_are_refused(units: list, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_units(Scaled(), units=units)


def test_ignored_parameters_belong_to_no_unit() -> None:
    model = Scaled(2)
    found = members(find_units(model, ignored=[model.scale, model.head.weight]))
    assert "" not in found and found["head"] == ["head.bias"]


def test_buffers_are_split_by_dtype_and_by_training() -> None:
    model = nn.Linear(5, 7)
    model.small = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    model.fixed = nn.Parameter(torch.zeros(3), requires_grad=False)
    (unit,) = find_units(model, units=[])
    kinds = {(flat.dtype, flat.trainable): [param.name for param in flat.params] for flat in unit.flats}
    assert kinds == {
        (torch.float32, True): ["weight", "bias"],
        (torch.bfloat16, True): ["small"],
        (torch.float32, False): ["fixed"],
    }
    assert unit.is_trained and unit.num_bytes == 4 * (64 + 64) + 2 * 64 + 4 * 64
    assert [flat.name for flat in unit.flats] == [
        "(root)[float32, trained]",
        "(root)[bfloat16, trained]",
        "(root)[float32, frozen]",
    ]


# ---------------------------------------------------------------- any model


@st.composite
def models(draw: st.DrawFn, depth: int = 0) -> nn.Module:
    kind = draw(st.sampled_from(["linear", "norm", "sequential", "list", "own"] if depth < 3 else ["linear", "norm"]))
    if kind == "linear":
        return nn.Linear(draw(st.integers(1, 40)), draw(st.integers(1, 40)), bias=draw(st.booleans()))
    if kind == "norm":
        return nn.LayerNorm(draw(st.integers(1, 40)))
    children = [draw(models(depth=depth + 1)) for _ in range(draw(st.integers(1, 4)))]
    if kind == "own":
        module = nn.Module()
        module.own = nn.Parameter(torch.zeros(draw(st.sampled_from([(), (3,), (0,), (5, 130)]))))
        module.part = nn.ModuleList(children)
        return module
    return nn.Sequential(*children) if kind == "sequential" else nn.ModuleList(children)


@given(models())
def test_every_parameter_is_in_one_unit_at_an_aligned_place(model: nn.Module) -> None:
    units = find_units(model)
    specs = [spec for unit in units for spec in unit.params]
    assert sorted(name for spec in specs for name in spec.names) == sorted(name for name, _ in model.named_parameters())
    modules = dict(model.named_modules())
    for unit in units:
        assert unit.name == "" or not isinstance(modules[unit.name], (nn.ModuleList, nn.ModuleDict)), "is never called"
        for flat in unit.flats:
            end = 0
            for spec in flat.params:
                assert spec.offset % ALIGNMENT == 0 and spec.offset >= end, "parameters overlap"
                assert unit.name == "" or spec.name.startswith(f"{unit.name}."), "read outside of the gather point"
                end = spec.stop
            assert end <= flat.numel < end + ALIGNMENT or flat.numel == end
            assert flat.boundaries[0] == 0 and flat.boundaries[-1] == flat.numel


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.lists(st.integers(0, 40), max_size=4))
def test_segments_cut_every_element_once(numels: list[int], cuts: list[int]) -> None:
    specs, offset = [], 0
    for index, numel in enumerate(numels):
        specs.append(ParamSpec((f"p{index}",), (numel,), (1,), torch.float32, True, offset))
        offset += -(-numel // ALIGNMENT) * ALIGNMENT
    flat = FlatSpec("", torch.float32, True, tuple(specs))
    edges = [0, *sorted(min(cut * ALIGNMENT, flat.numel) for cut in cuts), flat.numel]
    buffer = torch.arange(flat.numel)
    seen: dict[str, list[int]] = {spec.name: [] for spec in specs}
    for low, high in itertools.pairwise(edges):
        pieces = flat.segments((low, high))
        assert [piece.param for piece in pieces] == specs, "every parameter has a segment, possibly an empty one"
        for piece in pieces:
            seen[piece.param.name] += piece.view(buffer[low:high], shift=low).flatten().tolist()
    assert seen == {spec.name: list(range(spec.offset, spec.stop)) for spec in specs}


def test_memory_formats_are_kept() -> None:
    plain = torch.empty(2, 3, 4, 5)
    last = plain.to(memory_format=torch.channels_last)
    assert dense_stride(last) == tuple(last.stride())
    assert dense_stride(plain.transpose(0, 1)) == tuple(plain.transpose(0, 1).stride())
    assert dense_stride(plain[:, :2]) == (40, 20, 5, 1), "has holes"
    assert dense_stride(torch.empty(3).expand(4, 3)) == (3, 1), "overlaps itself"
    assert dense_stride(torch.empty(())) == ()
    spec = ParamSpec(("w",), (2, 3, 4, 5), dense_stride(last), torch.float32, True, 64)
    buffer = torch.zeros(256)
    spec.view(buffer).copy_(torch.ones_like(last))
    assert buffer[64 : 64 + 120].sum() == 120 == buffer.sum()
    assert torch.equal(spec.view(buffer[64:], shift=64), spec.view(buffer))


def test_a_class_names_no_parts_of_modules_that_never_call_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2), nn.MultiheadAttention(4, 2))
    assert set(members(find_units(model, units=[nn.Linear, nn.MultiheadAttention]))) == {"", "0", "2"}
    assert set(members(find_units(model, units=["1.linear1"]))) == {"", "1.linear1"}
