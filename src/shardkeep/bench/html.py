"""A page with the table and a chart for each measurement: one file, nothing loaded from elsewhere. Pure."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, Final

from shardkeep.bench.bars import BARS
from shardkeep.bench.run import BenchResult

_TITLES: Final = {
    "save": "Blocking save until durable",
    "load.cold": "Load from a cold page cache",
    "load.warm": "Load from the page cache",
    "partial.tensor": "Cold read of one large tensor",
    "tiers.restart": "Restart from a tier in memory (raw: one-thread memcpy of the state)",
    "async.first_stall": "Asynchronous save: first stall of a process",
    "async.stall": "Asynchronous save: later stalls",
    "async.lost": "Asynchronous save: training time lost until durable",
    "overlap.stall": "Overlapped save: wait of the loop",
    "memcpy": "One-thread memcpy of the state",
    "ranks4.save": "FSDP2 on 4 ranks: save until durable",
    "ranks4.reshard_load": "FSDP2: saved on 4 ranks, cold load on 2",
    "ranks2.save": "FSDP2 on 2 ranks: save until durable",
}
_STYLE: Final = """\
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1c2430;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.05rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .6rem;border-bottom:1px solid #dde3ea}td.n{text-align:right}
.met{color:#0a7a3d}.missed{color:#b3261e;font-weight:600}.none{color:#76818f}
svg{width:100%;height:auto;font:12px system-ui,sans-serif}
@media(prefers-color-scheme:dark){body{background:#12161c;color:#dde3ea}th,td{border-color:#2d3540}text{fill:#dde3ea}
.met{color:#4ecb85}.missed{color:#ff8a80}}
"""
_ROW: Final = 24
_LEFT: Final = 210
_WIDTH: Final = 900
_COLOURS: Final = {"shardkeep": "#1466c9", "raw": "#7b8794"}


def format_page(result: BenchResult) -> str:
    """Return the page."""
    details = result.details
    charts = [
        f"<h2>{_text(title)}</h2>\n{format_chart(details['seconds'][what])}"
        for what, title in _TITLES.items()
        if what in details["seconds"]
    ]
    machine = ", ".join(f"{name} {value}" for name, value in details["machine"].items())
    versions = ", ".join(f"{name} {value}" for name, value in details["versions"].items())
    missing = "".join(f"<li>{_text(name)}: {_text(why)}</li>" for name, why in details["not_measured"].items())
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>shardkeep bench</title><style>{_STYLE}</style></head><body>",
            "<h1>shardkeep bench</h1>",
            f"<p>A state of {details.get('state_bytes', 0) / (1 << 30):.2f} GiB in {details['state_tensor_count']} "
            f"tensors; {details['rounds']} rounds after a warm-up, {details['took_s']:.0f} s. Figures are medians of "
            "the ratios within rounds. Bars of charts are medians, lines reach from the least to the greatest.</p>",
            _format_figures(result),
            *charts,
            f"<h2>Not measured</h2><ul>{missing}</ul>" if missing else "",
            f"<h2>Machine</h2><p>{_text(machine)}</p><p>{_text(versions)}</p>",
            "</body></html>\n",
        ]
    )


def _format_figures(result: BenchResult) -> str:
    rows = []
    for key, figure in result.figures.items():
        bar = BARS[key]
        met = bar.is_met(figure.value)
        name, word = {True: ("met", "met"), False: ("missed", "not met"), None: ("none", "-")}[met]
        value = "-" if figure.value is None else f"{figure.value:.3g}"
        rows.append(
            f'<tr><td><code>{_text(key)}</code></td><td>{_text(bar.what)}</td><td class="n">{value}</td>'
            f'<td>{_text(bar.text)}</td><td class="{name}">{word}</td><td>{_text(figure.against or "")}</td></tr>'
        )
    head = "<tr><th>figure</th><th>what</th><th>value</th><th>bar</th><th></th><th>against</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def format_chart(times: Mapping[str, Mapping[str, Any]]) -> str:
    """Return an SVG of bars, the shortest first: who -> median, least, greatest in seconds."""
    ordered = sorted(times.items(), key=lambda item: (item[1]["median"], item[0]))
    most = max([spread["greatest"] for _, spread in ordered] + [1e-9])
    scale = (_WIDTH - _LEFT - 90) / most
    height = _ROW * len(ordered) + 6
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">']
    for at, (who, spread) in enumerate(ordered):
        y = at * _ROW + 4
        middle = y + _ROW / 2 - 3
        width = max(1.0, spread["median"] * scale)
        least, greatest = _LEFT + spread["least"] * scale, _LEFT + spread["greatest"] * scale
        parts.append(
            f'<text x="{_LEFT - 8}" y="{middle + 4:.1f}" text-anchor="end">{_text(who)}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" '
            f'fill="{_COLOURS.get(who, "#c9a14a")}"/>'
            f'<line x1="{least:.1f}" x2="{greatest:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            'stroke="#1c2430" stroke-width="1.5"/>'
            f'<text x="{greatest + 6:.1f}" y="{middle + 4:.1f}">{spread["median"]:.3f} s</text>'
        )
    return "".join([*parts, "</svg>"])


def _text(value: object) -> str:
    return html.escape(str(value))
