"""Records: every bit is checked, what is newer is named as such, and hostile text is Corrupt, quickly."""

from __future__ import annotations

import hashlib
import json
import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.errors import Corrupt, IncompatibleFormat
from shardkeep.format.names import StepRef
from shardkeep.format.records import (
    KINDS,
    CommitBrief,
    CommitRecord,
    Facts,
    FileRecord,
    GenerationRecord,
    JournalRecord,
    LayoutTable,
    MarkRecord,
    PartRecord,
    PartSummary,
    PartValues,
    PerRankTensor,
    PruneRecord,
    RunRecord,
    ShardRecord,
    StoredChunk,
    TensorRecord,
    ValueHolder,
    ViewRecord,
    decode_metrics,
    decode_record,
    encode_metrics,
    encode_record,
)
from shardkeep.format.versions import FORMAT_VERSION
from shardkeep.spec.chunks import Chunk
from shardkeep.spec.layout import Layout, Mesh, RankChunk

REF = StepRef(step=100, generation=2, attempt=3)
DIGEST = "0123456789abcdef" * 4
TABLE = LayoutTable(
    meshes=(Mesh(shape=(2,), ranks=(0, 1), names=("dp",)),),
    tensors={
        "model/w": TensorRecord(
            dtype="float32",
            shape=(4, 2),
            section="model",
            name="w",
            role="parameter",
            layout=Layout(meshes=(0,), placements=("S0",)),
            trainable=True,
        ),
        "model/s": TensorRecord(
            dtype="int64",
            shape=(),
            section="model",
            name="s",
            role="buffer",
            layout=Layout(boxes=(RankChunk(1, Chunk((), ())),)),
            owner=1,
        ),
    },
    aliases={"model/a": "model/w"},
    views={
        "model/v": ViewRecord(
            base="model/w", offset_bytes=4, dtype="int8", shape=(2,), strides=(3,), role="buffer", trainable=False
        )
    },
    per_rank=("model/mean",),
)
FACTS = Facts(
    layout=TABLE,
    holders=(ValueHolder(0, ("a", "b")), ValueHolder(1, ())),
    differing=("rng",),
    metrics=encode_metrics({"loss": math.nan, "best": -math.inf, "accuracy": 0.1}),
    healthy=False,
    created_at="2026-01-01T00:00:00+00:00",
    environment={"torch": "2.13"},
    assets={"config.json": FileRecord(2, DIGEST)},
)
PART = PartRecord(
    run_id="ab",
    ref=REF,
    rank=0,
    world_size=2,
    plan="p",
    shards=(ShardRecord("model-r00000-00001.safetensors", 4128, "model"),),
    digests=FileRecord(16, DIGEST),
    tensors={"model/w": (StoredChunk(Chunk((0, 0), (2, 2)), 0, 4096, 4112),)},
    per_rank={"model/mean": PerRankTensor("float32", (4,), 0, 4112, 4128)},
    values={"z": {"nested": [1, None, 1.5, "text", True]}, "a": 2**60},
    facts=FACTS,
)
RECORDS: list[Any] = [
    RunRecord(run_id="ab"),
    GenerationRecord(
        run_id="ab",
        generation=2,
        parent=REF,
        nonce="n",
        world_size=2,
        created_at="t",
        environment={"b": "1", "a": "2"},
    ),
    GenerationRecord(run_id="ab", generation=1, parent=None, nonce="n", world_size=1, created_at="t"),
    PART,
    CommitRecord(
        run_id="ab", ref=REF, world_size=2, plan="p", parts=(PartSummary(9, DIGEST, 4128, 1),) * 2, facts=FACTS
    ),
    MarkRecord(run_id="ab", kind="hold", ref=REF, reason='é\u2028"\\\n', created_at="t"),
    PruneRecord(run_id="ab", ref=REF, by_generation=4),
    JournalRecord(run_id="ab", generation=2, world_size=2, step_count=3, sha256=DIGEST),
]


def seal(body: bytes) -> bytes:
    """Return a body in a valid envelope, as anyone can make one."""
    return b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'","body":' + body + b"}\n"


