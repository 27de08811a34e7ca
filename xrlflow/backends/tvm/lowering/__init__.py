"""From an ONNX model to an executable: import, schedules, the plan of memory, and the compiled model.

- `importer` makes a Relax module with TVM's importer. `operators` and `einsum` have the operators that TVM's importer
  lacks or misinterprets, `value_types` the types that ONNX infers, `bounds` the checks of indices.
- `executable` schedules the module that the passes of `fusion` return, and compiles it.
- `plan`: the order of the kernels of a compiled graph, and where tensors are in memory. `joined`: kernels that are
  timed together.
- `compiled`: the compiled model, which can be run, timed, saved and loaded.
"""
