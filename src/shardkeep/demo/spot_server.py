"""An object store on this machine for the demo: SeaweedFS, where its program is installed."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import secrets
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardkeep.errors import StorageError

BUCKET: Final = "shardkeep-demo"
_PATIENCE_S: Final = 60.0
_PORTS: Final = ("master.port", "volume.port", "filer.port", "s3.port")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectServer:
    """A service that runs: the URL of its bucket, and the environment that leads a client to it."""

    url: str
    env: dict[str, str]


def find_server() -> str | None:
    """Return the path of the server's program, or None where it, or what clients need, is not installed."""
    if importlib.util.find_spec("obstore") is None:
        return None
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def run_server(program: str, folder: Path) -> Iterator[ObjectServer]:
    """Run the server with one empty bucket, on loopback and free ports, until the block ends.

    Raises:
        StorageError: it does not come up.
    """
    key_id, secret = f"DEMO{secrets.token_hex(8).upper()}", secrets.token_hex(20)
    (folder / "data").mkdir(parents=True)
    config = folder / "s3.json"
    keys = [{"accessKey": key_id, "secretKey": secret}]
    config.write_text(
        json.dumps(
            {"identities": [{"name": "demo", "credentials": keys, "actions": ["Admin", "Read", "Write", "List"]}]}
        )
    )
    ports = _find_ports(2 * len(_PORTS) + 1)
    # To stderr: otherwise it leaves its logs in the folder for temporary files.
    command = [
        program,
        "-logtostderr=true",
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={folder / 'data'}",
        "-s3",
    ]
    command += [f"-s3.config={config}", "-s3.iam=false", "-master.telemetry=false", f"-debug.port={ports[-1]}"]
    command += ["-s3.port.lance=0", "-s3.port.iceberg=0", "-master.volumeSizeLimitMB=64", "-volume.max=100"]
    command += [f"-{name}={port}" for name, port in zip(_PORTS, ports, strict=False)]
    command += [f"-{name}.grpc={port}" for name, port in zip(_PORTS, ports[len(_PORTS) :], strict=False)]
    # Relative to `cwd`: the path of a socket has room for 107 bytes, and a temporary folder may be longer.
    command += [f"-{name}.localSocket={name}.sock" for name in ("filer", "s3")]
    filer, s3 = ports[2], ports[3]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder, start_new_session=True
        )
        try:
            end_s = time.monotonic() + _PATIENCE_S
            while not (_ask(s3, "GET", "/") in (200, 403) and _ask(filer, "POST", f"/buckets/{BUCKET}/") == 201):
                if process.poll() is not None or time.monotonic() > end_s:
                    lines = log.read_text(errors="replace").splitlines()
                    fatal = [line for line in lines if line.startswith("F")]  # followed by its stacks
                    raise StorageError(f"{program} does not come up: {' '.join(fatal or lines[-5:])[-1000:]}")
                time.sleep(0.1)
            yield ObjectServer(
                url=f"s3://{BUCKET}",
                env={
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}",
                    "AWS_ACCESS_KEY_ID": key_id,
                    "AWS_SECRET_ACCESS_KEY": secret,
                    "AWS_REGION": "us-east-1",
                },
            )
        finally:
            process.kill()  # its own way down takes ten seconds, and its data goes with the demo
            process.wait()


def _find_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _ask(port: int, method: str, path: str) -> int:
    """Send one request without a body; return the status, 0 when nobody answers."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection):
            connection.request(method, path, headers={"Content-Length": "0"})
            return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
