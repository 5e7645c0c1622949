"""The report as people meet it: the command, and its page in a real browser."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import TIMEOUT_SECONDS, descendants, finish, shardwise, start
from tests.e2e.test_train import FOREVER, TINY, await_steps

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.e2e
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")
SECTIONS = ("loss", "step-memory", "memory", "time", "timeline", "traffic", "stragglers", "configuration")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("SHARDWISE_NEEDS_BROWSER"):
            pytest.fail("There is no chromium, and SHARDWISE_NEEDS_BROWSER says that these tests must run.")
        pytest.skip("There is no chromium on this machine: the page was not tried in a browser.")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, "--no-first-run"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one model, at stages 0 and 3."""
    folder = tmp_path_factory.mktemp("runs")
    for stage in (0, 3):
        command = [*TINY, "--steps", "8", "--stage", str(stage), "--trace", "4:5", "--out", f"stage{stage}"]
        answer = shardwise(*command, folder=folder)
        assert answer.exit_code == 0, answer.stderr
        assert f"Report:     stage{stage}/report.html" in answer.stdout
    return [folder / "stage0", folder / "stage3"]


def open_page(browser: Any, address: str, **options: Any) -> Any:
    """A page on which anything that goes wrong is an error."""
    page = browser.new_page(**options)
    page.wrong = []
    page.on("console", lambda message: page.wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on(
        "request",
        lambda request: (
            page.wrong.append(request.url) if not request.url.startswith(("file:", "data:", "http://127.")) else None
        ),
    )
    page.goto(address)
    return page


def marks(page: Any, section: str) -> int:
    """Shapes with data in the charts of a section."""
    return int(page.locator(f"#{section} svg path, #{section} svg rect, #{section} svg circle").count())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [380, 1200])
def test_page_shows_every_chart_with_data(browser: Any, runs: list[Path], scheme: str, width: int) -> None:
    page = open_page(browser, (runs[1] / "report.html").as_uri(), color_scheme=scheme, viewport={"width": width, "height": 800})
    for section in SECTIONS:
        assert page.locator(f"#{section}").is_visible()
    for section in ("loss", "step-memory", "memory", "time", "timeline", "traffic"):
        assert marks(page, section) > 0, section
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    # Nothing but charts and tables, which scroll by themselves, is wider than the screen.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.wrong == []


def test_gathers_and_releases_are_seen_in_the_memory_of_a_step(browser: Any, runs: list[Path]) -> None:
    page = open_page(browser, (runs[1] / "report.html").as_uri())
    shape = page.locator('#step-memory .tab:not(.hidden) svg path[data-series="gathered parameters"]').get_attribute("d")
    heights = {point.split()[1] for point in shape.strip("MZ").split(" L")}
    assert len(heights) > 4, shape


def test_series_ranks_and_themes_can_be_chosen(browser: Any, runs: list[Path]) -> None:
    page = open_page(browser, (runs[1] / "report.html").as_uri(), color_scheme="light")
    shape = page.locator('#memory svg rect[data-series="optimizer state"]').first
    box = page.locator('#memory .legend input[value="optimizer state"]')
    assert shape.is_visible()
    box.uncheck()
    assert not shape.is_visible()
    box.focus()
    page.keyboard.press("Space")
    assert shape.is_visible()
    assert page.locator("#step-memory .tab").nth(0).is_visible() and not page.locator("#step-memory .tab").nth(1).is_visible()
    page.get_by_role("radio", name="rank 1").check()
    assert page.locator("#step-memory .tab").nth(1).is_visible() and not page.locator("#step-memory .tab").nth(0).is_visible()
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert page.wrong == []


def test_tables_can_be_sorted(browser: Any, runs: list[Path]) -> None:
    page = open_page(browser, (runs[1] / "report.html").as_uri())
    table = page.get_by_role("table", name="Collectives by op")

    def column(at: int) -> list[float]:
        cells = table.locator(f"tbody tr td:nth-child({at})")
        return [float(cells.nth(row).get_attribute("data-value")) for row in range(cells.count())]

    assert len(column(3)) >= 3
    table.get_by_role("button", name="bytes").click()
    assert column(3) == sorted(column(3))
    table.get_by_role("button", name="bytes").click()
    assert column(3) == sorted(column(3), reverse=True)
    assert page.wrong == []


