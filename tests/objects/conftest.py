"""The services, the environment that leads to them, and stores on them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from shardkeep import knobs
from tests.support.proxy import FaultProxy, run_proxy
from tests.support.servers import BUCKET, Server, azurite, seaweed

__all__ = ["azurite", "seaweed"]


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing of this machine's own settings reaches a test."""
    import os

    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")) and name != "AZURITE_BLOB":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def s3(seaweed: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lead the environment to SeaweedFS; give the URL of an empty run."""
    for name, value in seaweed.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def az(azurite: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lead the environment to Azurite; give the URL of an empty run."""
    for name, value in azurite.env.items():
        monkeypatch.setenv(name, value)
    return f"az://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[FaultProxy]:
    """A proxy before SeaweedFS."""
    with run_proxy(seaweed.port) as made:
        yield made


@pytest.fixture
def proxied(s3: str, seaweed: Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lead the environment to the proxy; give the URL of an empty run."""
    for name, value in seaweed.env_by(proxy.port).items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def quick() -> Iterator[Callable[[], None]]:
    """Repeat soon, and not for long."""
    with knobs.override(RETRY_BASE_S=0.01, RETRY_BUDGET_S=20.0, REQUEST_TIMEOUT_S=10.0):
        yield lambda: None
