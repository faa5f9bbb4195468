"""Every name in a run's folder, made and parsed in one place. Parsing is anchored: near misses are not ours."""

from __future__ import annotations

import re
from typing import Annotated, Final

from msgspec import Meta, Struct

from shardkeep.errors import UsageError

RUN_RECORD: Final = "run.json"
GENERATION_RECORD: Final = "generation.json"
GENERATION_CLAIM: Final = "claim.json"
COMMIT_RECORD: Final = "commit.json"
PRUNE_INTENT: Final = "prune.json"
HF_INDEX: Final = "model.safetensors.index.json"
MARKS: Final = "marks"

_GENERATION = re.compile(r"g(\d{4,9})\Z", re.ASCII)
_STEP = re.compile(r"step-(\d{8,15})(?:\.([1-9]\d{0,5}))?\Z", re.ASCII)
_SHARD = re.compile(r"([A-Za-z0-9_.%-]{1,100})-r(\d{5,7})-(\d{5,7})\.safetensors\Z", re.ASCII)
_PART = re.compile(r"part-r(\d{5,7})\.json\Z", re.ASCII)
_SECTION = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9_.%-]{0,99}\Z", re.ASCII)
_ASSET = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}\Z", re.ASCII)
_JOURNAL = re.compile(r"journal-(\d{5,9})-(\d{8,15})\.jsonl\Z", re.ASCII)
_MARK = re.compile(r"([a-z]+)-g(\d{4,9})-step-(\d{8,15})\.([1-9]\d{0,5})-([0-9a-f]{8,32})\.json\Z", re.ASCII)


class StepRef(Struct, frozen=True, gc=False, order=True):
    """One try at one step: the address of a checkpoint within a run. Ordered by step first.

    The bounds are those of the names; a record that goes beyond them is refused when it is read.
    """

    step: Annotated[int, Meta(ge=0, lt=10**15)]
    generation: Annotated[int, Meta(ge=1, lt=10**9)]
    attempt: Annotated[int, Meta(ge=1, lt=10**6)] = 1

    @property
    def folder(self) -> str:
        """The step's folder within the run, without a trailing slash."""
        suffix = f".{self.attempt}" if self.attempt > 1 else ""
        return f"{format_generation(self.generation)}/step-{self.step:08d}{suffix}"

    def key(self, name: str) -> str:
        """Return the key of an object of this checkpoint."""
        return f"{self.folder}/{name}"

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}" + (f", try {self.attempt}" * (self.attempt > 1))


def format_generation(number: int) -> str:
    return f"g{number:04d}"


def find_generation(name: str) -> int | None:
    """Return the generation a folder name stands for, or None."""
    match = _GENERATION.match(name)
    return int(match[1]) if match and format_generation(int(match[1])) == name else None


def find_step(generation: int, name: str) -> StepRef | None:
    """Return the step a folder name within a generation stands for, or None."""
    match = _STEP.match(name)
    if not match:
        return None
    ref = StepRef(step=int(match[1]), generation=generation, attempt=int(match[2] or 1))
    return ref if ref.folder.endswith(f"/{name}") else None


def format_shard(section: str, rank: int, sequence: int) -> str:
    return f"{section}-r{rank:05d}-{sequence:05d}.safetensors"


def find_shard(name: str) -> tuple[str, int, int] | None:
    """Return the section, rank and sequence number that a file name stands for, or None."""
    match = _SHARD.match(name)
    if not match or not is_section(match[1]):
        return None
    found = match[1], int(match[2]), int(match[3])
    return found if format_shard(*found) == name else None


def is_shard(name: str) -> bool:
    """Say whether a file name is that of a shard."""
    return find_shard(name) is not None


def format_part(rank: int) -> str:
    return f"part-r{rank:05d}.json"


def find_part(name: str) -> int | None:
    """Return the rank whose part a file name stands for, or None."""
    match = _PART.match(name)
    return int(match[1]) if match and format_part(int(match[1])) == name else None


def format_digests(rank: int) -> str:
    return f"digests-r{rank:05d}.bin"


def is_section(name: str) -> bool:
    """Say whether a section may have this name, which begins the names of its files."""
    return _SECTION.match(name) is not None


def is_asset(name: str) -> bool:
    """Say whether a user's file may lie beside the shards under this name.

    Names that differ from ours in case only are refused too: some file systems take them for the same.
    """
    lower = name.lower()
    reserved = lower in (COMMIT_RECORD, PRUNE_INTENT, HF_INDEX, GENERATION_RECORD, GENERATION_CLAIM, RUN_RECORD)
    ours = _SHARD.match(lower) is not None or lower.startswith(("part-r", "digests-r"))
    return _ASSET.match(name) is not None and not reserved and not ours


def format_journal(generation: int, sequence: int, last_step: int) -> str:
    """Return the key of a journal segment; `last_step` is the greatest step in it."""
    return f"{format_generation(generation)}/journal-{sequence:05d}-{last_step:08d}.jsonl"


def find_journal(key: str) -> tuple[int, int, int] | None:
    """Return the generation, sequence number and last step of a journal segment's key, or None."""
    folder, _, name = key.partition("/")
    generation, match = find_generation(folder), _JOURNAL.match(name)
    if generation is None or not match:
        return None
    found = generation, int(match[1]), int(match[2])
    return found if format_journal(*found) == key else None


def format_mark(kind: str, ref: StepRef, nonce: str) -> str:
    """Return the key of a mark; `nonce` (hex) keeps two marks of one kind apart."""
    return f"{MARKS}/{kind}-{format_generation(ref.generation)}-step-{ref.step:08d}.{ref.attempt}-{nonce}.json"


def find_mark(key: str) -> tuple[str, StepRef] | None:
    """Return the kind and step of a mark's key, or None."""
    folder, _, name = key.partition("/")
    match = _MARK.match(name) if folder == MARKS else None
    if not match:
        return None
    kind, ref = match[1], StepRef(step=int(match[3]), generation=int(match[2]), attempt=int(match[4]))
    return (kind, ref) if format_mark(kind, ref, match[5]) == key else None


def check_step(step: int) -> None:
    """Refuse a step number that no folder name can hold.

    Raises:
        UsageError: not an int in 0 .. 10^15 - 1.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**15:
        raise UsageError(
            f"step {step!r}: expected an int from 0 to 10^15 - 1", advice="pass the count of optimizer steps done"
        )
