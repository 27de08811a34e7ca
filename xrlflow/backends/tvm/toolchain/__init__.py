"""TVM as everything above uses it: its import, with what is registered in it, the target, and Relax's expressions.

- `import_tvm` imports TVM, once, and registers `functions` and `powers` (elementary functions in the arithmetic of a
  vector unit), `gathers` (each without a warning), `stack` (small buffers in registers) and `unaligned` (memory of the
  caller, which may begin anywhere).
- `target`: the processor that kernels are compiled for.
- `reading`: reads expressions of Relax functions, and replaces them.
"""
