"""Every error is drawn in the module's tree with its exit code, public, and has its place in `docs/errors.md`."""

from __future__ import annotations

import re

import pytest

import shardkeep
from shardkeep import errors
from tests.rules.pages import DOCS

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.CheckpointError)
}
PAGE = (DOCS / "errors.md").read_text(encoding="utf-8")


def parse_tree() -> dict[str, tuple[str | None, int]]:
    """Return class -> (the class it is drawn under, its exit code) of the module's docstring."""
    found: dict[str, tuple[str | None, int]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"((?:│   |    )*(?:[├└]── )?)([A-Z]\w+)(?: \(\w+\))?(?:\s+(\d+))?", line)
        if not match or match[2] not in CLASSES:
            continue
        depth = len(match[1]) // 4
        parent = above[depth - 1] if depth else None
        above[depth:] = [match[2]]
        found[match[2]] = parent, int(match[3]) if match[3] else found[str(parent)][1]
    return found


def test_the_tree_is_the_classes() -> None:
    tree = parse_tree()
    assert set(tree) == set(CLASSES)
    for name, (parent, code) in tree.items():
        assert CLASSES[name].exit_code == code
        assert CLASSES[name].__bases__[0].__name__ == (parent or "Exception")


def test_builtin_bases_are_drawn() -> None:
    for name, cls in CLASSES.items():
        for base in cls.__bases__[1:]:
            assert f"{name} ({base.__name__})" in (errors.__doc__ or "")
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.NotFound, FileNotFoundError)


def test_every_error_is_public_and_documented() -> None:
    for name, cls in CLASSES.items():
        assert getattr(shardkeep, name) is cls
        assert (cls.__doc__ or "").strip()


def test_exit_codes_stay() -> None:
    """They are public: scripts branch on them."""
    assert {name: cls.exit_code for name, cls in CLASSES.items()} == {
        "CheckpointError": 2,
        "UsageError": 64,
        "NotFound": 10,
        "NotCommitted": 11,
        "IncompatibleFormat": 12,
        "StateMismatch": 13,
        "UnsupportedState": 14,
        "StateChanged": 15,
        "Corrupt": 20,
        "Unrecoverable": 21,
        "StorageError": 30,
        "OutOfSpace": 30,
        "Throttled": 30,
        "AlreadyExists": 30,
        "Denied": 30,
        "PeerFailure": 40,
        "BarrierTimeout": 40,
        "Fenced": 41,
        "NotBitExact": 50,
    }


def test_the_page_has_one_section_for_each_in_the_order_of_the_tree() -> None:
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == list(parse_tree())


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_says_what_happened_what_is_safe_and_what_to_type(name: str) -> None:
    section = re.split(r"^## \w+$", PAGE, flags=re.MULTILINE)[1 + list(parse_tree()).index(name)]
    cls = CLASSES[name]
    assert section.strip().startswith(f"Exit code: {cls.exit_code}")
    for item in ("- What happened: ", "- What is still safe: ", "- What to type next: "):
        assert len(section.split(item)) == 2, item
        assert len(section.split(item)[1].split("\n- ")[0]) > 20
    for base in cls.__bases__:
        if base not in (Exception, errors.CheckpointError):
            assert f"`{base.__name__}`" in section
    if issubclass(cls, errors.StorageError) and cls is not errors.StorageError:
        assert ("; retryable." in section) == cls.retryable
        assert ("; not retryable." in section) == (not cls.retryable)


def test_knobs_named_on_the_page_exist() -> None:
    from shardkeep.knobs import KNOBS

    assert set(re.findall(r"SHARDKEEP_(\w+)", PAGE)) <= set(KNOBS)


def test_messages_carry_what_the_fields_say() -> None:
    error = errors.Corrupt("bad leaf", step=3, rank=7, key="model/w", advice="shardkeep verify RUN")
    assert str(error) == "bad leaf (step 3, rank 7)\n  next: shardkeep verify RUN"
    assert (error.step, error.rank, error.key) == (3, 7, "model/w")
    assert str(errors.NotFound("no step 3 here", step=3)) == "no step 3 here"
    mismatch = errors.StateMismatch("differ", problems=["a: x", "b: y"], advice="look")
    assert str(mismatch) == "differ\n  - a: x\n  - b: y\n  next: look"
    failure = errors.PeerFailure("lost", causes={2: "b", 1: "a"}, exit_codes={1: 30, 2: 40})
    assert str(failure) == "lost\n  rank 1: a\n  rank 2: b"
    assert failure.transient
    assert not errors.PeerFailure("lost", exit_codes={1: 13}).transient
    assert not errors.OutOfSpace("full").retryable
    assert errors.StorageError("odd", retryable=False).retryable is False
    assert errors.BarrierTimeout("late", missing=[3]).missing == (3,)
