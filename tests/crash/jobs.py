"""A tiny training job through the real manager, one rank or several rank threads, on any store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import HashStore

from shardkeep.engine.run import list_generations, list_step_folders, scan_run
from shardkeep.engine.verify import verify_run, verify_step
from shardkeep.errors import CheckpointError
from shardkeep.events import Event
from shardkeep.manager.manager import CheckpointManager
from shardkeep.manager.resume import ResumeReport
from shardkeep.plan.retention import Keep
from shardkeep.ranks.base import Group
from shardkeep.ranks.single import SingleGroup
from shardkeep.ranks.store_group import StoreGroup
from shardkeep.state.wrappers import PerRank
from shardkeep.storage.base import Store
from tests.unit.ranks.worlds import run_threads


def make_state(step: int, rank: int = 0) -> dict[str, Any]:
    """Return a live state whose every bit follows from the step; the rank's own tensor from the rank too."""
    # Not through the global generator: threads share it.
    draw = torch.Generator().manual_seed(1000 + step)
    skip = torch.nn.utils.skip_init
    model = torch.nn.Sequential(skip(torch.nn.Linear, 6, 5), skip(torch.nn.Linear, 5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
            parameter.grad = torch.randn(parameter.shape, generator=draw)
    optimizer.step()
    own = torch.full((3,), step * 10 + rank, dtype=torch.int64)
    return {"model": model, "optimizer": optimizer, "note": {"step": step}, "own": PerRank(own)}


def digest(state: dict[str, Any]) -> str:
    """Return a digest of all that a save must not change and a resume must bring back: tensors, moments, values."""
    found = hashlib.sha256()
    optimizer = state["optimizer"]
    for name, tensor in state["model"].state_dict().items():
        found.update(name.encode() + tensor.numpy().tobytes())
    for parameter in state["model"].parameters():
        for name, value in sorted(optimizer.state[parameter].items()):
            found.update(name.encode() + value.numpy().tobytes())
    own = state["own"]
    found.update(repr(state["note"]).encode() + getattr(own, "value", own).numpy().tobytes())
    return found.hexdigest()


def live_digest(state: dict[str, Any]) -> str:
    """Return `digest` and the rest of a live process: gradients, train mode and the random stream."""
    model = state["model"]
    found = hashlib.sha256(digest(state).encode())
    for parameter in model.parameters():
        found.update(b"none" if parameter.grad is None else parameter.grad.numpy().tobytes())
    found.update(repr([module.training for module in model.modules()]).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    return found.hexdigest()


@dataclass(slots=True)
class Sink:
    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [event.name for event in self.events]


def manage(store: Store, group: Group | None = None, **options: Any) -> CheckpointManager:
    options.setdefault("events", Sink())
    return CheckpointManager("unused", store=store, group=group or SingleGroup(), **options)


def save_at(manager: CheckpointManager, step: int) -> None:
    manager.save(step, make_state(step, manager.group.rank))


def run_world(stores: Sequence[Store], body: Callable[[Store, Group], Any]) -> list[Any]:
    """Run `body(store, group)` on every rank, each with its own view of storage; results or exceptions by rank."""
    if len(stores) == 1:
        try:
            return [body(stores[0], SingleGroup())]
        except CheckpointError as error:
            return [error]
    shared = HashStore()
    groups = [StoreGroup(shared, rank, len(stores), "n") for rank in range(len(stores))]

    def on_rank(rank: int) -> Any:
        try:
            return body(stores[rank], groups[rank])
        finally:
            groups[rank].close()

    return run_threads(on_rank, len(stores))


def get_all(results: list[Any]) -> list[Any]:
    """Return the results by rank; raises the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def restart(store: Store, world_size: int, *, keep: Keep | None = None) -> int:
    """Start the job again, check that its state is exactly that of the step it says, and save one step more.

    The step after it is 20, or 30 when 20 is there. Returns the step that was resumed, 0 for a fresh start.
    """

    def body(rank_store: Store, group: Group) -> ResumeReport:
        state = make_state(999, group.rank)
        manager = manage(rank_store, group, keep=keep)
        report = manager.resume(state)
        if not report.fresh:
            assert digest(state) == digest(make_state(report.step, group.rank)), f"not the state of {report.step}"
        save_at(manager, 20 if report.step < 20 else 30)
        return report

    reports = get_all(run_world([store] * world_size, body))
    assert len({report.step for report in reports}) == 1
    return reports[0].step


def committed(store: Store) -> list[int]:
    view = scan_run(store)
    return [ref.step for ref in view.timeline] if view is not None else []


def check_clean(store: Store) -> None:
    """Every checkpoint there is verifies, byte for byte, and nothing lies beside the checkpoints."""
    view = scan_run(store)
    assert view is not None
    assert not verify_run(store).listed
    timeline = set(view.timeline)
    for number in list_generations(store):
        for ref, folder in list_step_folders(store, number).items():
            assert folder.committed, f"left behind: {ref} with {sorted(folder.files)}"
            assert not folder.pruning
            report = verify_step(store, view.run_id, folder, full=True)
            assert not report.findings.listed
            assert not report.findings.notes
            assert ref in timeline
