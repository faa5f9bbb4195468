"""What a live state wants of a checkpoint, compared by name before anything live is touched; and how it is put back.

Planning reads the live state, allocates what is missing and lists every difference. The engine then fills the
destinations with verified bytes, and `finish` installs the rest in one fixed order: models' extra state, optimizers,
schedulers and other objects, plain values, loaders, optimizers' groups once more, and random streams last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardkeep.errors import CheckpointError, StateMismatch
from shardkeep.spec.tensors import Catalog, LocalTensor
from shardkeep.state.capture import collect_names
from shardkeep.state.devices import wait_for_queued
from shardkeep.state.drafts import RestoreDraft, Stage
from shardkeep.state.dtensor import is_dtensor
from shardkeep.state.fill import Fill, plan_fill
from shardkeep.state.gradients import plan_gradients
from shardkeep.state.models import (
    capture_model,
    find_meta,
    materialise,
    restore_model_values,
    unfilled_after_materialise,
)
from shardkeep.state.names import canonical_names
from shardkeep.state.objects import Item, iter_items, plan_item, unpack_planned
from shardkeep.state.optimizers import Names, plan_optimizer
from shardkeep.state.rng import RngPlan, plan_derived, plan_rng, sample_streams
from shardkeep.state.subclasses import Parts
from shardkeep.state.values import find_tensors

RngDerivation = tuple[int, int, int]
"""`(seed, generation, rank)` from which a rank that did not exist at the save derives its random streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """Destinations for bytes, differences by name, and what is left to do when the bytes are in place.

    Attributes:
        tensors: by stored key, each at most once; sinks take bytes of the stored dtype.
        consumed_tensors, consumed_values: all names of the catalog that this rank asks for.
        problems: every mismatch; when there is one on any rank, nothing may be read or finished.
    """

    tensors: tuple[LocalTensor, ...]
    consumed_tensors: frozenset[str]
    consumed_values: frozenset[str]
    problems: tuple[str, ...]
    _finish: Callable[[RngDerivation | None], tuple[str, ...]]

    def finish(self, *, rng_derivation: RngDerivation | None = None) -> tuple[str, ...]:
        """Install everything that is not bytes; call once, after all bytes are verified and in place on all ranks.

        Args:
            rng_derivation: used only where this rank did not exist at the save (its number is not below the saving
                world size).

        Returns:
            Lines for the resume report, in the order in which things were restored.

        Raises:
            StateMismatch: an object or a random stream refused what it was given; it is named.
        """
        return self._finish(rng_derivation)


