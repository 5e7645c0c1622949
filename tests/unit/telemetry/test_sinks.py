"""Where records go: what listeners serve and write is what they were given."""

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from shardwise.core.errors import UsageError
from shardwise.core.records import DiskUse
from shardwise.telemetry.prometheus import Prometheus
from shardwise.telemetry.tensorboard import TensorBoard
from tests.unit.report.made import header, record

SAMPLE = re.compile(r'[a-z_]+(\{([a-z_]+="(\\.|[^"\\\n])*",?)*\})? [-+0-9.e]+|[a-z_]+\{.*\} (nan|inf)')


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_metrics_of_the_last_step_are_served() -> None:
    endpoint = Prometheus(0)
    try:
        endpoint.start(header(1, 2, hash='a "b"\n'))
        assert r'hash="a \"b\"\n"' in read(endpoint.port)
        endpoint.step(record(1, 1))
        endpoint.step(record(2, 1))
        text = read(endpoint.port)
        for line in text.splitlines():
            assert line.startswith("# ") or SAMPLE.fullmatch(line), line
        assert 'shardwise_steps_total{rank="1"} 2.0' in text
        assert 'shardwise_wire_bytes_total{rank="1"} 24000.0' in text
        assert 'shardwise_phase_seconds{rank="1",phase="backward"} 0.1' in text
        assert 'shardwise_peak_bytes{rank="1",tier="device",kind="gathered parameters"} 9000.0' in text
        assert 'shardwise_value{rank="1",name="loss"} 2.5' in text
        assert "disk_read" not in text
        endpoint.step(record(3, 1, disk=DiskUse(30, 4)))
        assert 'shardwise_disk_read_bytes_total{rank="1"} 30.0' in read(endpoint.port)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(endpoint.port, "/")
        with pytest.raises(UsageError, match=f"127.0.0.1:{endpoint.port}"):
            Prometheus(endpoint.port)
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        read(endpoint.port)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoard(tmp_path)
    sink.start(header(1, 2))
    for step in (1, 2, 3):
        sink.step(record(step, 1))
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "rank1"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("values/loss")] == [
        (1, 5.0),
        (2, 2.5),
        (3, pytest.approx(5 / 3)),
    ]
    assert events.Scalars("sent bytes/gather")[0].value == 8000
    assert {"seconds/step", "seconds/forward", "peak bytes/all", "peak bytes/parameter shards"} <= set(events.Tags()["scalars"])
