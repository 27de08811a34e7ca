"""Plots: what they show, of which data, and that the same data give the same bytes."""

from __future__ import annotations

import html
import json
import math
import re
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.test_cli import invoke, refused
from xrlflow.report.plots import Curve, Reached, Texts, cost_against_time, learning_curves, save

GAIN = "episode/return"
TEXTS = Texts("A $title", "steps", "gain")


def lines(figure: Figure) -> dict[str, tuple[list[float], list[float]]]:
    (axes,) = figure.axes
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()
    }


def test_a_band_has_the_median_and_the_ends_of_the_runs_that_have_got_so_far() -> None:
    curve = Curve("a", [((0, 2), (1.0, 3.0)), ((0, 1, 2), (2.0, 2.0, 8.0)), ((0,), (9.0,))])
    x, median, low, high = curve.band()
    assert x.tolist() == [0, 1, 2]
    assert median.tolist() == [2.0, 2.0, 5.5]
    assert low.tolist() == [1.0, 2.0, 3.0]
    assert high.tolist() == [9.0, 2.0, 8.0]


def test_what_is_not_finite_is_left_out() -> None:
    x, median, *_ = Curve("a", [((0, 1, 2), (1.0, math.nan, 3.0)), ((0,), (math.inf,))]).band()
    assert (x.tolist(), median.tolist()) == ([0, 2], [1.0, 3.0])
    assert Curve("none", [((), ())]).band()[0].size == 0


def test_steps_out_of_order_are_sorted() -> None:
    x, median, *_ = Curve("a", [((4, 2, 0), (5.0, 3.0, 1.0)), ((0, 4), (1.0, 5.0))]).band()
    assert (x.tolist(), median.tolist()) == ([0, 2, 4], [1.0, 3.0, 5.0])


@pytest.mark.parametrize("name", ["_seeds", "a\x07\x1b[31m\u202eb\ud800", "n" * 5000, "<b>&\n]]>"])
def test_hostile_names_are_text_in_the_legend(name: str, tmp_path: Path) -> None:
    runs = [((0, 1), (1.0, 2.0))]
    figure = learning_curves([Curve(name, runs)], Texts(name, name, name))
    save(figure, tmp_path / "a.svg")
    assert figure.axes[0].get_legend() is not None
    xml.dom.minidom.parse(str(tmp_path / "a.svg"))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "a.svg").read_text())
    assert len([text for text in texts if text.lstrip("\u200b")[:1] == html.escape(name)[:1]]) >= 4
    assert max(map(len, texts)) < 100


def test_learning_curves_draw_medians() -> None:
    runs = [((0, 1), (1.0, 2.0)), ((0, 1), (1.0, 4.0)), ((0, 1), (1.0, 3.0))]
    figure = learning_curves([Curve("ppo", runs), Curve("one", runs[:1])], TEXTS)
    drawn = lines(figure)
    assert drawn["ppo: median of 3, least to greatest"] == ([0, 1], [1.0, 3.0])
    assert drawn["one"] == ([0, 1], [1.0, 2.0])
    assert len(figure.axes[0].collections) == 1  # one band: a single run has none


def test_cost_against_time_draws_means_over_subjects() -> None:
    figure = cost_against_time(
        [
            Reached("fast", "a", (0.5, 0.5, 0.8), (1.0, 2.0, 4.0)),
            Reached("fast", "b", (0.125, 0.125, 0.2), (4.0, 8.0, 16.0)),
            Reached("rival", "a", (0.9,)),
        ],
        TEXTS,
    )
    drawn = lines(figure)
    assert drawn["rival"][1] == pytest.approx([0.9, 0.9])
    (bars,) = figure.axes[0].containers
    assert bars.get_label() == "fast"
    at, cost = bars.lines[0].get_xdata()[0], bars.lines[0].get_ydata()[0]
    assert (at, cost) == pytest.approx((4.0, 0.25))
    ends = sorted(float(v) for cap in bars.lines[1] for v in np.atleast_1d(cap.get_ydata()))
    assert ends[0] == pytest.approx(0.25)
    assert ends[-1] == pytest.approx(0.4)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_same_data_give_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    made = []
    for name in ("a", "b"):
        runs = [((0, 1), (1.0, 2.0)), ((0, 1), (1.0, 4.0))]
        save(learning_curves([Curve("c", runs)], TEXTS), tmp_path / f"{name}{suffix}")
        made.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert made[0] == made[1]
    assert len(made[0]) > 1000
    if suffix == ".svg":
        assert b"A $title" in made[0]
        assert not re.search(rb"\d{4}-\d\d-\d\dT", made[0])


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.pdf"):
        save(learning_curves([], TEXTS), tmp_path / "a.bmp")


# --- from logs ---


def logged(folder: Path, values: list[float]) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(folder)) as writer:
        for step, value in enumerate(values):
            writer.add_scalar(GAIN, value, 10 * step)


def test_curves_of_logs(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        logged(tmp_path / "ppo" / str(seed), [1.0, 1.0 + seed])
    logged(tmp_path / "dqn", [1.0, 1.5])
    output = tmp_path / "curves.svg"
    result = invoke("plot", tmp_path / "ppo", tmp_path / "dqn", "-o", output, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert (printed["x"], printed["y"]) == ("steps", GAIN)
    curves = {each["label"]: each["runs"] for each in printed["curves"]}
    assert [run["y"] for run in curves["ppo"]] == [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    assert [run["x"] for run in curves["dqn"]] == [[0, 10]]
    assert "ppo: median of 3" in output.read_text()
    seconds = invoke("plot", tmp_path / "dqn", "-o", output, "--over", "seconds", "--json")
    (curve,) = json.loads(seconds.stdout)["curves"]
    assert curve["runs"][0]["x"][0] < 5.0


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path) -> None:
    logged(tmp_path / "run", [1.0])
    output = tmp_path / "a.svg"
    refused(invoke("plot", tmp_path / "none", "-o", output), "none", "--log")
    refused(invoke("plot", tmp_path / "run", "-o", output, "--scalar", "x"), "'x'", GAIN)
    refused(invoke("plot", tmp_path / "run", "-o", tmp_path / "a.bmp"), ".svg")
    refused(invoke("plot", tmp_path / "run", "-o", tmp_path / "no" / "a.svg"), "cannot be written")
    refused(invoke("plot", tmp_path / "run", "-o", output, "--over", "years"), "seconds")
    assert not output.exists()


def test_values_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    logged(tmp_path / "run", [1.0, math.nan, math.inf, 2.0])
    result = invoke("plot", tmp_path / "run", "-o", tmp_path / "a.svg", "--json")
    assert result.exit_code == 0, result.output
    (curve,) = json.loads(result.stdout)["curves"]
    assert curve["runs"][0]["y"] == [1.0, None, None, 2.0]
    again = Curve.from_json(curve).band()
    assert again[1].tolist() == [1.0, 2.0]
    logged(tmp_path / "lost" / "0", [math.nan, math.nan])
    refused(invoke("plot", tmp_path / "lost", "-o", tmp_path / "b.svg"), "lost", "no finite value")
