"""Kernels for ONNX Runtime: a shared library of custom operators, and the file that names them.

- `kernel_library` compiles regions of a model with the C runtime in `native/`, which needs nothing of TVM.
- `hybrid`: an ONNX model that carries its own kernels, and runs without them.
- `operator_times`: how long kernels take for single operators, for cost models.
"""
