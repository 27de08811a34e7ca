"""The generated kernels. Each is a function of its workload (what it computes) and its blocking.

- For convolutions and products with constant weights there are several algorithms: `direct`, `products`, `winograd`
  (its rounding: `winograd_errors`), and TVM's loops in tiles. `layer_kernels` gives them one interface, `algorithms`
  chooses among them, and `loops` derives the loops of a kernel from its blocking.
- Kernels for several operators: `attention`, `bands` (blocked by `bands_plan`), `batches`, `direct_norm`.
- Kernels for one operator: `elementwise`, `pooling`, `pooling_rows`, `resizing`, `sampling`, `scanning`. `legalize`
  says which operator gets which kernel, and has the reductions.
- Shared parts: `building` (loops, vectors, tiles of accumulators) and `steps` (element-wise operators that are applied
  to results before they are stored).
"""
