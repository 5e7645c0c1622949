"""A manifest is believed only where it fits together: whatever stands in it, reading ends in a manifest or in a clear error."""

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint.manifest import (
    SCHEMA,
    Entry,
    Manifest,
    Piece,
    ShardFile,
    Summary,
    _checksum,
    parse_manifest,
    read_summary,
)
from shardwise.core.errors import CheckpointError

SUMMARY = Summary("0123456789abcdef", 3, 100, 1.5e9)
FILES = (ShardFile("rank-00000.safetensors", 128, 600, 7, 256, (1, 2, 3)), ShardFile("b", 16, 40, 8, 256, (9,)))
TENSORS = {
    "model/a": Entry(("a", "tied.a"), torch.float32, (5, 4), (1, 5), (Piece(0, 0, 0, 12), Piece(1, 8, 12, 20))),
    "model/none": Entry(("none",), torch.bfloat16, (0, 3), (3, 1), ()),
    "values/x/0": Entry((), torch.uint8, (), (), (Piece(1, 0, 0, 1),)),
}
MANIFEST = Manifest(SUMMARY, 2, {"stage": 3}, {"torch": "2"}, FILES, TENSORS, {"extra/x": {"!": "tensor", "is": "values/x/0"}})


def signed(values: dict[str, Any]) -> bytes:
    """A manifest with a right checksum over wrong values."""
    values = {key: value for key, value in values.items() if key != "checksum"}
    return json.dumps({**values, "checksum": _checksum(values)}).encode()


def plain() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MANIFEST.to_text())
    return found


def test_comes_back_as_it_was() -> None:
    text = MANIFEST.to_text()
    assert parse_manifest(text, "here") == MANIFEST
    assert read_summary(text.split(b"\n")[0], "here") == SUMMARY


def changed(path: list[Any], value: Any) -> bytes:
    values = plain()
    at: Any = values
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return signed(values)


@pytest.mark.parametrize(("path", "value", "why"), [
    (["schema"], SCHEMA + 1, "Update Shardwise"),
    (["format"], "zip", "no manifest"),
    (["id"], "../../etc", "no id"),
    (["files", 0, "name"], "../other/rank-0", "no name of a file"),
    (["files", 0, "name"], "/etc/passwd", "no name of a file"),
    (["files", 0, "name"], "a/b", "no name of a file"),
    (["files", 0, "name"], "..", "no name of a file"),
    (["files", 0, "name"], "manifest.json", "no name of a file"),
    (["files", 0, "name"], "b", "named twice"),
    (["files", 0, "data_bytes"], -1, "whole number"),
    (["files", 0, "data_bytes"], 2**70, "whole number"),
    (["files", 0, "data_bytes"], 6000, "number of checksums"),
    (["files", 0, "chunk_bytes"], 0, "number of checksums"),
    (["files", 0, "checksums"], "zz", "checksums"),
    (["tensors", "model/a", "dtype"], "load", "dtype"),
    (["tensors", "model/a", "dtype"], "float64", "outside"),
    (["tensors", "model/a", "shape"], [2**40, 2**40], "shape"),
    (["tensors", "model/a", "shape"], [-5, -4], "whole number"),
    (["tensors", "model/a", "shape"], [5, 5], "leave elements out"),
    (["tensors", "model/a", "shape"], [1] * 100, "shape"),
    (["tensors", "model/a", "stride"], [1, 1], "strides"),
    (["tensors", "model/a", "stride"], [1], "strides"),
    (["tensors", "model/a", "pieces"], [[0, 0, 0, 12], [1, 8, 11, 20]], "outside|twice"),
    (["tensors", "model/a", "pieces"], [[0, 0, 0, 12], [0, 0, 0, 12]], "twice"),
    (["tensors", "model/a", "pieces", 0, 0], 7, "there are 2"),
    (["tensors", "model/a", "pieces", 0, 1], -8, "whole number"),
    (["tensors", "model/a", "pieces", 0, 1], 2**62, "outside"),
    (["tensors", "model/a", "pieces", 0, 3], 2**61, "outside"),
    (["tensors", "model/a", "pieces", 0], [0, 0], "not 4"),
    (["tensors", "model/b"], {"dtype": "uint8", "shape": [600], "pieces": [[0, 0, 0, 600]]}, "more than the file"),
    (["tensors"], [], "table"),
    (["num_ranks"], True, "whole number"),
    (["saved_at"], "now", "when"),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(path: list[Any], value: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as error:
        parse_manifest(changed(path, value), "run/manifest.json")
    assert "run/manifest.json" in str(error.value)


@pytest.mark.parametrize("text", [
    b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"a":1,"a":2}', b"[" * 100_000, b'{"order": NaN}', b"1" * 5000,
])  # fmt: skip
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(text, "here")


def test_every_changed_byte_is_noticed() -> None:
    text = MANIFEST.to_text()
    for at in range(len(text)):
        for bit in (0, 3, 6):
            damaged = bytearray(text)
            damaged[at] ^= 1 << bit
            with suppress(CheckpointError):
                assert parse_manifest(bytes(damaged), "here") == MANIFEST  # A blank that became another.


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([-1, 2**63, "../x", "b"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A manifest in which something has been replaced by anything, with a right checksum."""
    values = copy.deepcopy(plain())
    for _ in range(draw(st.integers(1, 3))):
        at: Any = values
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            at[key] = draw(junk)
            break
    return signed(values)


@settings(max_examples=400, deadline=None)
@given(mutated())
def test_anything_ends_in_a_manifest_or_an_error(text: bytes) -> None:
    try:
        manifest = parse_manifest(text, "here")
    except CheckpointError:
        return
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            file = manifest.files[piece.file]
            assert 0 <= piece.offset <= piece.offset + (piece.stop - piece.start) * entry.dtype.itemsize <= file.data_bytes
        assert sum(piece.stop - piece.start for piece in entry.pieces) == entry.numel
    assert all("/" not in file.name and ".." not in file.name[:2] for file in manifest.files)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_end_in_an_error(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(text, "here")
