"""Names: made and parsed back, and near misses are nobody's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.errors import UsageError
from shardkeep.format.names import (
    StepRef,
    check_step,
    find_generation,
    find_mark,
    find_part,
    find_shard,
    find_step,
    format_digests,
    format_generation,
    format_mark,
    format_part,
    format_shard,
    is_asset,
    is_section,
    is_shard,
)

REFS = st.builds(
    StepRef,
    step=st.integers(0, 10**15 - 1),
    generation=st.integers(1, 10**9 - 1),
    attempt=st.integers(1, 10**6 - 1),
)
NEAR = st.from_regex(r"\A[a-z]{0,5}-?r?g?\d{0,9}(-\d{1,9})?(\.\d{1,3})?(\.json|\.safetensors)?\n?\Z")


@given(REFS)
def test_steps_round_trip(ref: StepRef) -> None:
    generation, _, folder = ref.folder.partition("/")
    assert find_generation(generation) == ref.generation
    assert find_step(ref.generation, folder) == ref
    assert ref.key("commit.json") == f"{ref.folder}/commit.json"


@given(REFS, st.sampled_from(["hold", "quarantine"]), st.from_regex(r"\A[0-9a-f]{8,32}\Z"))
def test_marks_round_trip(ref: StepRef, kind: str, nonce: str) -> None:
    key = format_mark(kind, ref, nonce)
    assert find_mark(key) == (kind, ref)
    for near in (key[1:], key + "\n", key + "/", key.replace("marks/", "marks/x/"), key.replace("-step-", "-step-0")):
        assert find_mark(near) is None


@given(
    st.integers(0, 10**7 - 1), st.integers(1, 10**7 - 1), st.from_regex(r"\A[A-Za-z0-9_%-][A-Za-z0-9_.%-]{0,30}\Z")
)
def test_files_round_trip(rank: int, sequence: int, section: str) -> None:
    assert find_part(format_part(rank)) == rank
    assert is_section(section)
    assert find_shard(format_shard(section, rank, sequence)) == (section, rank, sequence)
    assert not is_asset(format_part(rank))
    assert not is_asset(format_digests(rank))
    assert not is_asset(format_shard(section, rank, sequence))


@given(NEAR)
def test_what_parses_is_what_would_be_written(name: str) -> None:
    generation = find_generation(name)
    assert generation is None or format_generation(generation) == name
    step = find_step(3, name)
    assert step is None or step.folder == f"g0003/{name}"
    part = find_part(name)
    assert part is None or format_part(part) == name
    shard = find_shard(name)
    assert shard is None or format_shard(*shard) == name


def test_examples() -> None:
    assert StepRef(step=1200, generation=2).folder == "g0002/step-00001200"
    assert StepRef(step=1200, generation=2, attempt=2).folder == "g0002/step-00001200.2"
    assert str(StepRef(step=7, generation=1, attempt=3)) == "step 7 of generation 1, try 3"
    assert format_shard("model", 3, 1) == "model-r00003-00001.safetensors"
    assert (format_part(3), format_digests(3)) == ("part-r00003.json", "digests-r00003.bin")


@pytest.mark.parametrize(
    "name",
    [
        "g1",
        "g01",
        "g001",
        "g00001",
        "g0001 ",
        "xg0001",
        "g0001\n",
        "G0001",
        "g0001.tmp",
        "g\u0660\u0660\u0660\u0661",
        "",
        "g",
        "g-001",
    ],
)
def test_no_generations(name: str) -> None:
    assert find_generation(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        "step-0001200",
        "step-000001200",
        "step-00001200.1",
        "step-00001200.0",
        "step-00001200.02",
        "step-00001200.tmp",
        "xstep-00001200",
        "step-00001200x",
        "step-00001200\n",
        "step--0001200",
        "step-\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668",
        "checkpoint-00001200",
    ],
)
def test_no_steps(name: str) -> None:
    assert find_step(1, name) is None


def test_steps_are_ordered_as_numbers() -> None:
    """huggingface/accelerate#1163: text order puts 9 after 10."""
    refs = [StepRef(step=step, generation=1) for step in (9, 10, 99, 100, 10**9)]
    assert sorted(set(refs)) == refs
    assert sorted([StepRef(step=1, generation=2), StepRef(step=2, generation=1)])[-1].step == 2


@pytest.mark.parametrize(
    "name", ["part-r1.json", "part-r000001.json", "part-r00001.json\n", "part-r-0001.json", "part-r00001"]
)
def test_no_parts(name: str) -> None:
    assert find_part(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "model-r00003-00001.safetensors\n",
        "model-r000003-00001.safetensors",
        "model-r00003-000001.safetensors",
        "-r00003-00001.safetensors",
        ".x-r00003-00001.safetensors",
        "a/b-r00003-00001.safetensors",
        "..-r00003-00001.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors",
    ],
)
def test_no_shards(name: str) -> None:
    assert not is_shard(name)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "README.md", "chat_template.jinja", "_x", "a" * 100]
)
def test_assets(name: str) -> None:
    assert is_asset(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "a\\b",
        "a b",
        "a\n",
        "é",
        "a" * 101,
        "commit.json",
        "Commit.JSON",
        "prune.json",
        "generation.json",
        "run.json",
        "model.safetensors.index.json",
        "part-r00001.json",
        "part-r1.json",
        "PART-R00001.json",
        "digests-r00001.bin",
        "Digests-r1",
        "model-r00001-00001.safetensors",
        "Model-R00001-00001.SafeTensors",
    ],
)
def test_no_assets(name: str) -> None:
    assert not is_asset(name)


@pytest.mark.parametrize("name", ["", ".x", "a/b", "..", "a b", "a\n", "é", "a" * 101])
def test_no_sections(name: str) -> None:
    assert not is_section(name)


@pytest.mark.parametrize("step", [0, 1, 10**15 - 1])
def test_steps(step: int) -> None:
    check_step(step)


@pytest.mark.parametrize("step", [-1, 10**15, True, 1.0, "1", None])
def test_steps_that_no_folder_can_hold(step: Any) -> None:
    with pytest.raises(UsageError, match="expected an int") as caught:
        check_step(step)
    assert caught.value.advice
