"""Passes over a Relax module, between its import and the schedules of its kernels.

`fuse` lists them in their order, `passes` applies them and writes the module after each (`XRLFLOW_DUMP`).

- Which operators become one kernel: `attention`, `bands`, `direct_norm`, `layers`, `batches`. They look in `following`
  for what can become part of a kernel, and put kernels in place with `replacing`.
- Layouts, constants and sizes: `folding`, `checks`, `transposed`, `layouts`, `padding`, `slices`, `open_sizes`.
- `last_passes` makes primitive functions of operators and fuses them, also for a layer alone (`tiles`). `chains` cuts
  those that would take minutes to compile.
"""
