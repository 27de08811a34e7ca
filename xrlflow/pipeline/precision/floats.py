"""Converts models between float32 and the short floats, float16 and bfloat16."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from xrlflow.backends.protocol import one_line
from xrlflow.onnxio import protos
from xrlflow.options import OptionError
from xrlflow.pipeline.precision.naming import name_nodes, restore

# ONNX Runtime puts Casts around operators of these domains that it cannot compute in float16.
_DOMAINS = ("", "ai.onnx", "com.microsoft")
_SHORT = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
# Attributes that name the element type of an operator's output (Cast, EyeLike, RandomNormal, DequantizeLinear, ...).
_TYPES = ("to", "dtype", "output_dtype", "stash_type")


def to_float16(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with its float32 tensors in float16, and the names of the weights that were converted. Inputs and
    outputs stay float32.

    ONNX Runtime's library converts. Nodes of other domains than ONNX's and the runtime's stay in float32. Numbers
    beyond float16 are clamped. `model` may be changed. Raises OptionError if the library fails.
    """
    before = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    former = name_nodes(model)
    foreign = [node.name for node in model.graph.node if node.domain not in _DOMAINS]
    try:
        library = importlib.import_module("onnxruntime.transformers.float16")
        with warnings.catch_warnings():  # it warns of each tensor with numbers that float16 lacks
            warnings.simplefilter("ignore")
            disabled = logging.root.manager.disable
            logging.disable(logging.WARNING)
            try:
                converted = library.convert_float_to_float16(
                    model, keep_io_types=True, node_block_list=foreign
                )
            finally:
                logging.disable(disabled)
    except ImportError as error:
        raise OptionError(
            f"precision 'float16' needs {error.name or 'a package'}, which onnxruntime.transformers imports: install it"
        ) from error
    except Exception as error:  # the library raises whatever its parts raise
        raise OptionError(
            f"precision 'float16': onnxruntime.transformers cannot convert this model: {one_line(error)}"
        ) from error
    restore(converted, former)
    short = (t.name for t in converted.graph.initializer if t.data_type == TensorProto.FLOAT16)
    return converted, tuple(sorted(before.intersection(short)))


def to_float32(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with its tensors of float16 and bfloat16 in float32, and the names of the weights that were converted.

    Weights are widened exactly. Inputs and outputs keep their types, with Casts. Operators on integers, quantised ones
    too, stay as they are; only the scales of quantised tensors become float32. `model` is changed.
    """
    inputs = {
        value.name for value in model.graph.input
    }  # defaults that a caller may override keep their type
    converted = []
    for tensor in protos.all_tensors(model):
        if tensor.data_type in _SHORT and tensor.name not in inputs:
            converted.append(tensor.name)
            wide = np.asarray(numpy_helper.to_array(tensor), np.float32)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for graph in _graphs(model.graph):
        del graph.value_info[:]  # types that are not true any more; they are inferred
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in _TYPES and attribute.i in _SHORT:
                    attribute.i = TensorProto.FLOAT
        if graph is not model.graph:
            for value in (*graph.input, *graph.output):
                if value.type.tensor_type.elem_type in _SHORT:
                    value.type.tensor_type.elem_type = TensorProto.FLOAT
    _cast_ends(model.graph)
    return model, tuple(converted)


def _cast_ends(graph: onnx.GraphProto) -> None:
    """Put Casts behind inputs and before outputs in short floats, so that all nodes between compute in float32."""
    taken = protos.all_names(graph)
    wide: dict[str, str] = {}
    first, last = [], []

    def fresh(name: str) -> str:
        name = f"{name}_float32"
        while name in taken:
            name += "_"
        taken.add(name)
        return name

    for value in graph.input:
        if value.type.tensor_type.elem_type in _SHORT:
            wide[value.name] = fresh(value.name)
            first.append(helper.make_node("Cast", [value.name], [wide[value.name]], to=TensorProto.FLOAT))
    inputs = set(wide)
    for value in graph.output:
        elements = value.type.tensor_type.elem_type
        if elements in _SHORT and value.name not in inputs:
            wide[value.name] = fresh(value.name)
            last.append(helper.make_node("Cast", [wide[value.name]], [value.name], to=elements))
    _rename(graph, wide)
    for tensor in graph.initializer:
        if tensor.name not in inputs:
            tensor.name = wide.get(tensor.name, tensor.name)  # an output may be a constant
    nodes = [*first, *graph.node, *last]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Rename values in all nodes of a graph and of its bodies. Names are unique in a model, so bodies hide none."""
    for node in protos.all_nodes(graph):
        for names_of in (node.input, node.output):
            for at, name in enumerate(names_of):
                names_of[at] = names.get(name, name)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all bodies in it."""
    yield graph
    for node in protos.all_nodes(graph):
        yield from protos.subgraphs(node)