def test_on_paper_all_ranks_are_shown(browser: Any, runs: list[Path]) -> None:
    page = open_page(browser, (runs[1] / "report.html").as_uri(), color_scheme="dark")
    page.emulate_media(media="print")
    assert page.locator("#step-memory .tab").nth(1).is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_stages_are_put_side_by_side(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    answer = shardwise("report", *map(str, runs), "--out", "stages.html", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    assert (tmp_path / "stages.html").stat().st_size < 1_000_000
    page = open_page(browser, (tmp_path / "stages.html").as_uri())
    assert page.locator("#step-memory svg").count() == 2
    cells = page.get_by_role("table", name="Headline figures of all runs").locator("tr", has_text="last loss").locator("td")
    assert cells.nth(1).inner_text() == cells.nth(2).inner_text()  # The same bits at every stage.
    page.locator("details.run summary").first.click()
    assert page.locator("#run0-memory").is_visible()
    assert page.wrong == []


def test_live_page_changes_as_steps_arrive(browser: Any, tmp_path: Path) -> None:
    training = tmp_path / "training"
    training.mkdir()
    process = start(*FOREVER, "--out", "run", folder=training)
    serving = None
    try:
        await_steps(process, training, 4)
        command = [sys.executable, "-u", "-m", "shardwise", "report", "--live", str(training / "run")]
        serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert serving.stdout is not None
        address = serving.stdout.readline().split()[-1]
        page = open_page(browser, address)
        page.locator("#step-memory").wait_for()
        card = page.locator(".card", has_text="steps recorded").locator("b")
        before = int(card.inner_text().replace(",", ""))
        page.wait_for_function(
            "before => Number([...document.querySelectorAll('.card')].find(c => c.innerText.includes('steps recorded'))"
            ".querySelector('b').innerText.replaceAll(',', '')) > before",
            arg=before,
            timeout=TIMEOUT_SECONDS * 1000,
        )
        assert page.wrong == []
        guessed = browser.new_page()
        assert guessed.goto(address.rsplit("/", 2)[0] + "/").status == 404
    finally:
        process.terminate()
        finish(process, training)
        if serving is not None:
            # A shell that runs the tests in the background lets its children ignore the interrupt.
            is_heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
            serving.send_signal(signal.SIGINT if is_heard else signal.SIGTERM)
            assert serving.wait(30) == 0


def test_killed_run_has_a_report_of_what_is_there(tmp_path: Path) -> None:
    process = start(*FOREVER, "--out", "run", folder=tmp_path)
    try:
        await_steps(process, tmp_path, 5)
        ranks = [pid for pid in descendants(process.pid) if b"shardwise" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[-1], signal.SIGKILL)
    finally:
        finish(process, tmp_path)
    for log in (tmp_path / "run" / "ranks").glob("*.jsonl"):
        lines = log.read_bytes().split(b"\n")
        assert all(json.loads(line) for line in lines[:-1])
    answer = shardwise("report", "run", folder=tmp_path)
    assert answer.exit_code == 0, answer.stderr
    assert "steps recorded" in answer.stdout and (tmp_path / "run" / "report.html").exists()


def test_folders_that_hold_no_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, text in (("nothing", "There is no run folder"), ("empty", "holds no records")):
        answer = shardwise("report", folder, folder=tmp_path)
        assert answer.exit_code == 2 and text in answer.stderr and answer.stderr.count("\n") == 1


def test_places_that_cannot_be_written_name_their_option(runs: list[Path], tmp_path: Path) -> None:
    for option in ("--out", "--chrome-trace"):
        answer = shardwise("report", str(runs[1]), option, "nowhere/file", folder=tmp_path)
        assert answer.exit_code == 2 and f"Choose another place with {option}." in answer.stderr


def test_traced_steps_can_be_opened_elsewhere(runs: list[Path], tmp_path: Path) -> None:
    answer = shardwise("report", str(runs[1]), "--chrome-trace", "trace.json", folder=tmp_path)
    assert answer.exit_code == 0 and "steps 4, 5" in answer.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"forward blocks.0", "backward blocks.0", "gather blocks.0", "reduce blocks.0", "update"} <= names


def test_figures_can_be_read_by_programs(runs: list[Path], tmp_path: Path) -> None:
    answer = shardwise("report", str(runs[1]), "--json", folder=tmp_path)
    facts = json.loads(answer.stdout)["stage3"]
    assert facts["headline"]["steps recorded"] == "8" and {each["rank"] for each in facts["stragglers"]} == {0, 1}
    assert facts["problems"] == []


def test_metrics_and_tensorboard_while_a_run_goes_on(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = start(*FOREVER, "--out", "run", "--quiet", "--tensorboard", "--metrics-port", str(port), folder=tmp_path)
    try:
        await_steps(process, tmp_path, 4)
        for rank in (0, 1):
            with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            assert f'shardwise_held_bytes{{rank="{rank}",tier="device",kind="parameter shards"}}' in text
        taken = shardwise("train", "--out", "other", "--metrics-port", str(port), folder=tmp_path / "run")
        assert taken.exit_code == 2 and "--metrics-port" in taken.stderr
        assert not (tmp_path / "run" / "other").exists()
    finally:
        process.terminate()
        answer = finish(process, tmp_path)
    assert answer.stdout == ""
    assert len(list((tmp_path / "run" / "tensorboard").glob("rank*/events*"))) == 2