def open_body(data: bytes) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(data)["body"]
    return body


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_round_trip(record: Any) -> None:
    data = encode_record(record, writer="test")
    again = decode_record(type(record), data, where="x")
    assert again == record
    assert encode_record(again, writer="test") == data
    assert open_body(data)["head"] == {
        "format": FORMAT_VERSION,
        "kind": KINDS[type(record)],
        "requires": [],
        "writer": "test",
    }


def test_the_envelope_is_json_that_anyone_can_check() -> None:
    data = encode_record(RECORDS[0])
    body = b'{"head":{"format":1,"kind":"run","requires":[],"writer":""},"run_id":"ab"}'
    assert data == seal(body)
    assert json.loads(data)["sha256"] == hashlib.sha256(body).hexdigest()


def test_the_order_in_which_a_dict_was_filled_does_not_show() -> None:
    shuffled = msgspec.structs.replace(
        PART,
        values=dict(reversed(PART.values.items())),
        facts=msgspec.structs.replace(
            FACTS, layout=msgspec.structs.replace(TABLE, tensors=dict(reversed(TABLE.tensors.items())))
        ),
    )
    assert encode_record(shuffled) == encode_record(PART)


@pytest.mark.parametrize("record", [RECORDS[0], RECORDS[6]], ids=["run", "prune"])
def test_every_flipped_bit_is_found(record: Any) -> None:
    data = encode_record(record)
    for at in range(len(data)):
        for bit in range(8):
            broken = bytearray(data)
            broken[at] ^= 1 << bit
            with pytest.raises(Corrupt, match=r"^key: "):
                decode_record(type(record), bytes(broken), where="key")


def test_every_cut_and_every_addition_is_found() -> None:
    data = encode_record(RECORDS[6])
    cuts = [data[:at] for at in range(len(data))] + [data[at:] for at in range(1, len(data))]
    for broken in [
        *cuts,
        data + b"\n",
        data + b"}\n",
        b"\n" + data,
        data + data,
        data[:-1] + b" \n",
        bytes(len(data)),
    ]:
        with pytest.raises(Corrupt):
            decode_record(PruneRecord, broken, where="key")


def test_a_record_of_another_kind() -> None:
    for record in RECORDS:
        other = PruneRecord if not isinstance(record, PruneRecord) else RunRecord
        with pytest.raises(Corrupt, match=f"expected a {KINDS[other]} record, found a {KINDS[type(record)]} record"):
            decode_record(other, encode_record(record), where="key")


def test_what_is_newer_is_named_as_such() -> None:
    body = {"head": {"format": FORMAT_VERSION + 1, "kind": "unheard of"}, "anything": 1}
    with pytest.raises(
        IncompatibleFormat, match=rf"^key: written in format {FORMAT_VERSION + 1}; .* up to {FORMAT_VERSION}"
    ):
        decode_record(RunRecord, seal(json.dumps(body).encode()), where="key")
    data = encode_record(RECORDS[0], requires=("zeta", "alpha"))
    with pytest.raises(IncompatibleFormat, match="needs the features alpha, zeta") as caught:
        decode_record(RunRecord, data, where="key")
    assert "upgrade" in str(caught.value)


def test_fields_that_are_not_known_are_ignored() -> None:
    body = open_body(encode_record(RECORDS[0])) | {"later": [1, 2]}
    assert decode_record(RunRecord, seal(json.dumps(body).encode()), where="key") == RECORDS[0]


def test_a_brief_is_read_out_of_a_whole_commit() -> None:
    data = encode_record(RECORDS[4])
    brief = decode_record(CommitBrief, data, where="key")
    assert (brief.ref, brief.world_size, brief.parts) == (REF, 2, RECORDS[4].parts)
    assert (brief.facts.metrics, brief.facts.healthy) == (FACTS.metrics, False)


@given(st.dictionaries(st.text(max_size=5), st.floats(width=64), max_size=4))
def test_metrics_come_back_exactly(metrics: dict[str, float]) -> None:
    facts = msgspec.structs.replace(FACTS, metrics=encode_metrics(metrics))
    record = msgspec.structs.replace(PART, facts=facts)
    again = decode_record(PartRecord, encode_record(record), where="key").facts
    assert again is not None
    found = decode_metrics(again.metrics)
    assert list(found) == sorted(metrics)
    for name, value in metrics.items():
        assert type(found[name]) is float
        assert (math.isnan(found[name]) and math.isnan(value)) or (
            found[name] == value and math.copysign(1, found[name]) == math.copysign(1, value)
        )


