"""The kernels that are written here, each as a function of what it computes and of its blocking.

- For convolutions and products with constant weights there are several algorithms: `direct`, `products`, `winograd`
  (its rounding: `winograd_errors`), and TVM's loops in tiles. `ways` has them all under one interface, `algorithms`
  chooses, `loops` reads what a kernel does off its blocking.
- A kernel for several operators: `attention`, `bands` (blocked by `bands_plan`), `batches`, `direct_norm`.
- A kernel for one operator: `elementwise`, `pooling`, `pooling_rows`, `resizing`, `sampling`, `scanning`. `legalize`
  says which operator gets which, and has the reductions.
- `building` (loops, vectors, tiles of accumulators) and `steps` (what is done to results before they are stored) are
  the parts that they share.
"""
