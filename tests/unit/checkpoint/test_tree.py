"""Nested values come back as they were, without pickle; what cannot is refused by its place."""

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint import tree
from shardwise.core.errors import CheckpointError, UsageTypeError


def round_trip(value: Any) -> Any:
    kept: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        kept[f"t{len(kept)}"] = tensor.clone()
        return f"t{len(kept) - 1}"

    encoded = json.loads(json.dumps(tree.encode(value, keep, "value"), allow_nan=False))
    assert tree.names_in(encoded) == set(kept)
    renamed = tree.map_names(encoded, lambda name: f"x/{name}")
    return tree.decode(renamed, lambda name: kept[name.removeprefix("x/")])


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner) | st.builds(deque, st.lists(inner)),
    max_leaves=20,
)


@given(values)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    found = round_trip(value)
    assert found == value and repr(found) == repr(value)


def test_special_values_come_back() -> None:
    assert math.isnan(round_trip(math.nan)) and round_trip(-math.inf) == -math.inf
    value = [Counter(a=2), OrderedDict(b=1, a=2), {1, 2}, frozenset("x"), torch.Size([2, 3]), torch.bfloat16, 2 - 3j, {"!": 1}]
    found = round_trip(value)
    assert found == value and [type(each) for each in found] == [type(each) for each in value]


def test_tensors_and_arrays_come_back() -> None:
    value = {
        "t": torch.arange(6).view(2, 3).t(),
        "s": torch.tensor(2.5),
        "a": np.arange(4, dtype=np.uint32),
        "n": np.float64(0.1),
    }
    value["z"] = np.array(3)
    found = round_trip(value)
    assert torch.equal(found["t"], value["t"]) and torch.equal(found["s"], value["s"]) and found["s"].shape == ()
    assert found["z"].shape == () and found["z"] == 3
    assert found["a"].dtype == np.uint32 and (found["a"] == value["a"]).all()
    assert type(found["n"]) is np.float64 and found["n"] == value["n"]


class Thing:
    """Something that only pickle could keep."""


@pytest.mark.parametrize(("value", "place"), [
    ({"a": [1, Thing()]}, "value['a'][1]"),
    ({"f": len}, "value['f']"),
    (object, "value is a builtins.type"),
])  # fmt: skip
def test_what_needs_pickle_is_refused_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(UsageTypeError) as error:
        round_trip(value)
    assert place in str(error.value) and "without pickle" in str(error.value)


def test_values_that_hold_themselves_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageTypeError, match="holds itself"):
        round_trip(value)


@pytest.mark.parametrize("value", [
    {"!": "code", "is": "import os"}, {"!": "tuple", "is": 5}, {"!": "float", "is": "x"}, {"!": "dtype", "is": "load"},
    {"!": "bytes", "is": "%"}, {"!": []}, {"!": "tensor", "is": "nowhere"}, {"!": "table", "is": [[1]]}, {"!": "set", "is": [[1]]},
])  # fmt: skip
def test_foreign_values_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError):
        tree.decode(value, {}.__getitem__)
