"""Finds convolutions and products with constant weights in a Relax function, and chooses a kernel for each of them,
together with the element-wise steps after it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from xrlflow.backends.tvm.fusion import tiles
from xrlflow.backends.tvm.fusion.following import Function
from xrlflow.backends.tvm.fusion.replacing import Replacement, with_kernels
from xrlflow.backends.tvm.kernels import direct, products
from xrlflow.backends.tvm.kernels.algorithms import (
    WORST_CHANNEL,
    AlgorithmChoice,
    AlgorithmOption,
    Algorithms,
    shared_out,
    with_times,
)
from xrlflow.backends.tvm.kernels.building import FLOAT
from xrlflow.backends.tvm.kernels.layer_kernels import (
    KERNELS,
    Algorithm,
    KernelChoice,
    LayerWorkload,
    algorithms_of,
    tiles_cost,
    title,
)
from xrlflow.backends.tvm.kernels.winograd_errors import relative_errors
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.backends.tvm.toolchain.reading import (
    known_value,
    numbers,
    operator,
    sizes,
    weights_from_memory,
)
from xrlflow.backends.tvm.toolchain.target import Machine
from xrlflow.backends.tvm.toolchain.weights import array_of, moved

_LAYOUTS = {
    "relax.nn.conv1d": ("NWC", "WIO"),
    "relax.nn.conv2d": ("NHWC", "HWIO"),
    "relax.nn.conv3d": ("NDHWC", "DHWIO"),
}
# A generated kernel is faster than TVM's tiles for these numbers of rows. With one row, any kernel reads weights as
# fast as memory allows. With more rows than these, tiles use weights often enough while they are in the second-level
# cache.
_ROWS = range(2, 257)
# The least bytes of weights for a generated kernel. Smaller weights stay in the first-level cache with any kernel.
_LEAST_WEIGHTS = 128 << 10
_WEIGHTED = frozenset(
    f"relax.{name}" for name in ("nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv2d_transpose", "matmul")
)
CHOSEN = "xrlflow.algorithms"
"""The attribute of a module with the algorithm of each layer, in JSON."""


@dataclass(frozen=True, slots=True)
class Match:
    """A layer and the steps after it, up to the variable `last`. `call`: the convolution or product. `extras`: the
    expressions of the steps' extra operands."""

    workload: LayerWorkload
    call: Any
    extras: tuple[Any, ...]
    last: Any


def choose_kernels(module: Any, machine: Machine, algorithms: Algorithms) -> Any:
    """The module with a generated kernel for each layer of "main" for which that is the best choice. Other layers keep
    TVM's loops in tiles."""
    tvm()
    main = module["main"]
    matches = _matches(Function(main))
    if not matches:
        return module
    shared = [_sharing(match.workload, machine, algorithms) for match in matches]
    options = [_options(match, machine) if one is None else [one] for match, one in zip(matches, shared)]
    if (timings := algorithms.timings) is not None:
        far = weights_from_memory(main)
        times = [timings.of(m.workload, far) if one is None else {} for m, one in zip(matches, shared)]
        options = with_times(options, times)
    others = _layers(main) - len(matches)
    chosen = algorithms.choose(options, others)
    replacements = {}
    for match, choice in zip(matches, chosen):
        if (replacement := _replacement(match, choice, machine)) is not None:
            replacements[match.last] = replacement
    report = shared_out([title(match.workload) for match in matches], chosen, others)
    return with_kernels(module, replacements).with_attr(
        CHOSEN, json.dumps([each.stored() for each in report])
    )


def chosen_in(module: Any) -> tuple[AlgorithmChoice, ...]:
    """The algorithms that `choose_kernels` chose for the layers of a module."""
    stored = (module.attrs or {}).get(CHOSEN)
    return () if stored is None else tuple(AlgorithmChoice(**each) for each in json.loads(str(stored)))


def plain(workload: LayerWorkload, machine: Machine) -> Algorithm:
    """The plain algorithm that an untuned compilation chooses for a layer. Plain algorithms save no multiplications."""
    if isinstance(workload, direct.Convolution):
        return Algorithm.DIRECT if direct.gains(workload, machine) else Algorithm.TILES
    large = _is_large(workload, machine) and workload.rows in _ROWS
    return Algorithm.PRODUCT if large else Algorithm.TILES


def estimates(workload: LayerWorkload, machine: Machine) -> dict[Algorithm, float]:
    """The estimated times of the algorithms from which an untuned compilation chooses for a layer, with the plain
    algorithm first."""
    costs = {plain(workload, machine): tiles_cost(workload, machine)}
    for algorithm in algorithms_of(workload):
        if algorithm.m is not None:
            kernel = KERNELS[algorithm]
            costs[algorithm] = kernel.cost(workload, kernel.best_blocking(workload, machine), machine)
    return costs


def _sharing(workload: LayerWorkload, machine: Machine, algorithms: Algorithms) -> AlgorithmOption | None:
    """The only option for a product that packs its weights as one with `packed_for` rows does; None for others."""
    if (
        not algorithms.packed_for
        or not isinstance(workload, products.Product)
        or not _is_large(workload, machine)
    ):
        return None
    columns = products.best_blocking(products.with_rows(workload, algorithms.packed_for), machine).columns
    blocking = products.best_blocking(workload, machine, columns)
    return AlgorithmOption(Algorithm.PRODUCT, products.cost(workload, blocking, machine), blocking=blocking)


def _is_large(workload: products.Product, machine: Machine) -> bool:
    wide = workload.columns >= 2 * machine.lanes
    return wide and 4 * workload.terms * workload.columns >= _LEAST_WEIGHTS


