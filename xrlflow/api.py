"""The Python interface. Only this module and the command line connect the parts of the package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from xrlflow import batch, pipeline
from xrlflow.backends import BackendError
from xrlflow.batch import Batch
from xrlflow.common.sizes import Shapes
from xrlflow.onnxio import ModelError, Source, load
from xrlflow.options import (
    COMPARED,
    OptionError,
    Options,
    TrainOptions,
    TuneOptions,
    check_seed,
    check_shapes,
)
from xrlflow.pipeline import Result, Tuned, VerificationFailed, pages
from xrlflow.pipeline.artifact import runnable
from xrlflow.pipeline.errors import CORRECTABLE
from xrlflow.pipeline.factories import factory_of
from xrlflow.pipeline.latency import bench
from xrlflow.pipeline.library import list_rules, prove_rules, rule_stats
from xrlflow.pipeline.outputs import check_distinct_paths, check_writable
from xrlflow.pipeline.pages import data_of_trace as page_of_trace
from xrlflow.pipeline.pages import result_page
from xrlflow.pipeline.pages import write_networkx as save_networkx
from xrlflow.pipeline.pages import write_page as save_page
from xrlflow.pipeline.use import options_with_kernels, rows_of_blocks, run_once, save_outputs, session
from xrlflow.report import Listener, Report
from xrlflow.report.page.html import page_html
from xrlflow.report.page.server import PageServer
from xrlflow.search import TraceError
from xrlflow.storage.stores import StoreError
from xrlflow.verify import Verification, VerificationError, verify

if TYPE_CHECKING:
    from xrlflow.backends.tvm.devices.remote import Remote
    from xrlflow.rl.train import Trained

__all__ = [
    "BackendError",
    "Batch",
    "Comparison",
    "ModelError",
    "OptionError",
    "Options",
    "Result",
    "StoreError",
    "TraceError",
    "TrainOptions",
    "TuneOptions",
    "Tuned",
    "UserError",
    "VerificationError",
    "VerificationFailed",
    "bench",
    "check_distinct_paths",
    "check_writable",
    "compare",
    "list_rules",
    "optimize",
    "optimize_all",
    "page_of_trace",
    "prove_rules",
    "rule_stats",
    "run_once",
    "save_networkx",
    "save_outputs",
    "save_page",
    "serving",
    "session",
    "train",
    "tune",
    "verify_files",
    "view",
]

UserError = CORRECTABLE
"""The errors that a caller can correct."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of several search strategies on one model."""

    results: tuple[Result, ...]

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(result.report for result in self.results)

    @cached_property
    def page(self) -> dict[str, Any]:
        """The data of the page with all strategies side by side. The first call measures the times of operators."""
        return result_page(self.results).to_json()

    def report_html(self) -> str:
        """The page as one HTML file that needs no network."""
        return page_html(self.page)


