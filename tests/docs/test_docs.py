"""The documentation is true: its code runs, prints what it shows, and its links lead somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardkeep
from shardkeep import errors
from tests.docs.output import Digests, find_difference
from tests.docs.pages import ROOT, Block, find_anchors, find_pages, iter_blocks, iter_links, name_of
from tests.docs.session import Session

PAGES = find_pages()
KNOWN_WORDS = {
    "python": {"prelude", "ranks", "file", "same-as", "no-run", "slow", ""},
    "text": {"output", ""},
    "console": {"run", "exit", "slow", ""},
}


def _is_slow(page: Path) -> bool:
    return any("ranks" in block.words or "slow" in block.words for block in iter_blocks(page.read_text()))


def _cases() -> Iterator[object]:
    for page in PAGES:
        if any(_is_run(block) for block in iter_blocks(page.read_text())):
            marks = [pytest.mark.slow] if _is_slow(page) else []
            yield pytest.param(page, id=name_of(page), marks=marks)


def _is_run(block: Block) -> bool:
    return block.language == "python" or (block.language == "console" and "run" in block.words)


@pytest.mark.parametrize("page", list(_cases()))
def test_what_a_page_shows_happens(page: Path, tmp_path: Path) -> None:
    """Every Python block runs, every marked command ends as it says, all marked output is the real one."""
    with Session(tmp_path) as session:
        runner = _Runner(page, session)
        for block in iter_blocks(page.read_text()):
            runner.take(block)


class _Runner:
    def __init__(self, page: Path, session: Session) -> None:
        self._page = name_of(page)
        self._session = session
        self._digests = Digests()
        self._prelude = ""
        self._printed: str | None = None

    def take(self, block: Block) -> None:
        where = f"{self._page}:{block.line}"
        if block.language == "python":
            self._printed = self._take_python(block, where)
        elif block.language == "console" and "run" in block.words:
            self._take_console(block, where)
        elif block.language == "text" and "output" in block.words:
            assert self._printed is not None, f"{where}: no block before it printed anything"
            difference = find_difference(block.text, self._printed, self._digests)
            assert difference is None, f"{where}: {difference}"

    def _take_python(self, block: Block, where: str) -> str | None:
        compile(block.text, where, "exec")
        code = "\n" * (block.line - 1) + block.text
        if "same-as" in block.words:
            assert block.text == (ROOT / block.words["same-as"]).read_text(), f"{where}: not the file it names"
        if "no-run" in block.words:
            assert block.before.startswith("<!-- no-run: "), f"{where}: say above it why it does not run"
        elif "file" in block.words:
            (self._session.folder / block.words["file"]).write_text(block.text)
        elif "prelude" in block.words:
            self._prelude = block.text
        elif "ranks" in block.words:
            return self._session.run_ranks(self._prelude + block.text, where, int(block.words["ranks"]))
        else:
            return self._session.run_python(code, where)
        return None

    def _take_console(self, block: Block, where: str) -> None:
        commands = [part.partition("\n")[::2] for part in f"\n{block.text}".split("\n$ ")[1:]]
        assert commands, f"{where}: expected lines that begin with '$ '"
        for command, shown in commands:
            code, printed = self._session.run_command(command)
            assert code == int(block.words.get("exit", 0)), f"{where}: {command} ended with {code}: {printed}"
            difference = find_difference(shown, printed, self._digests)
            assert difference is None, f"{where}: {command}\n{difference}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in iter_links(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            dead.append(link)
        elif anchor and target.suffix == ".md" and anchor not in find_anchors(target.read_text()):
            dead.append(f"{link} (no such heading)")
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_of_fences_are_known(page: Path) -> None:
    """A misspelled word would leave a block unchecked without anyone noticing."""
    for block in iter_blocks(page.read_text()):
        unknown = set(block.words) - KNOWN_WORDS.get(block.language, set(block.words))
        assert not unknown, f"{name_of(page)}:{block.line}: {unknown}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in iter_links(index.read_text())}
    pages = {page for page in PAGES if page.is_relative_to(index.parent) and page != index}
    assert {name_of(page) for page in pages - linked} == set()


def test_troubleshooting_has_every_error() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.CheckpointError)
    ]
    assert len(classes) > 15
    assert [cls.__name__ for cls in classes if f"## {cls.__name__}\n" not in text] == []


def test_every_public_name_is_explained() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in shardkeep.__all__ if name[0] != "_" and name not in text] == []
