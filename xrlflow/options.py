"""The options of all entry points: they are typed, checked once, and the same in Python and on the command line.

The fields of `Options` are the keyword arguments of `optimize` and, if they have a `Flag`, the flags of `xrlflow
optimize`. The fields of `TuneOptions` and `TrainOptions` belong to `tune` and `train`. The command line imports this
module for every command, so nothing slow is imported at the top.
"""

from __future__ import annotations

import importlib.util
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xrlflow.common.sizes import Shapes, has_range
from xrlflow.storage.stores import masked, server_of

if TYPE_CHECKING:
    import onnxruntime as ort

    from xrlflow.backends.tvm.devices.remote import Remote
    from xrlflow.cost import CostModel

AGENT = "xrlflow"
TREE = "mcts"
"""Monte Carlo tree search with the agent's policy and critic."""
RLFLOW = "rlflow"
"""The agent's search, after it trained in a world model of this graph."""
WITH_AGENT = (AGENT, TREE, RLFLOW)
COMPARED = (AGENT, "taso", "greedy", "random")
"""The searches that `compare` compares by default."""
LOOKAHEAD = {"lookahead2": 2, "lookahead3": 3}
"""Greedy searches, each with the number of steps that it looks ahead when no single step gains."""
SEARCHES = (*COMPARED, TREE, RLFLOW, *LOOKAHEAD)
NONEMPTY = "nonempty"
VNNI = "vnni"
"""The processor adds products of bytes without saturation. This one is tried."""
SATURATES = "saturates"
"""The processor adds two products of bytes in 16 bits. This one is tried."""
ASSUMPTIONS = frozenset({"finite", "memory", NONEMPTY, SATURATES, VNNI})
"""Assumptions that rules may make. `allow_approximate` adds another one."""
ACCURACY = 4
"""The accuracy_level of MatMulNBits with most roundings: it quantises activations to 8 bits."""
COSTS = ("auto", "roofline", "profiled", "learned", "measured")
ALPHA = 1.05
"""TASO keeps graphs whose cost is at most this many times the least cost so far."""
AUTO = ("profiled", "learned", "roofline")
"""The cost models that `cost="auto"` tries, in this order, until a result is measured to be faster."""
KEEP, FLOAT32, FLOAT16, INT8 = "keep", "float32", "float16", "int8"
PRECISIONS = (KEEP, FLOAT32, FLOAT16, INT8)
"""`keep`: no number is changed on purpose."""
BY_CHANNEL = 13
"""The opset from which DequantizeLinear takes scales by channel, which precision "int8" needs."""
PRECISION_ERROR = 0.03
"""The default bound of a changed precision: the RMS error of an output over its RMS. 0.03 is 30 decibels."""
BACKENDS = ("auto", "onnxruntime", "hybrid", "tvm")
""""auto": a plain ONNX file, or one with generated kernels ("hybrid") if that is faster."""
TRAINING = ("torch", "torch_geometric", "gymnasium")
"""The packages of the extra `train`; tuning kernels needs them in addition to the extra `tvm`."""
TUNING = ("tvm", "torch", "xgboost")
METHODS = ("chameleon", "genetic", "annealing", "beam", "random", "one-shot", "one-shot-8")
"""The names of `xrlflow.tuning.tuners.protocol.Method`, which is not imported because the help must be quick."""
PROCESSORS = (
    *("x86-64-v2", "x86-64-v3", "x86-64-v4", "znver1", "znver2", "znver3", "znver4", "znver5", "haswell"),
    *("skylake", "skylake-avx512", "cascadelake", "icelake-server", "sapphirerapids", "emeraldrapids", "alderlake"),
    *("cortex-a53", "cortex-a72", "cortex-a76", "cortex-a78", "neoverse-n1", "neoverse-n2", "neoverse-v1"),
    *("neoverse-v2", "generic"),
)  # fmt: skip
"""LLVM's names of the processors that shell completion offers. LLVM knows more."""
SYSTEMS = ("x86_64-linux-gnu", "aarch64-linux-gnu", "riscv64-linux-gnu")
_CPU = "CPUExecutionProvider"
GROUPS = {
    "What the result may be": (
        *("assuming", "backend_ops", "int4_accuracy", "max_growth", "opset", "fix_shapes"),
        *("only", "exclude", "rules", "trust_rules"),
    ),
    "Precision, on request: it changes the outputs": ("precision", "precision_error"),
    "Search": ("search", "cost", "agent", "train_steps", "seed", "replay"),
    "Measurement and verification": ("measure", "verify"),
    "Kernels and compiled models": ("backend", "exact_kernels", "store", "cpu", "triple", "remote"),
    "Controls of experiments, besides --search lookahead2, lookahead3, random": ("budget", "alpha"),
}
"""The groups of options in the help of `optimize`. Options without a group come before all groups."""
SHAPES = (
    "Numbers for an input's dimensions: input=1,3,224,224, or ranges: ids=1,16..512. May be repeated, for several "
    "inputs."
)
LOCAL = "local"
"""The name of a Ray cluster of this machine alone, started for one command."""
RAY = "Use a Ray cluster: the HOST:PORT of its head, or local."

