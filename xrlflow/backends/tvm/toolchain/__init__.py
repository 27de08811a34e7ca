"""Adapts TVM for all other folders: its import, the functions and passes that are registered in it, the target, and
Relax's expressions.

- `import_tvm` imports TVM, once, and registers `functions` and `powers` (elementary functions in the arithmetic of a
  vector unit), `gathers` (gathers without a warning for each), `stack` (small buffers in registers) and `unaligned`
  (memory of the caller, which may begin at any address).
- `target`: the processor that kernels are compiled for.
- `reading`: reads expressions of Relax functions, and replaces them.
"""
