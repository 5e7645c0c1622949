"""The catalogue of hardware, users' own entries, and fleets."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.planning.catalogue import Catalogue, load_catalogue
from shardwise.planning.fleet import parse_fleet


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def written(folder: Path, text: str) -> Path:
    path = folder / "hardware.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_entries_have_figures_in_bytes_and_operations(catalogue: Catalogue) -> None:
    found = catalogue.find("a100-80gb")
    assert found.name == "A100-SXM-80GB"
    assert found.memory_bytes == 80 * 10**9
    assert found.memory_bytes_per_second == 2039e9
    assert found.peak("bfloat16") == found.peak("float16") == 312e12
    assert found.measured_flops == 271.2e12
    assert found.inside_node.kind == "NVLink3+NVSwitch"
    assert found.inside_node.bytes_per_second == 300e9
    assert found.between_nodes.bytes_per_second == 25e9  # 200 Gbit/s
    assert found.to_host.bytes_per_second == 31e9
    assert found.num_per_node == 8
    assert found.price_usd_per_hour is None
    assert found.cells["provenance"].startswith("ml-engineering")
    assert "hardware.csv, line " in found.place


def test_all_entries_are_sound_and_say_where_they_are_from(catalogue: Catalogue) -> None:
    assert len(catalogue) == 28
    for entry in catalogue.entries:
        assert entry.cells["provenance"]
        assert 16 * 10**9 <= entry.memory_bytes <= 288 * 10**9
        assert catalogue.find(entry.name.upper()) is entry
        for alias in entry.cells.get("aliases", "").split():
            assert catalogue.find(alias) is entry
        pair, all_others = entry.inside_node.pair_bytes_per_second, entry.inside_node.bytes_per_second
        assert (pair is None) == (all_others is None)
        assert pair is None or all_others is None or pair <= all_others


def test_unknown_peak_is_told_with_those_that_are_known(catalogue: Catalogue) -> None:
    with pytest.raises(UsageError, match=r"T4-16GB has no peak for bfloat16 .* one for float16\. Its notes: no bf16"):
        catalogue.find("t4").peak("bfloat16")
    with pytest.raises(UsageError, match="one for no dtype"):
        catalogue.find("H100-SXM-96GB-HBM2e-500W").peak("float16")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a100", ["A100-SXM-40GB", "A100-SXM-80GB", "A100-PCIe-80GB"]),
        ("a100-80g", ["A100-SXM-80GB"]),
        ("h1000", ["H100-SXM-80GB"]),
        ("mi300", ["MI300X-192GB"]),
        ("abacus-of-wood", ["It has V100-SXM2-16GB", "Gaudi3-128GB", "added in a file"]),
        ("", ["It has V100-SXM2-16GB"]),
    ],
)
def test_unknown_accelerator_is_told_with_the_nearest(catalogue: Catalogue, name: str, words: list[str]) -> None:
    with pytest.raises(UsageError, match="has no accelerator") as caught:
        catalogue.find(name)
    assert all(word in str(caught.value) for word in words), caught.value


def test_own_entries_add_and_override_what_they_give(tmp_path: Path, catalogue: Catalogue) -> None:
    text = (
        "\ufeff# ours\n\nname, memory_gb, price_usd_per_hour, aliases\nA100-80gb,,1.5,\nOurs-1,47.5,,ours mine\nT4-16GB,15,,\n"
    )
    own = written(tmp_path, text)
    found = load_catalogue(own)
    assert len(found) == len(catalogue) + 1
    a100, ours, t4 = (found.find(name) for name in ("a100-sxm-80gb", "MINE", "t4"))
    assert (a100.name, a100.price_usd_per_hour, a100.memory_bytes) == ("A100-SXM-80GB", 1.5, 80 * 10**9)
    assert a100.place == f"{own}, line 4"
    assert (ours.name, ours.memory_bytes, ours.memory_bytes_per_second, ours.inside_node.kind) == (
        "Ours-1",
        47_500_000_000,
        None,
        None,
    )
    assert (t4.memory_bytes, t4.peak("float16")) == (15 * 10**9, 65e12)
    assert catalogue.find("t4").memory_bytes == 16 * 10**9


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("name,memory_gb\nx,80\ny,80GB\n", 3, "memory_gb must be a number above 0, without a unit, but is '80GB'"),
        ("name,memory_gb\nx,0\n", 2, "above 0"),
        ("name,memory_gb\nx,-1\n", 2, "above 0"),
        ("name,memory_gb\nx,nan\n", 2, "above 0"),
        ("name,memory_gb\nx,1e308\n", 2, "above 0"),
        ("name,memory_gb\nx,1_0\n", 2, "above 0"),
        ("name,memory_gb\nx,\n", 2, "x is new to the catalogue and needs memory_gb"),
        ("name,memory_gb,typical_gpus_per_node\nx,8,2.5\n", 2, "typical_gpus_per_node must be a whole number"),
        ("# comment\nname,memory\n", 2, "there is no column 'memory'. Did you mean 'memory_gb'?"),
        ("name,name\n", 1, "twice"),
        ("memory_gb\n8\n", 1, "'name' must be one of them"),
        ("name,memory_gb\nx,8,9\n", 2, "expected 2 cells, as there are columns, but found 3"),
        ("name,memory_gb\nx\n", 2, "expected 2 cells, as there are columns, but found 1"),
        ("name,memory_gb\nx,8\n\nX,9\n", 4, "is there twice; it was at "),
        ('name,memory_gb\n"x,8\n', 2, "cannot be split"),
        ("name,memory_gb\na:b,8\n", 2, "name must be letters"),
        ("name,memory_gb\n,8\n", 2, "name must be letters"),
        ("name,memory_gb,aliases\nx,8,t4\n", 2, "'t4' is a name of T4-16GB already"),
        ("name,memory_gb,aliases\nx,8,a+b\n", 2, "aliases are letters"),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    own = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_catalogue(own)
    assert str(caught.value).startswith(f"{own}, line {line}: ")
    assert words in str(caught.value)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a line of column names"):
        load_catalogue(written(tmp_path, "# nothing\n"))
    with pytest.raises(UsageError, match=r"absent\.csv cannot be read"):
        load_catalogue(tmp_path / "absent.csv")
    with pytest.raises(UsageError, match="cannot be read"):
        load_catalogue(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"binary\.csv cannot be read"):
        load_catalogue(tmp_path / "binary.csv")


def test_fleets_are_read(catalogue: Catalogue) -> None:
    fleet = parse_fleet("a100-80gb:8", catalogue)
    assert (fleet.num_ranks, fleet.least_memory_bytes) == (8, 80 * 10**9)
    for text in ("a100-80gb:2 + t4:4", "a100-80gb:2+t4:4", " A100-SXM-80GB : 2 +T4-16GB:4 "):
        mixed = parse_fleet(text, catalogue)
        assert [(group.accelerator.name, group.count) for group in mixed.groups] == [("A100-SXM-80GB", 2), ("T4-16GB", 4)]
        assert (mixed.num_ranks, mixed.least_memory_bytes) == (6, 16 * 10**9)
    assert parse_fleet("V100-SXM3-32GB(DGX-2):16", catalogue).num_ranks == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "but got ''"),
        ("t4", "'t4:1' is one"),
        ("t4:", "but got 't4:'"),
        (":4", "but got ':4'"),
        ("t4:0", "1 or more"),
        ("t4:-1", "but got 't4:-1'"),
        ("t4:1.5", "but got 't4:1.5'"),
        ("t4:4:4", "but got 't4:4:4'"),
        ("t4:٤", "but got"),
        ("4xt4", "Say how many"),
        ("t4:4 +", "but got '' in 't4:4 +'"),
        ("t4:4, l4:2", "but got 't4:4, l4:2'"),
        ("t4:4 l4:2", "but got 't4:4 l4:2'"),
        ("t4:2 + T4-16GB:2", "T4-16GB twice. Write T4-16GB:4"),
        ("t5:2", "no accelerator 't5'"),
    ],
)
def test_fleets_of_another_form_are_refused(catalogue: Catalogue, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fleet(text, catalogue)
    assert words in str(caught.value)
