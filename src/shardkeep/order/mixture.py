"""Which sample of which source stands at each position of a weighted mixture: a pure function, nothing stored.

Positions are cut into blocks of about `block` samples. Source s has had `floor(b * block * weight_s)` samples before
block b, so that at every block's start each source is within one sample of its share, whatever the weights; within a
block a keyed permutation decides whose turn it is. The k-th sample of a source is sample k of its own endless
sequence of keyed permutations: no sample of a source comes again before all others of that source have come.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

import numpy as np

from shardkeep.errors import UsageError
from shardkeep.order.permutation import SIZE_MAX, Ids, PermutationCache, derive_key

MIXED: Final = "mixture-1/"
"""What the algorithm's name of a mixture begins with; a digest of sizes and weights follows."""

_BLOCK_MIN: Final = 1024
_BLOCK_PER_SOURCE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePlan:
    """Sizes and shares of the sources.

    Attributes:
        sizes: samples of each source, at least 1.
        shares: weights as integers without a common divisor.
        offsets: where each source's ids begin: sample i of source s has the id `offsets[s] + i`.
    """

    sizes: tuple[int, ...]
    shares: tuple[int, ...]
    offsets: tuple[int, ...]
    _orders: PermutationCache = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Samples of an epoch: as many as all sources have together."""
        return self.offsets[-1] + self.sizes[-1]

    @property
    def algorithm(self) -> str:
        """The name of this order: the same for the same sizes and weights, and for no others."""
        text = ";".join(f"{size}:{share}" for size, share in zip(self.sizes, self.shares, strict=True))
        return MIXED + hashlib.blake2b(text.encode(), digest_size=8, usedforsecurity=False).hexdigest()

    @property
    def block(self) -> int:
        """Samples of a block, up to the sources' fractions of one."""
        return max(_BLOCK_MIN, _BLOCK_PER_SOURCE * len(self.sizes))

    def ids_between(self, seed: int, start: int, stop: int) -> Ids:
        """Return the ids at positions `[start, stop)`, int64, counted from the run's beginning through all epochs."""
        if start >= stop:
            return np.empty(0, dtype=np.int64)
        number = self._find_block(start)
        # Python's integers carry the counts, which may pass 64 bits over a long run; arrays hold what is added.
        base, taken = self._counts(number), []
        while start < stop:
            begin, end = self._block_start(number), self._block_start(number + 1)
            upto = min(stop, end)
            taken.append(self._take_turns(seed, number, base, slice(start - begin, upto - begin)))
            start, number = upto, number + 1
        sources, visits = (np.concatenate(column) for column in zip(*taken, strict=True))
        ids = np.empty(len(sources), dtype=np.int64)
        for source in np.unique(sources).tolist():
            mine = sources == source
            ids[mine] = self._visit(seed, source, base[source], visits[mine])
        return ids

    def _counts(self, number: int) -> list[int]:
        """Return how many samples of each source come before block `number`."""
        total = sum(self.shares)
        return [number * self.block * share // total for share in self.shares]

    def _block_start(self, number: int) -> int:
        return sum(self._counts(number))

    def _find_block(self, position: int) -> int:
        # Rounding down makes a block start early, by less than a sample per source: it is this one or the next.
        number = position // self.block
        return number + (self._block_start(number + 1) <= position)

    def _take_turns(self, seed: int, number: int, base: list[int], wanted: slice) -> tuple[Ids, Ids]:
        """Return whose turn it is at the `wanted` slots of a block, and how many turns since `base` it had before."""
        before, after = self._counts(number), self._counts(number + 1)
        ends = np.cumsum([b - a for a, b in zip(before, after, strict=True)])
        turns = self._orders.get(int(ends[-1]), derive_key(seed, number, domain="mixture"))
        slots = turns.ids_at(np.arange(turns.n, dtype=np.int64))
        sources = np.searchsorted(ends, slots, side="right")
        # A source's turns are counted in the order of positions: the whole block is needed for one of them.
        by_source = np.argsort(sources, kind="stable")
        first = np.concatenate(([0], ends[:-1])) - [b - a for a, b in zip(base, before, strict=True)]
        visits = np.empty(turns.n, dtype=np.int64)
        visits[by_source] = np.arange(turns.n) - first[sources[by_source]]
        return sources[wanted], visits[wanted]

    def _visit(self, seed: int, source: int, before: int, later: Ids) -> Ids:
        """Return the ids of a source's visits number `before + later`."""
        size = self.sizes[source]
        if size == 1:
            return np.full(len(later), self.offsets[source], dtype=np.int64)
        round_before, at = divmod(before, size)
        rounds, places = np.divmod(later + at, size)
        ids = np.empty(len(later), dtype=np.int64)
        for number in np.unique(rounds).tolist():
            mine = rounds == number
            key = derive_key(seed, round_before + number, domain="mixture-source", index=source)
            ids[mine] = self._orders.get(size, key).ids_at(places[mine])
        return ids + self.offsets[source]


def plan_mixture(sizes: Sequence[int], weights: Sequence[float]) -> MixturePlan:
    """Return the plan of a mixture; weights are relative and taken exactly as the numbers they are.

    Raises:
        UsageError: no source, an empty one, or a weight that is not a finite number above 0.
    """
    if not sizes or len(sizes) != len(weights):
        raise UsageError(f"a mixture of {len(sizes)} sources with {len(weights)} weights: expected one weight each")
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        if size < 1:
            raise UsageError(f"source {number} of the mixture has {size} samples: expected at least 1")
        if not _is_weight(weight):
            raise UsageError(
                f"source {number} of the mixture has the weight {weight!r}: expected a finite number above 0",
                advice="leave a source out instead of giving it the weight 0",
            )
    if sum(sizes) > SIZE_MAX:
        raise UsageError(f"a mixture of {sum(sizes)} samples: expected up to 2^62")
    fractions = [Fraction(weight) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * scale) for fraction in fractions]
    divisor = math.gcd(*whole)
    return MixturePlan(
        sizes=tuple(sizes),
        shares=tuple(share // divisor for share in whole),
        offsets=tuple(sum(sizes[:number]) for number in range(len(sizes))),
        _orders=PermutationCache(2 * len(sizes) + 2),
    )


def _is_weight(weight: object) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and weight > 0 and math.isfinite(weight)