def plan_restore(
    state: Mapping[str, Any],
    catalog: Catalog,
    *,
    cast: bool = False,
    strict: bool = True,
    device: torch.device | str | None = None,
    rng: bool = True,
) -> RestorePlan:
    """Compare the live state with a checkpoint and plan its restore; talks to no other rank.

    Nothing that holds a value is changed. Modules on the meta device get (uninitialised) memory.

    Args:
        cast: let floating tensors of the model be rounded to the live dtype; optimizer state never is.
        strict: what the live state has and the checkpoint lacks is a problem; else it stays as it is, reported.
            Shapes, dtypes and unsupported things are problems either way.
        device: where modules on the meta device, and stored accelerator tensors without a live counterpart, go.
        rng: restore random streams, if the checkpoint has them.

    Raises:
        UsageError, UnsupportedState: the live state itself cannot be restored into; names the path.
    """
    where = torch.device(device) if device is not None else None
    draft = RestoreDraft(catalog=catalog, cast=cast, strict=strict, device=where)
    items = list(iter_items(state))
    for item in items:
        if item.kind == "model":
            _plan_one(draft, item, {})
    names = collect_names(items)
    for item in items:
        if item.kind != "model":
            _plan_one(draft, item, names)
    streams = _plan_streams(draft, rng)
    fill = plan_fill(
        draft.entries, stored=catalog.tensors, aliases=catalog.aliases, views=catalog.views, cast=draft.cast
    )
    # Read before anything live is touched.
    new = catalog.is_new and streams is not None
    sampled = sample_streams(catalog.differing.get("rng", ())) if new else ()
    wait_for_queued(fill.reads)
    return RestorePlan(
        tensors=fill.reads,
        consumed_tensors=fill.consumed | (draft.asked_tensors & set(catalog.tensors)),
        consumed_values=frozenset(draft.consumed_values),
        problems=tuple(draft.problems),
        _finish=_Finisher(draft=draft, fill=fill, streams=streams, sampled=sampled),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finisher:
    draft: RestoreDraft
    fill: Fill
    streams: RngPlan | None
    sampled: tuple[Any, ...]

    def __call__(self, rng_derivation: RngDerivation | None) -> tuple[str, ...]:
        lines = list(self.draft.notes)
        self.fill.finish()
        for stage, name, action in sorted(self.draft.actions, key=lambda planned: planned[:2]):
            try:
                lines.extend(action())
            except CheckpointError:
                raise
            except Exception as error:
                raise StateMismatch(f"{name} was not restored ({stage.name.lower()}): {error!r}", key=name) from error
        # ORDER: the very last, so that nothing above leaves a trace in the streams.
        if self.streams is not None:
            lines.extend(self._choose_streams(self.streams, rng_derivation).apply())
        return tuple(lines)

    def _choose_streams(self, own: RngPlan, derivation: RngDerivation | None) -> RngPlan:
        catalog = self.draft.catalog
        if derivation is None or catalog.same_ranks or derivation[2] < catalog.world_size:
            return own
        saved = self.sampled or sample_streams(catalog.differing.get("rng", ()))
        return plan_derived(*derivation, saved or [catalog.values["rng"]] * catalog.world_size)


def _plan_one(draft: RestoreDraft, item: Item, names: Names) -> None:
    """Plan one thing of the state; what is stored for it may be anything, and what does not fit is a problem."""
    try:
        if item.kind == "model":
            _plan_model(draft, item)
        elif item.kind == "optimizer":
            plan_optimizer(draft, item.key, item.value, names)
        elif item.kind == "gradients":
            plan_gradients(draft, item.key, item.value, names)
        else:
            plan_item(draft, item)
    except StateMismatch as error:
        draft.problems.append(error.message)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        if isinstance(error, CheckpointError):
            raise
        draft.problems.append(f"{item.key}: what is stored does not fit: {error!r}")


def _plan_streams(draft: RestoreDraft, rng: bool) -> RngPlan | None:
    if "rng" not in draft.catalog.values:
        if rng:
            draft.notes.append("rng: the checkpoint holds no random streams; they stay as they are")
        return None
    draft.consumed_values.add("rng")
    if not rng:
        draft.notes.append("rng: not asked for; random streams stay as they are")
        return None
    plan = plan_rng(draft.catalog.values["rng"])
    for problem in plan.problems:
        draft.miss(problem)
    return plan


def _plan_model(draft: RestoreDraft, item: Item) -> None:
    if not _give_memory(draft, item):
        return
    live: dict[str, Any] = {}

    def keep(path: str, tree: Any) -> Any:
        live[path] = tree
        return tree

    parts = capture_model(item.key, item.value, keep)
    types = {name: value for name, value in parts.values.items() if name not in live}
    draft.want_parts(Parts(entries=parts.entries, values=types))
    prefixes = (f"{item.key}/extra", f"{item.key}/hook/")
    stored = sorted(
        name
        for name in draft.catalog.values
        if (name == prefixes[0] or name.startswith((f"{prefixes[0]}/", prefixes[1]))) and not name.endswith("#type")
    )
    absent, surplus = sorted(set(live) - set(stored)), sorted(set(stored) - set(live))
    for name in absent:
        draft.miss(f"{name}: in the live model, not in the checkpoint")
    for name in surplus:
        draft.miss(f"{name}: in the checkpoint, the live model has no such state")
    if absent or surplus or not live:
        return
    values: dict[str, Any] = {}
    for name in stored:
        value = draft.take_value(name)
        values[name] = unpack_planned(draft, value, find_tensors(live[name], name), in_place=False)

    def give_back() -> tuple[str, ...]:
        restore_model_values(item.key, item.value, values)
        return ()

    draft.then(Stage.MODELS, item.key, give_back)


def _give_memory(draft: RestoreDraft, item: Item) -> bool:
    """Allocate a module that is on the meta device; False when something in it would stay without a value."""
    if not find_meta(item.value):
        return True
    unfilled = unfilled_after_materialise(item.value)
    if unfilled and draft.strict:
        draft.problems.append(
            f"{item.key}: non-persistent buffers on the meta device get no value from a checkpoint: "
            f"{', '.join(unfilled)}; build the module with real ones, or fill them before the restore"
        )
        return False
    for name in materialise(item.value, _choose_device(draft, item.value)):
        draft.notes.append(f"{item.key}/{name}: a non-persistent buffer without a value; compute it before use")
    return True


def _choose_device(draft: RestoreDraft, module: torch.nn.Module) -> torch.device | str:
    for named in canonical_names(module):
        tensor: Any = named.tensor
        if is_dtensor(tensor):
            return str(tensor.device_mesh.device_type)
    return draft.device if draft.device is not None else torch.get_default_device()
