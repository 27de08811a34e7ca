"""How a primitive function runs on a processor without tuning: the schedules of expert kernels.

Every function from Relax's fusion has one anchor, the block that does the work, with injective blocks before it
(padding) and after it (bias, activation, residual). `dispatch` finds its scheduler, by the anchor:

- `contraction` (MatMul, Conv in NHWC, batched or not): register-blocked. A tile of mr x nr accumulators stays in vector
  registers through the reduction, or a chunk of a long one; each step loads nr values of the packed operand as vectors
  and multiplies them with mr values broadcast from the other (Goto and van de Geijn, Anatomy of High-Performance Matrix
  Multiplication, 2008). Constant weights are packed into panels of nr columns, once, when the model is compiled. The
  epilogue runs on the tile while it is in registers.
- the same, channelwise (depthwise Conv): a small tile moves along the innermost row, so that the weights of its
  channels stay in registers.
- `planes`, a depthwise Conv with channels first: one plane after the other, with a tile of a few rows in vectors along
  them.
- `windows`, a pool with channels last: rows in parallel, and a few vectors of channels in registers.
- `rows`, a row reduction (softmax, normalisation, mean): rows in parallel, each with vectors of partial results.
- `injective`, no anchor: everything is inlined into the last block, which runs in parallel and in vectors.

The choices for a contraction (see `ratings`) are made by a heuristic if a model was not tuned, and are among those of
the tuners (see `kernels.layer_kernels`). `blocks` has what all schedulers read of a function.
"""
