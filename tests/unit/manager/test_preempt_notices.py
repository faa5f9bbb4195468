"""Watchers against local servers that speak the clouds' metadata endpoints, headers, statuses and all."""

from __future__ import annotations

import datetime
import email.utils
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from shardkeep.errors import UsageError
from shardkeep.events import Event
from shardkeep.manager.notices.aws import AwsSource
from shardkeep.manager.notices.azure import AzureSource
from shardkeep.manager.notices.gcp import GcpSource
from shardkeep.manager.notices.metadata import BadAnswer, MetadataClient
from shardkeep.manager.notices.slurm import SlurmSource
from shardkeep.manager.notices.watcher import Notice, Watcher
from shardkeep.manager.preempt import Lookout, Preemption
from shardkeep.ranks.single import SingleGroup


class Service:
    """A metadata service: what it answers is in its attributes, what it was asked in `log`."""

    def __init__(self, answer: Callable[[Service, BaseHTTPRequestHandler], tuple[int, str, dict[str, str]]]) -> None:
        self.values: dict[str, Any] = {}
        self.log: list[str] = []
        self.changed = threading.Condition()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                service.log.append(f"{self.command} {self.path}")
                status, body, headers = answer(service, self)
                data = body.encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client went away

            do_GET = do_PUT = _serve

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def set(self, **values: Any) -> None:
        with self.changed:
            self.values.update(values)
            self.changed.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(answer: Any, **values: Any) -> Service:
        services.append(Service(answer))
        services[-1].set(**values)
        return services[-1]

    yield start
    for service in services:
        service.close()


def answer_aws(service: Service, request: BaseHTTPRequestHandler) -> tuple[int, str, dict[str, str]]:
    """IMDSv2: a token for PUT with a time to live; everything else needs it."""
    if request.command == "PUT":
        lives_s = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if request.path != "/latest/api/token" or not lives_s.isdigit() or not 1 <= int(lives_s) <= 21600:
            return 400, "bad request", {}
        return 200, service.values["token"], {"X-aws-ec2-metadata-token-ttl-seconds": lives_s}
    if request.headers.get("X-aws-ec2-metadata-token") != service.values["token"]:
        return 401, "unauthorized", {}
    name = {
        "/latest/meta-data/spot/instance-action": "action",
        "/latest/meta-data/events/recommendations/rebalance": "rebalance",
    }.get(request.path, "")
    body = service.values.get(name)
    return (404, "not found", {}) if body is None else (200, body, {"Content-Type": "application/json"})


def answer_gcp(service: Service, request: BaseHTTPRequestHandler) -> tuple[int, str, dict[str, str]]:
    """The metadata server: it wants its header, and holds an answer back while its ETag is the newest."""
    if request.headers.get("Metadata-Flavor") != "Google":
        return 403, "Missing Metadata-Flavor:Google header.", {}
    parts = urlsplit(request.path)
    query = parse_qs(parts.query)
    name = parts.path.removeprefix("/computeMetadata/v1/instance/")
    if name not in ("preempted", "maintenance-event"):
        return 404, "", {}

    def tag() -> str:
        return f"{hash(service.values[name]) & 0xFFFF:x}"

    with service.changed:
        if query.get("wait_for_change") == ["true"]:
            held_s = float(query.get("timeout_sec", ["60"])[0])
            service.changed.wait_for(lambda: query.get("last_etag") != [tag()], held_s)
        return 200, service.values[name], {"Metadata-Flavor": "Google", "ETag": tag()}


def answer_azure(service: Service, request: BaseHTTPRequestHandler) -> tuple[int, str, dict[str, str]]:
    """IMDS: it wants its header and a version."""
    parts = urlsplit(request.path)
    if request.headers.get("Metadata") != "true" or "api-version" not in parse_qs(parts.query):
        return 400, '{"error": "Bad request"}', {}
    if parts.path == "/metadata/instance/compute/name":
        return 200, "machine-7", {}
    if parts.path == "/metadata/scheduledevents":
        body = {"DocumentIncarnation": service.values["incarnation"], "Events": service.values["events"]}
        return 200, json.dumps(body), {"Content-Type": "application/json"}
    return 404, "", {}


def in_seconds(seconds: float) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)


def about(left_s: float | None, wanted_s: float) -> bool:
    return left_s is not None and abs(left_s - wanted_s) < 3


# AWS


def test_aws_has_nothing_to_say_until_it_has(serve: Callable[..., Service]) -> None:
    service = serve(answer_aws, token="t1")
    source = AwsSource(service.url)
    assert source.poll() == []
    assert source.poll() == []
    assert service.log.count("PUT /latest/api/token") == 1
    service.set(action=json.dumps({"action": "terminate", "time": f"{in_seconds(120):%Y-%m-%dT%H:%M:%SZ}"}))
    (notice,) = source.poll()
    assert notice.kind == "stop"
    assert "terminate" in notice.reason
    assert about(notice.left_s, 120)


