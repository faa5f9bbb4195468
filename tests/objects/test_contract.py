"""Object stores pass the contract on real services."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from shardkeep.storage.base import Store
from shardkeep.storage.objects import ObjectStore
from shardkeep.storage.resolve import open_store
from shardkeep.storage.retry import RetryingStore
from shardkeep.testing.store_contract import StoreContract
from tests.support.proxy import FaultProxy


class OnService(StoreContract):
    url: str

    def make_store(self) -> Store:
        store = open_store(f"{self.url}/{secrets.token_hex(4)}")
        assert isinstance(store, ObjectStore)
        return store

    def reopen(self, store: Store) -> Store:
        return open_store(store.url)


class TestOnSeaweed(OnService):
    @pytest.fixture(autouse=True)
    def _lead(self, s3: str) -> None:
        self.url = s3


class TestOnSeaweedByClaims(OnService):
    """No conditional put: exclusive creates go by claims."""

    @pytest.fixture(autouse=True)
    def _lead(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
        self.url = s3

    def make_store(self) -> Store:
        store = super().make_store()
        assert not store.capabilities.exclusive_create
        return store


class TestOnAzurite(OnService):
    @pytest.fixture(autouse=True)
    def _lead(self, az: str) -> None:
        self.url = az


@pytest.mark.slow
class TestThroughTrouble(OnService):
    """One request in ten meets trouble."""

    @pytest.fixture(autouse=True)
    def _lead(self, proxied: str, proxy: FaultProxy, quick: object) -> Iterator[None]:
        self.url = proxied
        kinds = ["slow_down", "cut", "internal", "lost_answer", "truncate", "cut_later"]
        count = iter(range(10**9))
        proxy.plan = lambda method, path: (  # type: ignore[assignment,return-value]
            kinds[number // 10 % len(kinds)] if (number := next(count)) % 10 == 9 else None
        )
        yield
        assert any(passed.trouble for passed in proxy.log) or len(proxy.log) < 10

    def make_store(self) -> Store:
        return RetryingStore(super().make_store())

    def reopen(self, store: Store) -> Store:
        return RetryingStore(super().reopen(store))
