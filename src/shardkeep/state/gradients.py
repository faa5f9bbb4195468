"""Gradients that are not used up yet: a save between two micro-steps of one accumulation window.

Each is stored as `<key>/<parameter>`, in its own dtype and layout; which parameters have one is the value `<key>`.
Ranks that accumulate without synchronising hold different ones: then each rank's are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from shardkeep.errors import CheckpointError, Corrupt, UnsupportedState, UsageError
from shardkeep.state.destinations import plan_tensor
from shardkeep.state.drafts import MISSING, CaptureDraft, RestoreDraft, Stage, split_key
from shardkeep.state.names import NamedTensor, canonical_names, iter_modules
from shardkeep.state.subclasses import take_apart

_WAIT_ADVICE: Final = "save at the end of the window, or accumulate with set_requires_gradient_sync(True)"


class Gradients:
    """The `.grad` of every parameter of a model, for a state that is saved inside an accumulation window.

    `state = {"model": model, "gradients": sk.Gradients(model), ...}`; a restore puts each gradient back, and sets to
    None those that were None. Without it gradients are not saved, and a save belongs where they are used up: after
    the optimizer's step. Put the number of the micro-step into the state too, if the loop counts it.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch a model; reads nothing yet.

        Raises:
            UsageError: not a module.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(f"Gradients got a {type(model).__name__}; expected the torch.nn.Module that has them")
        self.model = model


def capture_gradients(draft: CaptureDraft, key: str, gradients: Gradients) -> None:
    """Add the gradients that are there to the draft; reads only.

    Raises:
        UnsupportedState: FSDP2 holds gradients that it has not reduced yet, or one is sparse; names it.
    """
    _refuse_unreduced(key, gradients.model)
    found = []
    for named in _iter_parameters(gradients.model):
        if named.tensor.grad is None:
            continue
        found.append(named.name)
        at = f"{key}/{named.name}"
        section, name = split_key(at)
        draft.add_parts(take_apart(at, named.tensor.grad, section=section, name=name, role="state"))
    draft.add_value(key, sorted(found))


def plan_gradients(draft: RestoreDraft, key: str, gradients: Gradients, names: Mapping[int, tuple[str, str]]) -> None:
    """Plan the gradients' restore; nothing live changes before it finishes.

    Args:
        names: `id(parameter) -> (model key, name)` of the models in the state.
    """
    stored = draft.take_value(key)
    if stored is MISSING:
        return
    if not isinstance(stored, list):
        raise Corrupt(f"the stored value {key} is a {type(stored).__name__}; expected the names of parameters")
    live = {named.name: named.tensor for named in _iter_parameters(gradients.model)}
    for name in sorted(set(stored) - live.keys()):
        draft.miss(f"{key}/{name}: in the checkpoint, the live model has no such parameter")
    planned: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for name, parameter in live.items():
        if name not in stored:
            planned.append((parameter, None))
            continue
        model, own = names.get(id(parameter), ("", ""))
        try:
            gradient = plan_tensor(
                draft, f"{key}/{name}", live=parameter.grad, like=parameter, like_key=f"{model}/{own}" if own else ""
            )
        except CheckpointError as error:
            draft.problems.append(error.message)
            continue
        planned.append((parameter, gradient))

    def put() -> Iterable[str]:
        for parameter, gradient in planned:
            parameter.grad = gradient
        return ()

    draft.then(Stage.OBJECTS, key, put)


def _iter_parameters(model: nn.Module) -> Iterator[NamedTensor]:
    """Yield each parameter once, by its first name."""
    seen: set[int] = set()
    for named in canonical_names(model):
        if named.kind == "parameter" and id(named.tensor) not in seen:
            seen.add(id(named.tensor))
            yield named


def _refuse_unreduced(key: str, model: nn.Module) -> None:
    for place in iter_modules(model):
        read: Any = getattr(place.module, "_get_fsdp_state", None)
        if read is None:
            continue
        group = getattr(read(), "_fsdp_param_group", None)
        for held in getattr(group, "fsdp_params", ()):
            whole = getattr(held, "_unsharded_param", None)
            if getattr(held, "unsharded_accumulated_grad", None) is not None or (
                whole is not None and whole.grad is not None
            ):
                raise UnsupportedState(
                    f"{key}: {place.name or 'the model'} holds whole gradients that FSDP2 has not reduced yet",
                    key=key,
                    advice=_WAIT_ADVICE,
                )
