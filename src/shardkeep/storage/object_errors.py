"""An object service's errors as shardkeep's: each with the object, what the service said, and what to do next.

What obstore says is quoted only in parts that are known to be harmless. Its texts hold whole requests and answers:
URLs whose query may be a signature, bodies that repeat a key's id. For the same reason the original is not chained.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardkeep.errors import AlreadyExists, CheckpointError, Denied, NotFound, OutOfSpace, StorageError, Throttled

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<(?:Code|code)>([A-Za-z0-9.]{1,60})</")
_KIND: Final = re.compile(r"HttpError \{\s+kind: ([A-Z][a-z]+)")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*")
_SLOW: Final = frozenset(
    {
        "SlowDown",
        "ServerBusy",
        "TooManyRequests",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "rateLimitExceeded",
    }
)
_FULL: Final = frozenset(
    {
        "QuotaExceeded",
        "InsufficientStorage",
        "NotEnoughSpace",
        "XMinioStorageFull",
        "AccountBeingCreatedOrFull",
        "MaximumCapacityExceeded",
    }
)
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "AccountNotFound"})
_PASSING_CODES: Final = frozenset(
    {
        "RequestTimeout",
        "InternalError",
        "ServiceUnavailable",
        "OperationAborted",
        "OperationTimedOut",
        "IncompleteBody",
        "BadDigest",
        "Md5Mismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_EXPIRED: Final = frozenset({"ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException"})
_METADATA: Final = ("169.254.169.254", "169.254.170.2", "fd00:ec2::254", "metadata.google.internal")
_LASTING: Final = ("certificate", "URL scheme is not allowed", "builder error", "relative URL without a base")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What matters of an obstore exception: HTTP status and error code where there are any, and a safe text."""

    status: int | None
    code: str | None
    text: str


def read_reply(error: BaseException) -> Reply:
    """Take an obstore exception apart; `text` holds no query, no user name and no body."""
    whole = str(error)
    head = whole.split("\n\nDebug source", 1)[0]
    status = _STATUS.search(head)
    code = _CODE.search(head)
    if status is not None or code is not None:
        words = [f"HTTP {status[1]}"] if status else []
        words += [code[1]] if code else []
        return Reply(status=int(status[1]) if status else None, code=code[1] if code else None, text=", ".join(words))
    line = head.splitlines()[0] if head else type(error).__name__
    if "Error performing" in line:
        line = line.partition(" - ")[2] or line  # what was asked, and how long it took, helps nobody
        kind = _KIND.search(whole)
        line += f" ({kind[1].lower()})" if kind else ""
    return Reply(status=None, code=None, text=_URL.sub(lambda match: strip_url(match[0]), line)[:300])


def strip_url(url: str) -> str:
    """Return a URL without what may be secret: query, fragment, user and password."""
    bare = re.split(r"[?#]", url, maxsplit=1)[0]
    scheme, sep, rest = bare.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{sep}{host.rpartition('@')[2]}{slash}{path}"


@contextlib.contextmanager
def mapped(doing: str, url: str, *, key: str, missing_ok: bool = False, reached: bool = True) -> Iterator[None]:
    """Raise every exception of obstore in the block as one of `shardkeep.errors`; see `map_object_error`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  # obstore raises its own, OSErrors, ValueErrors and NotImplementedError
        found = map_object_error(error, doing, url, key=key, missing_ok=missing_ok, reached=reached)
        raise found from None


def map_object_error(
    error: BaseException, doing: str, url: str, *, key: str, missing_ok: bool = False, reached: bool = True
) -> CheckpointError:
    """Return the error to raise instead of an exception of obstore.

    Args:
        doing: what failed, as in "cannot <doing> <url>".
        url: the object's, as a person writes it.
        missing_ok: an object that is not there is NotFound, not a failure of the store.
        reached: the service has answered this process before, so that missing credentials are a slip of theirs.
    """
    reply = read_reply(error)
    kind = type(error).__name__
    what = f"cannot {doing} {url}: {reply.text}"
    if isinstance(error, NotImplementedError) or kind == "NotSupportedError" or reply.status in (405, 501):
        return StorageError(what, retryable=False, key=key, advice="this service cannot do that; use another store")
    if reply.code in _NO_BUCKET:
        bucket = "/".join(url.split("/")[:3])
        return StorageError(what, retryable=False, key=key, advice=f"create {bucket} first, or check its name")
    if isinstance(error, FileNotFoundError) or reply.status == 404:
        if missing_ok:
            return NotFound(f"no object {url}", key=key)
        return StorageError(what, retryable=False, key=key, advice="check the name of the bucket and the endpoint")
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExists(f"{url} exists", key=key)
    if reply.status == 507 or reply.code in _FULL:
        return OutOfSpace(what, key=key, advice="raise the quota or remove checkpoints (shardkeep prune)")
    if reply.status == 429 or reply.code in _SLOW:
        return Throttled(what, key=key)
    if reply.code in _EXPIRED or _is_metadata(error):
        # A service for credentials that fails once it has worked is like any other that is down.
        if reached:
            return StorageError(what, retryable=True, key=key, advice=_ADVICE_CREDENTIALS)
        return Denied(f"cannot {doing} {url}: found no credentials", key=key, advice=_ADVICE_CREDENTIALS)
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or reply.status in (401, 403):
        return Denied(what, key=key, advice=_advise_denied(reply.code))
    return _map_rest(error, reply, what, key)


def _map_rest(error: BaseException, reply: Reply, what: str, key: str) -> StorageError:
    if reply.status is not None and not reply.status >= 500:
        passing = reply.status in (408, 409, 423, 425) or reply.code in _PASSING_CODES
        advice = None
        if 300 <= reply.status < 400:
            advice = "the bucket lies in another region: set AWS_REGION to it, or AWS_ENDPOINT_URL"
        elif not passing:
            advice = "check the endpoint and its settings (docs/guides/object-stores.md)"
        return StorageError(what, retryable=passing, key=key, advice=advice)
    text = str(error)
    if "BareRedirect" in text or "without LOCATION" in text:
        return StorageError(
            what, retryable=False, key=key, advice="the bucket lies in another region: set AWS_REGION to it"
        )
    if any(word in text for word in _LASTING):
        return StorageError(what, retryable=False, key=key, advice="check the endpoint's address and certificate")
    # Connections that break, time out or end early; 5xx: the same call may succeed later.
    return StorageError(what, retryable=True, key=key)


def _is_metadata(error: BaseException) -> bool:
    text = str(error)
    return any(host in text for host in _METADATA)


_ADVICE_CREDENTIALS: Final = (
    "set the service's usual variables (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY) or give the machine a role"
)


def _advise_denied(code: str | None) -> str:
    if code == "RequestTimeTooSkewed":
        return "set the clock of this machine: the service refuses signatures of another time"
    if code in ("SignatureDoesNotMatch", "InvalidAccessKeyId", "AuthenticationFailed", "InvalidToken"):
        return f"check the credentials. To use others, {_ADVICE_CREDENTIALS}"
    return "ask for the rights to list, read, write and delete there, or check which credentials are in use"
