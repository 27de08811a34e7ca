"""Kernels of every kind have the results of ONNX Runtime, also for sizes that tiles and vectors do not divide."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrlflow.backends.onnxruntime import open_model
from xrlflow.backends.tvm import Machine, Tvm, TvmModel, detect
from xrlflow.backends.tvm.fusion.fuse import fuse
from xrlflow.backends.tvm.fusion.padding import Rows, padded_columns, padded_width
from xrlflow.backends.tvm.lowering.compiled import compiled
from xrlflow.backends.tvm.lowering.importer import import_model
from xrlflow.backends.tvm.schedules.dispatch import apply, choices, heuristic, schedule
from xrlflow.backends.tvm.schedules.ratings import TileBlocking
from xrlflow.backends.tvm.toolchain.import_tvm import tvm
from xrlflow.onnxio import load
from xrlflow.ops.evaluate import evaluate_graph

pytestmark = pytest.mark.measures

MACHINE = Machine("x86_64-unknown-linux-gnu", "znver4", 2, 16, 32)


GRAPHS = {
    "product, a gate beside": "(float[24,32] x, float[32,48] w, float[24,48] c, float[24,48] h) => (float[24,48] y)"
    " <float one = {1.0}> { a = MatMul(x, w)\n g = Sigmoid(c)\n n = Sub(one, g)\n t = Tanh(a)\n k = Mul(n, t)"
    " l = Mul(g, h)\n y = Add(k, l) }",
    "product, a slice beside": "(float[1,1,64] x, float[64,64] w, float[64] b, float[1,30,64] p) => (float[1,1,64] y)"
    " <int64[1] begin = {0}, int64[1] end = {1}, int64[1] rows = {1}> { a = MatMul(x, w)\n d = Add(a, b)"
    " q = Slice(p, begin, end, rows)\n y = Add(d, q) }",
    "product": "(float[128,96] x, float[96,64] w) => (float[128,64] y) { y = MatMul(x, w) }",
    "product, odd": "(float[37,19] x, float[19,23] w) => (float[37,23] y) { y = MatMul(x, w) }",
    "product, prime rows": "(float[1,197,64] x, float[64,48] w) => (float[1,197,48] y) { y = MatMul(x, w) }",
    "product, one row": "(float[1,64] x, float[64,40] w, float[40] b) => (float[1,40] y) {"
    " a = MatMul(x, w)\n y = Add(a, b) }",
    "product, odd columns": "(float[40,64] x, float[64,37] w) => (float[40,37] y) { y = MatMul(x, w) }",
    "product, odd columns, epilogue": "(float[2,13,32] x, float[32,101] w, float[101] b, float[2,13,101] r) =>"
    " (float[2,13,101] y) { a = MatMul(x, w)\n c = Add(a, b)\n d = Gelu(c)\n y = Add(d, r) }",
    "product, odd columns, one row": "(float[1,64] x, float[64,1001] w, float[1001] b) => (float[1,1001] y) {"
    " a = MatMul(x, w)\n y = Add(a, b) }",
    "product, odd columns, read twice": "(float[24,32] x, float[32,37] w) => (float[24,37] y, float[37,24] z) {"
    " a = MatMul(x, w)\n y = Relu(a)\n z = Transpose(a) }",
    "product, two columns": "(float[33,64] x, float[64,2] w) => (float[33,2] y) { y = MatMul(x, w) }",
    "product, one column": "(float[33,64] x, float[64,1] w) => (float[33,1] y) { y = MatMul(x, w) }",
    "product, prime rows, odd columns": "(float[197,64] x, float[64,37] w, float[37] b) => (float[197,37] y) {"
    " a = MatMul(x, w)\n y = Add(a, b) }",
    "products in a row, odd columns": "(float[24,32] x, float[32,37] w, float[37,21] v) => (float[24,21] y) {"
    " a = MatMul(x, w)\n b = Relu(a)\n y = MatMul(b, v) }",
    "product of doubles, odd columns": "(double[24,32] x, double[32,37] w) => (double[24,37] y) {"
    " y = MatMul(x, w) }",
    "products in a batch": "(float[2,3,33,16] x, float[2,3,16,29] z) => (float[2,3,33,29] y) { y = MatMul(x, z) }",
    "epilogue": "(float[64,32] x, float[64,48] r, float[32,48] w, float[48] b) => (float[64,48] y) {"
    " a = MatMul(x, w)\n c = Add(a, b)\n d = Add(c, r)\n y = Relu(d) }",
    "Gelu": "(float[16,32] x, float[32,64] w) => (float[16,64] y) { a = MatMul(x, w)\n y = Gelu(a) }",
    "Gemm": "(float[5,32] x, float[24,32] w, float[24] b) => (float[5,24] y) { y = Gemm<transB=1>(x, w, b) }",
    "Conv": "(float[1,8,14,14] x, float[32,8,3,3] w, float[32] b) => (float[1,32,14,14] y) {"
    " a = Conv<pads=[1,1,1,1]>(x, w, b)\n y = Relu(a) }",
    "Conv, odd channels": "(float[1,8,14,14] x, float[1,37,14,14] r, float[37,8,3,3] w, float[37] b) =>"
    " (float[1,37,14,14] y) { a = Conv<pads=[1,1,1,1]>(x, w, b)\n c = Add(a, r)\n y = Relu(c) }",
    "Conv, odd channels, pointwise": "(float[2,16,9,7] x, float[255,16,1,1] w) => (float[2,255,9,7] y) {"
    " y = Conv(x, w) }",
    "Conv, odd channels, strided": "(float[1,5,15,15] x, float[21,5,3,3] w, float[21] b) => (float[1,21,7,7] y) {"
    " a = Conv<strides=[2,2]>(x, w, b)\n y = Sigmoid(a) }",
    "Conv, prime rows": "(float[1,8,19,17] x, float[1,48,19,17] r, float[48,8,3,3] w, float[48] b) =>"
    " (float[1,48,19,17] y) { a = Conv<pads=[1,1,1,1]>(x, w, b)\n c = Add(a, r)\n y = Relu(c) }",
    "Conv, prime rows, strided, odd channels": "(float[2,8,20,37] x, float[37,8,5,3] w, float[37] b) =>"
    " (float[2,37,8,19] y) { a = Conv<strides=[2,2], pads=[0,1,0,1]>(x, w, b)\n y = Sigmoid(a) }",
    "Conv, prime rows, pointwise": "(float[1,16,17,17] x, float[64,16,1,1] w, float[64] b) =>"
    " (float[1,64,17,17] y) { a = Conv(x, w, b)\n y = Relu(a) }",
    "Conv, prime rows, pointwise, a batch": "(float[8,16,17,17] x, float[64,16,1,1] w) => (float[8,64,17,17] y) {"
    " y = Conv(x, w) }",
    "Conv, prime rows, dilated": "(float[1,8,30,31] x, float[32,8,3,3] w) => (float[1,32,26,29] y) {"
    " y = Conv<dilations=[2,2], pads=[0,1,0,1]>(x, w) }",
    "Conv, strided, odd": "(float[1,3,23,23] x, float[24,3,3,3] w) => (float[1,24,12,12] y) {"
    " y = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w) }",
    "Conv, dilated": "(float[2,16,11,13] x, float[16,16,3,3] w) => (float[2,16,11,13] y) {"
    " y = Conv<pads=[2,2,2,2], dilations=[2,2]>(x, w) }",
    "Conv, pointwise": "(float[1,24,14,14] x, float[1,40,14,14] r, float[40,24,1,1] w) => (float[1,40,14,14] y) {"
    " a = Conv(x, w)\n y = Add(a, r) }",
    "Conv, pointwise and strided": "(float[1,16,9,9] x, float[16,16,1,1] w) => (float[1,16,5,5] y) {"
    " y = Conv<strides=[2,2]>(x, w) }",
    "Conv, depthwise": "(float[1,24,15,15] x, float[24,1,5,5] w, float[24] b) => (float[1,24,8,8] y) {"
    " a = Conv<group=24, pads=[2,2,2,2], strides=[2,2]>(x, w, b)\n s = Sigmoid(a)\n y = Mul(a, s) }",
    "Conv, depthwise alone, channels first": "(float[2,6,21,24] x, float[6,1,5,5] w, float[6] b) =>"
    " (float[2,6,21,24] y) { a = Conv<group=6, pads=[2,2,2,2]>(x, w, b)\n s = Sigmoid(a)\n y = Mul(a, s) }",
    "Conv, depthwise, strided, channels first": "(float[1,3,45,47] x, float[6,1,3,3] w) => (float[1,6,22,23] y) {"
    " y = Conv<group=3, strides=[2,2]>(x, w) }",
    "Conv, depthwise, dilated, channels first": "(float[1,4,20,31] x, float[4,1,3,3] w) => (float[1,4,18,30] y) {"
    " y = Conv<group=4, pads=[2,1,0,2], dilations=[2,2]>(x, w) }",
    "Conv, depthwise, large, channels first": "(float[1,3,20,16] x, float[3,1,9,9] w) => (float[1,3,20,16] y) {"
    " y = Conv<group=3, pads=[4,4,4,4]>(x, w) }",
    "Conv, depthwise, large": "(float[1,16,12,12] x, float[16,1,9,9] w) => (float[1,16,12,12] y) {"
    " y = Conv<group=16, pads=[4,4,4,4]>(x, w) }",
    "Conv, one channel": "(float[1,1,28,28] x, float[8,1,5,5] w) => (float[1,8,28,28] y) {"
    " y = Conv<pads=[2,2,2,2]>(x, w) }",
    "Conv, one dimension": "(float[2,12,30] x, float[16,12,3] w, float[8,16,1] v) => (float[2,8,28] y) {"
    " a = Conv<pads=[2,2], dilations=[3]>(x, w)\n y = Conv(a, v) }",
    "Conv, three dimensions": "(float[1,4,6,7,8] x, float[8,4,3,3,3] w) => (float[1,8,6,7,8] y) {"
    " y = Conv<pads=[1,1,1,1,1,1]>(x, w) }",
    "Conv, transposed": "(float[1,8,6,6] x, float[8,4,3,3] w, float[4,4,3,3] v) => (float[1,4,15,15] y) {"
    " a = ConvTranspose<strides=[2,2]>(x, w)\n y = ConvTranspose(a, v) }",
    "Conv, transposed, no overlap": "(float[2,6,5,4] x, float[6,3,2,2] w, float[3] b) => (float[2,3,10,8] y) {"
    " a = ConvTranspose<strides=[2,2]>(x, w, b)\n y = Relu(a) }",
    "Conv, transposed, overlapping, cut": "(float[1,5,6,7] x, float[5,4,4,3] w) => (float[1,4,11,14] y) {"
    " y = ConvTranspose<strides=[2,2], pads=[1,0,2,1], output_padding=[0,0]>(x, w) }",
    "Conv, transposed, output padded": "(float[1,5,6,7] x, float[5,4,3,3] w) => (float[1,4,12,14] y) {"
    " y = ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w) }",
    "Conv, transposed, with gaps": "(float[1,3,5,5] x, float[3,2,2,1] w) => (float[1,2,14,13] y) {"
    " y = ConvTranspose<strides=[3,3]>(x, w) }",
    "Conv, transposed, beyond the image": "(float[1,3,5,5] x, float[3,2,2,2] w) => (float[1,2,11,11] y) {"
    " y = ConvTranspose<strides=[2,2], output_padding=[1,1]>(x, w) }",
    "Conv, transposed, stride 1": "(float[1,3,7,6] x, float[3,8,3,3] w) => (float[1,8,7,6] y) {"
    " y = ConvTranspose<pads=[1,1,1,1]>(x, w) }",
    "Conv, transposed, far inside": "(float[1,3,5,5] x, float[3,2,7,6] w) => (float[1,2,6,5] y) {"
    " y = ConvTranspose<strides=[2,2], pads=[5,4,4,5]>(x, w) }",
    "Conv, transposed, grouped, between others": "(float[1,8,6,6] x, float[16,8,3,3] w, float[16,4,3,3] v,"
    " float[8,8,1,1] b) => (float[1,8,13,13] y) { a = Conv<pads=[1,1,1,1]>(x, w)\n"
    " c = ConvTranspose<strides=[2,2], group=2>(a, v)\n y = Conv(c, b) }",
    "Conv, transposed, computed weights, between others": "(float[1,8,6,6] x, float[16,8,3,3] w, float[16,4,3,3] k,"
    " float[8,4,1,1] v) => (float[1,8,13,13] y) { a = Conv<pads=[1,1,1,1]>(x, w)\n"
    " c = ConvTranspose<strides=[2,2]>(a, k)\n y = Conv(c, v) }",
    "Conv, depthwise, one pixel wide": "(float[1,32,20,1] x, float[32,1,3,1] w, float[16,32,1,1] v) =>"
    " (float[1,16,18,1] y) { a = Conv<group=32>(x, w)\n y = Conv(a, v) }",
    "Conv, pointwise, a batch of pixels": "(float[19,16,1,1] x, float[40,16,1,1] w) => (float[19,40,1,1] y) {"
    " y = Conv(x, w) }",
    "Conv, transposed, grouped, weights given": "(float[1,4,5,5] x, float[4,3,3,3] w, float[6,2,2,2] k)"
    " => (float[1,2,14,14] y) { a = ConvTranspose<group=2, pads=[0,0,0,0]>(x, w)\n"
    " y = ConvTranspose<strides=[2,2]>(a, k) }",
    "Conv, one pixel wide": "(float[1,16,60,1] x, float[24,16,5,1] w) => (float[1,24,56,1] y) { y = Conv(x, w) }",
    "Conv, transposed, between others": "(float[1,8,6,6] x, float[16,8,3,3] w, float[16,4,3,3] v, float[8,4,1,1] k)"
    " => (float[1,8,13,13] y) { a = Conv<pads=[1,1,1,1]>(x, w)\n b = Relu(a)\n"
    " c = ConvTranspose<strides=[2,2]>(b, v)\n d = Relu(c)\n y = Conv(d, k) }",
    "extremes, sums and means of several": "(float[1,8,6,5] x, float[1,1,6,5] z, float[8,1,1] q, float[4,8,1,1] w)"
    " => (float[1,4,6,5] y, float[1,8,6,5] n) { a = Max(x, z, q)\n b = Min(a, x)\n c = Sum(b, z, x)\n"
    " d = Mean(c, z, q)\n e = Max(d)\n y = Conv(e, w)\n n = Sum(x, z) }",
    "Conv, grouped": "(float[1,16,7,7] x, float[32,4,3,3] w) => (float[1,32,7,7] y) {"
    " y = Conv<group=4, pads=[1,1,1,1]>(x, w) }",
    "Conv, grouped, pointwise": "(float[1,24,9,9] x, float[48,8,1,1] w, float[48] b) => (float[1,48,9,9] y) {"
    " a = Conv<group=3>(x, w, b)\n y = Relu(a) }",
    "Conv, grouped, strided, weights given": "(float[2,32,15,15] x, float[16,8,3,3] k) => (float[2,16,7,7] y) {"
    " y = Conv<group=4, strides=[2,2]>(x, k) }",
    "gate": "(float[1,32,12,12] x, float[8,32,1,1] v, float[32,8,1,1] w) => (float[1,32,12,12] y) {"
    " p = GlobalAveragePool(x)\n a = Conv(p, v)\n b = Relu(a)\n c = Conv(b, w)\n g = Sigmoid(c)\n y = Mul(x, g) }",
    "Softmax": "(float[3,5,64] x) => (float[3,5,64] y) { y = Softmax<axis=-1>(x) }",
    "Softmax, odd": "(float[3,197] x) => (float[3,197] y) { y = Softmax<axis=-1>(x) }",
    "Softmax, along rows": "(float[3,32,5] x) => (float[3,32,5] y) { y = Softmax<axis=1>(x) }",
    "Softmax, apart": "(float[4,32] x, float[4,32] z) => (float[4,32] y) {"
    " d = Add(x, x)\n e = Add(d, d)\n s = Softmax(e)\n y = Add(s, z) }",
    "product of two vectors": "(float[64] x, float[64] z) => (float y) { y = MatMul(x, z) }",
    "LayerNormalization": "(float[1,12,96] x, float[96] s, float[96] b) => (float[1,12,96] y) {"
    " y = LayerNormalization(x, s, b) }",
    "pooling": "(float[1,16,13,13] x) => (float[1,16,6,6] y) { y = MaxPool<kernel_shape=[3,3], strides=[2,2]>(x) }",
    "pooling between others": "(float[1,8,13,13] x, float[40,8,1,1] w, float[24,40,1,1] v) => (float[1,24,7,7] y) {"
    " a = Conv(x, w)\n b = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(a)\n y = Conv(b, v) }",
    "pooling between others, averages": "(float[2,8,13,13] x, float[96,8,1,1] w, float[24,96,1,1] v) =>"
    " (float[2,24,13,13] y) { a = Conv(x, w)\n c = Relu(a)\n"
    " b = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(c)\n y = Conv(b, v) }",
    "pooling of everything": "(float[2,8,19,19] x, float[72,8,1,1] w) => (float[2,72,1,1] y) {"
    " a = Conv(x, w)\n c = Relu(a)\n y = GlobalAveragePool(c) }",
    "movement": "(float[2,6,8] x) => (float[8,12] y) <int64[2] s = {8, 12}> {"
    " a = Transpose<perm=[2,0,1]>(x)\n y = Reshape(a, s) }",
    "mean": "(float[4,33,7] x) => (float[4,1,7] y) <int64[1] a = {1}> { y = ReduceMean(x, a) }",
    "mean along rows": "(float[4,5,48] x, float[4,5,1] z) => (float[4,5,1] y) <int64[1] a = {-1}> {"
    " m = ReduceMean(x, a)\n y = Add(m, z) }",
    "mean along rows, odd": "(float[4,5,101] x) => (float[4,5,101] y, float[4,5] m) <int64[1] a = {2}> {"
    " m = ReduceMean<keepdims=0>(x, a)\n n = ReduceMean(x, a)\n y = Sub(x, n) }",
    "sum along rows, odd, of several axes": "(float[3,6,5,37] x) => (float[1,6,1,1] y) <int64[3] a = {0,2,3}> {"
    " p = Mul(x, x)\n y = ReduceSum(p, a) }",
    "sums of everything": "(float[3,37] x, float[64] z) => (float y, float u, float[1,1] v) {"
    " y = ReduceSum<keepdims=0>(x)\n u = ReduceMean<keepdims=0>(z)\n v = ReduceSum(x) }",
    "extremes along rows": "(float[8,67] x, float[8,32] z) => (float[8,1] y, float[8] u, float v, float[8,1] n)"
    " <int64[1] a = {1}> { y = ReduceMax(x, a)\n u = ReduceMax<keepdims=0>(z, a)\n v = ReduceMax<keepdims=0>(x)\n"
    " n = ReduceMin(x, a) }",
    "normalisation along rows, spelt out": "(float[6,101] x) => (float[6,101] y)"
    " <int64[1] a = {1}, float e = {0.00001}> { m = ReduceMean(x, a)\n d = Sub(x, m)\n q = Mul(d, d)\n"
    " v = ReduceMean(q, a)\n u = Add(v, e)\n r = Sqrt(u)\n y = Div(d, r) }",
    "LayerNormalization, odd": "(float[2,6,101] x, float[101] s, float[101] b) => (float[2,6,101] y) {"
    " y = LayerNormalization(x, s, b) }",
    "LayerNormalization, odd, of two axes": "(float[5,4,37] x, float[4,37] s) => (float[5,4,37] y) {"
    " y = LayerNormalization<axis=1, epsilon=0.01>(x, s) }",
    "InstanceNormalization": "(float[2,3,9,37] x, float[3] s, float[3] b) => (float[2,3,9,37] y) {"
    " y = InstanceNormalization(x, s, b) }",
    "sums of doubles and of integers": "(double[4,37] x, double[4,37] z) => (double[4,1] y, int64[4,1] n)"
    " <int64[1] a = {1}> { y = ReduceSum(x, a)\n i = Cast<to=7>(z)\n n = ReduceSum(i, a) }",
    "LogSoftmax": "(float[5,101] x, float[4,8,6] z) => (float[5,101] y, float[4,8,6] u) {"
    " y = LogSoftmax(x)\n u = LogSoftmax<axis=1>(z) }",
    "product, long, a scalar beside": "(float[1,480] x, float[480,32] w, float[64,32] z, float t) =>"
    " (float[64,32] y) { g = Exp(t)\n a = MatMul(x, w)\n r = Relu(a)\n q = Mul(r, z)\n y = Add(q, g) }",
    "means, a scalar beside": "(float[8,7] z, float[8,64] x) => (float[8,1] y) <int64[1] a = {1}> {"
    " g = ReduceMean<keepdims=0>(z)\n m = ReduceMean(x, a)\n u = Add(m, g)\n y = Mul(u, g) }",
    "mean of doubles": "(double[24] x, double[64] z) => (double y, double u) {"
    " y = ReduceMean<keepdims=0>(x)\n u = ReduceSum<keepdims=0>(z) }",
    "distance from the mean of everything": "(float[1,64,96] x) => (float[1,64,96] y) {"
    " m = ReduceMean(x)\n y = Sub(x, m) }",
    "sums of rows beside columns": "(float[48,101] x, float[48,48] z) => (float[48,48] y) <int64[1] a = {1}> {"
    " m = ReduceSum<keepdims=0>(x, a)\n y = Add(z, m) }",
    "pooling of everything, channels first": "(float[2,8,28,28] x) => (float[2,8,1,1] y) {"
    " y = GlobalAveragePool(x) }",
    "product, long": "(float[37,480] x, float[480,40] w, float[40] b) => (float[37,40] y) {"
    " a = MatMul(x, w)\n c = Add(a, b)\n y = Relu(c) }",
    "product, long, odd": "(float[13,257] x, float[257,19] w) => (float[13,19] y) { y = MatMul(x, w) }",
    "product, long, prime rows, odd columns": "(float[197,382] x, float[382,37] w) => (float[197,37] y) {"
    " y = MatMul(x, w) }",
    "products in a batch, long": "(float[2,3,33,384] x, float[2,3,384,29] z) => (float[2,3,33,29] y)"
    " <float f = {0.05}> { u = Mul(z, f)\n y = MatMul(x, u) }",
    "Conv, long": "(float[1,64,9,9] x, float[1,32,9,9] r, float[32,64,3,3] w, float[32] b) => (float[1,32,9,9] y) {"
    " a = Conv<pads=[1,1,1,1]>(x, w, b)\n c = Add(a, r)\n y = Relu(c) }",
    "Conv, long, pointwise, odd channels": "(float[1,480,7,5] x, float[37,480,1,1] w) => (float[1,37,7,5] y) {"
    " y = Conv(x, w) }",
    "Conv, long, prime rows, strided": "(float[1,50,19,37] x, float[24,50,3,3] w) => (float[1,24,9,18] y) {"
    " y = Conv<strides=[2,2]>(x, w) }",
    "Conv, long, grouped": "(float[1,256,7,7] x, float[32,64,3,3] w) => (float[1,32,7,7] y) {"
    " y = Conv<group=4, pads=[1,1,1,1]>(x, w) }",
}


# Inputs of these names are weights.
WEIGHTS = ("b", "b1", "b2", "s", "v", "w", "w1", "w2", "w3")


def network(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> agraph {text}')
    rng = np.random.default_rng(3)
    for value in list(model.graph.input):
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name in WEIGHTS:
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            weight = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
            model.graph.initializer.append(onnx.numpy_helper.from_array(weight.astype(kind), value.name))
            model.graph.input.remove(value)
    return model


def numbers(model: onnx.ModelProto) -> dict[str, npt.NDArray[np.floating]]:
    """Random inputs of a model."""
    rng = np.random.default_rng(1)
    return {
        value.name: rng.standard_normal([d.dim_value for d in value.type.tensor_type.shape.dim]).astype(
            onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        )
        for value in model.graph.input
    }


@pytest.mark.filterwarnings("error:a kernel was left unscheduled")
@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_agree_with_onnx_runtime(name: str) -> None:
    model = network(GRAPHS[name])
    feeds = numbers(model)
    with open_model(model.SerializeToString(), threads=1) as runtime:
        expected = runtime.run(feeds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a kernel that is left unscheduled
        lowered = compiled(model, detect(), threads=2)
    with lowered:
        result = lowered.run(feeds)
    for a, b in zip(expected, result, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "text",
    [
        "(float[20,3072] x, float[3072,48] w) => (float[20,48] y) { y = MatMul(x, w) }",
        "(float[2,20,3072] x, float[2,3072,48] z) => (float[2,20,48] y) { y = MatMul(x, z) }",
        "(float[1,384,6,6] x, float[40,384,3,3] w) => (float[1,40,6,6] y) { y = Conv<pads=[1,1,1,1]>(x, w) }",
        "(float[20,6625] x) => (float[20,1] y) <int64[1] a = {1}> { y = ReduceMean(x, a) }",
        "(float[20,6625] x) => (float[20] y) <int64[1] a = {1}> { y = ReduceSum<keepdims=0>(x, a) }",
        "(float[3,9,67] x) => (float y) { y = ReduceSum<keepdims=0>(x) }",
        "(float[20,6625] x) => (float[20,6625] y) { y = Softmax(x) }",
        "(float[20,6625] x, float[6625] s, float[6625] b) => (float[20,6625] y) { y = LayerNormalization(x, s, b) }",
    ],
)
def test_long_sums_are_as_exact_as_those_of_onnx_runtime(text: str) -> None:
    """All terms have the same sign: for these, a single accumulator has the largest error."""
    model = network(text)
    feeds = {name: np.abs(value) for name, value in numbers(model).items()}
    for weight in model.graph.initializer:
        weight.CopyFrom(onnx.numpy_helper.from_array(np.abs(onnx.numpy_helper.to_array(weight)), weight.name))
    imported = load(model)
    (exact,) = evaluate_graph(imported.graph, dict(zip(imported.graph.inputs, feeds.values(), strict=True)))
    with (
        open_model(model.SerializeToString(), threads=1) as runtime,
        compiled(model, detect(), threads=2) as ours,
    ):
        errors = [float(np.abs(run.run(feeds)[0] - exact).max()) for run in (runtime, ours)]
    assert errors[1] <= 2 * errors[0] + 2.0**-22 * float(np.abs(exact).max())


@pytest.mark.parametrize(
    "name",
    [
        "epilogue",
        "Conv, depthwise alone, channels first",
        "Conv, grouped",
        "Softmax",
        "Gelu",
        "product, long",
        "Softmax, odd",
        "LayerNormalization, odd",
    ],
)
def test_narrower_machines(name: str) -> None:
    """The target has 16 registers of 8 floats."""
    machine = detect(cpu="haswell")
    assert (machine.lanes, machine.registers) == (8, 16)
    model = network(GRAPHS[name])
    feeds = numbers(model)
    with open_model(model.SerializeToString()) as runtime, compiled(model, machine) as lowered:
        np.testing.assert_allclose(lowered.run(feeds)[0], runtime.run(feeds)[0], rtol=2e-5, atol=2e-6)


def kernels(name: str) -> dict[str, Any]:
    """The kernels of a graph before scheduling, each as a module of one function."""
    module = fuse(import_model(network(GRAPHS[name])), detect())
    return {
        variable.name_hint: tvm().IRModule({"main": function.with_attr("global_symbol", "main")})
        for variable, function in module.functions.items()
        if variable.name_hint != "main"
    }


@pytest.mark.parametrize(
    "name",
    ["product", "product, one row", "product, odd columns", "product, odd columns, epilogue",
     "product, odd columns, one row", "Conv, odd channels", "Conv, odd channels, pointwise", "Conv, prime rows",
     "Conv, prime rows, strided, odd channels", "Conv, prime rows, pointwise", "products in a batch", "gate",
     "Conv", "Conv, pointwise", "Conv, grouped, strided, weights given", "Conv, depthwise"],
)  # fmt: skip
def test_contractions_leave_a_choice(name: str) -> None:
    """A kernel that is not recognised as a contraction runs about ten times slower. A gate has two contractions, of one
    row."""
    result = [n for n, mod in kernels(name).items() if choices(mod, detect())]
    assert len(result) == (2 if name == "gate" else 1)


@pytest.mark.parametrize(
    ("name", "columns"), [("product, odd columns, epilogue", 101), ("Conv, odd channels", 37)]
)
def test_odd_columns_are_computed_in_whole_vectors(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's weights have additional columns, and the result is cropped, with every tile."""
    (result,) = (mod for n, mod in kernels(name).items() if "crop" in n)
    untuned = heuristic(result, detect())
    assert untuned is not None
    assert untuned.tile.lanes == detect().lanes
    assert padded_columns(columns, detect().lanes, detect().in_halves) % untuned.tile.columns == 0
    model = network(GRAPHS[name])
    feeds = numbers(model)
    with open_model(model.SerializeToString()) as runtime:
        expected = runtime.run(feeds)[0]
    few = choices(result, detect())[:: max(1, len(choices(result, detect())) // 3)]
    for choice in few:

        def chosen(mod: Any, machine: Machine, choice: TileBlocking = choice) -> Any:
            fits = choice in choices(mod, machine)
            return apply(mod, machine, choice if fits else None)

        monkeypatch.setattr("xrlflow.backends.tvm.lowering.executable.schedule", chosen)
        with compiled(model, detect()) as lowered:
            np.testing.assert_allclose(lowered.run(feeds)[0], expected, rtol=2e-5, atol=2e-6)


@given(columns=st.integers(1, 100_000), lanes=st.sampled_from([4, 8, 16]), in_halves=st.booleans())
def test_padding_of_columns(columns: int, lanes: int, in_halves: bool) -> None:
    width = padded_columns(columns, lanes, in_halves)
    assert columns <= width <= max(1.05 * (columns + lanes - 1), columns)
    assert width % lanes == 0 or width == columns
    assert columns % lanes or width == columns
    if columns > 3 * lanes:
        assert width % lanes == 0


def test_half_vectors_are_left_where_they_are_few() -> None:
    few = (8, 24, 40, 20, 37, 88)
    assert [padded_columns(n, 16, True) for n in few] == [8, 24, 40, 32, 48, 96]
    assert [padded_columns(n, 16, False) for n in few] == [8, 32, 48, 32, 48, 96]
    assert detect("znver4").in_halves
    assert not detect("znver5").in_halves


@pytest.mark.parametrize("name", [n for n in GRAPHS if n.startswith("Conv, transposed")])
def test_transposed_convolutions_are_blocked(name: str) -> None:
    left = any("conv2d_transpose" in kernel for kernel in kernels(name))
    assert left == any(word in name for word in ("grouped", "beyond", "computed"))


def test_weights_of_phases_keep_their_type() -> None:
    """Only the types are checked, because ONNX Runtime has no transposed convolution of doubles."""
    graph = "(double[1,3,5,5] x, double[3,2,2,2] w) => (double[1,2,10,10] y) { y = ConvTranspose<strides=[2,2]>(x, w) }"
    model = network(graph)
    given = {"x": np.random.default_rng(0).standard_normal((1, 3, 5, 5))}
    weights = onnx.numpy_helper.to_array(model.graph.initializer[0])
    expected = np.einsum("nchw,cdij->ndhiwj", given["x"], weights).reshape(1, 2, 10, 10)
    with compiled(model, detect()) as lowered:
        np.testing.assert_allclose(lowered.run(given)[0], expected, rtol=1e-12)


def test_an_image_of_one_column_has_a_tile_of_rows() -> None:
    (result,) = (mod for n, mod in kernels("Conv, one pixel wide").items() if "conv2d" in n)
    chosen = heuristic(result, detect())
    assert chosen is not None
    assert chosen.tile.rows > 2


def test_extremes_and_sums_are_not_stacked() -> None:
    (kernel,) = (
        k for k in kernels("extremes, sums and means of several") if "conv" not in k and "transpose" not in k
    )
    assert "stack" not in kernel
    assert "concat" not in kernel


def test_rows_that_are_prime_get_longer() -> None:
    def width(pixels: int, columns: int, flat: bool = False) -> int:
        return padded_width(Rows(pixels, pixels, flat), columns, 256, 576, MACHINE)

    for pixels in (17, 71, 149):
        assert pixels < width(pixels, 192) <= 1.15 * pixels
    assert 17 < width(17, 192, flat=True) < 20  # 17 * 17 has no better divisor than 17, but 8 of them have
    assert padded_width(Rows(8 * 17, 17, True), 192, 256, 576, MACHINE) == 17
    # The first convolution of SqueezeNet has few products for each element of its image. That of Inception has fewer
    # tiles.
    assert padded_width(Rows(111, 111, False, 3 * 224 * 224), 64, 12, 27, MACHINE) == 111
    assert padded_width(Rows(149, 149, False, 3 * 299 * 299), 32, 12, 27, MACHINE) > 149
    for pixels in (7, 13, 14, 28, 56, 80, 112):
        assert width(pixels, 192) == pixels
        assert width(pixels, 192, flat=True) == pixels
    for name in (
        "Conv, prime rows",
        "Conv, prime rows, strided, odd channels",
        "Conv, prime rows, pointwise",
    ):
        (result,) = (mod for n, mod in kernels(name).items() if "crop" in n)
        chosen = heuristic(result, detect())
        assert chosen is not None
        assert chosen.tile.rows > 1
    assert not any("crop" in n for n in kernels("Conv, prime rows, pointwise, a batch"))


def test_depthwise_convolutions_alone_stay_channels_first() -> None:
    (kernel,) = kernels("Conv, depthwise alone, channels first").values()
    scheduled = schedule(kernel, detect()).mod.script()
    assert "T.vectorized" in scheduled
    assert "T.unroll" in scheduled
    assert any("transpose" in n for n in kernels("Conv"))
    assert any("transpose" in n for n in kernels("Conv, depthwise"))  # rows of 8
    assert any("transpose" in n for n in kernels("Conv, one channel"))


def test_rows_of_pointwise_convolutions_are_one_dimension() -> None:
    """7 rows of 5 pixels are 35 rows of the product, in tiles of 7."""
    machine = detect(cpu="znver5")
    graph = "(float[1,24,7,5] x, float[48,24,1,1] w) => (float[1,48,7,5] y) { y = Conv(x, w) }"
    module = fuse(import_model(network(graph)), machine)
    (kernel,) = (f for v, f in module.functions.items() if "conv" in v.name_hint)
    chosen = heuristic(tvm().IRModule({"main": kernel.with_attr("global_symbol", "main")}), machine)
    assert chosen is not None
    assert chosen.tile.rows == 7


ACTIVATED = {
    "Relu": "y = Relu(x)",
    "Clip": "y = Clip(x, l, h)",
    "Max": "y = Max(x, l, h)",
    "after a product": "c = Conv(x, w) y = Relu(c)",
    "clipped after a product": "c = Conv(x, w) y = Clip(c, l, h)",
    "after fewer multiplications": "c = Conv<pads=[1,1,1,1]>(x, v) y = Relu(c)",
    "inside of a block": (
        "c = Conv(x, w) d = Relu(c) e = Conv<group=16, pads=[1,1,1,1]>(d, w1) f = Clip(e, l, h) y = Conv(f, w2)"
    ),
}


@pytest.mark.parametrize("name", ACTIVATED)
def test_activations_keep_what_is_not_a_number(name: str) -> None:
    model = network(
        "(float[1,16,6,6] x, float[16,16,1,1] w, float[16,16,3,3] v, float[16,1,3,3] w1, float[16,16,1,1] w2)"
        f" => (float[1,16,6,6] y) <float l = {{-0.5}}, float h = {{1.5}}> {{ {ACTIVATED[name]} }}"
    )
    x = np.random.default_rng(0).standard_normal((1, 16, 6, 6)).astype(np.float32)
    x[0, 3, 2, 2] = np.nan
    with open_model(model.SerializeToString(), threads=1) as runtime:
        (expected,) = runtime.run({"x": x})
    with Tvm().compile(model.SerializeToString(), threads=1) as compiled:
        (result,) = compiled.run({"x": x})
    assert np.isnan(expected).any()
    # With a fast algorithm, NaN spreads to the whole tile.
    assert np.isnan(np.asarray(result))[np.isnan(expected)].all()


def test_type() -> None:
    assert isinstance(Tvm().compile(network(GRAPHS["product"]).SerializeToString()), TvmModel)


def test_constants_are_packed_once_when_the_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled model only computes the product, and its weights are stored in panels."""
    from tvm import relax
    from tvm.ir import GenericConst, GlobalVar

    package, modules = tvm(), []
    build = package.compile

    def watched(module: Any, target: Any, **options: Any) -> Any:
        modules.append(module)
        return build(module, target, **options)

    monkeypatch.setattr(package, "compile", watched)
    text = "(float[16,32] x, float[32,512] w) => (float[16,512] y) { y = MatMul(x, w) }"
    Tvm().compile(network(text).SerializeToString())
    (module,) = modules
    shapes: list[tuple[int, ...]] = []
    calls: list[str] = []

    def look(expression: Any) -> None:
        if isinstance(expression, GenericConst) and isinstance(expression.ty, relax.TensorType):
            shapes.append(tuple(int(extent) for extent in expression.ty.shape))
        elif isinstance(expression, relax.Call) and isinstance(expression.op, GlobalVar):
            calls.append(str(expression.op))

    relax.analysis.post_order_visit(module["main"], look)
    assert len(calls) == 1
    ((panels, *panel),) = [shape for shape in shapes if math.prod(shape) == 32 * 512]
    assert panels > 1
    assert len(panel) >= 2


def test_intrinsics_of_other_targets_are_not_parsed() -> None:
    tvm()
    for name in ("cuda", "hexagon", "rocm"):
        assert not hasattr(sys.modules[f"tvm.s_tir.tensor_intrin.{name}"], "__file__")
