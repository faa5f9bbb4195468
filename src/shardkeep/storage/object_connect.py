"""From a URL and the usual environment to an opened bucket. Reads credentials, keeps and shows none.

What obstore reads from the environment by itself is left to it: keys, tokens, roles, instance metadata, endpoints.
Added here is what people expect beyond that: AWS profiles, Azure connection strings, and plain http where the
endpoint says so.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from shardkeep.errors import UsageError
from shardkeep.knobs import get_knob, read_cloud
from shardkeep.storage.aws_profile import find_profile
from shardkeep.storage.object_client import Connection

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

SCHEMES: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "http": "http",
    "https": "http",
}
SUPPORTED: Final = "s3://bucket/run, gs://bucket/run, az://container/run, https://host/run"

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_ACCOUNT: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)@([a-z0-9]+)\.(?:dfs|blob)\.[a-z0-9.-]+\Z")
_PREFIX: Final = re.compile(r"[^\x00-\x1f\x7f?#\\]*\Z")
_MAX_PAUSE_S: Final = 10
_PARTS_RETRIES: Final = 1_000_000


def connect(scheme: str, rest: str) -> Connection:
    """Open what `scheme`, one of SCHEMES, and the text after `scheme://` name. Talks to nobody yet.

    Raises:
        UsageError: obstore is not installed, or the URL names no bucket. It never repeats what may be a secret.
    """
    _require_obstore(scheme)
    kind = SCHEMES[scheme]
    place, _, path = rest.partition("/")
    prefix = "/".join(part for part in path.split("/") if part)
    if "?" in rest or "#" in rest or ("@" in place and kind != "az"):
        raise UsageError(
            f"{scheme} URL: expected {SUPPORTED}, with nothing else in it (no user, query or fragment)",
            advice="give credentials through the service's usual environment variables, never in the URL",
        )
    if not _PREFIX.match(prefix) or any(part in (".", "..") for part in prefix.split("/")):
        raise UsageError(f"{scheme}://{place}: what follows holds a part that no object's name may have")
    if kind == "http":
        return _connect_http(scheme, place, prefix)
    container, account = place, None
    match = _ACCOUNT.match(place) if kind == "az" else None
    if match:
        container, account = match[1], match[2]
    if not _BUCKET.match(container):
        raise UsageError(f"{scheme} URL without a bucket: expected {SUPPORTED}", advice="name the bucket and the run")
    url = f"{scheme}://{place}/{prefix}".rstrip("/")
    try:
        if kind == "s3":
            return _connect_s3(url, container, prefix)
        if kind == "gs":
            return _connect_gs(url, container, prefix)
        return _connect_azure(url, container, prefix, account)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # obstore refuses settings in many ways, and may quote them
        raise UsageError(
            f"{url}: the settings in the environment are refused ({type(error).__name__})",
            advice="check the endpoint, region and credentials set for this service (docs/guides/object-stores.md)",
        ) from None


def _require_obstore(scheme: str) -> None:
    try:
        import obstore.store  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{scheme}:// URLs need obstore, which is not installed", advice='pip install "shardkeep[objects]"'
        ) from None


def _connect_s3(url: str, bucket: str, prefix: str) -> Connection:
    from obstore.store import S3Store

    cloud = read_cloud()
    options: dict[str, Any] = {}
    profile = find_profile(cloud)
    endpoint = next(
        (cloud[n] for n in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if n in cloud), None
    )
    if profile is not None:
        options |= profile.options
        endpoint = endpoint or profile.endpoint
        if profile.region and "AWS_REGION" not in cloud and "AWS_DEFAULT_REGION" not in cloud:
            options["region"] = profile.region
    if endpoint:
        options["endpoint"] = endpoint
    conditional = True if endpoint is None else None
    if cloud.get("AWS_CONDITIONAL_PUT", "").lower() == "disabled":
        conditional = False
    made = [
        S3Store(bucket, prefix=prefix or None, client_options=_client(endpoint), retry_config=retry, **options)
        for retry in _retries()
    ]
    return Connection(
        url=url, calls=made[0], uploads=made[1], conditional=conditional, folders_linger=endpoint is not None
    )


def _connect_gs(url: str, bucket: str, prefix: str) -> Connection:
    from obstore.store import GCSStore

    made = [
        GCSStore(bucket, prefix=prefix or None, client_options=_client(None), retry_config=retry)
        for retry in _retries()
    ]
    return Connection(url=url, calls=made[0], uploads=made[1], conditional=True)


def _connect_azure(url: str, container: str, prefix: str, account: str | None) -> Connection:
    from obstore.store import AzureStore

    cloud = read_cloud()
    options: dict[str, Any] = _parse_connection_string(cloud.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    if account:
        options["account_name"] = account
    endpoint = options.get("endpoint") or cloud.get("AZURE_STORAGE_ENDPOINT") or cloud.get("AZURE_ENDPOINT")
    made = [
        AzureStore(container, prefix=prefix or None, client_options=_client(endpoint), retry_config=retry, **options)
        for retry in _retries()
    ]
    return Connection(url=url, calls=made[0], uploads=made[1], conditional=True, folders_linger=True)


def _connect_http(scheme: str, host: str, prefix: str) -> Connection:
    from obstore.store import HTTPStore

    if not host:
        raise UsageError(f"{scheme} URL without a host: expected {SUPPORTED}")
    url = f"{scheme}://{host}/{prefix}".rstrip("/")
    made = HTTPStore(url, client_options=_client(url), retry_config=_retries()[0])
    return Connection(url=url, calls=made, uploads=made, conditional=False, writable=False)


def _parse_connection_string(text: str) -> dict[str, str]:
    """Return obstore's options for an Azure connection string; empty for none."""
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "BlobEndpoint": "endpoint",
        "SharedAccessSignature": "sas_key",
    }
    pairs = (item.partition("=") for item in text.split(";"))
    return {names[name]: value for name, _, value in pairs if name in names and value}


def _client(endpoint: str | None) -> ClientConfig:
    return {
        "timeout": datetime.timedelta(seconds=get_knob("REQUEST_TIMEOUT_S")),
        "connect_timeout": datetime.timedelta(seconds=min(10.0, get_knob("REQUEST_TIMEOUT_S"))),
        "allow_http": _is_plain(endpoint) or _is_set(read_cloud(), "AWS_ALLOW_HTTP"),
    }


def _retries() -> tuple[RetryConfig, RetryConfig]:
    """Return how calls are repeated (not here), and how the requests of a writer are."""
    base_s = max(get_knob("RETRY_BASE_S"), 0.01)
    return (
        {"max_retries": 0, "retry_timeout": datetime.timedelta(0)},
        {
            "max_retries": _PARTS_RETRIES,
            "retry_timeout": datetime.timedelta(seconds=get_knob("RETRY_BUDGET_S")),
            "backoff": {
                "init_backoff": datetime.timedelta(seconds=base_s),
                "max_backoff": datetime.timedelta(seconds=_MAX_PAUSE_S),
                "base": 2,
            },
        },
    )


def _is_plain(endpoint: str | None) -> bool:
    return endpoint is not None and endpoint.lower().startswith("http://")


def _is_set(cloud: Mapping[str, str], name: str) -> bool:
    return cloud.get(name, "").lower() in ("1", "true", "yes", "on")