def test_aws_recommends_to_rebalance(serve: Callable[..., Service]) -> None:
    """A hint that may come to nothing: worth a checkpoint, not the end of the run."""
    service = serve(answer_aws, token="t1", rebalance=json.dumps({"noticeTime": "2020-10-27T08:22:00Z"}))
    (notice,) = AwsSource(service.url).poll()
    assert notice.kind == "save"
    assert "rebalance" in notice.reason


def test_aws_tokens_are_renewed(serve: Callable[..., Service]) -> None:
    service = serve(answer_aws, token="t1")
    source = AwsSource(service.url)
    source.poll()
    service.set(token="t2")
    assert source.poll() == []
    assert service.log.count("PUT /latest/api/token") == 2


@pytest.mark.parametrize("body", ["", "null", "{}", '{"action": "terminate", "time": "soon"}', "<html>", "\udcff"])
def test_aws_may_say_something_else(body: str, serve: Callable[..., Service]) -> None:
    service = serve(answer_aws, token="t1", action=body.encode("utf-8", "replace").decode())
    with pytest.raises(BadAnswer):
        AwsSource(service.url).poll()


# GCP


def test_gcp_tells_a_preemption_at_once(serve: Callable[..., Service]) -> None:
    service = serve(answer_gcp, preempted="FALSE", **{"maintenance-event": "NONE"})
    source = GcpSource(service.url)
    assert source.poll() == []
    timer = threading.Timer(0.3, lambda: service.set(preempted="TRUE"))
    timer.start()
    began_s = time.monotonic()
    (notice,) = source.poll()
    waited_s = time.monotonic() - began_s
    timer.join()
    assert 0.2 < waited_s < 3
    assert (notice.kind, notice.left_s) == ("stop", 30.0)
    assert "wait_for_change=true" in service.log[-1]


def test_gcp_tells_maintenance(serve: Callable[..., Service]) -> None:
    service = serve(answer_gcp, preempted="FALSE", **{"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"})
    source = GcpSource(service.url)
    assert [notice.kind for notice in source.poll()] == ["stop"]
    service.set(**{"maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"})
    assert [notice.kind for notice in source.poll()] == ["save"]


def test_gcp_is_known_by_its_header(serve: Callable[..., Service]) -> None:
    """A captive portal answers anything with 200."""
    service = serve(lambda service, request: (200, "NONE", {}))
    with pytest.raises(BadAnswer, match="another server"):
        GcpSource(service.url).poll()


# Azure