HEAD = '{"format":1,"kind":"prune"}'
GOOD = '"run_id":"a","ref":{"step":1,"generation":1},"by_generation":1'


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"head":null}',
        '{"head":{"kind":"prune"}}',
        '{"head":{"format":"1","kind":"prune"}}',
        '{"head":{"format":1.5,"kind":"prune"}}',
        '{"head":{"format":0,"kind":"prune"},' + GOOD + "}",
        '{"head":{"format":-1,"kind":"prune"},' + GOOD + "}",
        '{"head":{"format":1,"kind":"prune","requires":"x"},' + GOOD + "}",
        '{"head":' + HEAD + "}",
        '{"head":' + HEAD + "," + GOOD,
        '{"head":' + HEAD + "," + GOOD.replace('"a"', "5") + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"step":1', '"step":-1') + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"step":1', '"step":1000000000000000') + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"step":1', '"step":true') + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"step":1', '"step":1.5') + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"step":1', '"step":' + "9" * 100_000) + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"generation":1', '"generation":0') + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"generation":1', '"generation":1,"attempt":0') + "}",
        '{"head":' + HEAD + "," + GOOD + ',"x":' + "[" * 200_000 + "]" * 200_000 + "}",
        '{"head":' + HEAD + "," + GOOD.replace('"ref":{', '"ref":' + '{"x":' * 200_000 + "{") + "}",
        '{"head":' + HEAD + "," + GOOD + ',"x":NaN}',
    ],
    ids=lambda body: body[:60],
)
def test_hostile_text_in_a_valid_envelope(body: str) -> None:
    start = time.process_time()
    with pytest.raises(Corrupt, match=r"^key: ") as caught:
        decode_record(PruneRecord, seal(body.encode()), where="key")
    assert len(str(caught.value)) < 500
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        b'{"head":{"format":1,"kind":"\xff"}}',
        b'{"head":{"format":1,"kind":"prune"},"run_id":"\xed\xa0\x80"}',
    ],
)
def test_text_that_is_not_unicode(body: bytes) -> None:
    with pytest.raises(Corrupt, match=r"^key: "):
        decode_record(PruneRecord, seal(body), where="key")


def set_in(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    index: Any = int(first) if isinstance(body, list) else first
    copy: Any = list(body) if isinstance(body, list) else dict(body)
    copy[index] = set_in(copy[index], rest, value) if rest else value
    return copy


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rank", -1),
        ("world_size", 0),
        ("world_size", 10**12),
        ("digests.size_bytes", -1),
        ("digests.sha256", "0" * 63),
        ("digests.sha256", "0" * 63 + "G"),
        ("digests.sha256", "0" * 64 + "\n"),
        ("shards.0.1", -8),
        ("shards.0.1", 1 << 63),
        ("tensors.model/w.0.1", -1),
        ("tensors.model/w.0.2", -1),
        ("tensors.model/w.0.0.0", "x"),
        ("per_rank.model/mean.1", [-4]),
        ("facts.metrics.loss", None),
        ("facts.metrics.loss", "NaN"),
        ("facts.holders.0.0", -1),
        ("facts.layout.tensors.model/w.shape", [1.5]),
        ("facts.layout.tensors", []),
    ],
)
def test_parts_with_fields_that_cannot_be(path: str, value: Any) -> None:
    body = set_in(open_body(encode_record(PART)), path, value)
    with pytest.raises(Corrupt, match="malformed part record"):
        decode_record(PartRecord, seal(json.dumps(body).encode()), where="key")


def test_every_kind_of_record_has_a_name_of_its_own() -> None:
    partial = (CommitBrief, PartValues)
    kinds = {kind: name for kind, name in KINDS.items() if kind not in partial}
    assert len(set(kinds.values())) == len(kinds)
    assert {type(record) for record in RECORDS} == set(kinds)
