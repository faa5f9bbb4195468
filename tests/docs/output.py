"""Compares printed output with what a page shows of it, as far as it is the same on every machine.

`...` stands for anything within a line, and alone on a line for any lines. Numbers with a fraction may differ by two
per cent: processors and versions of torch round differently. Digests (16 or more hex digits) may be others, but equal
ones must stay equal and different ones different, over a whole page.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\.\.\.|\b[0-9a-f]{16,64}\b|-?\d+\.\d+(?:e-?\d+)?")
_FLOAT = r"(-?\d+\.\d+(?:e-?\d+)?|-?\d+)"


class Digests:
    """Which digest of a page stands for which one seen."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def fits(self, shown: str, found: str) -> bool:
        if shown in self._seen:
            return self._seen[shown] == found
        if found in self._seen.values():
            return False
        self._seen[shown] = found
        return True


def find_difference(shown: str, found: str, digests: Digests) -> str | None:
    """Return the first line that differs, with both sides, or None."""
    want, have = [[line.rstrip() for line in text.strip("\n").splitlines()] for text in (shown, found)]
    at = 0
    for index, line in enumerate(want):
        if line.strip() == "...":
            rest = want[index + 1 :]
            if not rest:
                return None
            while at < len(have) and not _fits(rest[0], have[at], digests):
                at += 1
            continue
        if at >= len(have) or not _fits(line, have[at], digests):
            return f"shown: {line!r}\nfound: {have[at] if at < len(have) else 'the end'!r}\nin all: {found}"
        at += 1
    return None if at >= len(have) else f"shown: the end\nfound: {have[at]!r}\nin all: {found}"


def _fits(shown: str, found: str, digests: Digests) -> bool:
    pattern, tokens, last = "", [], 0
    for match in _TOKEN.finditer(shown):
        pattern += _spaced(shown[last : match.start()])
        last = match.end()
        if match[0] == "...":
            pattern += ".*"
        else:
            tokens.append(match[0])
            pattern += _FLOAT if "." in match[0] else r"([0-9a-f]{16,64})"
    got = re.fullmatch(pattern + _spaced(shown[last:]), found)
    return got is not None and all(_equal(a, b, digests) for a, b in zip(tokens, got.groups(), strict=True))


def _spaced(text: str) -> str:
    # Columns move with the widths of what stands in them.
    return re.sub(r"(?:\\ ){2,}", r" +", re.escape(text))


def _equal(shown: str, found: str, digests: Digests) -> bool:
    if "." not in shown:
        return digests.fits(shown, found)
    return abs(float(shown) - float(found)) <= 0.02 * max(abs(float(shown)), 1e-9)
