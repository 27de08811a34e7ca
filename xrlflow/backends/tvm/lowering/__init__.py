"""From an ONNX model to an executable: import, passes, schedules, the plan of memory, and the compiled model.

- Import: `operators` and `einsum` have what TVM's importer lacks or takes for something else, `value_types` the types
  by ONNX, `bounds` the checks of indices.
- `lower` applies the passes of `fusion`, schedules kernels and compiles them.
- `plan`: the kernels of a compiled graph in their order, and where tensors are. `joined`: kernels timed together.
- `compiled`: the result, which can be run, timed, saved and loaded.
"""
