"""Draws the pictures of the README and of docs/: `python bench/pictures.py`. Figures come from docs/benchmarks."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import pages

FOLDER = pages.ROOT / "docs" / "pictures"
BLUE, GREY, LIGHT, INK = "#2463a8", "#9aa3ad", "#e8eef5", "#1f2933"


def svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *parts,
        "</svg>",
        "",
    ])  # fmt: skip


def words(x: float, y: float, text: str, *, anchor: str = "start", fill: str = INK, size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{escape(text)}</text>'


def box(
    x: float, y: float, width: float, height: float, title: str, *lines: str, fill: str = LIGHT
) -> list[str]:
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{BLUE}"/>'
    ]
    middle = x + width / 2
    top = y + height / 2 + 5 - 8 * len(lines)
    bold = words(middle, top, title, anchor="middle").replace("<text", '<text font-weight="bold"')
    rest = [words(middle, top + 17 * (i + 1), line, anchor="middle", size=12) for i, line in enumerate(lines)]
    return [*parts, bold, *rest]


def arrow(x1: float, y1: float, x2: float, y2: float, label: str = "") -> list[str]:
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}" marker-end="url(#head)"/>'
    said = [words((x1 + x2) / 2 + 6, (y1 + y2) / 2 + 4, label, size=12)] if label else []
    return [line, *said]


HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
)


def interval(cell: str) -> tuple[float, float, float] | None:
    """Median, low and high of a cell; None if the search returned the original."""
    found = re.fullmatch(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", cell)
    return (float(found[1]), float(found[2]), float(found[3])) if found else None


def speedups() -> str:
    """A bar with its interval for each model of the latency table (2 threads) that became faster."""
    table = pages.rows(pages.read("latency"))
    models = [row for row in table if row["model"] != "geometric mean"]
    ours = {row["model"].rstrip("*"): interval(row["the agent"]) for row in models}
    bars = sorted(((name, found) for name, found in ours.items() if found), key=lambda bar: -bar[1][0])
    left, scale, step, top = 150, 260.0, 26, 50

    def at(value: float) -> float:
        return left + (value - 0.8) * scale

    bottom = top + step * len(bars)
    parts = [words(20, 26, "How many times as fast as the original (95% interval)", size=15)]
    for tick in (1.0, 1.25, 1.5, 1.75, 2.0):
        colour = INK if tick == 1.0 else "#d5dbe1"
        parts.append(
            f'<line x1="{at(tick):g}" y1="{top}" x2="{at(tick):g}" y2="{bottom}" stroke="{colour}"/>'
        )
        parts.append(words(at(tick), bottom + 18, f"{tick:g}", anchor="middle", fill=INK, size=12))
    for i, (name, (median, low, high)) in enumerate(bars):
        y = top + step * i
        parts.append(words(left - 8, y + 17, name, anchor="end"))
        start, end = sorted((at(1.0), at(median)))
        parts.append(
            f'<rect x="{start:.1f}" y="{y + 4}" width="{end - start:.1f}" height="{step - 9}" fill="{BLUE}"/>'
        )
        parts.append(
            f'<line x1="{at(low):.1f}" y1="{y + 12.5}" x2="{at(high):.1f}" y2="{y + 12.5}" stroke="{GREY}" '
            'stroke-width="3"/>'
        )
        parts.append(words(at(max(high, median)) + 6, y + 17, f"{median:.2f}", size=12))
    left_out = sum(found is None for found in ours.values())
    rest = f"The other {left_out} of {len(ours)} models came back as they were: nothing was clearly faster."
    parts.append(words(20, bottom + 42, rest, size=12))
    return svg(540, bottom + 56, parts, "Speed-ups of models by the agent, with intervals")


def data_flow() -> str:
    """How a model goes through the layers."""
    parts = [HEAD]
    parts += box(20, 30, 110, 50, "model.onnx", fill="white")
    parts += arrow(130, 55, 170, 55)
    parts += box(170, 20, 150, 70, "import", "onnxio, ops", "ONNX to graph")
    parts += arrow(320, 55, 360, 55)
    parts += box(360, 20, 150, 70, "search", "search, rl", "greedy, TASO, agent")
    parts += arrow(510, 55, 550, 55)
    parts += box(550, 20, 150, 70, "select", "search", "whole graphs, timed")
    parts += arrow(625, 90, 625, 250)
    parts += box(550, 250, 150, 70, "decide", "backends", "many fresh processes")
    parts += arrow(550, 285, 510, 285)
    parts += box(360, 250, 150, 70, "verify", "verify", "same outputs?")
    parts += arrow(360, 285, 320, 285)
    parts += box(170, 250, 150, 70, "measure", "backends", "how much faster?")
    parts += arrow(170, 285, 130, 285)
    parts += box(20, 250, 110, 70, "fast.onnx", "onnxio, weights", "graph to ONNX", fill="white")
    parts += box(170, 130, 150, 80, "rules", "rewrite_rules, rewrite", "matches, successors", fill="#f5efe0")
    parts += arrow(320, 150, 385, 90)
    parts += box(360, 130, 150, 80, "cost", "cost", "roofline, profiled", fill="#f5efe0")
    parts += arrow(435, 130, 435, 90)
    parts += box(20, 130, 110, 80, "prover", "prover", "every rule", fill="#f5efe0")
    parts += arrow(130, 170, 170, 170)
    otherwise = "Nothing clearly faster: the original is written. Not the same: nothing is."
    parts.append(words(360, 345, otherwise, anchor="middle", size=12))
    return svg(720, 360, parts, "How a model goes through the layers of xrlflow")


PICTURES = {"speedups": speedups, "data-flow": data_flow}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
