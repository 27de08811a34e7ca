"""From an ONNX model to an executable: import, passes, schedules, the plan of memory, and the compiled model.

- `importer` makes a Relax module with TVM's importer. `operators` and `einsum` have what that lacks or takes for
  something else, `value_types` the types by ONNX, `bounds` the checks of indices.
- `executable` schedules what the passes of `fusion` leave, and compiles it.
- `plan`: the kernels of a compiled graph in their order, and where tensors are. `joined`: kernels timed together.
- `compiled`: the result, which can be run, timed, saved and loaded.
"""
