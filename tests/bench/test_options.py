"""What a person types, the state's shape, the page, and choosing settings."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardkeep.bench import BenchOptions, BenchResult
from shardkeep.bench.figures import describe_seconds, find_figures
from shardkeep.bench.gpt import EMBEDDING, plan_state
from shardkeep.bench.html import format_page
from shardkeep.bench.options import GROUPS, parse_groups, parse_peers, parse_size
from shardkeep.bench.registry import EVERYONE, PEERS, list_peers
from shardkeep.bench.tune import choose
from shardkeep.errors import UsageError
from tests.bench.test_figures import FACTS, SECONDS


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 << 20), ("3 GiB", 3 << 30), ("1.5g", 3 << 29), ("4096", 4096), ("2kb", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "3 parsecs", "1e9", "inf", "2000TiB", "9" * 400])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="size"):
        parse_size(text)


def test_groups_and_peers() -> None:
    assert parse_groups(()) == GROUPS
    assert parse_groups(("load,save", "cli")) == ("save", "load", "cli")
    assert parse_peers("none") == ()
    assert parse_peers("all") == tuple(PEERS)
    assert parse_peers("dcp-2t, torch") == ("torch", "dcp-2t")
    with pytest.raises(UsageError, match="async"):
        parse_groups(("asinc",))
    with pytest.raises(UsageError, match="safetensors"):
        parse_peers("safetensor")
    with pytest.raises(UsageError, match="--only ','"):
        parse_groups((",",))
    with pytest.raises(UsageError, match="--peers ''"):
        parse_peers("")
    with pytest.raises(UsageError, match="1 MiB"):
        BenchOptions(folder=Path(), size_bytes=10)


def test_who_writes_files_for_every_reader() -> None:
    for entry in EVERYONE.values():
        if "load" in entry.abilities and entry.kind != "limit":
            writers = [e for e in EVERYONE.values() if e.files == entry.files and "save" in e.abilities]
            assert writers, entry.name
    assert {e.name for e in list_peers("ranks", ("dcp-1t", "torch"))} == {"dcp-1t"}


def test_the_reference_state_is_the_one_of_the_known_figures() -> None:
    shape = plan_state(3 << 30)
    assert len(shape.pieces) == 928
    assert shape.size_bytes / (1 << 30) == pytest.approx(2.97, abs=0.02)
    assert next(p for p in shape.pieces if p.key == f"model.{EMBEDDING}").size_bytes == 102_400_000


@pytest.mark.parametrize("mib", [1, 8, 64, 512, 20_000])
def test_other_sizes_are_about_what_was_asked_for(mib: int) -> None:
    shape = plan_state(mib << 20)
    assert 0.7 <= shape.size_bytes / (mib << 20) <= 1.35
    assert len(shape.pieces) == 928
    end = 0
    for piece in sorted(shape.pieces, key=lambda piece: piece.offset):
        assert piece.offset >= end
        assert piece.offset % 64 == 0
        end = piece.offset + piece.size_bytes
    assert end <= shape.memory_bytes


def test_a_setting_has_to_be_clearly_better_than_the_default() -> None:
    assert choose({1: (2.0, 2.0), 2: (1.0, 1.0), 4: (0.99, 0.99)}, default=2) == 2
    assert choose({1: (2.0, 2.0), 2: (1.0, 1.0), 4: (0.9, 0.9)}, default=2) == 4


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_holds_everything_and_loads_nothing() -> None:
    details = {
        "seconds": describe_seconds(SECONDS),
        "machine": {"cpus": 2},
        "versions": {"torch": "2"},
        "not_measured": {"orbax": "not <installed>"},
        "state_bytes": 1 << 30,
        "state_tensor_count": 928,
        "rounds": 3,
        "took_s": 10.0,
    }
    page = format_page(BenchResult(figures=find_figures(SECONDS, FACTS, GROUPS), details=details))
    reader = Reader()
    reader.feed(page)
    assert reader.tags.count("svg") == len(SECONDS)
    assert not reader.links
    assert "script" not in reader.tags
    assert "not &lt;installed&gt;" in page
    for key in find_figures(SECONDS, FACTS, GROUPS):
        assert key in page
