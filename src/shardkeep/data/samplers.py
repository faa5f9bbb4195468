"""A plain torch DataLoader over a map-style dataset, made resumable: its sampler's pass is repeated, its data is not.

The order of a pass comes from the sampler, whose generator (or epoch, or state) is noted as the pass begins. A
resumed run sets it back to that, asks the sampler for its indices again and passes over the batches that were handed
out; no sample of them is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from shardkeep.data.draws import Request, make_fetcher
from shardkeep.errors import StateMismatch, UnsupportedState
from shardkeep.order.permutation import derive_key

_FIX: Final = "use sk.ResumableLoader(dataset, global_batch_size=..., seed=...)"
_OPTIONS: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


class SamplerPass:
    """Where a sampler's pass began and how many batches of it were handed out; gives torch's DataLoader the others.

    Holds no reference to the source or its workers, so that dropping the source stops them at once.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._sampler: Any = batches.sampler if type(batches) is BatchSampler else batches
        self.keeps = _find_keeping(self._sampler)
        self.epoch = 0
        self.count = 0
        self.start: Any = None

    @property
    def length(self) -> int | None:
        """Batches of a pass, where the sampler says."""
        return len(self._batches) if hasattr(self._batches, "__len__") else None

    @property
    def initial_seed(self) -> int:
        """The seed that the sampler's generator was given; 0 without one."""
        generator = getattr(self._sampler, "generator", None)
        return generator.initial_seed() if isinstance(generator, torch.Generator) else 0

    def __iter__(self) -> Iterator[Any]:
        """Begin the pass again, pass over what was handed out, and return the rest, as `Request`s."""
        self._begin()  # every time: a DataLoader with persistent workers asks twice before it takes anything
        lists = iter(self._batches)
        skipped = sum(1 for _ in islice(lists, self.count))
        if skipped < self.count:
            raise StateMismatch(
                f"the sampler gave {skipped} batches; the stored position is batch {self.count}",
                advice="build the DataLoader with the dataset, sampler and batch size of the saving run",
            )
        return (
            # The same index may come twice in a pass: batches keep their draws apart.
            Request(ids=ids, epoch=self.epoch, start=number, marks=_make_marks(ids), index=number)
            for number, ids in enumerate(map(list, lists), start=self.count)
        )

    def _begin(self) -> None:
        """Bring the sampler to where it was when this pass began, or note where it is."""
        if self.keeps == "epoch":
            self._sampler.set_epoch(self.epoch)
        elif self.start is None:
            self.start = self.note()
        elif self.keeps == "generator":
            self._sampler.generator.set_state(torch.frombuffer(bytearray(self.start), dtype=torch.uint8))
        elif self.keeps == "state":
            self._sampler.load_state_dict(copy.deepcopy(self.start))

    def note(self) -> Any:
        """Return what brings the sampler back to where it is now; None where nothing is needed."""
        if self.keeps == "generator":
            return self._sampler.generator.get_state().numpy().tobytes()
        return copy.deepcopy(self._sampler.state_dict()) if self.keeps == "state" else None

    def end(self) -> None:
        """Go to the next pass."""
        self.epoch, self.count, self.start = self.epoch + 1, 0, None


class SamplerSource:
    """A stream with a DataLoader's settings; fetches through a DataLoader of its own, draws seeded per sample."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise UnsupportedState(
                "a DataLoader over an IterableDataset: what its workers have read ahead cannot be told from outside",
                advice="put the dataset itself into sk.StreamLoader(dataset, batch_size=...), or use torchdata's "
                "StatefulDataLoader",
            )
        if loader.batch_sampler is None:
            raise UnsupportedState("a DataLoader with batch_size=None", advice=_FIX)
        self._pass = SamplerPass(loader.batch_sampler)
        self._seed = self._pass.initial_seed
        self._options = {name: getattr(loader, name) for name in _OPTIONS}
        self._dataset = loader.dataset
        self._generator = torch.Generator()
        self._fetcher: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._generator.manual_seed(derive_key(self._seed, self._pass.epoch, domain="workers").words[0])
        if self._fetcher is None:
            self._fetcher = make_fetcher(
                self._dataset, self._pass, seed=self._seed, generator=self._generator, options=self._options
            )
        return self._go_on(iter(self._fetcher))

    def _go_on(self, fetched: Iterator[Any]) -> Iterator[Any]:
        for batch in fetched:
            self._pass.count += 1
            yield batch
        self._pass.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: pass, batches handed out, the sampler's source of randomness as the pass began."""
        here = self._pass
        return {
            "epoch": here.epoch,
            "count": here.count,
            "kind": here.keeps,
            "start": here.note() if here.start is None else here.start,
            "length": here.length,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; takes effect at the next `iter()`.

        Raises:
            StateMismatch: another kind of sampler, or another number of batches in a pass.
        """
        own = {"kind": self._pass.keeps, "length": self._pass.length}
        differing = [
            f"{name}: stored {state[name]!r}, here {own[name]!r}" for name in own if state[name] != own[name]
        ]
        if differing:
            raise StateMismatch(
                "the stored position belongs to another DataLoader",
                problems=differing,
                advice="build the DataLoader with the dataset, sampler and batch size of the saving run",
            )
        self._pass.epoch, self._pass.count, self._seed = state["epoch"], state["count"], state["seed"]
        self._pass.start = copy.deepcopy(state["start"])
        self._fetcher = None  # its workers know the old seed


def _find_keeping(sampler: Any) -> str:
    """Return what must be kept to repeat a pass of the sampler: nothing, its generator, its epoch or its state."""
    if type(sampler) is SequentialSampler or isinstance(sampler, list | tuple | range):
        return "nothing"
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        return "generator"
    if callable(getattr(sampler, "set_epoch", None)):
        return "epoch"
    if all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict")):
        return "state"
    what = (
        "draws its order from the global random generator"
        if hasattr(sampler, "generator")
        else "does not say where its order comes from (no generator, set_epoch or state_dict)"
    )
    raise UnsupportedState(
        f"a DataLoader whose {type(sampler).__name__} {what}: after a resume it would draw another order",
        advice=f"{_FIX}, or give the DataLoader generator=torch.Generator()",
    )


def _make_marks(ids: list[Any]) -> list[int]:
    return ids if all(type(number) is int for number in ids) else list(range(len(ids)))
