"""The page as text: whole, small, and with everything escaped."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.records import DiskUse
from shardwise.report.charts import binary_ticks, nice_ticks
from shardwise.report.compare import compare_body
from shardwise.report.page import document, headline, run_body
from shardwise.report.runs import load_run
from shardwise.report.sections import colour_of_kind
from tests.unit.report.made import record, write_run

EVIL = '<img src=x onerror="alert(1)"><script>alert(2)</script>'


class Tags(HTMLParser):
    """Counts tags, and checks that each is closed in turn."""

    VOID = ("meta", "link", "input", "br", "img")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    @classmethod
    def of(cls, text: str) -> list[str]:
        parser = cls()
        parser.feed(text)
        assert not parser._open
        return parser.found


def page_of(*paths: Path) -> str:
    runs = [load_run(path) for path in paths]
    return document("a title", run_body(runs[0]) if len(runs) == 1 else compare_body(runs))


def test_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path))
    tags = Tags.of(text)
    assert tags.count("svg") == 8 and tags.count("script") == 1
    assert not re.search(r'(src|href)="(?!#|data:)', text) and "http" not in text.replace("http-equiv", "")
    for anchor in ("loss", "step-memory", "memory", "time", "timeline", "traffic", "stragglers", "configuration"):
        assert f'<section id="{anchor}">' in text


def test_runs_are_put_side_by_side(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    Tags.of(text)
    assert text.count('<details class="run">') == 2
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_what_went_to_disk_is_shown_where_state_rests_there(tmp_path: Path) -> None:
    plain, on_disk = write_run(tmp_path / "plain"), write_run(tmp_path / "disk", disk=DiskUse(3 * 2**20, 2**20))
    assert '<section id="disk">' not in page_of(plain) and "waiting for the disk" not in page_of(plain)
    text = page_of(on_disk)
    Tags.of(text)
    assert '<section id="disk">' in text and "Bytes from and to disk a step by rank" in text
    assert headline(load_run(on_disk))["read from disk a step by a rank"] == "3 MiB"
    assert "Bytes from and to disk a step by run" in page_of(plain, on_disk)


def test_names_and_configs_are_escaped(tmp_path: Path) -> None:
    path = write_run(tmp_path, plan={EVIL: EVIL}, config={"data": EVIL}, host={"name": EVIL}, hash=EVIL)
    text = document(EVIL, run_body(load_run(path)) + compare_body([load_run(path), load_run(path)]))
    tags = Tags.of(text)
    assert "img" not in tags and tags.count("script") == 1


def test_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    assert len(page_of(write_run(tmp_path, num_ranks=8, num_steps=1500)).encode()) < 1_000_000


def test_kinds_have_a_colour_each_in_whatever_tier() -> None:
    names = [
        "gathered parameters",
        "copies for checkpoints (host)",
        "optimizer state (disk)",
        "host: activations",
        "free workspace",
    ]
    assert len({colour_of_kind(name) for name in names}) == len(names)
    assert colour_of_kind("optimizer state (host)") == colour_of_kind("optimizer state")


def test_slow_rank_is_named_on_the_page(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path, slow={1: 0.2}))
    assert "Others wait for rank 1: typically 200 ms of a step" in text and "of which 200 ms in forward" in text
    assert "single step" not in text.replace("Slow steps are single ones", "")


def test_rank_that_is_slow_in_single_steps_is_not_called_typically_slow(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path, num_steps=40, slow={1: 2.0}, slow_steps=[12, 30]))
    assert "Others waited for rank 1 in 2 single steps (12, 30), not typically: 2.00 s more than usual" in text
    assert "mostly in forward" in text and "Others wait for" not in text


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_run_that_has_hardly_begun_has_a_page(tmp_path: Path, num_steps: int) -> None:
    text = page_of(write_run(tmp_path, num_steps=num_steps))
    Tags.of(text)
    assert "No step was traced yet" in text


@pytest.mark.parametrize("changes", [
    {"seconds": "soon"}, {"seconds": float("nan")}, {"step": EVIL}, {"phases": None}, {"phases": {"data": []}}, {"process": 3},
    {"held": [["device", "buffers", None, "many"]]}, {"traffic": [[EVIL]]}, {"rank": None},
])  # fmt: skip
def test_records_of_others_are_left_out_and_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_run(tmp_path)
    log = tmp_path / "ranks" / "1.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[2] |= changes
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = load_run(tmp_path)
    assert run.problems == [f"line 3 of {log} is no record"] and len(run.ranks[1].steps) == 5
    Tags.of(page_of(tmp_path))


def test_facts_of_others_are_shown_as_far_as_they_mean_anything(tmp_path: Path) -> None:
    host = {"num_parameters": "many", "link_bytes_per_second": [1], "peak_flops": EVIL}
    write_run(tmp_path, host=host)
    log = tmp_path / "ranks" / "0.jsonl"
    notes = [{"is": "note", "forward_flops": EVIL}, {"is": "note", "leak": {"kind": EVIL, "bytes_per_step": "x"}}]
    step = record(7, 0, seconds=0.0, values={"loss": float("nan"), "why": EVIL}).to_dict()
    with log.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in [*notes, {"is": "step", **step}])
    text = page_of(tmp_path)
    assert "img" not in Tags.of(text) and "is no record" in text


@given(st.floats(1e-9, 1e15))
def test_ticks_are_few_and_reach_the_top(high: float) -> None:
    for ticks in (nice_ticks(high), binary_ticks(high)):
        assert ticks[0] == 0 and 2 <= len(ticks) <= 7
        assert ticks[-1] >= high * 0.99 and ticks[-2] <= high * 1.001
