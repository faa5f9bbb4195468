"""`FaultProxy`: stands between a client and a service, counts what passes, and makes trouble by plan."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Trouble = (
    Literal["slow_down", "internal", "cut", "cut_later", "truncate", "lost_answer", "slow", "no_condition"]
    | tuple[int, str]
)
"""What happens to a request: 503 SlowDown; 500; the connection is cut before the service hears of it; cut in the
middle of the request's body; the answer ends early; the service does it and the answer is lost; everything waits a
second; the service never hears of If-None-Match. A status and a code: that answer."""

_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>made up by the proxy</Message></Error>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A request that came: `path` with its query; `trouble` that it met; bytes of both bodies."""

    method: str
    path: str
    trouble: str | None
    sent_bytes: int
    got_bytes: int


class FaultProxy:
    """An HTTP proxy on a port of its own. `plan(method, path)` says what goes wrong; `down` cuts everything."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.plan: Callable[[str, str], Trouble | None] = lambda method, path: None
        self.down = False
        self.log: list[Passed] = []
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


@contextlib.contextmanager
def run_proxy(upstream_port: int) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream_port)
    try:
        yield proxy
    finally:
        proxy.close()


def _handler(proxy: FaultProxy) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60
        wbufsize = -1
        upstream: http.client.HTTPConnection | None = None

        def log_message(self, format: str, *args: Any) -> None:
            return

        def finish(self) -> None:
            try:
                super().finish()
            except OSError:
                self.rfile.close()
                with contextlib.suppress(OSError):
                    self.wfile.close()
            if self.upstream is not None:
                self.upstream.close()

        def serve(self) -> None:
            trouble = proxy.plan(self.command, self.path)
            length = int(self.headers.get("Content-Length") or 0)
            if proxy.down or trouble == "cut":
                self.cut("down" if proxy.down else "cut")
                return
            if trouble == "cut_later":
                self.rfile.read(length // 2)
                self.cut("cut_later")
                return
            body = self.rfile.read(length)
            if isinstance(trouble, tuple):
                status, code = trouble
                self.note(code, length, 0)
                self.answer(status, [("Content-Type", "application/xml")], _ERROR.format(code).encode())
                return
            if trouble in ("slow_down", "internal"):
                status, code = (503, "SlowDown") if trouble == "slow_down" else (500, "InternalError")
                self.note(trouble, length, 0)
                self.answer(status, [("Content-Type", "application/xml")], _ERROR.format(code).encode())
                return
            if trouble == "slow":
                time.sleep(1.0)
            self.relay(body, trouble)

        def relay(self, body: bytes, trouble: Trouble | None) -> None:
            try:
                status, headers, data = self.ask(body, drop_condition=trouble == "no_condition")
            except (OSError, http.client.HTTPException):
                self.cut("upstream")
                return
            if proxy.down or trouble == "lost_answer":
                self.cut("down" if proxy.down else "lost_answer", len(body))
                return
            if trouble == "truncate" and data:
                self.answer(status, headers, data, only=len(data) // 2)
                self.cut("truncate", len(body), len(data) // 2)
                return
            self.note(trouble, len(body), len(data))
            self.answer(status, headers, data)

        def ask(self, body: bytes, *, drop_condition: bool) -> tuple[int, list[tuple[str, str]], bytes]:
            if self.upstream is None:
                self.upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream_port, timeout=60)
            self.upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if not (drop_condition and name.lower() == "if-none-match"):
                    self.upstream.putheader(name, value)
            self.upstream.endheaders(body or None)
            answer = self.upstream.getresponse()
            data = answer.read()
            length = answer.getheader("Content-Length")
            headers = [
                (name, value)
                for name, value in answer.getheaders()
                if name.lower() not in ("connection", "transfer-encoding", "content-length")
            ]
            if self.command == "HEAD" and length is not None:
                headers.append(("Content-Length", length))
            return answer.status, headers, data

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, only: int | None = None) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD" and status not in (204, 304):
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data[:only])
                self.wfile.flush()

        def cut(self, trouble: str, sent_bytes: int = 0, got_bytes: int = 0) -> None:
            """Reset the connection."""
            self.note(trouble, sent_bytes, got_bytes)
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

        def note(self, trouble: str | None, sent_bytes: int, got_bytes: int) -> None:
            proxy.log.append(
                Passed(
                    method=self.command,
                    path=self.path,
                    trouble=trouble,
                    sent_bytes=sent_bytes,
                    got_bytes=got_bytes,
                )
            )

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

    return Handler
