"""Which classes may stand in a saved state, and how their objects are taken apart and put together.

Only enums, dataclasses and namedtuples can be registered: their content is their fields, and it can be set
without running the class's own code. A class is found by its registered name alone; nothing is ever imported
because a file says so.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from shardkeep.errors import StateMismatch, UsageError

T = TypeVar("T", bound=type)
Kind = Literal["enum", "flag", "dataclass", "namedtuple"]
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: classes made by a `class` statement have it, built-in ones do not


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """One registered class. `fields` are those of a dataclass or namedtuple, in declared order."""

    name: str
    cls: type
    kind: Kind
    fields: tuple[str, ...]


class TypeRegistry:
    """Classes whose objects may be saved, by class and by name. Safe to read from several threads."""

    def __init__(self) -> None:
        self._by_class: dict[type, Registered] = {}
        self._by_name: dict[str, Registered] = {}

    def register(self, cls: type, name: str | None = None) -> None:
        """Let objects of exactly `cls` (not of subclasses) be saved, under `name` (default: the qualified name).

        The name is what files hold, so it must stay the same for as long as they are read. Registering a
        class again is harmless; a class that was defined anew (a notebook cell run twice) takes the old one's place.

        Raises:
            UsageError: not an enum, dataclass or namedtuple, or one with content beside its fields; or the name
                belongs to another class.
        """
        entry = _describe(cls, name)
        held = self._by_name.get(entry.name)
        if held is not None and held.cls is not cls and not _is_redefinition(held.cls, cls):
            raise UsageError(
                f"the name {entry.name!r} is registered for {full_name(held.cls)}, so not for {full_name(cls)}",
                advice=f"give it a name of its own: register_type({cls.__qualname__}, name=...)",
            )
        if (other := self._by_class.get(cls)) is not None and other.name != entry.name:
            raise UsageError(f"{full_name(cls)} is registered as {other.name!r}, so not as {entry.name!r}")
        if held is not None:
            self._by_class.pop(held.cls, None)
        self._by_class[cls] = entry
        self._by_name[entry.name] = entry

    def find(self, cls: type) -> Registered | None:
        """Return the entry of exactly this class, or None."""
        return self._by_class.get(cls)

    def get(self, name: str) -> Registered:
        """Return the entry called `name`.

        Raises:
            StateMismatch: there is none in this process.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise StateMismatch(
                f"stored object of type {name[:80]!r}: no such type is registered in this process; "
                f"there are {', '.join(sorted(self._by_name)) or 'none'}",
                advice="call shardkeep.register_type on its class before restoring, as when it was saved",
            ) from None


DEFAULT_REGISTRY: Final = TypeRegistry()
"""The registry of the process: filled by the user's `register_type` calls, never by shardkeep. Everything that reads
it takes another one as an argument."""


def register_type(cls: T, name: str | None = None) -> T:
    """Register an enum, dataclass or namedtuple with the process's registry; returns it, so it decorates too.

    Raises:
        UsageError: see `TypeRegistry.register`.
    """
    DEFAULT_REGISTRY.register(cls, name)
    return cls


