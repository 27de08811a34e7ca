"""A digest of what the regions of a file compute. It ties the file to the library of their kernels.

The name of the regions' domain ends with the digest, and a reader of the file can compute it again. It changes if a
node, a weight or a size of a region was edited. It stays the same if the file was only saved again, with its weights
elsewhere, or with other names of nodes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from xrlflow.onnxio import protos
from xrlflow.onnxio.errors import ModelError
from xrlflow.onnxio.tensors import TensorStore, raw_data
from xrlflow.onnxio.wire import WireError, strip_model

DIGITS = 16
_TENSORS = (AttributeProto.TENSOR, AttributeProto.TENSORS)
_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def digest_of_file(path: str | os.PathLike[str], domain: str) -> str | None:
    """The digest of the regions of a domain in a file; None if the data of the file cannot be read."""
    name = os.fspath(path)
    try:
        store = TensorStore.of_file(name)
        return region_digest(ModelProto.FromString(strip_model(store.data)), domain, store)
    except (OSError, WireError, DecodeError, ModelError):
        return None


def region_digest(model: ModelProto, domain: str, store: TensorStore | None = None) -> str:
    """The digest of the regions of a domain: of their functions, of the weights that their nodes read, and of the sizes
    of the model's inputs. In names that contain the domain, the domain is left out.

    `store` has the data of the model's tensors; default: the model itself. Raises ModelError if data is missing.
    """
    digester = _Digester(domain, store or TensorStore("model", memoryview(b""), None))
    functions = [function for function in model.functions if function.domain == domain]
    for function in sorted(functions, key=lambda f: f.name):
        imports = sorted((entry.domain, entry.version) for entry in function.opset_import)
        digester.add("function", function.name, list(function.input), list(function.output), imports)
        digester.nodes(function.node)
    for value in model.graph.input:
        tensor = value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
        digester.add("input", value.name, tensor.elem_type, dims)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for call in sorted(_calls(model.graph, domain), key=lambda node: node.op_type):
        for port, name in enumerate(call.input):
            if name in weights:
                digester.add("weight", call.op_type, port)
                digester.tensor(weights[name])
    for name in sorted(name for name in weights if name.startswith(domain)):  # sizes in a guard
        digester.add("size", name)
        digester.tensor(weights[name])
    return digester.digest.hexdigest()


def _calls(graph: GraphProto, domain: str) -> Iterator[NodeProto]:
    """The nodes of a domain, including those in bodies."""
    for node in graph.node:
        if node.domain == domain:
            yield node
        for body in protos.subgraphs(node):
            yield from _calls(body, domain)


class _Digester:
    """A digest to which parts of a model are added one after the other."""

    def __init__(self, domain: str, store: TensorStore) -> None:
        self._domain, self._store = domain, store
        self.digest = hashlib.blake2b(digest_size=DIGITS // 2)

    def add(self, *parts: Any) -> None:
        text = repr(parts).replace(self._domain, "") + "\n"
        self.digest.update(text.encode(errors="surrogatepass"))

    def nodes(self, nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            self.add("node", node.domain, node.op_type, list(node.input), list(node.output))
            for attribute in sorted(node.attribute, key=lambda a: a.name):
                self._attribute(attribute)

    def _attribute(self, attribute: AttributeProto) -> None:
        if attribute.type in _TENSORS:
            self.add("tensors", attribute.name)
            for tensor in (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else [])):
                self.tensor(tensor)
        elif attribute.type in _GRAPHS:
            self.add("graphs", attribute.name)
            for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                self._graph(graph)
        else:
            plain = AttributeProto()
            plain.CopyFrom(attribute)
            plain.ClearField("doc_string")
            self.add("attribute", plain.SerializeToString(deterministic=True))

    def _graph(self, graph: GraphProto) -> None:
        self.add("graph", [value.name for value in graph.input], [value.name for value in graph.output])
        for tensor in graph.initializer:
            self.add("initializer", tensor.name)
            self.tensor(tensor)
        self.nodes(graph.node)

    def tensor(self, tensor: TensorProto) -> None:
        const = self._store.const(tensor)
        self.add("tensor", tensor.data_type, list(tensor.dims))
        text = tensor.data_type == TensorProto.STRING
        self.digest.update(repr(const.numpy().tolist()).encode() if text else raw_data(const))