def azure_event(kind: str, *, resources: tuple[str, ...] = ("machine-7",), **fields: Any) -> dict[str, Any]:
    return {
        "EventId": f"id-{kind}",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "EventStatus": "Scheduled",
        "NotBefore": email.utils.format_datetime(in_seconds(30), usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
        **fields,
    }


def test_azure_tells_what_concerns_this_machine(serve: Callable[..., Service]) -> None:
    service = serve(answer_azure, incarnation=1, events=[])
    source = AzureSource(service.url)
    assert source.poll() == []
    service.set(incarnation=2, events=[azure_event("Preempt", resources=("machine-8",))])
    assert source.poll() == []
    events = [azure_event("Preempt"), azure_event("Freeze"), azure_event("Reboot", EventStatus="Completed")]
    service.set(incarnation=3, events=events)
    preempt, freeze = source.poll()
    assert (preempt.kind, freeze.kind) == ("stop", "save")
    assert "Preempt" in preempt.reason
    assert about(preempt.left_s, 30)
    assert source.poll() == []  # the same document


def test_azure_events_that_have_begun_have_no_date(serve: Callable[..., Service]) -> None:
    service = serve(
        answer_azure, incarnation=1, events=[azure_event("Redeploy", NotBefore="", EventStatus="Started")]
    )
    (notice,) = AzureSource(service.url).poll()
    assert (notice.kind, notice.left_s) == ("stop", None)


@pytest.mark.parametrize("events", ["x", [{"EventId": 1}], [azure_event("Preempt", NotBefore="soon")]])
def test_azure_may_say_something_else(events: Any, serve: Callable[..., Service]) -> None:
    source = AzureSource(serve(answer_azure, incarnation=1, events=events).url)
    for _ in range(2):  # not forgotten by the second time
        with pytest.raises(BadAnswer):
            source.poll()


# SLURM


def test_slurm_announces_its_time_limit() -> None:
    assert SlurmSource(time.time() + 600, lead_s=120).poll() == []
    (notice,) = SlurmSource(time.time() + 100, lead_s=120).poll()
    assert notice.kind == "stop"
    assert about(notice.left_s, 100)
    with pytest.raises(BadAnswer, match="SLURM_JOB_END_TIME"):
        SlurmSource(None, lead_s=120).poll()


# The thread


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


def wait_until(condition: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "never"
        time.sleep(0.005)


class Scripted:
    """A source whose polls go as in a list, the last again and again."""

    name = "scripted"
    pause_s = 0.001

    def __init__(self, *polls: Any) -> None:
        self.polls = list(polls)
        self.count = 0

    def poll(self) -> list[Notice]:
        self.count += 1
        found = self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]
        if isinstance(found, Exception):
            raise found
        return list(found)

    def abort(self) -> None: ...


def test_a_notice_is_passed_on_once() -> None:
    notices: list[Notice] = []
    notice = Notice(kind="stop", reason="one")
    source = Scripted([], [notice], [notice], [notice, Notice(kind="stop", reason="two")])
    watcher = Watcher(source, notices.append, Sink())
    wait_until(lambda: source.count > 8)
    watcher.stop()
    watcher.stop()
    assert [found.reason for found in notices] == ["one", "two"]


def test_trouble_is_told_once_and_so_is_its_end() -> None:
    sink = Sink()
    trouble = [ConnectionRefusedError("no"), TimeoutError(), BadAnswer("status 500")]
    source = Scripted(*trouble, [], [])
    watcher = Watcher(source, lambda notice: None, sink)
    wait_until(lambda: source.count > 5)
    watcher.stop()
    assert [event.name for event in sink.events] == ["preempt.watch_failed", "preempt.watch_works"]
    assert "scripted" in sink.events[0].text
    assert "no" in sink.events[0].text


def test_nobody_answers(serve: Callable[..., Service]) -> None:
    """The machine is no machine of that cloud: training goes on, and the watch ends when it is told to."""
    service = serve(answer_aws, token="t1")
    service.close()
    service.close = lambda: None  # type: ignore[method-assign]  # done
    sink = Sink()
    watcher = Watcher(AwsSource(service.url), lambda notice: None, sink)
    wait_until(lambda: sink.events)
    began_s = time.monotonic()
    watcher.stop()
    assert time.monotonic() - began_s < 1
    assert "training goes on without them: ConnectionRefusedError" in sink.events[0].text


def test_a_question_that_is_held_back_is_cut_short_at_the_end(serve: Callable[..., Service]) -> None:
    service = serve(answer_gcp, preempted="FALSE", **{"maintenance-event": "NONE"})
    sink = Sink()
    watcher = Watcher(GcpSource(service.url), lambda notice: None, sink)
    wait_until(lambda: any("wait_for_change" in line for line in service.log))
    began_s = time.monotonic()
    watcher.stop()
    assert time.monotonic() - began_s < 0.9
    assert not watcher._thread.is_alive()
    assert sink.events == []
    service.set(preempted="TRUE")  # lets the server's thread go


def test_from_notice_to_stop(serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(answer_aws, token="t1")
    service.set(action=json.dumps({"action": "stop", "time": f"{in_seconds(120):%Y-%m-%dT%H:%M:%SZ}"}))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
    sink = Sink()
    lookout = Lookout(Preemption(signals=(), watch=("aws", "slurm")), None, sink)
    wait_until(lambda: lookout.tick(SingleGroup()))
    assert lookout.is_due(SingleGroup(), 7)
    lookout.saved(7)
    lookout.close()
    named = {event.name: event for event in sink.events}
    assert set(named) == {"preempt.requested", "preempt.agreed", "preempt.saved", "preempt.watch_failed"}
    assert "AWS spot notice" in named["preempt.agreed"].text
    left_s = named["preempt.saved"].fields["left_s"]
    assert isinstance(left_s, float)
    assert about(left_s, 120)
    assert named["preempt.watch_failed"].fields["source"] == "slurm"


def test_one_process_of_a_node_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    before = threading.active_count()
    lookout = Lookout(Preemption(signals=(), watch=("aws", "gcp", "azure", "slurm")), None, Sink())
    lookout.tick(SingleGroup())
    assert threading.active_count() == before
    lookout.close()


def test_an_address_that_is_none_is_refused() -> None:
    for bad in ("https://host", "ftp://host", "http://", ""):
        with pytest.raises(UsageError, match="metadata service"):
            MetadataClient(bad)
    assert MetadataClient("host:81").url == "http://host:81"


def test_the_environment_says_where_services_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardkeep import knobs

    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    assert knobs.read_metadata_address("gcp") == "127.0.0.1:9"
    monkeypatch.delenv("GCE_METADATA_HOST")
    assert knobs.read_metadata_address("gcp") is None
    for text, wanted in (("1700000000", 1.7e9), ("", None), ("x", None)):
        monkeypatch.setenv("SLURM_JOB_END_TIME", text)
        assert knobs.read_slurm_end_time() == wanted
    assert os.environ["SLURM_JOB_END_TIME"] == "x"
