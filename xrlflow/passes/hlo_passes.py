"""The HLO passes of jaxlib 0.10 for the CPU, and how to run one pass alone.

XLA has no function that runs one pass. But compile options select the passes that run, and a hook (`jax.extend.xla`)
receives the module after all HLO passes and may end the compilation, before any code is generated. So a compilation
with a single pass enabled runs that pass alone.

"One pass" means: a pass outside nested pipelines runs once at each of its positions in XLA's order (mostly one). A
pass of the pipeline "simplification", which XLA repeats until nothing changes, runs to its own fixpoint (at most 25
times). After a single pass, XLA's importer runs, as it does before the first pass of every compilation: it drops dead
code, folds simple constants and removes unused loop variables and operands of sorts. Passes that have nothing to do
after the importer are not listed: dce, tuple-simplifier, zero_sized_hlo_elimination, simplify-sorts,
while-loop-constant-sinking, conditional-canonicalizer, dynamic-dimension-simplifier. `rng-expander` is not listed,
because it changes the random numbers; passes for layouts and fusion are not listed, because they depend on the target.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

HOOK = "apply-xla-transforms"
SIMPLIFICATION = "simplification"
_THROUGH_LAYOUT = "HLO passes through layout assignment"
_AFTER_LAYOUT = "HLO passes after layout assignment"
_AFTER_SCATTER = "post_scatter_expansion_simplification"


@dataclass(frozen=True, slots=True)
class HloPass:
    """One pass of XLA."""

    name: str
    does: str
    needs: tuple[str, ...] = ()
    """The pass has no effect on a module without live instructions of these kinds; empty: unknown."""
    repeated: bool = False  # the pass is part of the pipeline "simplification", and runs to its fixpoint
    unbatched: bool = False
    """The pass may abort if a gather or scatter has batch dimensions."""
    unusual: bool = False  # the pass has no effect on an ordinary module (see `hlo.is_ordinary`)


PASSES: tuple[HloPass, ...] = (
    HloPass(
        "algsimp",
        "algebraic simplification (A*1, exp(a)*exp(b), reshapes of reshapes, dots as reductions, ...)",
        repeated=True,
    ),
    HloPass("cse", "merges equal instructions and constants"),
    HloPass("constant_folding", "computes what depends on constants alone", repeated=True),
    HloPass(
        "reshape-mover",
        "moves reshapes and transposes below elementwise operators",
        ("reshape", "transpose"),
        repeated=True,
    ),
    HloPass("transpose-folding", "a dot of a transposed operand contracts another dimension", ("transpose",)),
    HloPass(
        "dot_decomposer", "brings dots to one contracting dimension and leading batch dimensions", ("dot",)
    ),
    HloPass("gemv-rewriter", "a matrix times a vector becomes a matrix product", ("dot",)),
    HloPass("batch-dot-simplification", "drops batch dimensions of size 1 from dots", ("dot",)),
    HloPass("call-inliner", "inlines calls", ("call",)),
    HloPass("flatten-call-graph", "a copy of a function for each of its callers"),
    HloPass("map-inline", "a map of one operator becomes the operator on tensors", ("map",)),
    HloPass("cse_barrier_expander", "removes optimization barriers", ("opt-barrier",)),
    HloPass(
        "batchnorm_expander",
        "batch normalization as elementwise operators",
        ("batch-norm-inference", "batch-norm-training", "batch-norm-grad"),
    ),
    HloPass("logistic-expander", "the logistic function as exp and a division", ("logistic",)),
    HloPass("conditional-to-select", "a conditional inside a map becomes a select", ("conditional",)),
    HloPass("simplify-conditional", "removes and merges conditionals", ("conditional",), repeated=True),
    HloPass("topk-decomposer", "top-k as a sort and slices", ("topk", "custom-call")),
    HloPass("topk-rewriter", "a sort and slices as top-k", ("sort",)),
    HloPass("gather_expander", "a gather as a loop of slices", ("gather",), repeated=True, unbatched=True),
    HloPass(
        "gather_simplifier",
        "brings gathers to one index dimension",
        ("gather",),
        repeated=True,
        unbatched=True,
    ),
    HloPass(
        "batched_gather_scatter_normalizer",
        "batch dimensions of gathers and scatters as indices",
        ("gather", "scatter"),
    ),
    HloPass("scatter_simplifier", "brings scatters to one index dimension", ("scatter",), unbatched=True),
    HloPass("scatter_expander", "a scatter as a loop or an update of a slice", ("scatter",), unbatched=True),
    HloPass(
        "select_and_scatter_expander",
        "select-and-scatter as a reduction and a scatter",
        ("select-and-scatter",),
    ),
    HloPass("reduce-window-rewriter", "a cumulative sum as sums of blocks", ("reduce-window",)),
    HloPass(
        "reduce-window-resizer",
        "reduce-window with as many dimensions as the backend wants",
        ("reduce-window",),
    ),
    HloPass("cholesky_expander", "the Cholesky decomposition as a loop", ("cholesky",)),
    HloPass("triangular_solve_expander", "a triangular solve as a loop", ("triangular-solve",)),
    HloPass("rng-bit-generator-expander", "random bits as integer arithmetic", ("rng-bit-generator",)),
    HloPass("comparison-expander", "a total order of floats as a comparison of integers", ("compare",)),
    HloPass(
        "convolution-group-converter", "a grouped convolution as one with a masked filter", ("convolution",)
    ),
    HloPass(
        "convolution-canonicalization",
        "transposes around a convolution until the backend has a kernel",
        ("convolution",),
    ),
    HloPass(
        "operand_upcaster",
        "converts operands of dots to the type of the result",
        ("dot", "convolution"),
        unusual=True,
    ),
    HloPass(
        "result_caster",
        "converts the result of a dot instead of its operands",
        ("dot", "convolution"),
        unusual=True,
    ),
    HloPass(
        "change-op-data-type", "16-bit dots and convolutions in 32 bits", ("dot", "convolution"), unusual=True
    ),
    HloPass("float-normalization-bf16", "bfloat16 arithmetic in 32 bits", unusual=True),
    HloPass(
        "bitcast_dtypes_expander",
        "bitcasts between types of different widths as shifts",
        ("bitcast-convert",),
    ),
    HloPass(
        "stochastic_convert_decomposer", "stochastic rounding as integer arithmetic", ("stochastic-convert",)
    ),
    HloPass(
        "all-reduce-promotion", "all-reduces of 16-bit numbers in 32 bits", ("all-reduce", "reduce-scatter")
    ),
    HloPass("dynamic_padder", "dynamic dimensions as padding and masks", unusual=True),
    HloPass("qr_expander", "the QR decomposition as a loop", ("custom-call",)),
    HloPass("eigh_expander", "the symmetric eigenvalue decomposition as a loop", ("custom-call",)),
    HloPass(
        "while-loop-invariant-code-motion", "moves what a loop repeats out of it", ("while",), repeated=True
    ),
    HloPass(
        "simplify-while-loops",
        "removes loops of at most one trip and what they do not change",
        ("while",),
        repeated=True,
    ),
)

# Every pass and pipeline of the CPU compiler in XLA's order (a log of TF_CPP_VMODULE=hlo_pass_pipeline=2).
# fmt: off
_ALL = (
    "async-collective", "async-collective-replacer", "pre-spmd-partitioner",
    "strip-memory-placement-annotations", "sharding-removal", "flatten-call-graph", "sharding-remover",
    "control-dep-rewriter", "dce", "SubbytePacker pipeline", "sub-byte-size-setter",
    "HLO passes through layout assignment", "batched_gather_scatter_normalizer", "result_caster",
    "dot_decomposer", "operand_upcaster", "rng-expander", "rng-bit-generator-expander",
    "zero_sized_hlo_elimination", "dynamic-index-splitter", "conditional-to-select", "map-inline",
    "topk-decomposer", "comparison-expander", "cholesky_expander", "qr_expander", "eigh_expander",
    "triangular_solve_expander", "all_to_all_decomposer", "stochastic_convert_decomposer", "call-inliner",
    "batch-dot-simplification", "all-reduce-promotion", "float-normalization-bf16",
    "float-normalization-f8e5m2", "float-normalization-f8e4m3", "float-normalization-f8e4m3fn",
    "float-normalization-f8e4m3b11fnuz", "float-normalization-f8e5m2fnuz", "float-normalization-f8e4m3fnuz",
    "float-normalization-f8e3m4", "float-normalization-s4", "float-normalization-u4",
    "float-normalization-f4e2m1fn", "float-normalization-f8e8m0fnu", "convolution-group-converter",
    "batchnorm_expander", "logistic-expander", "conditional-canonicalizer", "dynamic-dimension-simplifier",
    "associative-scan-rewriter", "reduce-window-rewriter", "reduce-window-resizer", "scan_expander",
    "dynamic_padder", "convolution-canonicalization", "change-op-data-type", "simplification", "algsimp",
    "simplify-sorts", "gather_expander", "gather_simplifier", "tree_reduction_rewriter",
    "while-loop-invariant-code-motion", "tuple-simplifier", "while-loop-constant-sinking",
    "simplify-while-loops", "reshape-mover", "constant_folding", "simplify-conditional",
    "select_and_scatter_expander", "scatter_expander", "scatter_simplifier",
    "post_scatter_expansion_simplification", "gemv-rewriter", "bitcast_dtypes_expander", "topk-rewriter",
    "transpose-folding", "cse", "cse_barrier_expander", "while-loop-trip-count-annotator",
    "layout-assignment", "shape-canonicalizer", "literal-canonicalizer", "hlo normalization",
    "reshape-decomposer", "reduce-decomposer", "broadcast_canonicalizer", "dot-library-passes",
    "dot-library-rewriter", "HLO passes after layout assignment", "after layout assignment", "fusion",
    "fusion-wrapper", "cpu-all-reduce-combiner", "simplification after layout assignment",
    "cpu-parallel-task-assigner", "optimize_input_output_buffer_alias", "copy-insertion",
    "small-while-loop-hoisting", "propagate-call-metadata", "apply-xla-transforms",
)
# fmt: on


def only(pass_: HloPass | None) -> tuple[tuple[str, str], ...]:
    """The compile options (name, value) with which this pass runs alone; None: no pass runs."""
    if pass_ is not None and pass_.repeated:
        return _without({pass_.name, SIMPLIFICATION})
    names = (pass_.name, HOOK) if pass_ is not None else (HOOK,)
    return (("xla_enable_hlo_passes_only", ",".join(names)),)


def default_order(names: Collection[str]) -> tuple[tuple[str, str], ...]:
    """The compile options with which these passes run in XLA's own order, before layouts are assigned."""
    return _without({*names, SIMPLIFICATION, _AFTER_SCATTER})


def _without(enabled: set[str]) -> tuple[tuple[str, str], ...]:
    enabled = {*enabled, HOOK, _THROUGH_LAYOUT, _AFTER_LAYOUT}
    return (("xla_disable_hlo_passes", ",".join(n for n in _ALL if n not in enabled)),)
