"""`StoreContract`: what every store must do. Ours pass it; yours should too.

Needs no test framework. With pytest, in a test module of your own:

    class TestMyStore(StoreContract):
        def make_store(self) -> Store:
            return MyStore("bucket/" + secrets.token_hex(8))  # empty, and a new one each time

Each `test_*` method takes no arguments and raises AssertionError, so a plain loop over them works as well.
"""

from __future__ import annotations

from collections.abc import Callable

from shardkeep.errors import AlreadyExists, Corrupt, NotFound, StorageError
from shardkeep.storage.base import ObjectInfo
from shardkeep.testing.contract_support import (
    BAD_KEYS,
    GOOD_KEYS,
    SIZES,
    THREADS_COUNT,
    make_bytes,
    raises,
    run_threads,
)
from shardkeep.testing.store_contract_writers import WriterContract


class StoreContract(WriterContract):
    """All the tests. A subclass defines `make_store`, and `reopen` where it can."""

    # --- put, get, head

    def test_put_then_get_returns_the_bytes(self) -> None:
        store = self.make_store()
        for size in SIZES:
            data = make_bytes(size)
            store.put(f"a/{size}", data)
            assert store.get(f"a/{size}", limit_bytes=size) == data
            assert self.reopen(store).get(f"a/{size}", limit_bytes=1 << 20) == data
            assert store.head(f"a/{size}") == ObjectInfo(key=f"a/{size}", size_bytes=size)

    def test_put_replaces_the_whole_object(self) -> None:
        store = self.make_store()
        for data in (b"long, long ago", b"short", b"", b"longer than all before"):
            store.put("a/b", data)
            assert store.get("a/b", limit_bytes=100) == data
        assert [info.key for info in store.list_objects("")] == ["a/b"]

    def test_a_missing_object_is_not_found(self) -> None:
        store = self.make_store()
        store.put("a/b", b"x")
        for key in ("b", "a/c", "a", "a/b/c", "b/c/d"):
            with raises(NotFound) as caught:
                store.get(key, limit_bytes=10)
            assert key in str(caught[0]), f"the message must name the object: {caught[0]}"
            with raises(NotFound):
                store.head(key)
            with raises(NotFound):
                store.read_into(key, 0, memoryview(bytearray(1)))
            with raises(NotFound):
                store.read_into(key, 0, memoryview(bytearray(0)))

    def test_get_of_more_than_the_limit_is_corrupt(self) -> None:
        store = self.make_store()
        store.put("a", b"12345")
        assert store.get("a", limit_bytes=5) == b"12345"
        with raises(Corrupt) as caught:
            store.get("a", limit_bytes=4)
        assert "4" in str(caught[0])
        assert "5" in str(caught[0])

    # --- exclusive create

    def test_if_absent_refuses_other_bytes_and_keeps_the_first(self) -> None:
        store = self.make_store()
        store.put("a/b", b"first", if_absent=True)
        for other in (b"other", b"", b"first and more", b"firs"):
            with raises(AlreadyExists) as caught:
                store.put("a/b", other, if_absent=True)
            assert isinstance(caught[0], StorageError)
            assert not caught[0].retryable
        assert store.get("a/b", limit_bytes=100) == b"first"

    def test_if_absent_with_identical_bytes_is_success(self) -> None:
        store = self.make_store()
        for data in (b"same", b""):
            store.put(f"a/{len(data)}", data)
            store.put(f"a/{len(data)}", data, if_absent=True)
            store.put(f"a/{len(data)}", data, if_absent=True)

    def test_of_threads_that_create_one_key_exactly_one_wins(self) -> None:
        store = self.make_store()
        if not store.capabilities.exclusive_create:
            return
        for attempt in range(5):
            key = f"claims/{attempt}/generation.json"
            outcomes = run_threads(lambda index, key=key: store.put(key, b"%d" % index, if_absent=True))  # type: ignore[misc]
            losers = [error for error in outcomes if error is not None]
            assert all(isinstance(error, AlreadyExists) for error in losers), losers
            assert len(losers) == THREADS_COUNT - 1
            assert store.get(key, limit_bytes=10) == b"%d" % outcomes.index(None)

    def test_threads_that_create_identical_objects_all_succeed(self) -> None:
        store = self.make_store()
        outcomes = run_threads(lambda _: store.put("a/b", b"commit", if_absent=True))
        assert outcomes == [None] * THREADS_COUNT
        assert [info.key for info in store.list_objects("")] == ["a/b"]

    def test_readers_see_old_or_new_bytes_never_a_mixture(self) -> None:
        store = self.make_store()
        versions = [bytes([index]) * (1000 + index) for index in range(THREADS_COUNT)]
        store.put("a/b", versions[0])

        def work(index: int) -> None:
            for _ in range(10):
                if index % 2:
                    store.put("a/b", versions[index])
                else:
                    assert store.get("a/b", limit_bytes=2000) in versions

        assert run_threads(work) == [None] * THREADS_COUNT

    # --- listing

    def test_list_objects_is_ascending_by_key_and_matches_by_prefix(self) -> None:
        store = self.make_store()
        keys = ["a", "a-b", "a.b", "a/b", "a/b-c", "a/b/c", "a0", "b/a/c/d", "b/ab", "ab/c"]
        keys = [key for key in keys if not any(other.startswith(f"{key}/") for other in keys)]  # files are no folders
        for index, key in enumerate(reversed(keys)):
            store.put(key, bytes(index))
        sizes = {key: index for index, key in enumerate(reversed(keys))}
        for prefix in ("", "a", "a/", "a/b", "a/b/", "a-", "b", "b/a", "b/a/", "b/a/c/d", "c", "c/", "a/b/c/d/e"):
            wanted = [ObjectInfo(key=key, size_bytes=sizes[key]) for key in sorted(keys) if key.startswith(prefix)]
            assert store.list_objects(prefix) == wanted, prefix

    def test_list_folders_names_what_is_right_below(self) -> None:
        store = self.make_store()
        assert store.list_folders("") == []
        assert store.list_folders("g0001/") == []
        for key in ("run.json", "g0002/s1/c", "g0002/s1/d", "g0001/s2/c", "g0001/s1.2/c", "g0001/x", "g00010/s/c"):
            store.put(key, b"")
        assert store.list_folders("") == ["g0001", "g00010", "g0002"]
        assert store.list_folders("g0001/") == ["s1.2", "s2"]
        assert store.list_folders("g0001/s2/") == []
        assert store.list_folders("none/") == []
        for prefix in ("g0001", "g000"):
            with raises(StorageError):
                store.list_folders(prefix)

    def test_what_was_put_is_listed_at_once_also_elsewhere(self) -> None:
        store = self.make_store()
        for index in range(20):
            store.put(f"a/{index:02}", b"")
            assert len(self.reopen(store).list_objects("a/")) == index + 1

    # --- delete

    def test_delete_removes_and_may_be_repeated(self) -> None:
        store = self.make_store()
        for key in ("a/b/c", "a/b/d", "a/e", "f"):
            store.put(key, b"x")
        store.delete(iter(["a/b/c", "a/none", "none/none", "a/b/c"]))
        store.delete(["a/b/c"])
        assert [info.key for info in store.list_objects("")] == ["a/b/d", "a/e", "f"]
        with raises(NotFound):
            store.get("a/b/c", limit_bytes=10)
        store.delete([])
        store.delete(["a/b/d", "a/e"])
        assert store.list_folders("") == []
        store.delete(["f"])
        assert self.reopen(store).list_objects("") == []
        store.put("a/b/c", b"again", if_absent=True)
        assert store.get("a/b/c", limit_bytes=10) == b"again"

    def test_delete_of_a_folder_name_removes_nothing(self) -> None:
        store = self.make_store()
        store.put("a/b", b"x")
        store.delete(["a", "a/b/c"])
        assert store.get("a/b", limit_bytes=10) == b"x"

    def test_delete_checks_all_keys_before_it_removes_one(self) -> None:
        store = self.make_store()
        store.put("a", b"x")
        with raises(StorageError):
            store.delete(["a", "../a"])
        assert store.get("a", limit_bytes=10) == b"x"

    def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(self) -> None:
        store = self.make_store()

        def work(index: int) -> None:
            for _ in range(15):
                store.put(f"a/b/{index}", b"x", if_absent=index % 2 == 0)
                assert store.get(f"a/b/{index}", limit_bytes=10) == b"x"
                store.delete([f"a/b/{index}"])

        assert run_threads(work) == [None] * THREADS_COUNT
        assert store.list_objects("") == []

    # --- keys

    def test_odd_keys_are_refused_by_every_call(self) -> None:
        store = self.make_store()
        for key in BAD_KEYS:
            calls: list[Callable[[], object]] = [
                lambda key=key: store.put(key, b""),  # type: ignore[misc]
                lambda key=key: store.put(key, b"", if_absent=True),  # type: ignore[misc]
                lambda key=key: store.writer(key, 1),  # type: ignore[misc]
                lambda key=key: store.clone(key, "a"),  # type: ignore[misc]
                lambda key=key: store.clone("a", key),  # type: ignore[misc]
                lambda key=key: store.get(key, limit_bytes=1),  # type: ignore[misc]
                lambda key=key: store.read_into(key, 0, memoryview(bytearray(1))),  # type: ignore[misc]
                lambda key=key: store.head(key),  # type: ignore[misc]
                lambda key=key: store.delete([key]),  # type: ignore[misc]
            ]
            for call in calls:
                with raises(StorageError) as caught:
                    call()
                assert isinstance(caught[0], StorageError)
                assert not caught[0].retryable, key
        for prefix in ("/", "/a", "../", "a/../", "a//", "./", "é", ".tmp-"):
            with raises(StorageError):
                store.list_objects(prefix)
            with raises(StorageError):
                store.list_folders(prefix)
        assert store.list_objects("") == []

    def test_plain_keys_are_taken_as_they_are(self) -> None:
        store = self.make_store()
        for key in GOOD_KEYS:
            store.put(key, key.encode())
        for key in GOOD_KEYS:
            assert store.get(key, limit_bytes=300) == key.encode()
        assert [info.key for info in store.list_objects("")] == sorted(GOOD_KEYS)

    # --- what a store says of itself

    def test_url_and_capabilities_are_stable(self) -> None:
        store = self.make_store()
        before = (store.url, store.capabilities)
        store.put("a", b"x")
        assert (store.url, store.capabilities) == before
        assert before[0]
        assert before[1].write_offsets_multiple_bytes >= 1
