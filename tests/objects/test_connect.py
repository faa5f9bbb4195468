"""From a URL and the environment to a service: what is taken, what is refused, and what is never shown."""

from __future__ import annotations

import builtins
import secrets
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from shardkeep import knobs
from shardkeep.errors import (
    AlreadyExists,
    CheckpointError,
    Denied,
    NotFound,
    OutOfSpace,
    StorageError,
    Throttled,
    UsageError,
)
from shardkeep.events import Event
from shardkeep.storage.object_claims import claim_name, put_by_claim
from shardkeep.storage.object_errors import map_object_error, read_reply, strip_url
from shardkeep.storage.objects import ObjectStore
from shardkeep.storage.resolve import is_remote, open_store
from shardkeep.storage.retry import RetryingStore
from tests.cli.runner import shardkeep
from tests.support.proxy import FaultProxy
from tests.support.servers import BUCKET, Server, run_metadata


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("s3://bucket/a/run", "s3://bucket/a/run"),
            ("s3://bucket", "s3://bucket"),
            ("S3://bucket//a///run/", "s3://bucket/a/run"),
            (Path("s3://bucket/a run"), "s3://bucket/a run"),
            ("s3a://my.bucket-1/x", "s3a://my.bucket-1/x"),
            ("gs://bucket/a/run", "gs://bucket/a/run"),
            ("az://container/run", "az://container/run"),
            ("abfs://files@account.dfs.core.windows.net/run", "abfs://files@account.dfs.core.windows.net/run"),
            ("https://host.example/a/run", "https://host.example/a/run"),
        ],
    )
    def test_names_of_stores(self, url: str | Path, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        assert is_remote(url)
        store = open_store(url)
        assert store.url == shown
        assert open_store(store.url).url == shown
        assert store.capabilities.remote

    @pytest.mark.parametrize(
        "url",
        [
            "s3://user:hunter2@bucket/run",
            "s3://bucket/run?X-Amz-Signature=hunter2",
            "https://user:hunter2@host/run",
            "https://host/run?sig=hunter2",
            "az://container/run#hunter2",
            "s3://",
            "s3:///run",
            "s3://-bucket/run",
            "s3://bucket/../hunter2",
            "https:///run",
            "gopher://host/hunter2",
        ],
    )
    def test_what_is_refused_is_not_repeated(self, url: str) -> None:
        with pytest.raises(UsageError) as caught:
            open_store(url)
        text = "".join(traceback.format_exception(caught.value)).replace(repr(url), "")
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in text
        result = shardkeep("ls", url)
        assert result.code == UsageError.exit_code
        assert "hunter2" not in result.err + result.out

    def test_paths_are_paths(self) -> None:
        for path in ("run", "/a/b", "a:b", "C:/x", "file:///a", Path("s3/x")):
            assert not is_remote(path)

    def test_without_obstore_the_advice_is_to_install_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def find(name: str, *rest: Any, **named: Any) -> Any:
            if name.partition(".")[0] == "obstore":
                raise ImportError(name)
            return real(name, *rest, **named)

        monkeypatch.setattr(builtins, "__import__", find)
        with pytest.raises(UsageError, match="obstore") as caught:
            open_store("s3://bucket/run")
        assert caught.value.advice == 'pip install "shardkeep[objects]"'

    def test_nothing_of_it_is_imported_before_it_is_needed(self, tmp_path: Path) -> None:
        code = (
            "import sys, shardkeep\n"
            "from shardkeep.storage.resolve import open_store\n"
            f"open_store({str(tmp_path)!r}).list_folders('')\n"
            "assert not {'obstore', 'boto3', 'torch'} & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


class TestCredentials:
    def test_a_profile_gives_keys_and_endpoint(
        self, seaweed: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        env = seaweed.env
        keys = tmp_path / "keys"
        keys.write_text(
            f"[lab]\naws_access_key_id = {env['AWS_ACCESS_KEY_ID']}\n"
            f"aws_secret_access_key = {env['AWS_SECRET_ACCESS_KEY']}\n"
        )
        config = tmp_path / "config"
        config.write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {env['AWS_ENDPOINT_URL']}\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_PROFILE", "lab")
        store = open_store(f"s3://{BUCKET}/{secrets.token_hex(8)}")
        store.put("a", b"x", if_absent=True)
        assert store.get("a", limit_bytes=1) == b"x"
        # Another program rotates the keys; a new connection takes the new ones.
        keys.write_text("[lab]\naws_access_key_id = WRONG\naws_secret_access_key = WRONG\n")
        with pytest.raises(Denied):
            open_store(store.url).put("b", b"x")

    def test_the_default_profile_comes_after_everything_else(
        self, s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        keys = tmp_path / "keys"
        keys.write_text("[default]\naws_access_key_id = WRONG\naws_secret_access_key = WRONG\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        open_store(s3).put("a", b"x")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(Denied):
            open_store(s3).put("a", b"x")

    def test_a_machine_with_a_role_needs_nothing(
        self, s3: str, seaweed: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with run_metadata(seaweed.env["AWS_ACCESS_KEY_ID"], seaweed.env["AWS_SECRET_ACCESS_KEY"]) as port:
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{port}")
            store = open_store(s3)
            store.put("a", b"x")
            assert store.get("a", limit_bytes=1) == b"x"

    def test_profiles_that_cannot_be_had_are_named(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        config = tmp_path / "config"
        config.write_text("[profile sso]\nsso_session = corp\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_PROFILE", "none")
        with pytest.raises(UsageError, match="'none' is in neither"):
            open_store("s3://bucket/run")
        monkeypatch.setitem(sys.modules, "boto3", None)
        monkeypatch.setenv("AWS_PROFILE", "sso")
        with pytest.raises(UsageError, match="needs boto3") as caught:
            open_store("s3://bucket/run")
        assert "pip install boto3" in str(caught.value)
        config.write_text("not an ini file")
        with pytest.raises(UsageError, match="cannot read"):
            open_store("s3://bucket/run")

    def test_wrong_keys_are_denied_and_no_secret_is_shown(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDHUNTER2")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-secret")
        store = open_store(s3)
        with pytest.raises(Denied) as caught:
            store.put("a", b"x")
        shown = "".join(traceback.format_exception(caught.value)) + repr(store) + repr(vars(store))
        assert "HTTP 403" in shown
        for secret in ("hunter2", "HUNTER2"):
            assert secret not in shown
        assert caught.value.advice

    def test_azure_connection_strings_are_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=lab;AccountKey=not base64 hunter2;")
        with pytest.raises(CheckpointError) as caught:
            open_store("az://container/run").put("a", b"x")
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "code", "kind", "retryable"),
        [
            (503, "SlowDown", Throttled, True),
            (429, "TooManyRequests", Throttled, True),
            (503, "ServerBusy", Throttled, True),
            (500, "InternalError", StorageError, True),
            (502, "BadGateway", StorageError, True),
            (504, "OperationTimedOut", StorageError, True),
            (408, "RequestTimeout", StorageError, True),
            (400, "RequestTimeout", StorageError, True),
            (400, "ExpiredToken", Denied, False),
            (400, "InvalidArgument", StorageError, False),
            (301, "PermanentRedirect", StorageError, False),
            (403, "AccessDenied", Denied, False),
            (401, "Unauthorized", Denied, False),
            (403, "RequestTimeTooSkewed", Denied, False),
            (403, "QuotaExceeded", OutOfSpace, False),
            (507, "InsufficientStorage", OutOfSpace, False),
            (404, "NoSuchBucket", StorageError, False),
            (501, "NotImplemented", StorageError, False),
        ],
    )
    def test_answers_of_a_service(
        self, proxied: str, proxy: FaultProxy, status: int, code: str, kind: type[Exception], retryable: bool
    ) -> None:
        proxy.plan = lambda method, path: (status, code)
        store = open_store(proxied)
        with pytest.raises(CheckpointError) as caught:
            store.put("a/b", b"x")
        error = caught.value
        assert type(error) is kind
        assert isinstance(error, StorageError)
        assert error.retryable is retryable
        assert error.key == "a/b"
        assert f"{proxied}/a/b" in str(error)
        assert retryable or error.advice
        shown = "".join(traceback.format_exception(error))  # what a log gets, chained errors too
        assert "made up by the proxy" not in shown
        assert "127.0.0.1" not in shown

    def test_a_missing_bucket_is_no_missing_object(self, proxied: str, proxy: FaultProxy) -> None:
        proxy.plan = lambda method, path: (404, "NoSuchBucket")
        for call in (
            lambda: open_store(proxied).get("a", limit_bytes=1),
            lambda: open_store(proxied).list_objects(""),
        ):
            with pytest.raises(StorageError, match="NoSuchBucket") as caught:
                call()
            assert f"create s3://{BUCKET}" in str(caught.value)

    @pytest.mark.parametrize("trouble", ["cut", "truncate", "lost_answer"])
    def test_broken_connections_may_be_repeated(self, proxied: str, proxy: FaultProxy, trouble: str) -> None:
        store = open_store(proxied)
        store.put("a", b"x" * 1000)
        proxy.plan = lambda method, path: trouble  # type: ignore[assignment,return-value]
        for call in (
            lambda: store.get("a", limit_bytes=1000),
            lambda: store.read_into("a", 1, memoryview(bytearray(900))),
        ):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.retryable

    def test_nobody_listens(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        with pytest.raises(StorageError, match="connect") as caught:
            open_store(s3).head("a")
        assert caught.value.retryable

    def test_texts_are_stripped(self) -> None:
        assert strip_url("https://me:pw@host/a?sig=1#x") == "https://host/a"
        error = RuntimeError(
            "Generic Azure error: Error performing GET https://a.blob/x?sig=SECRET in 1ms - broke at "
            "https://b/y?sig=SECRET\n\nDebug source:\nSECRET"
        )
        assert read_reply(error).text == "broke at https://b/y"
        for lost in (ValueError("x"), NotImplementedError("x"), OSError("x"), RuntimeError("")):
            assert isinstance(map_object_error(lost, "read", "s3://b/x", key="x"), StorageError)

    def test_no_credentials_is_said_at_once_but_not_in_the_middle_of_a_run(self) -> None:
        error = RuntimeError(
            "Error performing PUT http://169.254.169.254/latest/api/token in 5s - HTTP error: timeout"
        )
        first = map_object_error(error, "read", "s3://b/x", key="x", reached=False)
        assert isinstance(first, Denied)
        assert "AWS_PROFILE" in str(first)
        later = map_object_error(error, "read", "s3://b/x", key="x", reached=True)
        assert isinstance(later, StorageError)
        assert later.retryable


class TestExclusiveCreates:
    @pytest.fixture
    def ignoring(self, proxied: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
        """A service that has never heard of conditions: it answers 200 and overwrites."""
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        proxy.plan = lambda method, path: "no_condition"
        return proxied

    def test_a_service_that_ignores_conditions_is_found_out(self, ignoring: str) -> None:
        store = open_store(ignoring)
        assert store.capabilities.exclusive_create
        store.put("a", b"first", if_absent=True)
        assert not store.capabilities.exclusive_create
        with pytest.raises(AlreadyExists):
            open_store(ignoring).put("a", b"second", if_absent=True)
        assert store.get("a", limit_bytes=10) == b"first"
        assert [info.key for info in store.list_objects("")] == ["a"]
        assert store.list_folders("") == []

    def test_one_that_heeds_them_is_trusted(self, proxied: str, proxy: FaultProxy) -> None:
        store = open_store(proxied)
        for number in range(3):
            store.put(f"a/{number}", b"x", if_absent=True)
        assert store.capabilities.exclusive_create
        assert len([passed for passed in proxy.log if ".probe" in passed.path]) == 2

    def test_a_claim_of_the_dead_is_waited_out_and_removed(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
        store = open_store(s3)
        assert isinstance(store, ObjectStore)
        client = store._client
        dead = claim_name("g/a", b"theirs", "0" * 32)
        client.put(dead, b"")
        put_by_claim(client, "g/a", b"ours", claim_s=0.5)
        assert store.get("g/a", limit_bytes=10) == b"ours"
        assert client.list_below("g/.claim/") == []

    def test_a_live_claim_keeps_others_out(self, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
        store = open_store(s3)
        assert isinstance(store, ObjectStore)
        store._client.put(claim_name("a", b"theirs", "0" * 32), b"")
        with (
            knobs.override(RETRY_BUDGET_S=0.2),
            pytest.raises(StorageError, match="kept claiming") as caught,
        ):
            put_by_claim(store._client, "a", b"ours", claim_s=0.4, patience_s=0.2)
        assert caught.value.retryable
        with pytest.raises(NotFound):
            store.head("a")


class TestPatience:
    def test_many_deletes_get_through_though_some_fail(self, proxied: str, proxy: FaultProxy, quick: object) -> None:
        store = RetryingStore(open_store(proxied))
        keys = [f"a/{number:02}" for number in range(40)]
        for key in keys:
            store.put(key, b"")
        proxy.log.clear()
        proxy.plan = lambda method, path: "slow_down" if len(proxy.log) % 5 == 4 else None
        store.delete(keys)
        assert len(proxy.log) < 60
        proxy.plan = lambda method, path: None
        assert store.list_objects("") == []

    def test_an_outage_within_the_budget_is_waited_out_and_told(self, proxied: str, proxy: FaultProxy) -> None:
        events: list[Event] = []

        class Sink:
            def emit(self, event: Event) -> None:
                events.append(event)

        pauses: list[float] = []

        def sleep(pause_s: float) -> None:
            pauses.append(pause_s)
            if len(pauses) == 9:
                proxy.down = False

        store = RetryingStore(open_store(proxied), events=Sink(), sleep=sleep)
        proxy.down = True
        store.put("a", b"x")
        assert len(pauses) == len(events) == 9
        assert all(pause <= 0.2 * 2**number for number, pause in enumerate(pauses))
        assert max(pauses) <= 10

    def test_beyond_the_budget_the_error_is_raised(self, proxied: str, proxy: FaultProxy) -> None:
        now_s = [0.0]

        def sleep(pause_s: float) -> None:
            now_s[0] += pause_s

        proxy.down = True
        store = RetryingStore(open_store(proxied), sleep=sleep, clock=lambda: now_s[0])
        with pytest.raises(StorageError):
            store.head("a")
        assert 50 < now_s[0] <= 120


def test_deletes_go_in_order_each_done_before_the_next(proxied: str, proxy: FaultProxy) -> None:
    """A prune that is cut off has removed the commit record first, whatever else it has."""
    store = open_store(proxied)
    for key in "cab":
        store.put(key, b"x")
    proxy.log.clear()
    proxy.plan = lambda method, path: "cut" if len(proxy.log) >= 1 else None
    with pytest.raises(StorageError):
        store.delete(["c", "a", "b"])
    proxy.plan = lambda method, path: None
    assert [info.key for info in store.list_objects("")] == ["a", "b"]
