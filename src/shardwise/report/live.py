"""Serves the page of runs that go on, on this machine alone, behind an address that nobody can guess."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from shardwise.core.errors import ShardwiseError, UsageError
from shardwise.report.page import document
from shardwise.report.parts import warning

HOST = "127.0.0.1"
REFRESH_SECONDS = 2.0

Body = Callable[[], str]


class LivePage:
    """A page that is made anew when what it shows has changed.

    Args:
        title: Of the page.
        paths: Folders of runs; a change of any log in them is a new version.
        body: Makes the body.
    """

    def __init__(self, title: str, paths: Sequence[Path], body: Body) -> None:
        self._title = title
        self._paths = list(paths)
        self._body = body

    @property
    def version(self) -> str:
        """Changes when a log grows."""
        facts = []
        for path in self._paths:
            for file in sorted((path / "ranks").glob("*.jsonl")):
                status = file.stat()
                facts.append(f"{file} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

    def body(self) -> str:
        """What is known now; a run that has not begun may still begin."""
        try:
            return self._body()
        except ShardwiseError as error:
            return warning(str(error))

    def page(self) -> str:
        """The whole page."""
        return document(self._title, self.body(), live_seconds=REFRESH_SECONDS, version=self.version)


class LiveServer:
    """Serves a live page until it is closed.

    Raises:
        UsageError: The port is in use.
    """

    def __init__(self, page: LivePage, port: int = 0) -> None:
        token = secrets.token_urlsafe(24)
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(page, token))
        except OSError as error:
            raise UsageError(f"Port {port} cannot be used: {error.strerror}. Choose another, or none.") from error
        self._server.daemon_threads = True
        self.address = f"http://{HOST}:{self._server.server_address[1]}/{token}/"

    def serve(self) -> None:
        """Until interrupted, or closed by another thread."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def _handler(page: LivePage, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "shardwise"

        def do_GET(self) -> None:
            """Answer two addresses, and know no others."""
            if secrets.compare_digest(self.path, f"/{token}/"):
                self._answer(page.page(), page.version)
            elif secrets.compare_digest(self.path, f"/{token}/body"):
                version = page.version
                if self.headers.get("If-None-Match") == version:
                    self._send(304, "", version)
                else:
                    self._answer(page.body(), version)
            else:
                self._send(
                    404, "There is nothing here. Use the address that shardwise report has printed, with its token.\n", ""
                )

        def _answer(self, text: str, version: str) -> None:
            self._send(200, text, version)

        def _send(self, status: int, text: str, version: str) -> None:
            payload = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8" if status == 200 else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(payload)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            if version:
                self.send_header("ETag", version)
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the address holds the token."""

    return Handler
