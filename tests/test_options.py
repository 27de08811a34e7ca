"""One set of options: what Python takes, what the command line takes, and what is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from typer.testing import CliRunner

import xrlflow
from xrlflow import api, pipeline
from xrlflow.cli import app
from xrlflow.onnxio import ModelError
from xrlflow.options import GROUPS, OptionError, Options, TrainOptions, TuneOptions, flags

BOTH = ((xrlflow.optimize, Options), (xrlflow.tune, TuneOptions), (xrlflow.train, TrainOptions))


def test_what_most_users_need_is_a_parameter() -> None:
    taken = {
        p.name: p.default
        for p in inspect.signature(xrlflow.optimize).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in ("listener", "options")
    }
    assert len(taken) == 12
    assert taken.keys() < {f.name for f in fields(Options)}
    assert set(taken.values()) == {None}, "defaults are those of Options"


def test_what_is_given_by_name_takes_the_place_of_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []
    monkeypatch.setattr("xrlflow.pipeline.optimize", lambda model, options, listener: asked.append(options))
    own = Options(search="greedy", time_limit=5.0, measure=False)
    xrlflow.optimize("m.onnx")
    xrlflow.optimize("m.onnx", options=own)
    xrlflow.optimize("m.onnx", options=own, time_limit=7.0, measure=True, only=["CancelTransposes"])
    assert asked[0] == Options()
    assert asked[1] == own
    assert asked[2] == Options(search="greedy", time_limit=7.0, only=["CancelTransposes"])
    with pytest.raises(OptionError, match="choose one of xrlflow"):
        xrlflow.optimize("m.onnx", options=own, search="luck")
    with pytest.raises(TypeError, match="serach"):
        xrlflow.optimize("m.onnx", serach="greedy")


def test_errors_that_a_caller_can_correct_are_exported() -> None:
    named = {error.__name__ for error in xrlflow.UserError}
    assert named <= set(xrlflow.__all__)
    assert all(getattr(xrlflow, name) in xrlflow.UserError for name in named)


def test_the_help_has_ten_options_before_its_groups() -> None:
    command = typer.main.get_command(app).commands["optimize"]  # type: ignore[attr-defined]
    text = command.get_help(typer.Context(command))
    first = text.partition("\nOptions:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^  (?:-\w, )?(--[\w-]+)", first, re.MULTILINE) == [
        *("--output", "--report", "--json", "--quiet", "--portable", "--allow-approximate"),
        *("--time-limit", "--shape", "--threads", "--inputs", "--help"),
    ]
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles == ["Arguments", "Options", *GROUPS]
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) < flags(Options).keys()


@pytest.mark.parametrize(("function", "kind"), BOTH[1:])
def test_a_function_takes_the_options_with_the_same_defaults(
    function: Callable[..., Any], kind: type
) -> None:
    taken = {
        p.name: p.default
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name != "listener"
    }
    assert taken == {f.name: f.default for f in fields(kind)}


@pytest.mark.parametrize(("function", "kind"), BOTH)
def test_every_option_is_explained(function: Callable[..., Any], kind: type) -> None:
    assert function.__doc__ is not None
    for name in {f.name for f in fields(kind)} - {"threads", "seed", "verify", "measure"}:
        assert f"`{name}" in function.__doc__, name


@pytest.mark.parametrize(("function", "kind"), BOTH)
def test_the_command_line_has_a_flag_for_each(function: Callable[..., Any], kind: type) -> None:
    command = typer.main.get_command(app).commands[function.__name__]  # type: ignore[attr-defined]
    parameters = {p.name: p for p in command.params}
    for name, (flag, default) in flags(kind).items():
        parameter = parameters[name]
        assert parameter.help == flag.help
        assert (flag.name or f"--{name.replace('_', '-')}") in parameter.opts
        assert parameter.default in (default, None, [])


def test_without_a_flag_are_only_objects_of_python() -> None:
    assert {f.name for f in fields(Options)} - flags(Options).keys() == {
        "further_shapes",
        "session_options",
        "providers",
    }
    assert {f.name for f in fields(TuneOptions)} == flags(TuneOptions).keys()
    assert {f.name for f in fields(TrainOptions)} == flags(TrainOptions).keys()


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Options, {"search": "luck"}, "choose one of xrlflow, taso"),
        (Options, {"cost": "free"}, "choose one of auto, roofline"),
        (Options, {"backend": "abacus"}, "choose of auto, onnxruntime, hybrid, tvm"),
        (Options, {"assuming": ("infinite",)}, "choose of finite, memory, nonempty, saturates, vnni"),
        (Options, {"int4_accuracy": 5}, "int4_accuracy 5 is not known: give 0 to 4"),
        (Options, {"int4_accuracy": 4, "backend": "tvm"}, "int4_accuracy has no meaning with backend 'tvm'"),
        (Options, {"budget": -1}, "budget -1 is negative"),
        (Options, {"time_limit": 0.0}, "time_limit 0 is not positive"),
        (Options, {"alpha": 0.5}, "alpha 0.5 is below 1"),
        (Options, {"time_limit": float("inf")}, "time_limit inf is not positive"),
        (Options, {"time_limit": float("nan")}, "time_limit nan is not positive"),
        (Options, {"max_growth": float("nan")}, "max_growth nan is not positive"),
        (Options, {"alpha": float("inf")}, "alpha inf is below 1 or not finite"),
        (
            Options,
            {"search": "greedy", "alpha": 1.2},
            "alpha has no meaning with search 'greedy': choose taso",
        ),
        (Options, {"threads": 1.5}, "threads 1.5 is not positive and whole"),
        (Options, {"shapes": ["x=4,64"]}, "give the whole numbers of each input"),
        (Options, {"shapes": {"x": "4,64"}}, "give the whole numbers of each input"),
        (Options, {"shapes": {"x": (4.0, 64)}}, "give the whole numbers of each input"),
        (Options, {"shapes": {"x": 4}}, "give the whole numbers of each input"),
        (Options, {"further_shapes": [{"x": "4"}]}, "give the whole numbers of each input"),
        (TuneOptions, {"shapes": {"x": "4,64"}}, "give the whole numbers of each input"),
        (Options, {"threads": 0}, "threads 0 is not positive"),
        (Options, {"threads": 100_000}, "threads 100000 is too many for this machine: give at most"),
        (TuneOptions, {"threads": 0}, "threads 0 is not positive"),
        (TuneOptions, {"threads": 100_000}, "threads 100000 is too many for this machine: give at most"),
        (TrainOptions, {"time_limit": 0.0}, "time_limit 0 is not positive"),
        (Options, {"max_growth": 0.0}, "max_growth 0 is not positive"),
        (Options, {"search": "greedy", "train_steps": 5}, "train_steps has no meaning with search 'greedy'"),
        (Options, {"cpu": "haswell"}, "cpu has no meaning with backend 'auto': choose 'tvm' or 'hybrid'"),
        (Options, {"backend": "tvm", "opset": 17}, "opset has no meaning with backend 'tvm'"),
        (TuneOptions, {"method": "luck"}, "choose of chameleon"),
        (TuneOptions, {"ray": "somewhere"}, "write it as HOST:PORT"),
        (TuneOptions, {"ray": "ray://host:10001"}, "write it as HOST:PORT"),
        (TrainOptions, {"ray": "host:0"}, "write it as HOST:PORT"),
        (TrainOptions, {"ray": ""}, "write it as HOST:PORT"),
        (TrainOptions, {"ray": "local", "workers": 0}, "ray has no meaning with 0 workers"),
        (TrainOptions, {"ray": "local", "world_model": True}, "ray has no meaning with world_model"),
        (Options, {"precision": "int4"}, "choose one of keep, float32, float16, int8"),
        (Options, {"precision": "int8"}, "calibrated with your own inputs: give some with --inputs"),
        (Options, {"precision": "float16", "precision_error": 0.0}, "precision_error 0 is not positive"),
        (Options, {"precision": "float16", "precision_error": float("nan")}, "precision_error nan is not"),
        (Options, {"precision_error": 0.1}, "precision_error has no meaning without precision"),
        (Options, {"precision": "float16", "backend": "tvm"}, "precision has no meaning with backend 'tvm'"),
        (Options, {"precision": "float16", "replay": "x.json"}, "precision has no meaning with replay"),
        (TuneOptions, {"batch": 0}, "above zero"),
        (TrainOptions, {"iterations": 0}, "iterations 0 is not positive"),
        (TrainOptions, {"workers": -1}, "workers -1 is negative"),
        *((kind, {"seed": -1}, "seed -1 is negative") for kind in (Options, TuneOptions, TrainOptions)),
    ],
)
def test_what_makes_no_sense_is_refused(kind: type, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        kind(**given)


def test_shapes_may_be_numbers_of_numpy() -> None:
    shapes = {"x": np.array([4, 64]), "y": [np.int64(2)], "z": ()}
    assert Options(shapes=shapes).shapes is shapes
    for function in (api.verify_files, lambda *m, **s: api.run_once(m[0], **s)):
        with pytest.raises(OptionError, match="give the whole numbers of each input"):
            function("m.onnx", "m.onnx", shapes={"x": "4,64"})


def test_a_comparison_has_the_same_backend_however_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []
    monkeypatch.setattr(pipeline, "optimize", lambda _, options, listener: asked.append(options))
    for options, arguments in ((None, {"seed": 1}), (Options(seed=1), {}), (Options(), {"seed": 1})):
        api.compare("m.onnx", searches=("greedy",), options=options, **arguments)
    assert {(options.backend, options.seed) for options in asked} == {("onnxruntime", 1)}
    api.compare("m.onnx", searches=("greedy",), backend="auto")
    api.compare("m.onnx", searches=("greedy",), options=Options(backend="hybrid"))
    assert [options.backend for options in asked[3:]] == ["auto", "hybrid"]
    with pytest.raises(OptionError, match="search has no meaning for a comparison: name the strategies"):
        api.compare("m.onnx", search="greedy")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is none to learn from"):
        xrlflow.train([], tmp_path / "agent.safetensors")
    with pytest.raises(ModelError, match="there is no such file"):
        xrlflow.session(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "option", [["--shape", "x=1"], ["--threads", "1"], ["--port", "80"], ["--no-measure"]]
)
def test_what_a_graph_for_other_programs_does_not_take_is_refused(option: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["view", "m.onnx", "--networkx", str(tmp_path / "g.gexf"), *option])
    assert result.exit_code == 2
    assert f"{option[0]} has no meaning with it" in result.stderr


def test_an_original_that_is_kept_has_its_own_opset_and_a_note() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Relu(x) }'
    )
    result = xrlflow.optimize(proto, opset=20, measure=False, search="greedy", cost="roofline")
    assert result.report.returned_original
    assert any("kept as it is, at opset 17" in note for note in result.report.notes)
    result = xrlflow.optimize(proto, opset=17, measure=False, search="greedy", cost="roofline")
    assert not any("opset" in note for note in result.report.notes)


def test_a_remote_device_may_have_more_threads_than_this_machine() -> None:
    assert Options(backend="tvm", remote="host:1/key", threads=100_000).threads == 100_000
