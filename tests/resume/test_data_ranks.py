"""Positions of real ranks through checkpoints: each gets its own back, another world's are split or refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkeep as sk
from tests.support.ranks import run_ranks


class Lines:
    """Numbers in files; `split` lets another world share out what is left."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.at = {f"{number:02}": 0 for number in range(12) if number % world_size == rank}

    def __iter__(self) -> Iterator[int]:
        for name in sorted(self.at):
            for line in range(self.at[name], 10):
                self.at[name] = line + 1
                yield int(name) * 10 + line
        self.at = dict.fromkeys(self.at, 0)

    def state_dict(self) -> dict[str, int]:
        return dict(self.at)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = dict(state)


class Splitting(Lines):
    def split_state(self, states: list[dict[str, int]], rank: int, world_size: int) -> dict[str, int]:
        every = {name: line for state in states for name, line in state.items()}
        return {name: every[name] for name in sorted(every)[rank::world_size]}


def train(rank: int, world_size: int, root: str, kind: type[Lines], stop: int, uneven: bool) -> Any:
    loader = sk.StreamLoader(sk.Filter(kind(rank, world_size), lambda item: item % 3), batch_size=2, collate_fn=list)
    state = {"text": loader}
    seen: list[int] = []
    with sk.CheckpointManager(root) as manager:
        try:
            manager.resume(state)
        except sk.CheckpointError as error:
            return str(error)
        for step, batch in manager.steps(loader, stop=stop):
            seen += batch
            if uneven and rank == 0:
                seen += next(iter(loader))  # this rank's counter runs ahead
            manager.save(step, state)
            if step == stop:
                break
    return seen


def drain(rank: int, world_size: int, root: str, kind: type[Lines]) -> Any:
    loader = sk.StreamLoader(sk.Filter(kind(rank, world_size), lambda item: item % 3), batch_size=2, collate_fn=list)
    with sk.CheckpointManager(root) as manager:
        try:
            manager.resume({"text": loader})
        except sk.CheckpointError as error:
            return str(error)
        return [item for batch in loader for item in batch]


WANTED = [item for item in range(120) if item % 3]


def test_every_rank_gets_its_own_position_back(tmp_path: Path) -> None:
    """PrimeIntellect-ai/prime-rl#1035: one rank's counter was stored for all."""
    root = str(tmp_path / "run")
    seen = [item for share in run_ranks(train, 2, root, Lines, 3, True) for item in share]
    assert len(seen) == 18
    seen += [item for share in run_ranks(drain, 2, root, Lines) for item in share]
    assert sorted(seen) == WANTED


@pytest.mark.parametrize("world", [1, 3])
def test_another_world_splits_what_is_left(world: int, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    seen = [item for share in run_ranks(train, 2, root, Splitting, 3, False) for item in share]
    seen += [item for share in run_ranks(drain, world, root, Splitting) for item in share]
    assert sorted(seen) == WANTED


def test_another_world_is_refused_by_name_where_nothing_can_be_split(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    run_ranks(train, 2, root, Lines, 3, False)
    for text in run_ranks(drain, 3, root, Lines):
        assert "text: the positions of 2 ranks in a Lines, which cannot be split over 3" in text
        assert "split_state" in text
        assert "sk.ResumableLoader" in text


def bare(rank: int, world_size: int, root: str, save: bool) -> str:
    source = Lines(0, 1)  # the same position everywhere, by chance
    with sk.CheckpointManager(root) as manager:
        try:
            manager.resume({"text": source})
            if save:
                next(iter(source))
                manager.save(1, {"text": source})
        except sk.CheckpointError as error:
            return str(error)
    return str(source.at["00"])


def test_equal_positions_of_two_ranks_are_not_one_position(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    assert run_ranks(bare, 2, root, True) == ["1", "1"]
    assert run_ranks(bare, 2, root, False) == ["1", "1"]
    for text in run_ranks(bare, 3, root, False):
        assert "text: the positions of 2 ranks in a Lines, and another number of ranks restores" in text
