"""`Mixture`: several map-style datasets read in given proportions through a `ResumableLoader`."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from shardkeep.errors import UsageError
from shardkeep.order.mixture import MixturePlan, plan_mixture


class Mixture(Dataset[Any]):
    """Datasets and the weights by which their samples follow each other in a `ResumableLoader`.

    The order is a pure function of the loader's seed and the position: any run goes on exactly, with any number of
    ranks, workers and samples per batch. After every 1,024 samples (16 per source, if that is more) each source has
    had its share to within one sample. Within a source no sample comes again before all others have come, across
    epochs too. An epoch has as many samples as all datasets together, so that a dataset may come more than once in
    it or not as a whole, by its weight.

    Sample i of dataset s has the id `i + len(dataset 0) + ... + len(dataset s-1)`.

    Args:
        sources: `(dataset, weight)`; weights are relative numbers above 0.

    Raises:
        UsageError: no source, an empty or iterable-style one, or a weight that is none.
    """

    def __init__(self, sources: Sequence[tuple[Dataset[Any], float]]) -> None:
        self._datasets: tuple[Any, ...] = tuple(dataset for dataset, _ in sources)
        for number, dataset in enumerate(self._datasets):
            missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
            if missing or isinstance(dataset, IterableDataset):
                raise UsageError(
                    f"source {number} of the mixture is a {type(dataset).__name__}: expected a map-style dataset"
                )
        self.plan: MixturePlan = plan_mixture(
            [len(dataset) for dataset in self._datasets], [weight for _, weight in sources]
        )

    def __len__(self) -> int:
        """Return the samples of all datasets together, which is what an epoch has."""
        return sum(len(dataset) for dataset in self._datasets)

    def find(self, sample_id: int) -> tuple[int, int]:
        """Return which dataset a sample id belongs to, and its index there."""
        if not 0 <= sample_id < self.plan.size:
            raise IndexError(f"sample {sample_id} of a mixture of {self.plan.size}")
        source = bisect.bisect_right(self.plan.offsets, sample_id) - 1
        return source, sample_id - self.plan.offsets[source]

    def __getitem__(self, sample_id: int) -> Any:
        source, index = self.find(sample_id)
        return self._datasets[source][index]
