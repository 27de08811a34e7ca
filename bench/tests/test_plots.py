"""Plots of benchmarks: files of all of them are read, and the plots of the docs are those that the data give."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from bench import pages, plots, world_model
from xrlflow.report.plots import MethodResult, save


def test_files_of_all_benchmarks_are_read(tmp_path: Path) -> None:
    agents = [
        {"graph": "bert", "method": "taso", "seed": 0, "initial": 2.0, "cost": 1.0, "seconds": 3.0},
        {"graph": "bert", "method": "taso", "seed": 1, "initial": 2.0, "cost": 1.5, "seconds": 4.0},
        {"graph": "bert", "method": "agent", "seconds": 4.0},
    ]
    assert plots.reached(agents) == [MethodResult("taso", "bert", (0.5, 0.75), (3.0, 4.0))]
    passes = {
        "beam gpt2": {"module": "gpt2", "method": "beam", "default": 100, "operations": 80, "seconds": 2.0},
        "PPO 0": {"variant": "PPO", "less": [0.1], "seconds": 9.0},
    }
    assert plots.reached(passes) == [MethodResult("beam", "gpt2", (0.8,), (2.0,))]
    world = {
        "bert": {
            "network": "bert", "greedy": 1.1, **{key: [1.25, 2.0] for key in world_model.METHODS},
            "seconds": {"ppo": [1.0, 2.0], "fifth": [3.0, 4.0]},
        }
    }  # fmt: skip
    found = {r.method: r for r in plots.reached(world)}
    assert found["PPO, all steps"] == MethodResult("PPO, all steps", "bert", [0.8, 0.5], [1.0, 2.0])
    assert found["random agent"].seconds == ()
    file = tmp_path / "x.json"
    file.write_text("[{}]")
    with pytest.raises(plots.UnknownFile, match=r"x\.json: no rows"):
        plots.draw([file], "", "")


@pytest.mark.parametrize(
    "content",
    ["{", "3", '{"x": "s", "y": "g", "curves": [{"label": "a"}]}', '[{"curves": 1}]',
     *(json.dumps([{"graph": "a", "method": "m", "initial": i, "cost": c, "seconds": s}])
       for i, c, s in ((1, 0, 1), (0, 1, 1), (1, "x", 1), (1, 1, None), (1, 1, 0), (1, math.nan, 1)))],
)  # fmt: skip
def test_files_that_cannot_be_drawn_are_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(plots.UnknownFile, match=r"file\.json: "):
        plots.draw([file], "title")
    with pytest.raises(plots.UnknownFile, match=r"none\.json: "):
        plots.draw([tmp_path / "none.json"], "title")


def test_the_data_of_the_page_are_those_of_its_table() -> None:
    rows = json.loads((plots.DATA / "world-model-efficiency.json").read_text())
    assert world_model.efficiency_table(list(rows.values())) == pages.read("world-model-efficiency")


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plots_of_the_docs_are_what_the_script_draws(name: str, tmp_path: Path) -> None:
    """With the pinned matplotlib. Another one may place a label elsewhere."""
    import matplotlib

    pinned = re.search(r"^matplotlib==(.*)$", (plots.pages.ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    if matplotlib.__version__ != pinned[1]:
        pytest.skip("another version of matplotlib")
    save(plots.PLOTS[name](), tmp_path / "new.svg")
    kept = plots.FOLDER / f"{name}.svg"
    assert kept.read_bytes() == (tmp_path / "new.svg").read_bytes(), "run: python bench/plots.py"
