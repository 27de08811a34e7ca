"""The sizes of ONNX Runtime's own operators (domain com.microsoft), as those of operators of ONNX.

Semantics: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xrlflow.ir import Attrs, DType, TensorType
from xrlflow.ops.schema import schema

CONTRIB = "com.microsoft::"


@dataclass(frozen=True, slots=True)
class _Like:
    """An operator of ONNX whose result has the same sizes, where it finds its operands, and which inputs may say the
    type of the result. The first one that is given does.
    """

    op: str
    operands: tuple[int, ...]
    typed_by: tuple[int, ...]


_UNARY = {
    name: _Like(op, (0,), (4, 0))
    for name, op in (
        ("QLinearAveragePool", "AveragePool"),
        ("QLinearGlobalAveragePool", "GlobalAveragePool"),
        ("QLinearLeakyRelu", "LeakyRelu"),
        ("QLinearSigmoid", "Sigmoid"),
        ("QLinearSoftmax", "Softmax"),
    )
}
_LIKE: Mapping[str, _Like] = {
    "BiasGelu": _Like("Add", (0, 1), (0,)),
    "DynamicQuantizeMatMul": _Like("MatMul", (0, 1), (0,)),
    "FastGelu": _Like("Identity", (0,), (0,)),
    "Gelu": _Like("Identity", (0,), (0,)),
    "MatMulIntegerToFloat": _Like("MatMul", (0, 1), (2,)),
    "QGemm": _Like("Gemm", (0, 3), (8, 1)),  # without a zero point, the result is of floats
    "QLinearAdd": _Like("Add", (0, 3), (7, 0)),
    "QLinearConv": _Like("Conv", (0, 3), (7, 0)),
    "QLinearMul": _Like("Mul", (0, 3), (7, 0)),
    "QLinearWhere": _Like("Where", (0, 1, 4), (8, 1)),
    "QuickGelu": _Like("Identity", (0,), (0,)),
    **_UNARY,
}


@dataclass(frozen=True, slots=True)
class Standard:
    """An application of an operator of ONNX, whose result has these sizes but the type `dtype`."""

    op: str
    attrs: Attrs
    types: tuple[TensorType | None, ...]
    dtype: DType


def standard(op: str, attrs: Attrs, types: Sequence[TensorType | None]) -> Standard | None:
    """An operator of ONNX with the same sizes. None if none is known, or if a type is missing."""
    if not op.startswith(CONTRIB) or attrs.get("channels_last"):
        return None
    name = op.removeprefix(CONTRIB)
    like = _like_concat(len(types)) if name == "QLinearConcat" else _LIKE.get(name)
    if like is None or len(types) <= max(like.operands, default=0):
        return None
    definition = schema(like.op)
    given = [type for i in like.typed_by if i < len(types) and (type := types[i]) is not None]
    operands = [types[i] for i in like.operands]
    if definition is None or not given or any(t is None or t.dtype == DType.UNDEFINED for t in operands):
        return None
    known = Attrs({key: value for key, value in attrs.items() if key in definition.attributes})
    return Standard(like.op, known, tuple(_floats(t) for t in operands), given[0].dtype)


def _like_concat(inputs: int) -> _Like:
    """Scale and zero point of the result come first, then each part with its own."""
    return _Like("Concat", tuple(range(2, inputs, 3)), (1, 2))


def _floats(type: TensorType | None) -> TensorType | None:
    """The type of an operand in floats. Conditions stay as they are."""
    if type is None or type.dtype == DType.BOOL:
        return type
    return TensorType(DType.FLOAT, type.shape)


_NAMES = """
Attention AttnLSTM BeamSearch BiasAdd BiasDropout BiasGelu BiasSoftmax BiasSplitGelu BifurcationDetector
BitmaskBiasDropout BitmaskDropout BranchwiseRMSNorm CDist CausalConvWithState ComplexMul ComplexMulConj
ConvTransposeWithDynamicPads CropAndResize DecoderAttention DecoderMaskedMultiHeadAttention
DecoderMaskedSelfAttention DequantizeBFP DequantizeLinear DequantizeWithOrder DynamicQuantizeLSTM
DynamicQuantizeMatMul DynamicSparseAttention DynamicTimeWarping EPContext EmbedLayerNormalization EngramGate
ExpandDims FastGelu FusedConv FusedGemm FusedMatMul FusedMatMulActivation GatedAdd GatedDeltaNet GatedRMSNorm
GatedRelativePositionBias GatherBlockQuantized GatherND Gelu GemmFastGelu GemmFloat8 GemmaRotaryEmbedding
GreedySearch GridSample GroupNorm GroupQueryAttention HyperConnectionPostMix HyperConnectionPreMix Inverse Irfft
IsAllFinite LinearAttention LinearAttentionGate LongformerAttention MRotaryEmbedding
MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight MatMulBnb4 MatMulFpQ4 MatMulInteger16
MatMulIntegerToFloat MatMulNBits MatMulNBitsMlp MatMulNBitsQkv MaxpoolWithMask MoE MulInteger MultiHeadAttention
MurmurHash3 NGramHashMapping NGramRepeatBlock NhwcConv NhwcFusedConv NhwcMaxPool PackedAttention
PackedMultiHeadAttention PackedSparseAttentionIndexer Pad PagedAttention QAttention QEmbedLayerNormalization
QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu
QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax QLinearWhere QMoE QOrderedAttention QOrderedGelu
QOrderedLayerNormalization QOrderedLongformerAttention QOrderedMatMul QuantizeBFP QuantizeLinear
QuantizeWithOrder QuickGelu Range ReduceSumInteger RelativePositionBias RemovePadding RestorePadding Rfft
RotaryEmbedding SampleOp Sampling ScaledSiLU SkipGroupNorm SkipLayerNormalization
SkipSimplifiedLayerNormalization Snpe SparseAttention SparseAttentionIndexer SparsePagedAttention
SparseToDenseMatMul Tokenizer TorchEmbedding TransposeMatMul Trilu UnfoldTensor Unique VarlenCausalConvWithState
VarlenNGramHashMapping WhisperBeamSearch WordConvEmbedding
"""
OPERATORS = frozenset(_NAMES.split())
"""The operators that ONNX Runtime 1.31.1 defines in the domain com.microsoft."""