Values = Sequence[str] | Callable[[], Sequence[str]]
"""The values that an option may have, or a function that returns them if computing them takes time."""


class OptionError(ValueError):
    """An argument is not allowed. The message names it, and says what is allowed."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option as a flag of the command line."""

    help: str
    type: Any
    name: str | None = None  # None: derived from the field's name
    least: float | None = None  # the least value
    shown: bool = True  # whether the help shows the default
    values: Values = ()  # the values that shell completion offers; empty: files


def rule_names() -> Sequence[str]:
    """The names of all rules, then those of all families."""
    from rewrite_rules import LIBRARY

    return [*(rule.name for rule in LIBRARY), *sorted({rule.family for rule in LIBRARY})]


def option(
    default: Any, help: str, type: Any, *, shown: bool = True, secret: bool = False, **flag: Any
) -> Any:
    """A field that is also a flag of the command line. `secret`: it may contain a password, so it is not printed."""
    return field(default=default, repr=not secret, metadata={"flag": Flag(help, type, shown=shown, **flag)})


def flags(kind: type) -> Mapping[str, tuple[Flag, Any]]:
    """The flags of a class of options by field name, with their defaults. The flags of the class itself come before
    inherited ones.
    """
    own = {name: place for place, name in enumerate(kind.__annotations__)}
    flag_fields = [f for f in fields(kind) if "flag" in f.metadata]
    return {
        f.name: (f.metadata["flag"], f.default)
        for f in sorted(flag_fields, key=lambda f: own.get(f.name, len(own)))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The options that `optimize` and `tune` share. Raises OptionError."""

    cpu: str | None = option(
        None,
        "hybrid, tvm: LLVM's name of the processor to compile for; default: this one.",
        str | None,
        values=PROCESSORS,
    )
    triple: str | None = option(
        None,
        "hybrid, tvm: LLVM's name of its system, if it is another (aarch64-linux-gnu).",
        str | None,
        values=SYSTEMS,
    )
    remote: str | Remote | None = option(
        None, "tvm: run on a device of a TVM RPC tracker: HOST:PORT/KEY.", str | None
    )
    shapes: Shapes | None = option(
        None,
        SHAPES,
        list[str] | None,
        name="--shape",
    )
    threads: int | None = option(
        None, "Threads of the runtime; default: the physical cores.", int | None, least=1
    )
    seed: int = option(0, "Seed of everything random.", int, least=0)
    exact_kernels: bool = option(
        False, "Kernels: no algorithm that rounds more than the direct one.", bool, name="--exact-kernels"
    )
    store: str | os.PathLike[str] | None = option(
        None,
        "Where measurements are: the URL of a server (postgresql://HOST/DATABASE), or the file of tuned kernels; "
        "default: XRLFLOW_STORE, or the user's cache.",
        str | None,
        secret=True,
    )
    measure: bool = option(True, "Measure the result against the original.", bool)
    verify: bool = option(True, "Compare the result with the original on random inputs.", bool)
    inputs: str | os.PathLike[str] | Mapping[str, Any] | None = option(
        None,
        "Your own inputs for verification and measurement (.npz; --precision: or a folder).",
        Path | None,
    )

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    def server(self) -> str | None:
        """The URL of the server with all measurements, if `store` names one."""
        return None if self.store is None else server_of(self.store)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Common):
    """The options of `optimize`; `xrlflow.optimize` explains them. Raises OptionError."""

    search: str = option(
        AGENT,
        "xrlflow (an agent), mcts, rlflow, taso or greedy; controls of experiments: lookahead2, lookahead3, random.",
        str,
        values=SEARCHES,
    )
    cost: str | CostModel = option(
        "auto",
        "What guides the search: roofline, profiled, learned, measured; auto: profiled, others if nothing is faster.",
        str,
        values=COSTS,
    )
    backend: str = option(
        "auto",
        "auto: generated kernels in NAME.so if they are faster; onnxruntime: none; hybrid: in any case; "
        "tvm: -o names a shared library.",
        str,
        values=BACKENDS,
    )
    portable: bool = option(False, "One ONNX file, without a library of kernels.", bool, name="--portable")
    backend_ops: bool = option(False, "Allow operators that only this runtime has (com.microsoft).", bool)
    allow_approximate: bool = option(
        False, "Allow rules that may lose more than two bits of accuracy.", bool, name="--allow-approximate"
    )
    precision: str = option(
        KEEP,
        "float32, float16, or int8 (layers in 8 bits; needs --inputs: a folder of .npz files); keep: no change.",
        str,
        values=PRECISIONS,
    )
    precision_error: float = option(
        PRECISION_ERROR,
        "What --precision may cost on the sets of inputs: the RMS of each output's error, over the output's RMS.",
        float,
        name="--precision-error",
    )
    int4_accuracy: int | None = option(
        None,
        "Products with packed weights (MatMulNBits) at this accuracy_level: 0 to 3 (float32), or 4 (activations of 8 "
        "bits); default: the file's.",
        int | None,
        least=0,
    )
    assuming: Sequence[str] = option(
        (),
        "What holds: finite (no infinities, no NaN), memory (weights may be unpacked in it), nonempty (no dimension is "
        "0), vnni (the processor: tried).",
        list[str],
        name="--assume",
        values=sorted(ASSUMPTIONS),
    )
    budget: int = option(1000, "Graphs that the search may expand.", int, least=0)
    time_limit: float = option(60.0, "Seconds for everything.", float)
    shapes: Shapes | None = option(
        None,
        f"{SHAPES[:-1]}, and for one to get kernels for several sizes.",
        list[str] | None,
        name="--shape",
    )
    alpha: float = option(ALPHA, "taso: how much worse than the best may a graph be.", float, least=1.0)
    agent: str | os.PathLike[str] | None = option(
        None, "xrlflow, mcts, rlflow: an agent of your own (`xrlflow train`).", Path | None, shown=False
    )
    train_steps: int = option(
        0,
        "xrlflow, mcts: train the agent on this model first, for so many steps; rlflow: learn from so many.",
        int,
        least=0,
    )
    exclude: Sequence[str] = option(
        (), "Leave out a rule, or a family of rules. May be repeated.", list[str], values=rule_names
    )
    only: Sequence[str] = option(
        (), "Use no other rules, or families of rules. May be repeated.", list[str], values=rule_names
    )
    rules: str | os.PathLike[str] | None = option(
        None, "Rules of your own: a Python file with RULES, proven before they are used.", Path | None
    )
    trust_rules: bool = option(False, "Use the rules of --rules unproven.", bool, name="--trust-rules")
    further_shapes: Sequence[Mapping[str, Sequence[int]]] = ()
    fix_shapes: bool = option(False, "Write the numbers of --shape into the file.", bool)
    session_options: Mapping[str, str] | ort.SessionOptions | None = None
    providers: Sequence[str] = (_CPU,)
    max_growth: float = option(1.2, "Largest size of the result, in sizes of the input.", float)
    opset: int | None = option(
        None, "The opset of the result; default: the model's, or what the result needs.", int | None
    )
    replay: str | os.PathLike[str] | None = option(
        None, "Apply the substitutions of this file; no search.", Path | None
    )

    def __post_init__(self) -> None:
        from xrlflow.backends.onnxruntime import check_providers

        self._check_names()
        self._check_numbers()
        check_shapes(self.shapes)
        check_shapes(*self.further_shapes, ranges=False)
        self._check_agent()
        self._check_precision()
        check_providers(self.providers)
        kernels = {
            "cpu": self.cpu,
            "triple": self.triple,
            "store": self.store if self.server is None else None,
        }
        self._check_backend(("tvm", "hybrid"), kernels)
        self._check_backend(("tvm",), {"remote": self.remote})
        self._check_backend(("auto", "tvm", "hybrid"), {"exact_kernels": self.exact_kernels or None})
        level = self.int4_accuracy
        if level is not None and not 0 <= level <= ACCURACY:
            raise OptionError(f"int4_accuracy {level} is not known: give 0 to {ACCURACY}")
        plain = {"opset": self.opset, "backend_ops": self.backend_ops or None, "int4_accuracy": level}
        self._check_backend(("onnxruntime", "auto", "hybrid"), plain)
        if self.portable and self.backend in ("hybrid", "tvm"):
            raise OptionError(
                f"portable has no meaning with backend {self.backend!r}, which writes a library"
            )
        ranged = any(map(has_range, (self.shapes or {}).values()))
        if ranged and (self.fix_shapes or self.compiling or self.further_shapes):
            why = (
                "fix_shapes"
                if self.fix_shapes
                else "several shapes"
                if self.further_shapes
                else "backend tvm"
            )
            raise OptionError(f"a range of sizes (16..512) has no meaning with {why}: give numbers")
        if self.further_shapes and not self.with_kernels:
            raise OptionError(
                "further shapes have no meaning without generated kernels: give one shape for each input"
            )
        if self.trust_rules and self.rules is None:
            raise OptionError("trust_rules has no meaning without rules: name the file")
        if self.store is not None and self.server is None and not os.path.isfile(self.store):
            raise OptionError(
                f"store {masked(os.fspath(self.store))} is neither a file that `xrlflow tune --store` wrote nor a URL"
            )

    @property
    def cost_name(self) -> str:
        return self.cost if isinstance(self.cost, str) else self.cost.name

    @property
    def costs(self) -> tuple[str | CostModel, ...]:
        """The cost models to try, one after the other until a result is faster than the original.

        It is only one cost model if nothing is measured, if generated kernels are required, or if an agent is trained
        on the model (the training uses the time of further searches).
        """
        once = self.replay is not None or self.search in ("random", RLFLOW) or self.train_steps > 0
        if self.cost != "auto":
            return (self.cost,)
        return AUTO[:1] if once or self.backend in ("hybrid", "tvm") or not self.measure else AUTO

    @property
    def compiling(self) -> bool:
        """Whether the result is compiled with TVM."""
        return self.backend == "tvm"

    @property
    def runtime(self) -> str:
        """The runtime of the result. Rules that only this runtime supports may be applied."""
        return "tvm" if self.compiling else "onnxruntime"

    @property
    def with_kernels(self) -> bool:
        """Whether the result may be an ONNX file with generated kernels. With `auto`, measurements decide."""
        return self.backend == "hybrid" or (self.backend == "auto" and self.measure and not self.portable)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions that rules may make."""
        return (*self.assuming, *(("approximate",) if self.allow_approximate else ()))

    def _check_names(self) -> None:
        if self.search not in SEARCHES:
            raise OptionError(f"search {self.search!r} is not known: choose one of {', '.join(SEARCHES)}")
        if isinstance(self.cost, str) and self.cost not in COSTS:
            raise OptionError(f"cost {self.cost!r} is not known: choose one of {', '.join(COSTS)}")
        if self.backend not in BACKENDS:
            raise OptionError(f"backend {self.backend!r} is not known: choose of {', '.join(BACKENDS)}")
        if unknown := set(self.assuming) - ASSUMPTIONS:
            raise OptionError(
                f"assumption {min(unknown)!r} is not known: choose of {', '.join(sorted(ASSUMPTIONS))}"
            )

    def _check_numbers(self) -> None:
        check_seed(self.seed)
        if self.budget < 0:
            raise OptionError(f"budget {self.budget} is negative")
        if self.train_steps < 0:
            raise OptionError(f"train_steps {self.train_steps} is negative: give steps of training, or 0")
        check_threads(self.threads, self.remote)
        if not 0 < self.time_limit < math.inf:
            raise OptionError(f"time_limit {self.time_limit:g} is not positive and finite: give seconds")
        if not 1 <= self.alpha < math.inf:
            raise OptionError(
                f"alpha {self.alpha:g} is below 1 or not finite: TASO keeps graphs that cost up to alpha times the best"
            )
        if self.alpha != ALPHA and self.search != "taso":
            raise OptionError(f"alpha has no meaning with search {self.search!r}: choose taso")
        if not self.max_growth > 0:
            raise OptionError(
                f"max_growth {self.max_growth:g} is not positive: give sizes of the input, such as 1.2"
            )

    def _check_precision(self) -> None:
        if self.precision not in PRECISIONS:
            raise OptionError(
                f"precision {self.precision!r} is not known: choose one of {', '.join(PRECISIONS)}"
            )
        if not 0 < self.precision_error < math.inf:
            raise OptionError(
                f"precision_error {self.precision_error:g} is not positive and finite: "
                f"give a relative error, such as {PRECISION_ERROR:g}"
            )
        if self.precision != KEEP:
            self._check_backend(("auto", "onnxruntime", "hybrid"), {"precision": self.precision})
            if self.replay is not None:
                raise OptionError("precision has no meaning with replay, whose substitutions are of one file")
            if self.precision == INT8 and self.opset is not None and self.opset < BY_CHANNEL:
                raise OptionError(
                    f"precision 'int8' needs opset {BY_CHANNEL} or later, for scales of channels: not {self.opset}"
                )
            if self.precision == INT8 and self.inputs is None:
                raise OptionError(
                    "precision 'int8' is calibrated with your own inputs: give some with --inputs data.npz"
                )
            return
        if self.precision_error != PRECISION_ERROR:
            raise OptionError(
                "precision_error has no meaning without precision: choose float32, float16 or int8"
            )

    def _check_agent(self) -> None:
        for name, value in (("agent", self.agent), ("train_steps", self.train_steps)):
            if value and self.search not in WITH_AGENT:
                choices = ", ".join(WITH_AGENT)
                raise OptionError(
                    f"{name} has no meaning with search {self.search!r}: choose one of {choices}"
                )
        for name, set_by_user in (
            ("train_steps", self.train_steps),
            ("search 'rlflow'", self.search == RLFLOW),
        ):
            if set_by_user:
                check_installed(name, "train", *TRAINING)
        if self.agent is not None and not os.path.isfile(self.agent):
            raise OptionError(
                f"agent {os.fspath(self.agent)} is no file: give one that `xrlflow train` wrote"
            )

    def _check_backend(self, only: tuple[str, ...], values: Mapping[str, object]) -> None:
        """Raise OptionError for options in `values` if they have a meaning only with the backends `only`, and another
        is chosen.
        """
        for name, value in values.items():
            if self.backend not in only and value is not None:
                choices = " or ".join(repr(backend) for backend in only)
                raise OptionError(f"{name} has no meaning with backend {self.backend!r}: choose {choices}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(Common):
    """The options of `tune`; `xrlflow.tune` explains them. Raises OptionError."""

    method: str = option(
        "chameleon",
        "chameleon, one-shot or one-shot-8; controls of experiments: genetic, annealing, beam, random.",
        str,
        values=METHODS,
    )
    trials: int = option(512, "Kernels that are built and measured.", int, least=0)
    batch: int = option(16, "Of one kernel at a time.", int, least=1)
    time_limit: float = option(600.0, "Seconds of tuning.", float)
    rewrite: bool = option(True, "Tune what greedy search makes of the graph, too.", bool)
    ray: str | None = option(None, RAY, str | None)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise OptionError(f"method {self.method!r} is not known: choose of {', '.join(METHODS)}")
        if self.trials < 0 or self.batch < 1 or not 0 < self.time_limit < math.inf:
            raise OptionError("trials must not be negative, the batch and the time limit must be above zero")
        check_seed(self.seed)
        check_shapes(self.shapes, ranges=False)
        check_threads(self.threads, self.remote)
        check_installed("tuning", "tvm", *TUNING)
        check_ray(self.ray)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The options of `train`; `xrlflow.train` explains them. Raises OptionError."""

    held_out: Sequence[str | os.PathLike[str]] = option(
        (), "A file to evaluate on and not to learn from. May be repeated.", list[Path]
    )
    iterations: int = option(200, "Updates of the agent.", int, least=1)
    steps: int = option(2048, "Substitutions tried for each update.", int, least=1)
    horizon: int = option(100, "Substitutions of an episode.", int, least=1)
    workers: int = option(2, "Processes; 0: only this one.", int, least=0)
    ray: str | None = option(None, RAY, str | None)
    start: str | os.PathLike[str] | None = option(None, "An agent to begin with.", Path | None)
    restart: bool = option(
        False, "Do not go on where a run with this output stopped.", bool, name="--restart"
    )
    time_limit: float | None = option(None, "Seconds after which it ends.", float | None)
    log: str | os.PathLike[str] | None = option(None, "A folder for TensorBoard.", Path | None)
    seed: int = option(0, "Seed of everything random.", int, least=0)
    world_model: bool = option(
        False,
        "Learn what substitutions do, and train the agent in what was learned.",
        bool,
        name="--world-model",
    )

    def __post_init__(self) -> None:
        for name in ("iterations", "steps", "horizon"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} {getattr(self, name)} is not positive: give 1 or more")
        if self.time_limit is not None and not self.time_limit > 0:
            raise OptionError(f"time_limit {self.time_limit:g} is not positive: give seconds")
        if self.workers < 0:
            raise OptionError(f"workers {self.workers} is negative: give processes, or 0")
        check_seed(self.seed)
        check_installed("training", "train", *TRAINING)
        self._check_ray()
        if self.log is not None:
            check_installed("log", "train", "tensorboard")

    def _check_ray(self) -> None:
        check_ray(self.ray)
        if self.ray is None:
            return
        if self.world_model:
            raise OptionError("ray has no meaning with world_model, which trains in one process")
        if self.workers == 0:
            raise OptionError("ray has no meaning with 0 workers: give their number")


def check_ray(ray: str | None) -> None:
    """Raise OptionError unless this is "local" or HOST:PORT (an IPv6 address is in brackets), and Ray is installed."""
    if ray is None:
        return
    host, _, port = ray.rpartition(":")
    if ray != LOCAL and not (host and "/" not in host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise OptionError(
            f"ray {ray!r}: write it as HOST:PORT, the address of the cluster's head, or {LOCAL}, which starts Ray here"
        )
    check_installed(f"ray {ray}", "ray", "ray")


def check_installed(what: str, extra: str, *packages: str) -> None:
    """Raise OptionError if `what` needs a package that is not installed; `extra` would install it."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder with the package's name is no package
            raise OptionError(f"{what} needs {package}: install it with `pip install 'xrlflow[{extra}]'`")


def check_threads(threads: int | None, remote: str | Remote | None) -> None:
    """Raise OptionError unless a runtime can use this many threads. The limit of a remote device is not known here."""
    if threads is None:
        return
    if not hasattr(threads, "__index__") or threads < 1:
        raise OptionError(f"threads {threads} is not positive and whole: give 1 or more")
    from xrlflow.backends.limits import most_threads  # this imports NumPy, which takes time

    if remote is None and threads > (limit := most_threads()):
        raise OptionError(f"threads {threads} is too many for this machine: give at most {limit}")


def check_shapes(*shapes: Any, ranges: bool = True) -> None:
    """Raise OptionError unless these are mappings of names of inputs to whole numbers (with `ranges` also to pairs of
    the least and the greatest number), or None.
    """
    wrong = ""
    for mapping in shapes:
        if mapping is None:
            continue
        try:
            for name, shape in mapping.items():
                if isinstance(shape, str) or not isinstance(name, str):
                    raise TypeError
                for size in shape:
                    if not (ranges and isinstance(size, tuple) and len(size) == 2):
                        size = (size, size)
                    low, high = map(operator.index, size)
                    wrong = f"{low}..{high} is no range: the first number is greater" if low > high else wrong
        except (AttributeError, TypeError) as error:
            raise OptionError(
                f"shapes {mapping!r}: give the whole numbers of each input, as in {{'x': (1, 3, 224, 224)}}"
            ) from error
        if wrong:
            raise OptionError(f"shapes {mapping!r}: {wrong}")


def check_seed(seed: int) -> None:
    if seed < 0:
        raise OptionError(f"seed {seed} is negative: give 0 or more")
