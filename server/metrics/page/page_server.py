"""An HTTP server that serves the page and canned reports, with the headers of the daemon's."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:"
)


class PageServer:
    """Counts requests, and answers each for the report with that of the next second.

    Threads: `make_report`, `failure` and `page` may be set at any time.
    """

    def __init__(self, page: str):
        self.page = page
        # Makes the report of a second.
        self.make_report: Callable[[int], object] = lambda tick: {}
        # The answer instead, as (status, body); a status of 0 closes the connection.
        self.failure: tuple[int, str] | None = None
        self.tick = 0
        self.requests: list[str] = []
        self._condition = threading.Condition()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def begin(self, make_report: Callable[[int], object]) -> None:
        """Serves these reports, from the first on."""
        with self._condition:
            self.make_report, self.failure, self.tick = make_report, None, 0
            self.requests.clear()

    def await_requests(self, count: int) -> None:
        """Returns when the report has been asked for so often since begin()."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.tick >= count, timeout=300):
                raise AssertionError(f"asked {self.tick} times, not {count}")

    def _answer(self, method: str, path: str) -> tuple[int, str, str]:
        with self._condition:
            self.requests.append(f"{method} {path}")
            if path == "/":
                return 200, "text/html; charset=utf-8", self.page
            if path != "/status.json":
                return 404, "text/plain", "there is no such thing"
            self.tick += 1
            self._condition.notify_all()
            if self.failure:
                return self.failure[0], "text/plain", self.failure[1]
            tick, make_report = self.tick, self.make_report
        return 200, "application/json", json.dumps(make_report(tick))

    def _handler(self):
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_one_request(self):
                self.raw_requestline = self.rfile.readline(65537)
                self.close_connection = True
                if not self.raw_requestline or not self.parse_request():
                    return
                status, content_type, text = server._answer(self.command, self.path)
                if status == 0:
                    return
                # A page that was left waits for no answer.
                with contextlib.suppress(ConnectionError):
                    self._send(status, content_type, text.encode())

            def _send(self, status, content_type, body):
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        return Handler
