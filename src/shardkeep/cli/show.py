"""`shardkeep show`: what a checkpoint holds, or a plain safetensors file or folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from shardkeep.cli.contents import Row, iter_tree, list_checkpoint, list_files, select
from shardkeep.cli.output import (
    escape,
    fit,
    format_age,
    format_count,
    format_metrics,
    format_table,
    write,
    write_json,
)
from shardkeep.cli.target import STEP_HELP, choose_selection, find_ref, open_run, parse_target
from shardkeep.engine.listing import no_run
from shardkeep.engine.restore import CheckpointReader
from shardkeep.engine.run import read_commit, read_run_id
from shardkeep.engine.sources import CheckpointSource, FileSource, find_files
from shardkeep.errors import NotFound, UsageError
from shardkeep.format.records import CommitRecord, ShardRecord, decode_metrics
from shardkeep.storage.base import Store
from shardkeep.types import format_bytes

_MAX_TENSORS = 40


@click.command("show")
@click.argument("run")
@click.option("--step", help=f"{STEP_HELP}; 'latest' by default.")
@click.option("--tree", is_flag=True, help="The tree of names, with sizes summed up.")
@click.option("-t", "--tensors", "pattern", metavar="GLOB", help="List the tensors that match; '*' for all.")
@click.option("--shards", "with_shards", is_flag=True, help="List the shard files.")
@click.option("--values", "with_values", is_flag=True, help="Show the plain values (schedules, cursors, RNG).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(
    run: str,
    step: str | None,
    tree: bool,
    pattern: str | None,
    with_shards: bool,
    with_values: bool,
    as_json: bool,
) -> int:
    """Show what a checkpoint of RUN holds. RUN may also be a safetensors file, or a folder of them."""
    target = parse_target(run)
    local = os.path.expanduser(target.url)
    store = open_run(target.url)
    is_run = not os.path.isfile(local) and read_run_id(store) is not None
    if not is_run:
        source = find_files(local) if os.path.exists(local) else None
        if source is None:
            raise no_run(store)
        if step is not None or target.selection is not None or with_values:
            raise UsageError(
                f"{run}: is no run, so it has no steps and values", advice=f"shardkeep show {target.url}"
            )
        rows = select(list_files(source), pattern)
        _check_any(rows, pattern, source.url)
        if as_json:
            write_json(_describe_files(source, rows))
        else:
            write(*_format_files(source, rows, tree=tree, listed=pattern is not None, with_shards=with_shards))
        return 0
    commit = read_commit(store, find_ref(store, choose_selection(target, step)))
    rows = select(list_checkpoint(commit), pattern)
    _check_any(rows, pattern, f"{store.url}, {commit.ref}")
    shards = _read_shards(store, commit) if with_shards else None
    values = CheckpointSource(store, commit).values() if with_values else None
    if as_json:
        write_json(_describe(store.url, commit, rows, shards, values))
    else:
        lines = _format_head(store.url, commit, list_checkpoint(commit))
        lines += _format_rows(rows, tree=tree, listed=pattern is not None)
        lines += _format_shards(shards) if shards is not None else []
        lines += _format_values(values) if values is not None else []
        write(*lines)
    return 0


def _check_any(rows: Sequence[Row], pattern: str | None, where: str) -> None:
    if pattern is not None and not rows:
        raise NotFound(f"{where}: no tensor matches {pattern!r}", advice="shardkeep show RUN --tree shows the names")


def _read_shards(store: Store, commit: CommitRecord) -> list[tuple[int, ShardRecord, int]]:
    """Return `(rank, shard, tensor count)`; reads every part record."""
    reader = CheckpointReader(store, commit)
    found: list[tuple[int, ShardRecord, int]] = []
    for rank in range(commit.world_size):
        part = reader.part(rank).record
        counts = [0] * len(part.shards)
        for chunks in part.tensors.values():
            for number in {chunk.shard for chunk in chunks}:
                counts[number] += 1
        for own in part.per_rank.values():
            counts[own.shard] += 1
        found += [(rank, shard, counts[number]) for number, shard in enumerate(part.shards)]
    return found


def _sections(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        count, size = found.get(row.section, (0, 0))
        found[row.section] = count + 1, size + row.size_bytes
    return dict(sorted(found.items()))


def _describe(
    url: str,
    commit: CommitRecord,
    rows: Sequence[Row],
    shards: list[tuple[int, ShardRecord, int]] | None,
    values: dict[str, Any] | None,
) -> dict[str, Any]:
    facts = commit.facts
    found: dict[str, Any] = {
        "run": url,
        "run_id": commit.run_id,
        "step": commit.ref.step,
        "generation": commit.ref.generation,
        "attempt": commit.ref.attempt,
        "folder": commit.ref.folder,
        "created_at": facts.created_at,
        "ranks": commit.world_size,
        "size_bytes": sum(part.size_bytes + part.shard_bytes for part in commit.parts),
        "shard_count": sum(part.shard_count for part in commit.parts),
        "metrics": decode_metrics(facts.metrics),
        "healthy": facts.healthy,
        "environment": dict(facts.environment),
        "assets": {name: {"size_bytes": a.size_bytes, "sha256": a.sha256} for name, a in facts.assets.items()},
        "meshes": [
            {"shape": list(m.shape), "names": list(m.names), "ranks": list(m.ranks)} for m in facts.layout.meshes
        ],
        "value_names": sorted(name for holder in facts.holders for name in holder.names),
        "tensors": [_describe_row(row) for row in rows],
    }
    if shards is not None:
        found["shards"] = [
            {"name": s.name, "rank": rank, "section": s.section, "size_bytes": s.size_bytes, "tensor_count": count}
            for rank, s, count in shards
        ]
    if values is not None:
        found["values"] = values
    return found


def _describe_row(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        "key": row.key,
        "dtype": row.dtype or None,
        "shape": list(row.shape),
        "size_bytes": row.size_bytes,
    }
    if row.file is not None:
        return {**found, "file": row.file}
    return {
        **found,
        "section": row.section,
        "role": row.role,
        "placement": row.placement,
        "ranks": list(row.ranks),
    }


def _describe_files(source: FileSource, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "path": source.url,
        "files": [
            {"path": path, "size_bytes": header.size_bytes, "metadata": header.metadata}
            for path, header in sorted(source.headers.items())
        ],
        "tensors": [_describe_row(row) for row in rows],
    }


def _format_head(url: str, commit: CommitRecord, rows: Sequence[Row]) -> list[str]:
    facts = commit.facts
    age = format_age(facts.created_at)
    size = format_bytes(sum(part.size_bytes + part.shard_bytes for part in commit.parts))
    shard_count = sum(part.shard_count for part in commit.parts)
    lines = [
        f"{escape(url)}, {commit.ref}",
        f"saved      {escape(facts.created_at)}" + (f" ({age} ago)" if age else ""),
        f"size       {size} in {format_count(shard_count, 'shard')} of {format_count(commit.world_size, 'rank')}",
    ]
    for number, mesh in enumerate(facts.layout.meshes):
        axes = f" ({', '.join(map(escape, mesh.names))})" if mesh.names else ""
        lines.append(f"mesh {number}     {'x'.join(map(str, mesh.shape))}{axes}")
    if facts.metrics:
        lines.append(f"metrics    {escape(format_metrics(decode_metrics(facts.metrics)))}")
    if not facts.healthy:
        lines.append("health     said to be unhealthy when it was saved")
    names = sorted(name for holder in facts.holders for name in holder.names)
    if names:
        lines.append(f"values     {', '.join(map(escape, names))}")
    if facts.assets:
        lines.append(f"assets     {', '.join(map(escape, sorted(facts.assets)))}")
    if facts.environment:
        lines.append("saved by   " + ", ".join(f"{escape(k)} {escape(v)}" for k, v in facts.environment.items()))
    for section, (count, total_bytes) in _sections(rows).items():
        lines.append(f"section    {escape(section)}: {format_count(count, 'tensor')}, {format_bytes(total_bytes)}")
    return fit(lines)


def _format_rows(rows: Sequence[Row], *, tree: bool, listed: bool) -> list[str]:
    if tree:
        return _format_tree(rows)
    shown = rows if listed else rows[:_MAX_TENSORS]
    cells = [
        [
            row.key,
            row.dtype,
            "x".join(map(str, row.shape)),
            format_bytes(row.size_bytes),
            row.role,
            row.placement,
            _format_ranks(row.ranks),
        ]
        for row in shown
    ]
    lines = [
        "",
        *format_table(["TENSOR", "DTYPE", "SHAPE", "SIZE", "ROLE", "PLACEMENT", "RANKS"], cells, right="SIZE"),
    ]
    if len(rows) > len(shown):
        lines.append(
            f"... and {format_count(len(rows) - len(shown), 'tensor')} more (-t '*' lists all, --tree sums up)"
        )
    return lines


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return `0-3,7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _format_tree(rows: Sequence[Row]) -> list[str]:
    cells = []
    for node in iter_tree(rows):
        row = node.row
        what = f"{row.dtype}{list(row.shape)}" if row and row.dtype else row.placement if row else None
        what = what or format_count(node.tensor_count, "tensor")
        cells.append(["  " * node.depth + node.name, format_bytes(node.size_bytes), what])
    return ["", *format_table(["NAME", "SIZE", "WHAT"], cells, right="SIZE")]


def _format_shards(shards: Sequence[tuple[int, ShardRecord, int]]) -> list[str]:
    cells = [
        [shard.name, str(rank), shard.section, format_bytes(shard.size_bytes), str(count)]
        for rank, shard, count in shards
    ]
    titles = ["SHARD", "RANK", "SECTION", "SIZE", "TENSORS"]
    return ["", *format_table(titles, cells, right="RANK SIZE TENSORS")]


def _format_values(values: dict[str, Any]) -> list[str]:
    import json

    return [
        "",
        *(f"{escape(name)} = {escape(json.dumps(value, ensure_ascii=True))}" for name, value in values.items()),
    ]


def _format_files(
    source: FileSource, rows: Sequence[Row], *, tree: bool, listed: bool, with_shards: bool
) -> list[str]:
    total = sum(row.size_bytes for row in list_files(source))
    lines = [
        escape(source.url),
        f"size       {format_bytes(total)} of tensors in {format_count(len(source.headers), 'file')}",
        f"tensors    {len(source.tensors)}",
    ]
    metadata = sorted({(k, v) for header in source.headers.values() for k, v in header.metadata.items()})
    lines += [f"metadata   {escape(name)} = {escape(text)}" for name, text in metadata[:20]]
    if with_shards:
        cells = [
            [os.path.basename(path), format_bytes(header.size_bytes), str(len(header.tensors))]
            for path, header in sorted(source.headers.items())
        ]
        lines += ["", *format_table(["FILE", "SIZE", "TENSORS"], cells, right="SIZE TENSORS")]
    return fit(lines) + _format_rows(rows, tree=tree, listed=listed)
