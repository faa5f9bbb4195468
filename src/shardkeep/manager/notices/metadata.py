"""A client of a machine's metadata service: plain HTTP on a link-local address, no proxy, no kept connections."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from shardkeep.errors import UsageError

TIMEOUT_S: Final = 3.0
_BODY_BYTES: Final = 1 << 20


class BadAnswer(Exception):
    """The service answered, and not as documented. Stays within this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An HTTP answer. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace").strip()


class MetadataClient:
    """Asks one service. For one thread; `abort` may be called from another."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"//{base_url}", scheme="http")
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(f"metadata service {base_url!r}: expected http://host or http://host:port")
        self.url = f"http://{parts.netloc}"
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._socket: socket.socket | None = None
        self._aborted = False

    def ask(
        self, path: str, *, headers: Mapping[str, str], method: str = "GET", timeout_s: float = TIMEOUT_S
    ) -> Reply:
        """Send one request; return the answer, whatever its status.

        Raises:
            OSError, http.client.HTTPException: nobody answers, or not in `timeout_s`, or not in HTTP.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._aborted:
                raise ConnectionAbortedError("the watch is over")
            connection.request(method, self._prefix + path, headers=dict(headers))
            answer = connection.getresponse()
            body = answer.read(_BODY_BYTES)
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(status=answer.status, headers=named, body=body)
        finally:
            self._socket = None
            connection.close()

    def abort(self) -> None:
        """Let a request that is waiting fail at once, and all later ones."""
        self._aborted = True
        waiting = self._socket
        if waiting is not None:
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)


def check_status(reply: Reply, path: str) -> None:
    """Raise BadAnswer unless the status is 200."""
    if reply.status != 200:
        raise BadAnswer(f"{path} was answered with status {reply.status}, expected 200")
