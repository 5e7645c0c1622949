"""What is worked out from records: who keeps whom, what moved, what was held."""

import random
from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.core.records import Held, StepTrace
from shardwise.report import figures
from shardwise.report.chrome import chrome_trace
from shardwise.report.memory import ACTIVATIONS, layers_of, memory
from shardwise.report.parts import Page
from shardwise.report.runs import RunLog, load_run
from shardwise.telemetry.files import RankLog
from tests.unit.report.made import header, record, write_run


def test_rank_that_others_wait_for_comes_first(tmp_path: Path) -> None:
    found = figures.stragglers(load_run(write_run(tmp_path, num_ranks=4, slow={2: 0.3, 1: 0.1})))
    assert [each.rank for each in found][:2] == [2, 1]
    worst = found[0]
    assert worst.lost_seconds == pytest.approx(0.3) and worst.typical_seconds == pytest.approx(0.3)
    assert (worst.num_last, worst.num_steps, worst.phase) == (4, 4, "forward")


def test_single_slow_steps_are_told_from_what_is_typical(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, num_ranks=3, num_steps=50, slow={1: 1.5}, slow_steps=[7, 20, 21]))
    first = figures.stragglers(run)[0]
    assert first.rank == 1 and first.typical_seconds == pytest.approx(0)
    assert first.slow_steps == (7, 20, 21) and first.slow_seconds == pytest.approx(1.5) and first.slow_phase == "forward"
    assert first.slow_seconds_a_step == pytest.approx(3 * 1.5 / 48)
    assert all(each.slow_steps == () for each in figures.stragglers(run)[1:])


def test_noise_does_not_stand_out(tmp_path: Path) -> None:
    draws = random.Random(0).choices(range(100), k=200)
    records = {
        step: {rank: record(step, rank, forward=0.05 + (draw if rank else 99 - draw) * 1e-3) for rank in (0, 1)}
        for step, draw in enumerate(draws, start=1)
    }
    ranks = {rank: RankLog(tmp_path, header(rank, 2), [by_rank[rank] for by_rank in records.values()]) for rank in (0, 1)}
    assert all(each.slow_steps == () for each in figures.stragglers(RunLog(tmp_path, ranks)))


def test_equal_ranks_keep_nobody(tmp_path: Path) -> None:
    assert all(each.lost_seconds == pytest.approx(0) for each in figures.stragglers(load_run(write_run(tmp_path))))


def test_one_rank_has_nobody_to_wait_for(tmp_path: Path) -> None:
    assert figures.stragglers(load_run(write_run(tmp_path, num_ranks=1))) == []


def test_flows_are_a_step_of_one_rank(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path))
    records = [record for by_rank in run.steady_steps.values() for record in by_rank.values()]
    gather, reduce = figures.flows(records)
    assert (gather.name, gather.num_collectives, gather.wire_bytes) == ("gather", 2, 8000)
    assert gather.bytes_per_second == pytest.approx(8e6) and gather.hidden_seconds == 0
    assert reduce.hidden_seconds == pytest.approx(0.005)
    (link,) = figures.flows(records, "link")
    assert link.wire_bytes == 12000


def test_rates_are_over_all_ranks(tmp_path: Path) -> None:
    assert figures.rate(load_run(write_run(tmp_path)), "tokens") == pytest.approx(2 * 256 / 0.19)


@pytest.mark.parametrize(("device", "tier", "copied_bytes"), [("cpu", "device", 700), ("sim:0", "host", 0)])
def test_activations_are_what_the_allocator_gave_out_beyond_what_the_ledger_has_of_it(
    device: str, tier: str, copied_bytes: int
) -> None:
    """What rests elsewhere, or is mapped from the system, is none of its bytes; on the CPU, the host's memory is."""
    run = RunLog(Path(), {0: RankLog(Path(), header(0, 1, host={"device": device}))})
    kinds = ("device: parameter shards", f"{tier}: disk staging", "host: copies for checkpoints", "disk: optimizer state")
    rows = (
        (0.0, 1000, 0, 0, 9000, 5000),
        (0.1, 1000, 400, 700, 9000, 5300 + copied_bytes),
        (0.2, 1000, 800, 700, 12_000, 5200 + copied_bytes),
        (0.3, 1000, 0, 0, 9000, 5000),
    )
    _, layers = layers_of(StepTrace(1, 0, 0.0, (), (*kinds, "allocated"), rows), run.allocator_tiers)
    by_name = {layer.name: list(layer.values) for layer in layers}
    assert by_name[ACTIVATIONS] == [0, 300, 200, 0]
    assert "disk: optimizer state" not in by_name


def test_the_disk_is_no_memory_beside_what_is_resident(tmp_path: Path) -> None:
    on_disk = Held("disk", "optimizer state", 80_000, 80_000)
    plain, other = record(1, 0), record(1, 0, held=(*record(1, 0).held, on_disk))
    texts = []
    for each in (plain, other):
        run = RunLog(tmp_path, {0: RankLog(tmp_path, header(0, 1), [each])})
        texts.append(memory(run, Page(), "").partition("The ledger beside what the machine says")[2])
    assert texts[0] == texts[1] != ""


def test_trace_for_viewers_lays_ranks_over_each_other(tmp_path: Path) -> None:
    events = chrome_trace(load_run(write_run(tmp_path)))["traceEvents"]
    ends = {e["pid"]: e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["name"] == "backward blocks.0"}
    # Rank 1 left the exchange 10 ms later by its own clock, so its step began 10 ms earlier.
    assert ends[0] - ends[1] == pytest.approx(10_000)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert any(e["ph"] == "C" and e["args"]["device: gathered parameters"] == 9000 for e in events)


def test_folders_that_hold_no_run_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no run folder"):
        load_run(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        load_run(tmp_path / "file")
    with pytest.raises(UsageError, match=r"no ranks/N\.jsonl"):
        load_run(tmp_path)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "0.jsonl").write_text("")
    with pytest.raises(UsageError, match="they are empty"):
        load_run(tmp_path)
    (tmp_path / "ranks" / "0.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(UsageError, match="is no record"):
        load_run(tmp_path)


def test_rank_that_wrote_nothing_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, num_ranks=3)
    (tmp_path / "ranks" / "1.jsonl").unlink()
    run = load_run(tmp_path)
    assert run.problems == ["rank 1 has written nothing"] and sorted(run.ranks) == [0, 2]
