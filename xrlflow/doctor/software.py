"""Checks of the software: which packages are installed, and whether they work. Checks that may crash run in separate
processes (see `examination`).
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from xrlflow.doctor.finding import Finding, Status

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Extra:
    """The purpose of an extra of the package, and the modules that it installs."""

    purpose: str
    modules: Sequence[str]


EXTRAS: Mapping[str, Extra] = {
    "train": Extra("agents of your own", ("torch", "torch_geometric", "gymnasium", "tensorboard")),
    "tvm": Extra("kernels", ("tvm", "tvm_ffi", "torch", "xgboost")),
    "postgres": Extra("measurements on a server", ("psycopg",)),
    "plots": Extra("plots", ("matplotlib",)),
    "ray": Extra("many machines", ("ray",)),
    "xla": Extra("XLA's passes", ("jax", "jaxlib")),
    "models": Extra("the zoo of models", ("onnxscript", "torch", "transformers")),
    "rivals": Extra("benchmarks against other optimizers", ("onnxsim", "onnxslim", "onnxoptimizer")),
}
_PACKAGES = ("xrlflow", "onnxruntime", "onnx", "numpy")
_MODEL = (
    '<ir_version: 8, opset_import: ["" : 18]> agraph (float[4,8] x) => (float[4,8] y) '
    "{ a = Transpose<perm=[1,0]>(x) b = Transpose<perm=[1,0]>(a) c = Relu(b) y = Exp(c) }"
)
_KERNELS = "pip install 'xrlflow[tvm]' installs what makes kernels; without, results are plain ONNX files"


def packages() -> Finding:
    """The versions of the packages that xrlflow needs."""
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # it is importable, but is not registered as installed
            versions.append(f"{name} (on the path)")
    return Finding("packages", Status.OK, ", ".join(versions))


def extras() -> Finding:
    """Which extras are installed. All extras are optional."""
    lacking = {name: missing for name, extra in EXTRAS.items() if (missing := _missing(extra.modules))}
    have = ", ".join(name for name in EXTRAS if name not in lacking) or "none"
    text = f"installed: {have}"
    if lacking:
        text += "; not: " + ", ".join(f"{name} ({EXTRAS[name].purpose})" for name in lacking)
    advice = f"pip install 'xrlflow[{','.join(lacking)}]' installs the rest" if lacking else ""
    return Finding("extras", Status.OK, text, advice)


def onnx_runtime() -> Finding:
    """Whether ONNX Runtime runs a small model and gives the right numbers."""
    import numpy as np
    import onnxruntime

    session = onnxruntime.InferenceSession(_model().SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    (y,) = session.run(None, {"x": x})
    if not np.allclose(y, np.exp(np.maximum(x, 0)), rtol=1e-5):
        advice = "reinstall it: pip install --force-reinstall onnxruntime"
        return Finding("ONNX Runtime", Status.FAIL, "a small model gives wrong numbers", advice, needed=True)
    return Finding("ONNX Runtime", Status.OK, f"{onnxruntime.__version__} runs a model", needed=True)


def products_of_bytes() -> Finding:
    """Whether ONNX Runtime adds products of bytes exactly on this processor."""
    from xrlflow.backends.onnxruntime.saturation import saturates

    if not saturates():
        return Finding("8 bits", Status.OK, "sums of products of bytes are exact")
    return Finding(
        "8 bits",
        Status.WARN,
        "sums of products of unsigned and signed bytes saturate, so 8-bit models may be off",
        "set the session option session.x64quantprecision=1 for exact sums, or use a processor with VNNI",
    )


def agent() -> Finding:
    """Whether the agent of the package can be loaded, and finds substitutions."""
    from rewrite_rules import LIBRARY
    from xrlflow.cost import Roofline
    from xrlflow.onnxio import load
    from xrlflow.rewrite import Library, RewriteState
    from xrlflow.rl.features import Featuriser
    from xrlflow.rl.network import Network
    from xrlflow.rl.parameters import Parameters
    from xrlflow.rl.pretrained import PRETRAINED
    from xrlflow.rl.situation import Situation, choices

    library, prices = Library(LIBRARY), Roofline()
    parameters = Parameters.load(PRETRAINED).extended(library)
    graph = load(_model()).graph
    state, cost = RewriteState.start(graph, library, prices.delta), prices.cost(graph)
    candidates = choices(state)
    situation = Situation(state, candidates, cost, cost)
    log_probs = Network(parameters).log_probs([Featuriser(parameters.vocabulary, prices)(situation)])
    if len(log_probs) != len(candidates) + 1 or not math.isclose(
        sum(map(math.exp, log_probs)), 1.0, rel_tol=1e-3
    ):
        advice = "reinstall xrlflow, or search without it: --search greedy"
        return Finding("agent", Status.FAIL, "it gives no probabilities", advice, needed=True)
    return Finding("agent", Status.OK, f"answers, with {len(library.rules)} rules", needed=True)


def compiler() -> Finding:
    """Whether there is a C compiler, which links libraries of kernels."""
    path = next(filter(None, map(shutil.which, ("cc", "gcc"))), None)
    if path is None:
        return Finding(
            "C compiler", Status.WARN, "none", "kernels need one: apt install gcc, or use --portable"
        )
    return Finding("C compiler", Status.OK, path)


def kernels() -> Finding:
    """Whether TVM and the C compiler build a library of kernels, and whether ONNX Runtime computes with this
    library."""
    if missing := _missing(EXTRAS["tvm"].modules):
        return Finding("TVM", Status.WARN, f"not installed ({', '.join(missing)} missing)", _KERNELS)
    import numpy as np

    from xrlflow.backends.library_files import library_path
    from xrlflow.backends.onnxruntime import open_model, with_library
    from xrlflow.backends.tvm import detect
    from xrlflow.backends.tvm.library.hybrid import hybrid
    from xrlflow.backends.tvm.toolchain.import_tvm import tvm

    machine = detect()
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
        path = os.path.join(folder, "model.onnx")
        hybrid(_model(), {}, machine).save(path)
        options = with_library(None, str(library_path(path)))
        with open_model(path, session_options=options) as model:
            (y,) = model.run({"x": x})
    if not np.allclose(y, np.exp(np.maximum(x, 0)), rtol=1e-4):
        return Finding("TVM", Status.FAIL, "a small kernel gives wrong numbers", f"reinstall it: {_KERNELS}")
    return Finding("TVM", Status.OK, f"{tvm().__version__} makes kernels for {machine.cpu}, and they run")


def _model() -> onnx.ModelProto:
    import onnx.parser

    return onnx.parser.parse_model(_MODEL)


def _missing(modules: Sequence[str]) -> list[str]:
    """The modules that are not installed. A folder with a module's name does not count as one."""
    specs = {name: importlib.util.find_spec(name) for name in modules}
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]
