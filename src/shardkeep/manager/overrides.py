"""What a resume changes on purpose: parts that are not restored, and options that are set afterwards.

    manager.resume(state, override={"optimizer/lr": 1e-4})            # in all groups; "optimizer/0/lr" in one
    manager.resume(state, override={"scheduler/T_max": 20_000})       # a field of what its state_dict() returns
    manager.resume(state, override={"scheduler": scheduler})          # this one as it is, the stored one is not taken
    manager.resume(state, override={"note": "second try"})            # a plain value

Everything else (weights, moments, steps, other options) is restored as always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from shardkeep.errors import UsageError

_ADVICE = 'name a part of the state ("scheduler") or an option of one ("optimizer/lr")'
_RATES = ("lr", "initial_lr")


class Overrides:
    """The overrides of one resume, checked when made.

    Raises:
        UsageError: an override names nothing that is in the state, or what cannot be overridden. Nothing was read.
    """

    def __init__(self, state: Mapping[str, Any], override: Mapping[str, Any] | None) -> None:
        self._state = state
        self._options: list[tuple[str, str, str, Any]] = []
        self._left: dict[str, Any] = {}
        self._rates: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._given = dict(override or {})
        if not self._given:
            return
        from shardkeep.state.observe import list_keys

        kinds = list_keys(state)
        for name, value in sorted(self._given.items()):
            if name in state:
                self._take_whole(name, kinds.get(name, "table"), value)
            else:
                self._take_option(name, kinds, value)

    def __bool__(self) -> bool:
        return bool(self._given)

    def _take_whole(self, name: str, kind: str, value: Any) -> None:
        if kind == "value" and isinstance(self._state, MutableMapping):
            self._left[name] = value
            return
        if kind != "object" or value is not self._state[name]:
            raise UsageError(
                f"override[{name!r}]: a whole {kind} cannot be overridden by a {type(value).__name__}",
                advice=f"put the new one into the state and pass it here too: override={{{name!r}: state[{name!r}]}}"
                if kind == "object"
                else _ADVICE,
            )
        self._left[name] = value

    def _take_option(self, name: str, kinds: Mapping[str, str], value: Any) -> None:
        owners = [key for key in kinds if name.startswith(f"{key}/")]
        owner = max(owners, key=len, default="")
        kind, option = kinds.get(owner, ""), name[len(owner) + 1 :]
        if kind not in ("optimizer", "object"):
            raise UsageError(f"override[{name!r}]: the state has nothing of that name to override", advice=_ADVICE)
        if kind == "optimizer":
            find_groups(self._find(owner), option, name)
        self._options.append((name, owner, option, value))

    def _find(self, key: str) -> Any:
        from shardkeep.state.objects import iter_items

        return next(item.value for item in iter_items(self._state) if item.key == key)

    def narrow(self) -> Mapping[str, Any]:
        """Return the state without the parts that are not restored; remember the rates that such a schedule set."""
        self._rates = []
        for part in self._left.values():
            # A schedule sets its optimizer's rates when it is made: they are part of it.
            groups = getattr(getattr(part, "optimizer", None), "param_groups", [])
            self._rates += [(group, {k: group[k] for k in _RATES if k in group}) for group in groups]
        # Not a copy: a restore puts plain values anew into the table it is given, and that is the caller's.
        return _Without(self._state, frozenset(self._left)) if self._left else self._state

    def accept(self, plan: Any, catalog: Any) -> Any:
        """Return a restore's plan that also accounts for what is stored of the parts that are not restored.

        A field that a stored object does not have becomes one of its problems.
        """
        problems = []
        for name, owner, option, _ in self._options:
            stored = catalog.values.get(owner)
            if isinstance(stored, Mapping) and option not in stored:
                problems.append(f"override {name}: {owner} has no field {option!r}; {_list(stored)}")

        def ours(key: str) -> bool:
            return key.partition("/")[0] in self._left

        tensors = {key for key in {*catalog.tensors, *catalog.aliases, *catalog.views} if ours(key)}
        values = {key for key in {*catalog.values, *catalog.differing} if ours(key)}
        return dataclasses.replace(
            plan,
            consumed_tensors=plan.consumed_tensors | tensors,
            consumed_values=plan.consumed_values | values,
            problems=(*plan.problems, *problems),
        )

    def apply(self) -> dict[str, str]:
        """Set the options, after the restore; return name -> what it was and is, for the report and the record.

        Raises:
            UsageError: an object has no such field.
        """
        done: dict[str, str] = {}
        for name, value in self._left.items():
            live = self._state[name]
            if live is value:
                done[name] = f"the stored one was not taken; a {type(live).__name__} as this start made it"
            else:
                self._state[name] = value  # type: ignore[index]  # looked at when it was taken
                done[name] = f"the stored one was not taken; {value!r}"
        for group, rates in self._rates:
            group.update(rates)
        for name, owner, option, value in self._options:
            live = self._find(owner)
            groups = getattr(live, "param_groups", None)
            if isinstance(groups, list):
                before = _set_groups(find_groups(live, option, name), option.rpartition("/")[2], value)
            else:
                before = _set_field(live, option, value, name)
            done[name] = f"{before} -> {value!r}"
        return done

    def notes(self) -> tuple[str, ...]:
        """Return what a person should know of the overrides beyond that they were made."""
        found = []
        for name, owner, option, _ in self._options:
            if option.rpartition("/")[2] != "lr":
                continue
            optimizer = self._find(owner)
            for key, value in self._state.items():
                if key not in self._left and getattr(value, "optimizer", None) is optimizer:
                    found.append(
                        f"{name}: {key} goes on with its own rates at its next step; to change those for good, "
                        f"override a field of it ({key}/base_lrs) or all of it ({key})"
                    )
        return tuple(found)


def find_groups(optimizer: Any, option: str, name: str) -> list[dict[str, Any]]:
    """Return the groups that an option such as `lr` or `0/lr` means.

    Raises:
        UsageError: no such group, or one of them has no such option.
    """
    number, slash, field = option.rpartition("/")
    groups: list[dict[str, Any]] = optimizer.param_groups
    if slash:
        if not number.isdecimal() or int(number) >= len(groups):
            raise UsageError(f"override[{name!r}]: there are groups 0 to {len(groups) - 1}", advice=_ADVICE)
        groups = [groups[int(number)]]
    for group in groups:
        if field == "params" or field not in group:
            raise UsageError(f"override[{name!r}]: no option {field!r}; {_list(group)}", advice=_ADVICE)
    return groups


def _set_groups(groups: list[dict[str, Any]], field: str, value: Any) -> str:
    before = list(dict.fromkeys(_show(group[field]) for group in groups))
    for group in groups:
        if hasattr(group[field], "fill_"):  # a capturable rate is a tensor that compiled steps hold on to
            group[field].fill_(value)
        else:
            group[field] = value
    return ", ".join(before)


def _set_field(live: Any, field: str, value: Any, name: str) -> str:
    fields = dict(live.state_dict())
    if field not in fields:
        raise UsageError(f"override[{name!r}]: no field {field!r}; {_list(fields)}", advice=_ADVICE)
    before = _show(fields[field])
    fields[field] = value
    live.load_state_dict(fields)
    return before


def _list(fields: Mapping[str, Any]) -> str:
    return "there are " + ", ".join(sorted(str(key) for key in fields if key != "params"))


def _show(value: Any) -> str:
    return repr(value.item() if hasattr(value, "item") else value)


class _Without(MutableMapping[str, Any]):
    """A table without some of its names; what is set in it is set in the table."""

    def __init__(self, table: Mapping[str, Any], left: frozenset[str]) -> None:
        self._table = table
        self._left = left

    def __getitem__(self, name: str) -> Any:
        if name in self._left:
            raise KeyError(name)
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        table: Any = self._table
        table[name] = value

    def __delitem__(self, name: str) -> None:
        table: Any = self._table
        del table[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table if name not in self._left)

    def __len__(self) -> int:
        return sum(1 for _ in self)
