"""Kernels for ONNX Runtime: a shared library of custom operators, and the model that calls them.

- `kernel_library` compiles regions of a model with the C runtime in `native/`, which needs no part of TVM.
- `hybrid`: an ONNX model with a library of its kernels, which also runs without them.
- `operator_times` measures kernels of single operators, for cost models.
"""