def _layers(function: Any) -> int:
    """The number of operators with constant weights in a function."""
    from tvm.ir import GenericConst

    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    return sum(operator(v) in _WEIGHTED and isinstance(v.args[1], GenericConst) for v in values)


def _options(match: Match, machine: Machine) -> list[AlgorithmOption]:
    """The algorithms for a layer, the plain one first. The cost is infinite for those without an estimate. An algorithm
    is left out if its rounding error is unknown, or large in one channel."""
    workload, costs = match.workload, estimates(match.workload, machine)
    first = next(iter(costs))
    options = [AlgorithmOption(first, costs[first])]
    others = [algorithm for algorithm in algorithms_of(workload) if algorithm is not first]
    options += [AlgorithmOption(algorithm, math.inf) for algorithm in others if algorithm.m is None]
    faster = {a: a.m for a in others if a.m is not None}
    errors = relative_errors(array_of(match.call.args[1]), *faster.values()) if faster else []
    for algorithm, each in zip(faster, errors, strict=True):
        if each.finite and each.channel <= WORST_CHANNEL:
            options.append(AlgorithmOption(algorithm, costs[algorithm], each.error, most=each.most))
    return options


def _replacement(match: Match, option: AlgorithmOption, machine: Machine) -> Replacement | None:
    """The kernel of an option; None if Relax's fusion yields this kernel anyway."""
    workload = match.workload
    if option.algorithm is Algorithm.TILES:
        return None if option.blocking is None else _tiled(match, option, machine)
    kernel = KERNELS[option.algorithm]
    blocking = option.blocking or kernel.best_blocking(workload, machine)
    image, weights = match.call.args

    def read() -> Sequence[Any]:
        return [image, _packed(weights, workload, choice), *match.extras]

    choice = KernelChoice(option.algorithm, blocking)
    return Replacement(
        kernel.name, (workload, choice), partial(kernel.code, workload, blocking), read, workload.out,
        workload.kind,
    )  # fmt: skip


def _packed(weights: Any, workload: LayerWorkload, choice: KernelChoice) -> Any:
    """The constant with the weights of a layer as its kernel reads them."""
    if isinstance(choice.blocking, products.ProductBlocking):  # for any number of rows
        return moved(weights, products.panels, choice.blocking.columns)
    return moved(weights, KERNELS[choice.algorithm].packed, workload, choice.blocking)


def _tiled(match: Match, option: AlgorithmOption, machine: Machine) -> Replacement | None:
    workload, (image, weights) = match.workload, match.call.args
    usual, *others = tiles.tile_choices(workload, machine) or (None,)
    if option.blocking == usual or option.blocking not in others:
        return None
    values = tuple(
        known_value(x) if extra.by_channel else None for x, extra in zip(match.extras, workload.extras)
    )
    if any(value is None and extra.by_channel for value, extra in zip(values, workload.extras)):
        return None
    variables = {"image": image, **{f"extra{i}": x for i, x in enumerate(match.extras)}}
    alone = tiles.only_kernel(tiles.fused(workload, machine))
    kernel = None if alone is None else tiles.tiled(alone, option.blocking, machine)
    if kernel is None:
        return None

    def read() -> Sequence[Any]:
        operands = tiles.Operands(array_of(weights), values)
        return tiles.spliced(tiles.fuse_layer(workload, operands, machine), variables)

    return Replacement(
        "tiles",
        (workload, KernelChoice(option.algorithm, option.blocking)),
        lambda: kernel,
        read,
        workload.out,
        workload.kind,
    )


def _matches(function: Function) -> list[Match]:
    """The layers of a function, each with all steps that follow it. No two matches share a step."""
    matches = []
    used: set[Any] = set()
    for variable, call in function.values.items():
        workload = _product(call) if operator(call) == "relax.matmul" else convolution_of(call)
        if workload is None:
            continue
        followed = function.followed(variable, used, to_bytes=True)
        used |= followed.inside
        matches.append(Match(replace(workload, steps=followed.steps), call, followed.extras, followed.last))
    return matches


def _product(call: Any) -> products.Product | None:
    """The workload of a product of rows with constant weights; None for other products, or if a size is unknown."""
    from tvm.ir import GenericConst

    x, weights, out = (sizes(each, FLOAT) for each in (*call.args, call))
    if x is None or out is None or weights is None or not isinstance(call.args[1], GenericConst):
        return None
    if len(weights) != 2 or len(x) < 2 or 0 in (*x, *out):
        return None
    return products.Product(x, out)


def convolution_of(call: Any) -> direct.Convolution | None:
    """The workload of a convolution with channels last and constant weights; None for other calls, or if a size is
    unknown."""
    from tvm.ir import GenericConst

    if operator(call) not in _LAYOUTS:
        return None
    attrs = call.attrs
    data, kernel_layout = _LAYOUTS[operator(call)]
    layouts = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or data))
    if layouts != (data, kernel_layout, data) or not isinstance(call.args[1], GenericConst):
        return None
    image, weights, out = (sizes(x, FLOAT) for x in (*call.args, call))
    if image is None or weights is None or out is None or 0 in (*image, *weights, *out):
        return None
    space = len(image) - 2

    def of_three(values: Any, missing: int) -> tuple[int, int, int]:
        first, second, third = [missing] * (3 - space) + list(values)
        return first, second, third

    return direct.Convolution(
        image, out, of_three(weights[:space], 1), of_three(numbers(attrs.strides), 1),
        of_three(numbers(attrs.dilation), 1), of_three(numbers(attrs.padding)[:space], 0), int(attrs.groups),
    )  # fmt: skip
