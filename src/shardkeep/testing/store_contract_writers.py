"""`WriterContract`: the part of the store contract about writers and ranged reads."""

from __future__ import annotations

import random

from shardkeep.errors import AlreadyExists, Corrupt, NotFound, StorageError
from shardkeep.storage.base import ObjectWriter, Store
from shardkeep.testing.contract_support import (
    BIG_BYTES,
    SIZES,
    THREADS_COUNT,
    make_bytes,
    raises,
    read_object,
    run_threads,
    write_object,
)


class WriterContract:
    """Writers and ranged reads; part of `StoreContract`."""

    def make_store(self) -> Store:
        """Return an empty store. Called once in each test."""
        raise NotImplementedError

    def reopen(self, store: Store) -> Store:
        """Return a store over the same objects that shares no memory with `store`, where there is such a thing."""
        return store

    # --- clones

    def test_a_clone_is_an_object_of_its_own_with_the_same_bytes(self) -> None:
        store = self.make_store()
        for size in SIZES:
            data = make_bytes(size)
            write_object(store, f"a/{size}", data)
            store.clone(f"a/{size}", f"b/c/{size}")
            store.clone(f"b/c/{size}", f"b/{size}")
            for key in (f"b/c/{size}", f"b/{size}"):
                assert self.reopen(store).get(key, limit_bytes=size) == data
                assert store.head(key).size_bytes == size
            store.delete([f"a/{size}"])
            assert store.get(f"b/c/{size}", limit_bytes=size) == data
            store.put(f"b/c/{size}", b"replaced")
            assert store.get(f"b/{size}", limit_bytes=size) == data
        assert [info.key for info in store.list_objects("a/")] == []

    def test_a_clone_of_what_is_put_and_of_large_objects(self) -> None:
        store = self.make_store()
        store.put("a/small", b"put")
        write_object(store, "a/big", make_bytes(BIG_BYTES))
        for name in ("small", "big"):
            store.clone(f"a/{name}", f"b/{name}")
        assert store.get("b/small", limit_bytes=10) == b"put"
        assert read_object(store, "b/big", 0, BIG_BYTES) == make_bytes(BIG_BYTES)

    def test_a_clone_of_nothing_is_not_found_and_leaves_nothing(self) -> None:
        store = self.make_store()
        store.put("a/b", b"x")
        for source in ("a/c", "c", "a", "a/b/c"):
            with raises(NotFound) as caught:
                store.clone(source, "d/e")
            assert source in str(caught[0]), f"the message must name the object: {caught[0]}"
        assert [info.key for info in store.list_objects("")] == ["a/b"]

    def test_a_clone_never_changes_an_object(self) -> None:
        store = self.make_store()
        store.put("a/b", b"first")
        store.put("a/c", b"second")
        for _ in range(2):
            with raises(AlreadyExists) as caught:
                store.clone("a/b", "a/c")
            assert "a/c" in str(caught[0])
        assert store.get("a/c", limit_bytes=10) == b"second"
        assert store.get("a/b", limit_bytes=10) == b"first"

    # --- writers

    def test_writer_of_every_size_gives_back_the_bytes(self) -> None:
        store = self.make_store()
        for size in SIZES:
            data = make_bytes(size)
            write_object(store, f"a/{size}", data)
            assert self.reopen(store).get(f"a/{size}", limit_bytes=size) == data
            assert store.head(f"a/{size}").size_bytes == size

    def test_writer_takes_blocks_in_any_order_and_size(self) -> None:
        store = self.make_store()
        data = make_bytes(70_001)
        step = store.capabilities.write_offsets_multiple_bytes
        for seed in range(4):
            draw = random.Random(seed)
            marks = range(step, len(data), step)
            cuts = sorted(draw.sample(marks, k=min(9, len(marks))))
            blocks = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
            draw.shuffle(blocks)
            writer = store.writer(f"a/{seed}", len(data))
            for start, end in blocks:
                writer.write_at(start, memoryview(data)[start:end])
            writer.finish()
            assert store.get(f"a/{seed}", limit_bytes=len(data)) == data

    def test_writer_takes_header_then_blocks_then_a_short_tail_from_threads(self) -> None:
        store = self.make_store()
        data = make_bytes(BIG_BYTES + 4096)
        block = 1 << 20
        writer = store.writer("a/b", len(data))
        starts = [0, *range(4096, len(data), block)]
        blocks = list(zip(starts, [*starts[1:], len(data)], strict=True))
        step = store.capabilities.write_offsets_multiple_bytes
        if any(start % step for start, _ in blocks):
            blocks = [(start, min(start + step, len(data))) for start in range(0, len(data), step)]

        def work(index: int) -> None:
            for start, end in blocks[index::THREADS_COUNT]:
                writer.write_at(start, memoryview(data)[start:end])

        assert run_threads(work) == [None] * THREADS_COUNT
        writer.finish()
        assert store.get("a/b", limit_bytes=len(data)) == data

    def test_finish_refuses_a_hole_and_the_object_is_abandoned(self) -> None:
        store = self.make_store()
        step = max(512, store.capabilities.write_offsets_multiple_bytes)
        for number, written in enumerate([[], [0], [1], [0, 2], [1, 2]]):
            writer = store.writer(f"a/{number}", 3 * step)
            for index in written:
                writer.write_at(index * step, memoryview(bytes(step)))
            with raises(StorageError) as caught:
                writer.finish()
            assert f"a/{number}" in str(caught[0])
            self._check_abandoned(store, writer, f"a/{number}")

    def test_blocks_that_leave_the_object_or_overlap_are_refused(self) -> None:
        store = self.make_store()
        step = max(512, store.capabilities.write_offsets_multiple_bytes)
        for number, (offset, length) in enumerate(
            [(-step, step), (2 * step, 1), (step, step + 1), (0, 1), (0, step)]
        ):
            writer = store.writer(f"a/{number}", 2 * step)
            writer.write_at(0, memoryview(bytes(step)))
            with raises(StorageError):
                writer.write_at(offset, memoryview(bytes(length)))
            writer.abort()
            self._check_abandoned(store, writer, f"a/{number}")

    def test_abort_removes_what_was_written_and_never_raises(self) -> None:
        store = self.make_store()
        writer = store.writer("a/b", 10_000)
        writer.write_at(0, memoryview(bytes(4096)))
        writer.abort()
        self._check_abandoned(store, writer, "a/b")
        writer = store.writer("a/b", 5)
        writer.write_at(0, memoryview(b"hello"))
        writer.finish()
        writer.abort()
        writer.abort()
        assert store.get("a/b", limit_bytes=10) == b"hello"

    def test_a_writer_never_touches_an_object_that_is_there(self) -> None:
        store = self.make_store()
        store.put("a/b", b"committed")
        with raises(AlreadyExists):
            writer = store.writer("a/b", 5)
            writer.write_at(0, memoryview(b"other"))
            writer.finish()
        assert store.get("a/b", limit_bytes=100) == b"committed"

    def test_after_finish_a_writer_takes_nothing_more(self) -> None:
        store = self.make_store()
        writer = store.writer("a", 2)
        writer.write_at(0, memoryview(b"ab"))
        writer.finish()
        with raises(StorageError):
            writer.write_at(0, memoryview(b"c"))
        with raises(StorageError):
            writer.finish()
        assert store.get("a", limit_bytes=2) == b"ab"

    def test_blocks_may_be_any_contiguous_memory(self) -> None:
        store = self.make_store()
        shaped = memoryview(bytearray(make_bytes(96))).cast("i", (4, 6))
        writer = store.writer("a", 96)
        writer.write_at(0, shaped)
        writer.finish()
        back = memoryview(bytearray(96)).cast("i", (4, 6))
        store.read_into("a", 0, back)
        assert back.tobytes() == shaped.tobytes()

    # --- reads

    def test_read_into_at_odd_offsets_and_lengths(self) -> None:
        store = self.make_store()
        data = make_bytes(BIG_BYTES)
        write_object(store, "a/b", data, 1 << 20)
        near = (0, 1, 511, 512, 4095, 4096, 4097, 262_144, 1 << 20)
        for offset in (*near, BIG_BYTES - 4097, BIG_BYTES - 1, BIG_BYTES):
            for length in (0, *near, BIG_BYTES - offset):
                if offset + length <= BIG_BYTES:
                    assert read_object(store, "a/b", offset, length) == data[offset : offset + length], (
                        offset,
                        length,
                    )

    def test_read_into_leaves_what_is_beside_the_buffer(self) -> None:
        store = self.make_store()
        data = make_bytes(600_000)
        store.put("a", data)
        for before in (0, 1, 4096):
            buffer = bytearray(b"\xaa" * (before + 524_289 + 10))
            store.read_into("a", 4096, memoryview(buffer)[before : before + 524_289])
            assert buffer[:before] == b"\xaa" * before
            assert buffer[before : before + 524_289] == data[4096 : 4096 + 524_289]
            assert buffer[before + 524_289 :] == b"\xaa" * 10

    def test_a_short_object_is_corrupt_and_says_by_how_much(self) -> None:
        store = self.make_store()
        store.put("a/b", make_bytes(300_000))
        for offset, length in ((0, 300_001), (299_999, 2), (300_001, 0), (4096, 300_000), (1 << 40, 4096)):
            with raises(Corrupt) as caught:
                store.read_into("a/b", offset, memoryview(bytearray(length)))
            for part in ("a/b", str(offset + length), "300000"):
                assert part in str(caught[0]), f"{part} is missing in: {caught[0]}"
        with raises(StorageError):
            store.read_into("a/b", -1, memoryview(bytearray(1)))

    def test_threads_read_one_object_at_once(self) -> None:
        store = self.make_store()
        data = make_bytes(1 << 20)
        write_object(store, "a", data)

        def work(index: int) -> None:
            for offset in range(index * 1000, len(data), 131_072):
                length = min(300_000, len(data) - offset)
                assert read_object(store, "a", offset, length) == data[offset : offset + length]

        assert run_threads(work) == [None] * THREADS_COUNT

    def _check_abandoned(self, store: Store, writer: ObjectWriter, key: str) -> None:
        """An abandoned object is gone and its writer takes nothing more."""
        with raises(StorageError):
            writer.write_at(0, memoryview(b"x"))
        with raises(StorageError):
            writer.finish()
        writer.abort()
        with raises(NotFound):
            store.head(key)
