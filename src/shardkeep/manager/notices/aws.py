"""Interruption notices and rebalance recommendations of EC2 spot instances, by version 2 of the metadata service.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html: two minutes ahead. Both
paths are answered with 404 until there is something to say.
"""

from __future__ import annotations

import datetime
import time
from typing import Final, TypeVar

import msgspec

from shardkeep.manager.notices.metadata import BadAnswer, MetadataClient, Reply, check_status
from shardkeep.manager.notices.watcher import Notice

BASE_URL: Final = "http://169.254.169.254"
_TOKEN: Final = "/latest/api/token"
_ACTION: Final = "/latest/meta-data/spot/instance-action"
_REBALANCE: Final = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN_S: Final = 21600


class _Action(msgspec.Struct, frozen=True):
    action: str
    time: datetime.datetime


class _Rebalance(msgspec.Struct, frozen=True, rename="camel"):
    notice_time: datetime.datetime


class AwsSource:
    """Asks every 5 s, as AWS recommends."""

    name = "aws"
    pause_s = 5.0

    def __init__(self, base_url: str = BASE_URL) -> None:
        self._client = MetadataClient(base_url)
        self._token = ""
        self._renew_at_s = 0.0

    def poll(self) -> list[Notice]:
        found = []
        action = self._get(_ACTION)
        if action is not None:
            what = _decode(action, _Action, _ACTION)
            left_s = (_utc(what.time) - datetime.datetime.now(datetime.UTC)).total_seconds()
            reason = f"AWS spot notice ({what.action} at {what.time.isoformat()})"
            found.append(Notice(kind="stop", reason=reason, left_s=left_s))
        rebalance = self._get(_REBALANCE)
        if rebalance is not None:
            when = _decode(rebalance, _Rebalance, _REBALANCE).notice_time.isoformat()
            found.append(Notice(kind="save", reason=f"AWS rebalance recommendation of {when}"))
        return found

    def abort(self) -> None:
        self._client.abort()

    def _get(self, path: str) -> Reply | None:
        """Return the answer, or None while there is nothing to say."""
        if time.monotonic() >= self._renew_at_s:
            self._renew()
        reply = self._client.ask(path, headers={"X-aws-ec2-metadata-token": self._token})
        if reply.status == 401:  # the token ended, or the instance was moved
            self._renew()
            reply = self._client.ask(path, headers={"X-aws-ec2-metadata-token": self._token})
        if reply.status == 404:
            return None
        check_status(reply, path)
        return reply

    def _renew(self) -> None:
        reply = self._client.ask(
            _TOKEN,
            method="PUT",
            headers={"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S), "Content-Length": "0"},
        )
        check_status(reply, _TOKEN)
        self._token, self._renew_at_s = reply.text, time.monotonic() + _TOKEN_S / 2


T = TypeVar("T", _Action, _Rebalance)


def _decode(reply: Reply, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(reply.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(f"{path} holds something else than documented: {error}") from None


def _utc(when: datetime.datetime) -> datetime.datetime:
    return when if when.tzinfo is not None else when.replace(tzinfo=datetime.UTC)