def optimize(
    model: Source,
    *,
    time_limit: float | None = None,
    threads: int | None = None,
    shapes: Shapes | None = None,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    search: str | None = None,
    backend: str | None = None,
    portable: bool | None = None,
    assuming: Sequence[str] | None = None,
    allow_approximate: bool | None = None,
    measure: bool | None = None,
    verify: bool | None = None,
    seed: int | None = None,
    options: Options | None = None,
    listener: Listener | None = None,
    **further: Any,
) -> Result:
    """Make a model faster. `model` is a path, the bytes of a file, or a ModelProto.

    `options` has all options; keyword arguments override its fields. The most common fields are parameters here, and
    every other field of `Options` may be passed by name as well.

    Search:

    - `search`: "xrlflow" (a trained agent), "mcts" (tree search with that agent), "rlflow" (an agent that first
      trains in a world model of this graph), "greedy" or "taso". Controls of experiments: "lookahead2" and "lookahead3"
      (greedy, but they look 2 or 3 steps ahead when no single step gains), "random" (`budget` edits that ignore the
      cost).
    - `agent`: the file of an agent; default: the agent of the package. `train_steps`: first train the agent on
      this model for this many steps; with "rlflow", its world model learns from these steps (default 200).
    - `cost`: "profiled" (operators measured alone), "learned" (the costs of "profiled", corrected by a network for the
      operators around each), "roofline" (from the machine's figures), "auto" ("profiled"; if no result is measured as
      faster and time is left, "learned", and last "roofline"), "measured" (whole models, slow), or any CostModel.
    - `budget`: states that a search may expand. `alpha`: TASO keeps graphs that cost up to `alpha` times the best.
    - `time_limit`: seconds for everything (default 60). `seed`: the seed of everything random.
    - `replay`: apply the substitutions of this trace file instead of searching.

    Permitted changes:

    - `backend_ops`: the result may have operators that only ONNX Runtime has (com.microsoft).
    - `allow_approximate`: allow rules that may lose more than two bits of float32 accuracy.
    - `int4_accuracy`: the `accuracy_level` of products with packed weights (MatMulNBits): 0 to 3 compute in float32, 4
      quantises activations to 8 bits, which changes results by some thousandths of their range; a note of the report
      has the error that was measured. Default: what the file says.
    - `assuming`: assumptions that some rules need: "finite" (no infinities, no NaN in the data), "memory" (it
      has room for packed weights as float32, eight times their size), "nonempty" (no dimension is 0), "vnni" (the
      processor adds products of 8-bit integers without saturation; this processor is tried, unless the result is
      `portable` or for another one).
    - `exclude`, `only`: names of rules or of rule families. `rules`: a Python file with the user's own RULES, which are
      proven before use unless `trust_rules` is set.
    - `precision`: "int8", "float16" or "float32" change the model's precision first, and so its outputs: each output's
      RMS error over its RMS is at most `precision_error` (default 0.03) on inputs that had no part in calibrating.
      "int8" quantises the layers that gain time, and needs `inputs`: best a folder of several .npz files. The default
      is "keep".
    - `shapes`: input name -> shape, for cost and measurement; `fix_shapes` also writes them into the model. A pair in a
      shape, as in (1, (16, 512)), is the least and the greatest size of a dimension, which stays open: both, and one
      between, count.
    - `max_growth`: the largest size of the result, as a multiple of the model's. `opset`: the opset of the result
      (default: the model's, or the lowest later one that has all operators).

    Measurement and verification:

    - `inputs`: the user's own inputs (a mapping or an .npz file) for verification and measurement.
    - `measure=False`: return the graph of least modelled cost, without measuring. `verify=False`: do not compare the
      result with the original.
    - `threads`: threads of the runtime; default: the physical cores. `session_options`: options of ONNX
      Runtime's sessions. `providers`: execution providers of ONNX Runtime; only the CPU's is allowed.
    - `listener(phase, done, total, note)` is called with the progress.

    Generated kernels: with `backend="auto"`, parts of the graph (usually all of it) are compiled with TVM, if that is
    installed, and measured against the plain result. If they are faster, `save` writes an ONNX file and, in its
    folder, a library that ONNX Runtime registers; without the library the file runs as usual. With `backend="hybrid"`,
    the result has generated kernels in any case; with "onnxruntime" or `portable`, never. With open dimensions,
    the parts that compute row by row have kernels for all sizes, and the whole graph has kernels for `shapes` and for
    each of `further_shapes`. 3x3 convolutions may use algorithms with fewer multiplications,
    whose rounding errors are greater than those of the direct algorithm, but within the tolerance of verification;
    `exact_kernels` forbids these algorithms.

    With `backend="tvm"` the result is compiled, and `save` writes a shared library. The latency of the library is
    compared with that of the original in ONNX Runtime, and the report says which is faster. The result is the library
    even if it is slower. Operators that TVM lacks are decomposed before the search. `cpu`: LLVM's name of the
    processor to compile for (default: this one); `triple`: LLVM's name of the target system, if it is not this one. If
    this machine cannot run the code, give a `remote` device ("HOST:PORT/KEY" of TVM's RPC tracker) or set
    `measure=False, verify=False`. On a remote device, the result is compared with the compiled original. `store`: the
    file in which `tune` stores tuned kernels, which are used where they fit (default: a file in the user's cache).

    Raises ModelError, BackendError, VerificationError, StoreError or OptionError if the caller can correct the error,
    and VerificationFailed if a trace (`replay`) or a compiled model (`backend="tvm"`) does not compute the same as the
    original. In all other cases, a result that does not compute the same is replaced by the result without the
    substitutions of the rule to blame or, if this fails, by the original. The notes of the report say so.
    """
    arguments = dict(locals())
    for name in ("model", "options", "listener", "further"):
        del arguments[name]
    return pipeline.optimize(model, _asked(options, arguments | further), listener)


