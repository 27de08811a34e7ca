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
    "text.parse_math": False,  # a dollar sign is printed as it is
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
    """The learning curves of several runs (seeds): the x and y of each run; y is None where it is not finite."""

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
        """All values of x, and for each the median, the least and the greatest y over the runs that have reached it.

        The y of a run is interpolated linearly between its points. Points that are not finite are left out.
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
class MethodResult:
    """The results of a method on one subject, by seed."""

    method: str
    subject: str
    costs: Sequence[float]  # as parts of the original's cost
    seconds: Sequence[float] = ()  # empty: the times are unknown, and the method is drawn as a line


@dataclass(frozen=True, slots=True)
class Texts:
    title: str
    x: str
    y: str


def learning_curves(curves: Sequence[Curve], texts: Texts) -> Figure:
    """A plot with a line for each curve, the median of its runs, and a shaded area from the least to the greatest
    run."""
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


def cost_against_time(results: Sequence[MethodResult], texts: Texts) -> Figure:
    """A plot with a large mark for each method, at the geometric means over subjects of the median cost and of the
    median seconds. Its bars go from the least to the greatest mean of a seed; small marks are single subjects."""
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
    """The suffix of a plot's file. Raises ValueError if plots cannot be written in this format."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in FORMATS:
        raise ValueError(f"{os.fspath(path)}: plots are written as {', '.join(FORMATS)}")
    return suffix


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as SVG, PNG or PDF, by the file's suffix. Raises OSError, and ValueError for another suffix."""
    suffix = check_format(path)
    buffer = BytesIO()
    with _drawing():
        figure.savefig(buffer, format=suffix[1:], metadata=_NO_DATES[suffix], dpi=150)
    files.write(path, buffer.getvalue())


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
    """Add a legend below the axes, where it hides no curve."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(
            handles, labels, frameon=False, fontsize=9, ncols=2,
            loc="upper left", bbox_to_anchor=(0, -0.16),
        )  # fmt: skip


def _colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _or_none(value: float | None) -> float | None:
    """The number, or None if it is not finite: JSON has only finite numbers."""
    return value if value is not None and math.isfinite(value) else None


def _text(text: str) -> str:
    """A name from outside, as text that SVG can hold and that leaves room for the plot."""
    return shortened(printable(text), _LONGEST)


def _label(text: str) -> str:
    """The text of a legend; matplotlib would leave out one that begins with an underscore."""
    label = _text(text)
    return f"\u200b{label}" if label.startswith("_") else label


def _finite(x: Sequence[float], y: Sequence[float | None]) -> tuple[Floats, Floats]:
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    finite = np.isfinite(xs) & np.isfinite(ys)
    order = np.argsort(xs[finite], kind="stable")
    return xs[finite][order], ys[finite][order]


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _seeds(by_subject: Sequence[Sequence[float]]) -> tuple[float, float]:
    """For each seed the geometric mean over subjects; returns the least and the greatest of these."""
    count = min(map(len, by_subject))
    means = [_mean([values[seed] for values in by_subject]) for seed in range(count)]
    return min(means), max(means)
