"""The Python interface."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xrlflow import pipeline
from xrlflow.backends import BackendError
from xrlflow.onnxio import ModelError, Source, load
from xrlflow.options import COMPARED, OptionError, Options, TrainOptions, TuneOptions, check_seed
from xrlflow.pipeline import Result, Tuned, VerificationFailed
from xrlflow.pipeline.context import runnable
from xrlflow.pipeline.latency import bench
from xrlflow.pipeline.library import list_rules, prove_rules, rule_stats
from xrlflow.pipeline.outputs import check_apart, check_writable
from xrlflow.report import Listener, Report
from xrlflow.search import TraceError
from xrlflow.tuning.store import StoreError
from xrlflow.verify import Verification, VerificationError, verify

if TYPE_CHECKING:
    import onnxruntime as ort

    from xrlflow.backends.tvm.remote import Remote
    from xrlflow.cost import CostModel
    from xrlflow.rl.train import Trained

__all__ = [
    "Comparison",
    "OptionError",
    "Options",
    "Result",
    "TrainOptions",
    "TuneOptions",
    "Tuned",
    "UserError",
    "VerificationFailed",
    "bench",
    "check_apart",
    "check_writable",
    "compare",
    "list_rules",
    "optimize",
    "prove_rules",
    "rule_stats",
    "train",
    "tune",
    "verify_files",
]

UserError = (ModelError, BackendError, VerificationError, OptionError, TraceError, StoreError)
"""Errors that a caller can correct."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of several strategies on one model."""

    reports: tuple[Report, ...]


