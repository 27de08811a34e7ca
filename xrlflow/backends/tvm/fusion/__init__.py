"""Passes over a Relax module, between its import and the schedules of its kernels.

`fuse` lists them in their order, `passes` applies them and writes the module after each (`XRLFLOW_DUMP`).

- Which operators become one kernel: `attention`, `bands`, `direct_norm`, `layers`, `batches`. They use `following` to
  find the operators that can become part of a kernel, and `replacing` to replace operators by kernels.
- Layouts, constants and sizes: `folding`, `checks`, `transposed`, `layouts`, `padding`, `slices`, `open_sizes`.
- `last_passes` turns operators into primitive functions and fuses them, also for a layer alone (`tiles`). `chains`
  splits functions that would take minutes to compile.
"""
