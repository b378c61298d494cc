"""The comparison as one SVG: for each workload and cluster size, every router's mean TTFT as a bar.

Bars are relative to Tandem's, on a logarithmic scale, because a router that breaks down is a hundred times slower. A
line at the bar's end spans one standard deviation over the seeds to either side. Pure: results in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import log10

from cluster.bench.route.matrix import Figures, Results
from cluster.bench.route.policies import OURS

_PANEL_W, _BAR_H, _GAP, _LEFT, _TOP = 300, 13, 34, 110, 46
_LOWEST, _HIGHEST = 0.5, 100.0
"""The scale's ends, in multiples of Tandem's mean TTFT."""
_OURS_FILL, _OTHER_FILL = "#0b7285", "#adb5bd"


def chart(results: Results) -> str:
    """An SVG document: workloads downwards, cluster sizes side by side."""
    workloads = list(dict.fromkeys(workload for workload, _ in results))
    sizes = sorted({workers for _, workers in results})
    height = max((len(policies) for policies in results.values()), default=0) * _BAR_H + _GAP
    parts = []
    for column, workers in enumerate(sizes):
        for row, workload in enumerate(workloads):
            if (policies := results.get((workload, workers))) is not None:
                x, y = _LEFT + column * (_PANEL_W + _LEFT), _TOP + row * height
                parts += [_text(x, y - 6, f"{workload}, {workers} workers", "title"), *_panel(x, y, policies)]
    return _document(len(sizes) * (_PANEL_W + _LEFT) + 20, _TOP + len(workloads) * height, parts)


def _panel(x: int, y: int, policies: dict[str, Figures]) -> Iterator[str]:
    base = policies.get(OURS, next(iter(policies.values())))["ttft_mean"][0]
    for place, (policy, figures) in enumerate(policies.items()):
        mean, spread = figures["ttft_mean"]
        top, width = y + place * _BAR_H, _along(mean / base)
        fill = _OURS_FILL if policy == OURS else _OTHER_FILL
        yield _text(x - 4, top + 9, policy, "name")
        yield f'<rect x="{x}" y="{top}" width="{width:.1f}" height="{_BAR_H - 3}" fill="{fill}"/>'
        low, high = _along((mean - spread) / base), _along((mean + spread) / base)
        middle = top + (_BAR_H - 3) / 2
        yield f'<path d="M{x + low:.1f} {middle}H{x + high:.1f}" stroke="#212529"/>'
        yield _text(x + max(width, high) + 4, top + 9, f"{mean:.2f} s", "value")


def _along(ratio: float) -> float:
    """Pixels from the left end of the scale."""
    clipped = min(max(ratio, _LOWEST), _HIGHEST)
    return (_PANEL_W - 60) * log10(clipped / _LOWEST) / log10(_HIGHEST / _LOWEST)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _document(width: int, height: int, parts: list[str]) -> str:
    style = "text{font:10px sans-serif}.title{font:bold 11px sans-serif}.name{text-anchor:end}"
    heading = _text(10, 18, "Mean time to first token, logarithmic; lines: one standard deviation over seeds", "title")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            heading,
            *parts,
            "</svg>",
            "",
        ]
    )
