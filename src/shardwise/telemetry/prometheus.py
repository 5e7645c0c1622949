"""Serves the last step's figures in Prometheus' text format, from a thread of its own. Bound to this machine unless told otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shardwise.core.errors import UsageError
from shardwise.core.records import Header, StepRecord
from shardwise.telemetry.sink import Callback

LOCAL = "127.0.0.1"
_DISK_COUNTERS = {
    "disk_read_bytes": "Bytes of state read from disk.",
    "disk_written_bytes": "Bytes of state written to disk.",
    "disk_wait_seconds": "Seconds in which the disk was waited for.",
}


class Prometheus(Callback):
    """An endpoint ``/metrics`` for one rank.

    Args:
        port: 0 takes a free one; see ``port``.
        host: The address to listen at. Whoever can reach it can read the figures.

    Raises:
        UsageError: The port cannot be used.
    """

    def __init__(self, port: int, host: str = LOCAL) -> None:
        self._text = ""
        self._sums: dict[str, float] = {}
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(self))
        except OSError as error:
            raise UsageError(f"Metrics cannot be served at {host}:{port}: {error.strerror}. Choose another port.") from error
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        self._thread.start()

    def start(self, header: Header) -> None:
        """Before the first step."""
        self._text = "".join(
            _family("shardwise_info", "gauge", "The run.", [({"hash": header.hash, "rank": str(header.rank)}, 1.0)])
        )

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        sums: dict[str, float] = {"wire_bytes": record.wire_bytes, "seconds": record.seconds}
        if record.disk is not None:
            sums |= {
                "disk_read_bytes": record.disk.read_bytes,
                "disk_written_bytes": record.disk.written_bytes,
                "disk_wait_seconds": record.disk_seconds,
            }
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._text = "".join(_families(record, self._sums))

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def text(self) -> str:
        """What is served."""
        return self._text


def _families(record: StepRecord, sums: Mapping[str, float]) -> Iterator[str]:
    rank = {"rank": str(record.rank)}
    yield from _family("shardwise_steps_total", "counter", "Steps committed.", [(rank, record.step)])
    yield from _family("shardwise_step_seconds", "gauge", "Seconds of the last step.", [(rank, record.seconds)])
    phases = [({**rank, "phase": phase}, seconds) for phase, seconds in record.phases.items()]
    yield from _family("shardwise_phase_seconds", "gauge", "Seconds of the last step by phase.", phases)
    held = [({**rank, "tier": each.tier, "kind": each.kind}, each.live_bytes) for each in record.held]
    yield from _family("shardwise_held_bytes", "gauge", "Bytes held when the last step had ended.", held)
    peaks = [({**rank, "tier": each.tier, "kind": each.kind}, each.peak_bytes) for each in record.held]
    yield from _family("shardwise_peak_bytes", "gauge", "The most bytes of a kind in the last step.", peaks)
    if record.process is not None:
        yield from _family("shardwise_resident_bytes", "gauge", "Resident.", [(rank, record.process.resident_bytes)])
    yield from _family("shardwise_wire_bytes_total", "counter", "Bytes sent.", [(rank, sums["wire_bytes"])])
    yield from _family("shardwise_seconds_total", "counter", "Seconds of all steps.", [(rank, sums["seconds"])])
    for name, about in _DISK_COUNTERS.items():
        yield from _family(f"shardwise_{name}_total", "counter", about, [(rank, sums[name])] if name in sums else [])
    values = [({**rank, "name": name}, value) for name, value in record.values.items()]
    yield from _family("shardwise_value", "gauge", "What users logged with the last step.", values)


def _family(name: str, kind: str, about: str, samples: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    if samples:
        yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        yield f"{name}{{{text}}} {float(value)!r}\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _handler(endpoint: Prometheus) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "shardwise"

        def do_GET(self) -> None:
            """Answer one address."""
            is_known = self.path.partition("?")[0] == "/metrics"
            payload = (endpoint.text if is_known else "There is nothing here but /metrics.\n").encode()
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler
