"""The documentation's pages as tests see them: fenced blocks with their words, links, headings.

Words after a fence's language say what is done with the block:

    python                  runs; blocks of one page share their names, in order
    python prelude          runs on each rank before every later `ranks` block of the page
    python ranks=2          runs on two real ranks; its output is that of rank 0
    python file=train.py    is written to that file (same-as=examples/x.py: and equals it)
    python no-run           is only parsed; a comment `<!-- no-run: why -->` stands above
    text output             is what the block before printed
    console run             `$ command` lines run, with the output that follows; exit=N for another code than 0
    ... slow                left to the long test runs
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\S*)[ \t]*([^\n]*)\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `line` is where its first line stands; `before` the last line of text above it."""

    language: str
    words: dict[str, str]
    text: str
    line: int
    before: str


def find_pages() -> list[Path]:
    """Return every page for people, by path."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def iter_blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page that begin at the margin."""
    for match in _FENCE.finditer(text):
        above = text[: match.start()].rstrip().splitlines()
        words = dict(word.partition("=")[::2] for word in match[2].split())
        yield Block(
            language=match[1],
            words=words,
            text=match[3],
            line=text.count("\n", 0, match.start(3)) + 1,
            before=above[-1] if above else "",
        )


def without_blocks(text: str) -> str:
    return _FENCE.sub("", text)


def iter_links(text: str) -> Iterator[str]:
    """Yield the targets of a page's links, those within code left out."""
    plain = re.sub(r"`[^`\n]*`", "", without_blocks(text))
    yield from _LINK.findall(plain)


def find_anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, spelled as GitHub does."""
    found: set[str] = set()
    for heading in _HEADING.findall(without_blocks(text)):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        slug = words.replace(" ", "-")
        count = 0
        while (anchor := slug if not count else f"{slug}-{count}") in found:
            count += 1
        found.add(anchor)
    return found
