"""Passes over a Relax module, between its import and the schedules of its kernels.

- Which operators become one kernel: `attention`, `bands`, `batches`, `direct_norm`, `layers`. They look in `following`
  for what can become part of a kernel, and put kernels in place with `replacing`.
- Layouts and constants: `folding`, `layouts`, `transposed`, `padding`, `slices`, `open_sizes`.
- `last_passes` makes primitive functions of operators and fuses them, also for a layer alone (`tiles`). `chains` cuts
  those that would take minutes to compile.
"""
