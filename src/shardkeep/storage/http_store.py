"""`HttpStore`: a run on a web server, to read. Lists by the server's own index pages; objects through obstore.

For runs that somebody publishes: any server that answers ranged requests and shows what is in a folder (nginx with
`autoindex`, Apache, `python -m http.server` for whole objects only, and most others) will do.
"""

from __future__ import annotations

import html.parser
import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from shardkeep.errors import CheckpointError, Denied, StorageError
from shardkeep.knobs import get_knob
from shardkeep.storage.base import Capabilities, ObjectInfo, ObjectWriter
from shardkeep.storage.keys import check_folder, check_key, check_prefix, is_part
from shardkeep.storage.object_reader import ObjectReader

_MAX_PAGE_BYTES: Final = 64 << 20
_HEAD_THREADS: Final = 16


class HttpStore(ObjectReader):
    """Objects below an http or https URL. Implements `Store`; every change is Denied. Safe for threads."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exclusive_create=False, write_offsets_multiple_bytes=1, shared=True, remote=True)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Raise Denied."""
        check_key(key)
        raise self._refuse(key)

    def writer(self, key: str, size_bytes: int) -> ObjectWriter:
        """Raise Denied."""
        check_key(key)
        raise self._refuse(key)

    def clone(self, source: str, target: str) -> None:
        """Raise Denied."""
        check_key(source)
        check_key(target)
        raise self._refuse(target)

    def delete(self, keys: Iterable[str]) -> None:
        """Raise Denied."""
        for key in keys:
            check_key(key)
            raise self._refuse(key)

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key starts with `prefix`, ascending by key. Asks for each one's size."""
        check_prefix(prefix)
        top = prefix[: prefix.rfind("/") + 1]
        waiting = [top]
        keys: list[str] = []
        while waiting:
            at = waiting.pop()
            for name in self._read_index(at):
                if not (at + name).startswith(prefix):
                    continue
                if name.endswith("/"):
                    waiting.append(at + name)
                else:
                    keys.append(at + name)
        with ThreadPoolExecutor(_HEAD_THREADS, thread_name_prefix="shardkeep-head") as pool:
            return list(pool.map(self.head, sorted(keys)))

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below `prefix`, ascending."""
        check_folder(prefix)
        return sorted(name[:-1] for name in self._read_index(prefix) if name.endswith("/"))

    def _read_index(self, folder: str) -> list[str]:
        """Return the names in a folder, those of folders with a `/` at their end; nothing when there is none."""
        # A person may have typed a space; what is escaped already stays.
        url = f"{urllib.parse.quote(self.url, safe=_URL_SAFE)}/{urllib.parse.quote(folder)}"
        try:
            request = urllib.request.Request(url, headers={"Accept": "text/html"})
            with urllib.request.urlopen(request, timeout=get_knob("REQUEST_TIMEOUT_S")) as answer:
                kind = answer.headers.get_content_type()
                data = answer.read(_MAX_PAGE_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return []
            raise self._map(error.code, url) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StorageError(f"cannot list {url}: {type(error).__name__}", retryable=True, key=folder) from None
        if kind != "text/html":
            raise self._refuse_index(url)
        if len(data) > _MAX_PAGE_BYTES:  # half a list would pass for a whole one
            raise StorageError(
                f"{url}: the index is larger than {_MAX_PAGE_BYTES} bytes", retryable=False, key=folder
            )
        parser = _Links()
        parser.feed(data.decode("utf-8", "replace"))
        return sorted(parser.names)

    def _map(self, status: int, url: str) -> CheckpointError:
        if status in (401, 403):
            return Denied(f"cannot list {url}: HTTP {status}", advice=_ADVICE_INDEX)
        passing = status >= 500 or status in (408, 429)
        return StorageError(f"cannot list {url}: HTTP {status}", retryable=passing)

    def _refuse_index(self, url: str) -> StorageError:
        return StorageError(f"{url} is no index of a folder", retryable=False, advice=_ADVICE_INDEX)

    def _refuse(self, key: str) -> Denied:
        return Denied(
            f"{self._client.where(key)}: http and https are for reading only",
            key=key,
            advice="save to a path or an object store, and publish that folder",
        )


_URL_SAFE: Final = "%/:[]@!$&'()*+,;=~"
_ADVICE_INDEX: Final = "let the server show what is in its folders (nginx: autoindex on)"


class _Links(html.parser.HTMLParser):
    """Gathers the names that an index page links to; links that lead elsewhere are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href") if tag == "a" else None
        if not target or "?" in target or "#" in target:
            return
        name = urllib.parse.unquote(target.removeprefix("./"))
        if is_part(name.removesuffix("/")):
            self.names.add(name)
