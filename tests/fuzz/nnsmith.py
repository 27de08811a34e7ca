"""Models by NNSmith for `tests/fuzz/run.py`: its graphs, exported by PyTorch.

NNSmith 0.1.0 was written for the libraries of 2023. Of it we use the generator of graphs and the PyTorch modules made
of them; the export is our own call, and its search for inputs is not used. `omegaconf` (which it imports for a name
in an annotation) need not be installed."""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import random
import sys
import types
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx

from tests.fuzz.check import Refused, Session, sees_nan
from tests.fuzz.models import Subject

_ELEMENTS = 2048  # of a tensor
_WINDOW = 200  # elements
_TRIES = 12


class NothingDrawn(ValueError):
    """None of the graphs that were drawn can be exported."""


@cache
def _nnsmith() -> Any:
    """The parts of NNSmith that are used, and its operators."""
    if importlib.util.find_spec("omegaconf") is None:
        stub = types.ModuleType("omegaconf")
        stub.ListConfig = list  # type: ignore[attr-defined]
        sys.modules["omegaconf"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from nnsmith.abstract import dtype
        from nnsmith.error import ConstraintError, InternalError
        from nnsmith.graph_gen import ConcolicGen, SymbolicGen
        from nnsmith.materialize.torch.forward import ALL_TORCH_OPS
        from nnsmith.materialize.torch.symbolnet import SymbolNet
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    without = set(dtype.DTYPE_GEN_COMPLEX)
    choices = [t for t in [*dtype.DTYPE_GEN_ALL, dtype.DType.bool] if t not in without]
    return types.SimpleNamespace(
        torch=torch, SymbolNet=SymbolNet, generators=(SymbolicGen, ConcolicGen), operators=ALL_TORCH_OPS,
        dtypes=choices, failures=(ConstraintError, InternalError),
    )  # fmt: skip


def nnsmith(seed: int) -> Subject:
    """A model of 3 to 12 operators. Raises NothingDrawn."""
    parts = _nnsmith()
    failure = ""
    for attempt in range(_TRIES):
        made = seed * _TRIES + attempt
        random.seed(made)
        np.random.seed(made % 2**32)
        parts.torch.manual_seed(made)
        try:
            return _exported(parts, _graph(parts, made), made)
        # What NNSmith asserts and what PyTorch's exporter lacks (complex numbers, say): another graph is drawn.
        except (
            *parts.failures,
            AssertionError,
            ValueError,
            RuntimeError,
            TypeError,
            KeyError,
            IndexError,
        ) as error:
            failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise NothingDrawn(failure)


def _graph(parts: Any, seed: int) -> Any:
    generator = parts.generators[seed % 2](
        parts.operators,
        seed,
        max_elem_per_tensor=_ELEMENTS,
        concr_ph_dim_rng=(1, 12),
        dtype_choices=parts.dtypes,
    )
    # It picks from a list made of a set, whose order is another one in every process.
    generator.dtype_choices.sort(key=str)
    generator.abstract_gen(max_node_size=random.randint(3, 12), max_gen_millisec=6000)
    return generator.make_concrete()


def _exported(parts: Any, graph: Any, seed: int) -> Subject:
    torch = parts.torch
    net = parts.SymbolNet(graph).eval()
    likes = net.input_like
    given = tuple(torch.ones(tuple(v.shape)).uniform_(1, 2).to(v.dtype.torch()) for v in likes.values())
    if any(t.is_complex() for t in given):
        raise ValueError("complex numbers")
    firsts = {t.shape[0] for t in given if t.dim()}
    dynamic = len(firsts) == 1 and all(t.dim() for t in given) and seed % 3 == 0
    file = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, given, file, input_names=list(likes), output_names=list(net.output_like),
            opset_version=(17, 18, 20)[seed % 3], do_constant_folding=False, dynamo=False,
            dynamic_axes={name: {0: "N"} for name in likes} if dynamic else None,
        )  # fmt: skip
    proto = onnx.load_from_string(file.getvalue())
    check_runs(proto)
    return Subject(
        proto, _sizes(firsts if dynamic and len(proto.graph.input) else ()), specials=sees_nan(proto)
    )


def check_runs(proto: onnx.ModelProto) -> None:
    """Raise ValueError if ONNX Runtime has no kernels for a model (NNSmith asks its backends the same of operators), or
    if it has windows that take our evaluator minutes.
    """
    for node in proto.graph.node:
        kernel = next((a.ints for a in node.attribute if a.name == "kernel_shape"), ())
        if math.prod(kernel) > _WINDOW:
            raise ValueError("a large window")
    try:
        Session(proto, False)
    except Refused as error:
        raise ValueError(f"ONNX Runtime does not load it: {error}") from error


def _sizes(firsts: Sequence[int] | set[int]) -> tuple[dict[str, int], ...]:
    """The size that was exported, and others, at which the model may run too."""
    if not firsts:
        return ({},)
    (size,) = firsts
    return ({"N": size}, {"N": size + 1}, {"N": 2 * size})
