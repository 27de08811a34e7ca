"""Plots of training and of benchmarks: learning curves with the spread of seeds, and cost against time by method.

The same data give the same bytes of an SVG file, with one version of matplotlib.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xrlflow.common.text import printable, shortened
from xrlflow.storage import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
_COLOURS = ("#2463a8", "#c8553d", "#2a9d5c", "#8e5ea2", "#b8860b", "#3aa6b9", "#7a5c46", "#d6498f")
_INK, _GREY, _LIGHT = "#1f2933", "#9aa3ad", "#e4e8ed"
_STYLE = {
    "text.parse_math": False,  # a dollar sign is one
    "svg.hashsalt": "xrlflow",  # ids of clip paths are random otherwise
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.grid": True,
    "grid.color": _LIGHT,
    "axes.axisbelow": True,
}
_LONGEST = 80
"""Characters of a title or a name in the legend."""
_NO_DATES = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}
_NO_DATES[".pdf"] = {"CreationDate": None, "Creator": None, "Producer": None}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """What several runs (seeds) of one kind reached: for each run its x and y, None where y is not finite."""

    label: str
    runs: Sequence[tuple[Sequence[float], Sequence[float | None]]]

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "runs": [{"x": list(x), "y": [_or_none(v) for v in y]} for x, y in self.runs],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Curve:
        return Curve(data["label"], [(run["x"], run["y"]) for run in data["runs"]])

    def band(self) -> tuple[Floats, Floats, Floats, Floats]:
        """All x, and there the median, the least and the greatest y of the runs that have got so far.

        Between two of its points, a run is on the line between them. Points that are not finite are left out.
        """
        runs = [_finite(*run) for run in self.runs]
        runs = [(x, y) for x, y in runs if len(x)]
        if not runs:
            empty = np.empty(0)
            return empty, empty, empty, empty
        every = np.unique(np.concatenate([x for x, _ in runs]))
        at = np.array([np.interp(every, x, y, left=np.nan, right=np.nan) for x, y in runs])
        return every, np.nanmedian(at, 0), np.nanmin(at, 0), np.nanmax(at, 0)


@dataclass(frozen=True, slots=True)
class Reached:
    """What a method reached on one subject: costs as parts of the original's and seconds, by seed. Without `seconds`,
    the method is drawn as a line."""

    method: str
    subject: str
    costs: Sequence[float]
    seconds: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Texts:
    title: str
    x: str
    y: str


def learning_curves(curves: Sequence[Curve], texts: Texts) -> Figure:
    """The median of each curve's runs as a line, in a band from the least to the greatest."""
    with _drawing():
        figure, axes = _figure(texts)
        for curve, colour in zip(curves, _colours(len(curves))):
            x, median, low, high = curve.band()
            count = len(curve.runs)
            name = _label(curve.label)
            label = name if count == 1 else f"{name}: median of {count}, least to greatest"
            axes.plot(x, median, color=colour, linewidth=1.8, label=label)
            if count > 1:
                axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        _finish(axes)
        return figure


def cost_against_time(results: Sequence[Reached], texts: Texts) -> Figure:
    """For each method a mark at the geometric mean over subjects of the median cost and of the median seconds, with
    bars from the least to the greatest of the seeds' means; small marks are the subjects."""
    with _drawing():
        figure, axes = _figure(texts)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        methods = list(dict.fromkeys(r.method for r in results))
        for method, colour in zip(methods, _colours(len(methods))):
            mine = [r for r in results if r.method == method]
            cost = _mean([float(np.median(r.costs)) for r in mine])
            if not all(r.seconds for r in mine):
                axes.axhline(cost, color=colour, linestyle="--", linewidth=1.2, label=_label(method))
                continue
            x = [float(np.median(r.seconds)) for r in mine]
            axes.scatter(
                x, [float(np.median(r.costs)) for r in mine], s=12, color=colour, alpha=0.4, linewidths=0
            )
            low, high = _seeds([r.costs for r in mine])
            fast, slow = _seeds([r.seconds for r in mine])
            at = _mean(x)
            axes.errorbar(
                at, cost, xerr=[[max(0, at - fast)], [max(0, slow - at)]],
                yerr=[[max(0, cost - low)], [max(0, high - cost)]],
                color=colour, marker="o", markersize=8, capsize=3, linestyle="none", label=_label(method),
            )  # fmt: skip
        _finish(axes)
        return figure


def check_format(path: str | os.PathLike[str]) -> str:
    """The suffix of a plot's file. Raises ValueError for one that is no format of plots."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in FORMATS:
        raise ValueError(f"{os.fspath(path)}: plots are written as {', '.join(FORMATS)}")
    return suffix


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as SVG, PNG or PDF, by the file's suffix. Raises OSError, and ValueError for another suffix."""
    suffix = check_format(path)
    made = BytesIO()
    with _drawing():
        figure.savefig(made, format=suffix[1:], metadata=_NO_DATES[suffix], dpi=150)
    files.write(path, made.getvalue())


def _drawing() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]


def _figure(texts: Texts) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(_text(texts.title), loc="left", fontsize=12)
    axes.set_xlabel(_text(texts.x))
    axes.set_ylabel(_text(texts.y))
    return figure, axes


def _finish(axes: Axes) -> None:
    """Add a legend below, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles, labels, frameon=False, fontsize=9, ncols=2,
            loc="upper left", bbox_to_anchor=(0, -0.16),
        )  # fmt: skip


def _colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _or_none(value: float | None) -> float | None:
    """JSON has only finite numbers."""
    return value if value is not None and math.isfinite(value) else None


def _text(text: str) -> str:
    """A name from outside, as text that SVG can hold and that leaves room for the plot."""
    return shortened(printable(text), _LONGEST)


def _label(text: str) -> str:
    """The text of a legend, where matplotlib leaves out what begins with an underscore."""
    said = _text(text)
    return f"\u200b{said}" if said.startswith("_") else said


def _finite(x: Sequence[float], y: Sequence[float | None]) -> tuple[Floats, Floats]:
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    kept = np.isfinite(xs) & np.isfinite(ys)
    order = np.argsort(xs[kept], kind="stable")
    return xs[kept][order], ys[kept][order]


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _seeds(by_subject: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The least and the greatest over seeds of the geometric mean over subjects."""
    count = min(map(len, by_subject))
    means = [_mean([values[seed] for values in by_subject]) for seed in range(count)]
    return min(means), max(means)