def _asked(options: Options | None, arguments: Mapping[str, Any]) -> Options:
    """The options, overridden by those in `arguments` that are not None."""
    return replace(
        options or Options(), **{name: value for name, value in arguments.items() if value is not None}
    )


def optimize_all(
    models: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    workers: int = 1,
    ray: str | None = None,
    executor: batch.Executor | None = None,
    listener: batch.Listener | None = None,
    options: Options | None = None,
    **arguments: Any,
) -> Batch:
    """Make many models faster: the models of a folder, of a pattern ("models/**/*.onnx"), or of a list of paths in a
    file.

    The folder `output` receives a result for each model (`a/x.onnx` becomes `OUTPUT/a/x.onnx`), its report page next
    to the result, and a page `report.html` with all results. `options` and `arguments` are those of `optimize`; a
    shape applies to every model that has an input of this name. A model that cannot be optimised becomes a row with an
    error; the batch continues with the other models.

    A repetition of the same call continues where the last call ended: a model is not optimised again unless its
    content, its external data, an option, or the version of xrlflow, ONNX Runtime or TVM has changed. Ctrl-C ends the
    batch; the results of finished models stay.

    Jobs run in `workers` processes of this machine, or on the nodes of a Ray cluster (`ray`: "local", or its
    HOST:PORT), or by an `executor` of your own. On one machine, only one job at a time measures. `listener` is called
    with a `Progress`.

    Raises OptionError if an argument is wrong, ModelError if the output cannot be written.
    """
    asked = _asked(options, arguments)
    if ray is None or executor is not None:
        here = executor if executor is not None else batch.Processes(workers)
        return batch.optimize_all(models, output, asked, executor=here, listener=listener)
    with factory_of(ray) as factory:
        return batch.optimize_all(models, output, asked, executor=batch.Elsewhere(factory), listener=listener)


def tune(
    model: Source,
    *,
    method: str = "chameleon",
    trials: int = 512,
    batch: int = 16,
    time_limit: float = 600.0,
    cpu: str | None = None,
    triple: str | None = None,
    remote: str | Remote | None = None,
    shapes: Shapes | None = None,
    threads: int | None = None,
    seed: int = 0,
    store: str | os.PathLike[str] | None = None,
    rewrite: bool = True,
    ray: str | None = None,
    measure: bool = True,
    verify: bool = True,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    exact_kernels: bool = False,
    listener: Listener | None = None,
) -> Tuned:
    """Compile a model with TVM, and tune its kernels by measurement.

    `method`: "chameleon" (reinforcement learning), "genetic", "annealing", "beam" or "random" measure kernels;
    "one-shot" uses the kernels that a predictor selects, without measuring any, and "one-shot-8" measures the
    predictor's first eight kernels for each layer. `trials`: the total number of kernels to build and measure;
    `batch`: how many kernels are built and measured for one layer at a time. `time_limit`: seconds of tuning. `cpu`,
    `triple` and `remote` are as in `optimize`: kernels are built here and timed on the remote device. `store`: the
    file with all measurements (default: in the user's cache), so that a second run continues the first. `rewrite`:
    also tune the graph that greedy search finds (by the roofline), and choose the faster graph; this needs `measure`.
    `ray`: "local" or the HOST:PORT of a Ray cluster, whose nodes build kernels; those with the resource `latency` time
    them. `shapes` binds dynamic dimensions; `inputs` are the user's own, for verification and measurement;
    `exact_kernels` is as in `optimize`. Raises ModelError, BackendError, VerificationError, StoreError or OptionError
    if the caller can correct the error, and VerificationFailed.
    """
    arguments = dict(locals())
    model, listener = arguments.pop("model"), arguments.pop("listener")
    return pipeline.tune(model, TuneOptions(**arguments), listener)