def full_name(cls: type) -> str:
    """Return `module.QualifiedName`, or only the name of a built-in."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def is_registrable(cls: type) -> bool:
    """Say whether `TypeRegistry.register` would take the class, its name aside."""
    try:
        _describe(cls, "x")
    except UsageError:
        return False
    return True


def find_stray_content(value: Any, entry: Registered) -> str | None:
    """Return what an object of a registered class holds or lacks so that its fields do not say it all, or None."""
    if entry.kind in ("enum", "flag"):
        return None
    allowed = set(entry.fields)
    for name in getattr(value, "__dict__", {}):
        # What a cached_property keeps is computed again when asked for.
        if name not in allowed and not isinstance(getattr(entry.cls, name, None), functools.cached_property):
            return f"holds {name!r}, which is not a field"
    for name in _iter_slots(entry.cls):
        if name not in allowed and hasattr(value, name):
            return f"holds {name!r}, which is not a field"
    for name in entry.fields:
        if not hasattr(value, name):
            return f"has no value for its field {name!r}"
    return None


def put_together(entry: Registered, fields: dict[str, Any]) -> Any:
    """Return a dataclass or namedtuple object with these field values; runs neither `__init__` nor `__new__`.

    Raises:
        StateMismatch: the class has other fields now, or does not let them be set.
    """
    if set(fields) != set(entry.fields):
        gone = [f"stored field {name!r} is not in the class" for name in sorted(set(fields) - set(entry.fields))]
        new = [f"field {name!r} of the class is not stored" for name in sorted(set(entry.fields) - set(fields))]
        raise StateMismatch(
            f"stored object of type {entry.name!r} and the class {full_name(entry.cls)} differ", problems=gone + new
        )
    if entry.kind == "namedtuple":
        return tuple.__new__(entry.cls, [fields[name] for name in entry.fields])
    try:
        value: Any = object.__new__(entry.cls)
        for name in entry.fields:
            object.__setattr__(value, name, fields[name])
    except (AttributeError, TypeError) as error:
        raise StateMismatch(f"{full_name(entry.cls)} cannot be filled with its stored fields now: {error}") from error
    return value


def find_member(entry: Registered, stored: str | int) -> Any:
    """Return the enum member of a name, or the flag of a number.

    Raises:
        StateMismatch: the class has no such member now.
    """
    member: Any = None
    if isinstance(stored, str):
        member = getattr(entry.cls, "__members__", {}).get(stored)
    else:
        try:
            member = entry.cls(stored)
        except ValueError:
            member = None
    found = entry.cls if isinstance(stored, str) or getattr(member, "value", None) == stored else None
    if type(member) is not found:
        text = repr(stored) if isinstance(stored, str) else hex(stored)  # decimal fails on very large ones
        raise StateMismatch(f"stored member {text[:80]} of {entry.name!r}: {full_name(entry.cls)} has no such member")
    return member


def _describe(cls: type, name: str | None) -> Registered:
    if not isinstance(cls, type):
        raise UsageError(f"register_type({cls!r}): expected a class")
    name = cls.__qualname__ if name is None else name
    if not name or not name.isprintable():
        raise UsageError(f"register_type({cls.__qualname__}, name={name!r}): expected a printable, non-empty name")
    fields: tuple[str, ...] = ()
    kind: Kind
    if issubclass(cls, enum.Flag):
        kind = "flag"
    elif issubclass(cls, enum.Enum):
        kind = "enum"
    elif issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple):
        kind, fields = "namedtuple", tuple(getattr(cls, "_fields", ()))
    elif dataclasses.is_dataclass(cls):
        kind, fields = "dataclass", tuple(field.name for field in dataclasses.fields(cls))
    else:
        raise UsageError(
            f"register_type({full_name(cls)}): expected an enum, a dataclass or a namedtuple",
            advice="give the class state_dict() and load_state_dict(), or make it a dataclass",
        )
    builtin = tuple if kind == "namedtuple" else object
    if kind not in ("enum", "flag") and (extra := _find_builtin_base(cls, builtin)) is not None:
        raise UsageError(
            f"register_type({full_name(cls)}): it derives from {full_name(extra)}, whose content is in no field",
            advice="hold the content in a field instead",
        )
    return Registered(name=name, cls=cls, kind=kind, fields=fields)


def _find_builtin_base(cls: type, but: type) -> type | None:
    """Return a base that is implemented in C (so may hold content of its own), `object` and `but` aside."""
    for base in cls.__mro__:
        if not base.__flags__ & _HEAP_TYPE and base not in (object, but):
            return base
    return None


def _is_redefinition(old: type, new: type) -> bool:
    return (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def _iter_slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name in ("__dict__", "__weakref__"):
                continue
            private = name.startswith("__") and not name.endswith("__")
            yield f"_{base.__name__.lstrip('_')}{name}" if private else name
