"""Fetches the samples of a batch, each under random streams of its own, and collates them.

The one place that seeds Python's, NumPy's and torch's global CPU generators: in loader workers, whose generators
belong to nobody else, and in the main process, where they are put back before the batch is handed out. It runs as the
dataset of torch's DataLoader, in whichever process fetches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate, get_worker_info

from shardkeep.order.draws import iter_draw_seeds

_PYTHON: Final = random.seed.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
# Past the checks of random.Random.seed, which take as long as seeding NumPy's generator; same streams.
_SEED_PYTHON: Final = super(random.Random, _PYTHON).seed
_SEED_NUMPY: Final = np.random.seed
_SEED_TORCH: Final = torch.default_generator.manual_seed


@dataclass(frozen=True, slots=True)
class Request:
    """One batch to fetch, as the main process tells a worker.

    Attributes:
        ids: indices into the dataset.
        marks: what tells the draws of these samples apart within the epoch; None: their ids.
        epoch: from 0.
        start: position of the first sample in the epoch's order.
        index: separates draws further; 0 where marks say enough.
    """

    ids: Sequence[Any]
    epoch: int
    start: int
    marks: Sequence[int] | None = None
    index: int = 0


class SeededDataset(Dataset[Any]):
    """What torch's DataLoader is given as a dataset: takes a `Request`, returns the collated batch.

    Each sample is fetched under seeds of (seed, epoch, sample). A dataset that fetches whole batches (`__getitems__`)
    and `collate_fn` run under seeds of (seed, epoch, position of the batch's first sample).
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> None:
        self.dataset = dataset
        self._collate = collate_fn if collate_fn is not None else default_collate
        self._seed = seed
        self._spare: Any = None

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, request: Request) -> Any:
        """Return the collated batch. In the main process the global generators are as before, also on an error."""
        with nullcontext() if get_worker_info() is not None else self._kept_generators():
            if get_worker_info() is not None and self._spare is None:
                self._own_numpy()
            samples = self._fetch(request)
            self._begin(request, "collate")
            return self._collate(samples)

    def _fetch(self, request: Request) -> list[Any]:
        if _fetches_batches(self.dataset):
            self._begin(request, "batch")
            found: list[Any] = self.dataset.__getitems__(list(request.ids))
            return found
        dataset, samples = self.dataset, []
        marks = request.ids if request.marks is None else request.marks
        seeds = iter_draw_seeds(self._seed, request.epoch, marks, domain="sample", index=request.index)
        for number, (for_python, for_numpy, for_torch) in zip(request.ids, seeds, strict=True):
            _SEED_PYTHON(for_python)
            _PYTHON.gauss_next = None
            _SEED_NUMPY(for_numpy)
            _SEED_TORCH(for_torch)
            samples.append(dataset[number])
        return samples

    def _begin(self, request: Request, domain: str) -> None:
        seeds = iter_draw_seeds(self._seed, request.epoch, [request.start], domain=domain, index=request.index)
        for_python, for_numpy, for_torch = next(seeds)
        _SEED_PYTHON(for_python)
        _PYTHON.gauss_next = None
        _SEED_NUMPY(for_numpy)
        _SEED_TORCH(for_torch)

    def _own_numpy(self) -> None:
        """Give NumPy's global functions a generator that can be seeded, should someone have put in another kind."""
        self._spare = np.random.MT19937(0)
        if not isinstance(np.random.mtrand.get_bit_generator(), np.random.MT19937):
            np.random.mtrand.set_bit_generator(self._spare)

    @contextmanager
    def _kept_generators(self) -> Iterator[None]:
        if self._spare is None:
            self._spare = np.random.MT19937(0)
        python, for_torch = random.getstate(), torch.default_generator.get_state()
        for_numpy, own = np.random.get_state(legacy=False), np.random.mtrand.get_bit_generator()
        # Changing generators costs a tenth of setting one's state.
        np.random.mtrand.set_bit_generator(self._spare)
        try:
            yield
        finally:
            np.random.mtrand.set_bit_generator(own)
            if for_numpy["has_gauss"]:
                np.random.set_state(for_numpy)
            random.setstate(python)
            torch.default_generator.set_state(for_torch)


class WorkerInit:
    """Shows the user's dataset, not ours, in `torch.utils.data.get_worker_info()`, then calls their function."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            # Some releases of torch freeze it.
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(worker)


def make_fetcher(
    dataset: Any, requests: Any, *, seed: int, generator: torch.Generator, options: dict[str, Any]
) -> DataLoader[Any]:
    """Return torch's DataLoader over `requests` (an iterable of `Request`s with a length), draws seeded per sample.

    Raises what torch's DataLoader raises for options that contradict each other.
    """
    rest = {name: value for name, value in options.items() if name not in ("collate_fn", "worker_init_fn")}
    return DataLoader(
        SeededDataset(dataset, options["collate_fn"], seed),
        batch_sampler=requests,
        generator=generator,
        collate_fn=_as_it_is,
        worker_init_fn=WorkerInit(options["worker_init_fn"]),
        **rest,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def _fetches_batches(dataset: Any) -> bool:
    """Say whether samples are read by whole batches; torch's Subset only hands on what its own dataset does."""
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return _fetches_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))