def train(
    models: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    held_out: Sequence[str | os.PathLike[str]] = (),
    iterations: int = 200,
    steps: int = 2048,
    horizon: int = 100,
    workers: int = 2,
    ray: str | None = None,
    start: str | os.PathLike[str] | None = None,
    restart: bool = False,
    time_limit: float | None = None,
    log: str | os.PathLike[str] | None = None,
    seed: int = 0,
    world_model: bool = False,
) -> Trained:
    """Train an agent on ONNX files. Writes the agent to `output` whenever an evaluation is better than all before.

    A stopped run with the same output continues, unless `restart` is set. `held_out`: files for evaluation only.
    `iterations`: updates of the agent; `steps`: substitutions tried for each update; `horizon`: the maximum number of
    substitutions in an episode. `workers`: how many processes try substitutions (0: this process does). `ray`: "local"
    or the HOST:PORT of a Ray cluster where the workers run; the agent is the same. `start`: the first agent.
    `time_limit`: seconds after which the run ends. `log`: a folder for TensorBoard.

    `world_model`: learn what substitutions change, and train the agent inside the learned model, as RLFlow does. With
    a world model, an iteration tries `steps` substitutions and learns from all that were tried so far; a few
    iterations of a few hundred steps are enough for one file. The world model is written next to the agent
    (NAME.world.safetensors). A later run continues from the best agent. Such a training runs in this process only
    (`workers` has no meaning). Such a run replaces one without a world model only with `restart`.

    Raises OptionError if an argument is wrong, ModelError if a file cannot be read.
    """
    arguments = dict(locals())
    models, output = arguments.pop("models"), arguments.pop("output")
    return pipeline.train(models, output, TrainOptions(**arguments))


def compare(
    model: Source,
    *,
    searches: Sequence[str] = COMPARED,
    options: Options | None = None,
    **arguments: Any,
) -> Comparison:
    """Optimise with each of several strategies. `options`, `arguments` and the errors raised are those of `optimize`,
    but "auto" is a backend only if it is given as an argument: by default no kernels are generated."""
    if "search" in arguments:
        raise OptionError("search has no meaning for a comparison: name the strategies in searches")
    if options is None or options.backend == "auto":
        arguments.setdefault("backend", "onnxruntime")
    return Comparison(
        tuple(optimize(model, search=search, options=options, **arguments) for search in searches)
    )


def view(
    model: Source,
    other: Source | None = None,
    *,
    shapes: Shapes | None = None,
    threads: int | None = None,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    seed: int = 0,
    measure: bool = True,
) -> dict[str, Any]:
    """The data of the page that shows a model, or two models side by side. Nothing is optimised.

    `measure`: measure the times of the operators on `inputs`, by default random ones. Raises ModelError, BackendError
    or VerificationError.
    """
    options = Options(
        search="greedy", shapes=shapes, threads=threads, seed=seed, inputs=inputs, measure=measure
    )
    return pages.view(model, other, options).to_json()


@contextmanager
def serving(data: Mapping[str, Any], port: int = 0) -> Iterator[PageServer]:
    """A server of a page, reachable from this machine only. Raises OptionError if the port is in use."""
    try:
        server = PageServer(page_html(data), port)
    except OSError as error:
        raise OptionError(f"port {port} cannot be used ({error.strerror}): choose another, or 0") from error
    with server:
        yield server


def verify_files(
    original: Source,
    new: Source,
    *,
    shapes: Shapes | None = None,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    seed: int = 0,
    kernels: bool = False,
) -> Verification:
    """Whether two models compute the same. Raises ModelError, BackendError, VerificationError.

    `kernels`: load the libraries of kernels in the models' folders (`NAME.so`). This runs their code.
    """
    check_seed(seed)
    check_shapes(shapes)
    load(new)  # raises ModelError with a clear message if the file is damaged
    first, second = runnable(original), runnable(new)
    return verify(
        first, second, imported=load(original, shapes=shapes), inputs=inputs, seed=seed,
        further=sorted(rows_of_blocks(second), reverse=True) if kernels else (),
        session_options=options_with_kernels(first, second, required=True) if kernels else None,
    )  # fmt: skip
