"""``shardwise report``: what runs took, as a page, a few lines, JSON or a trace."""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path

from shardwise.cli.exits import ExitCode
from shardwise.cli.parsing import Commands, Parser, add_command, port_number
from shardwise.core.errors import UsageError
from shardwise.report.chrome import chrome_trace
from shardwise.report.compare import compare_body, name_runs
from shardwise.report.figures import disk_flow, stragglers
from shardwise.report.live import LivePage, LiveServer
from shardwise.report.page import document, headline, run_body
from shardwise.report.runs import RunLog, load_run

PAGE_NAME = "report.html"
_MOST_CHANGES = 10
_EXAMPLE = """\
shardwise report runs/gpt-20260101-120000
shardwise report runs/stage0 runs/stage1 runs/stage2 runs/stage3 --out stages.html
shardwise report --live runs/gpt-20260101-120000
shardwise report runs/gpt-20260101-120000 --chrome-trace trace.json     (for chrome://tracing or ui.perfetto.dev)"""


def add_to(commands: Commands[Parser]) -> None:
    """Add the command to the parser of all commands."""
    summary = "show what a run took: memory, bytes and time by rank and by cause, on one page"
    parser = add_command(commands, "report", execute, summary=summary, example=_EXAMPLE)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder; several are put side by side")
    parser.add_argument("--out", metavar="FILE", help=f"the page (default: {PAGE_NAME} in the folder of the first run)")
    parser.add_argument("--live", action="store_true", help="serve the page on this machine, and keep it up to date")
    parser.add_argument("--port", type=port_number, default=0, metavar="N", help="for --live (default: a free port)")
    parser.add_argument(
        "--chrome-trace", metavar="FILE", help="write the traced steps for Chrome's or Perfetto's viewer instead"
    )
    parser.add_argument("--json", action="store_true", help="print headline figures and stragglers as JSON; write no page")


def execute(args: argparse.Namespace) -> int:
    """Run the command."""
    paths = [Path(path) for path in args.runs]
    if args.live:
        return _serve(paths, args.port)
    runs = [load_run(path) for path in paths]
    if args.json:
        print(json.dumps({name: _facts(run) for name, run in name_runs(runs).items()}))
        return ExitCode.DONE
    if args.chrome_trace:
        return _write_trace(runs, Path(args.chrome_trace))
    target = Path(args.out) if args.out else paths[0] / PAGE_NAME
    write_page(runs, target)
    for name, run in name_runs(runs).items():
        print(f"{name}:")
        for key, value in headline(run).items():
            print(f"  {key:<36}{value:>16}")
        for change in run.adaptations[-_MOST_CHANGES:]:
            print(f"  {change}")
        for problem in run.problems[:3]:
            print(f"  note: {problem}")
    print(f"Report: {target}")
    return ExitCode.DONE


def write_page(runs: list[RunLog], target: Path) -> None:
    """Write the page of one or several runs.

    Raises:
        UsageError: It cannot be written.
    """
    _write(target, document(_title(runs), _body(runs)), "--out")


def _title(runs: list[RunLog]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(name_runs(runs))}"


def _body(runs: list[RunLog]) -> str:
    return run_body(runs[0]) if len(runs) == 1 else compare_body(runs)


def _facts(run: RunLog) -> dict[str, object]:
    return {
        "headline": headline(run),
        "disk": {rank: _disk_facts(run, rank) for rank in run.ranks},
        "stragglers": [vars(each) for each in stragglers(run)],
        "adaptations": [vars(each) for each in run.adaptations],
        "problems": run.problems,
        "folder": str(run.path),
    }


def _disk_facts(run: RunLog, rank: int) -> dict[str, float] | None:
    flow = disk_flow(run.steady_records_of(rank))
    return None if flow is None else dict(vars(flow))


def _write(target: Path, text: str, option: str) -> None:
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Choose another place with {option}.") from error


def _write_trace(runs: list[RunLog], target: Path) -> int:
    if len(runs) > 1:
        raise UsageError("--chrome-trace takes one run. Leave the others out.")
    if not runs[0].traced_steps:
        raise UsageError(
            f"No step of {runs[0].path} was traced. Choose some with shardwise train --trace 10:12, or record(trace=...)."
        )
    _write(target, json.dumps(chrome_trace(runs[0])), "--chrome-trace")
    print(f"Trace of steps {', '.join(map(str, runs[0].traced_steps))}: {target}")
    return ExitCode.DONE


def _serve(paths: list[Path], port: int) -> int:
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"There is no run folder {path}. Give one that a run writes to; it may be empty yet.")
    page = LivePage(", ".join(path.resolve().name for path in paths), paths, lambda: _body([load_run(path) for path in paths]))
    server = LiveServer(page, port)
    print(f"Live report: {server.address}\nCtrl-C ends it; the run goes on.", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # In the background, Ctrl-C is not heard.
    try:
        server.serve()
    except KeyboardInterrupt:
        print("\nThe live report has ended.")
    return ExitCode.DONE