def optimize(
    model: Source,
    *,
    search: str = "xrlflow",
    cost: str | CostModel = "profiled",
    backend: str = "onnxruntime",
    cpu: str | None = None,
    triple: str | None = None,
    remote: str | Remote | None = None,
    backend_ops: bool = False,
    allow_approximate: bool = False,
    assuming: Sequence[str] = (),
    budget: int = 1000,
    time_limit: float = 60.0,
    alpha: float = 1.05,
    agent: str | os.PathLike[str] | None = None,
    train_steps: int = 0,
    exclude: Sequence[str] = (),
    only: Sequence[str] = (),
    rules: str | os.PathLike[str] | None = None,
    trust_rules: bool = False,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fix_shapes: bool = False,
    store: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    session_options: Mapping[str, str] | ort.SessionOptions | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    seed: int = 0,
    measure: bool = True,
    verify: bool = True,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    max_growth: float = 1.2,
    opset: int | None = None,
    replay: str | os.PathLike[str] | None = None,
    listener: Listener | None = None,
) -> Result:
    """Make a model faster. It takes a path, the bytes of a file, or a ModelProto.

    What is searched, and how:

    - `search`: "xrlflow" (a trained agent), "greedy", "taso", "lookahead2" and "lookahead3" (greedy, but they
      look so many steps ahead where they are stuck), or "random" (`budget` edits that ignore the cost).
    - `agent`: the file of an agent of one's own; by default the one that is shipped. `train_steps`: train it so
      many steps on this model first.
    - `cost`: "profiled" (operators measured alone), "roofline", "measured" (whole models, slow), or any
      CostModel.
    - `budget`: states that a search may expand. `alpha`: TASO keeps graphs that cost up to so many times the
      best.
    - `time_limit`: seconds, for everything. `seed`: of everything random.
    - `replay`: apply the substitutions of a trace (a file) instead of searching.

    What may be changed:

    - `backend_ops`: the result may have operators that only ONNX Runtime has (com.microsoft).
    - `allow_approximate`: also rules that may lose more than two bits of float32 accuracy.
    - `assuming`: what holds, for rules that are right only then: "finite" (no infinities, no NaN in the data),
      "vnni" (the processor adds products of 8-bit integers without saturation).
    - `exclude`, `only`: names of rules, or of families of rules. `rules`: a Python file with RULES of one's own, which
      are proven before they are used, or not (`trust_rules`).
    - `shapes`: input name -> shape, for cost and measurement; with `fix_shapes` also written into the model.
    - `max_growth`: how large the result may be, in sizes of the input. `opset`: of the result (default: 23).

    How it is measured and verified:

    - `inputs`: the user's own (a mapping or an .npz file), for verification and measurement.
    - `measure=False`: the best graph by modelled cost, never run. `verify=False`: it is not compared with the
      original.
    - `threads`: of the runtime, the physical cores by default. `session_options`: ONNX Runtime's. `providers`:
      ONNX Runtime's; others than the CPU's are refused for now.
    - `listener(phase, done, total, note)` hears what is going on.

    With `backend="tvm"` the result is compiled: `save` writes a shared library, and its latency is compared with the
    original's in ONNX Runtime (the report says which is faster: it is the library that was asked for). Operators that
    TVM lacks are spelt out before the search. `cpu`: LLVM's name of the processor to compile for (default: this one),
    `triple`: that of its system if it is another. What this machine cannot run has to run on a `remote` device
    ("HOST:PORT/KEY", of TVM's RPC tracker; there it is compared with the original graph, compiled), or not at all
    (`measure=False, verify=False`). Kernels run as they were tuned, where `store` (the file of `tune`; by default in
    the user's cache) knows them.

    Raises ModelError, BackendError, VerificationError, StoreError or OptionError for what the caller can put right,
    and VerificationFailed if the result does not compute the same.
    """
    arguments = dict(locals())
    model, listener = arguments.pop("model"), arguments.pop("listener")
    return pipeline.optimize(model, Options(**arguments), listener)


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
    shapes: Mapping[str, Sequence[int]] | None = None,
    threads: int | None = None,
    seed: int = 0,
    store: str | os.PathLike[str] | None = None,
    rewrite: bool = True,
    measure: bool = True,
    verify: bool = True,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    listener: Listener | None = None,
) -> Tuned:
    """Compile a model with TVM, its kernels tuned by measurement.

    `method`: "chameleon" (reinforcement learning), "evolutionary" (MetaSchedule's own), "random", "annealing" or
    "beam". `trials`: kernels that are built and measured in all, `batch` of one at a time. `time_limit`: seconds of
    tuning. `cpu`, `triple` and `remote` are those of `optimize`: kernels are built here, and timed on the remote
    device. What was measured is kept in `store` (a file; by default in the user's cache), so that a second run goes on
    where the first ended. With `rewrite` the graph that greedy search finds (by the roofline) is tuned as well
    as the original's, and the faster one taken (but not without `measure`). `shapes` binds dynamic dimensions;
    `inputs` are the user's own, for verification and measurement. Raises ModelError, BackendError,
    VerificationError, StoreError or OptionError for what the caller can put right, and VerificationFailed.
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
    start: str | os.PathLike[str] | None = None,
    restart: bool = False,
    time_limit: float | None = None,
    log: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Trained:
    """Train an agent on ONNX files, and write it to `output` whenever it is found better than before.

    It goes on where a run with this output stopped, unless `restart`. `held_out`: files to evaluate on and not to learn
    from. `iterations`: updates of the agent; `steps`: substitutions tried for each; `horizon`: substitutions of an
    episode. `workers`: processes that try them (0: this one). `start`: an agent to begin with. `time_limit`: seconds
    after which it ends. `log`: a folder for TensorBoard. Raises OptionError for what the caller can put right,
    ModelError for a file that cannot be read.
    """
    arguments = dict(locals())
    models, output = arguments.pop("models"), arguments.pop("output")
    return pipeline.train(models, output, TrainOptions(**arguments))


def compare(
    model: Source,
    *,
    searches: Sequence[str] = COMPARED,
    **options: Any,
) -> Comparison:
    """Optimise with each of several strategies; `options` are those of `optimize`. Raises what it raises."""
    return Comparison(tuple(optimize(model, search=search, **options).report for search in searches))


def verify_files(
    original: Source,
    new: Source,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Verification:
    """Whether two models compute the same. Raises ModelError, BackendError, VerificationError."""
    check_seed(seed)
    load(new)  # says what is wrong with the file
    return verify(
        runnable(original), runnable(new), imported=load(original, shapes=shapes), inputs=inputs, seed=seed
    )
