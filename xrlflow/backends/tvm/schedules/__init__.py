"""The schedules of primitive functions on a processor, without tuning. They follow the methods of expert kernels.

Every function from Relax's fusion has at most one anchor, the block that does the work, with injective blocks before it
(padding) and after it (bias, activation, residual). `dispatch` chooses the scheduler by the anchor:

- `contraction` (MatMul, Conv in NHWC, batched or not): register-blocked. A tile of mr x nr accumulators stays in vector
  registers through the reduction, or a chunk of a long one; each step loads nr values of the packed operand as vectors
  and multiplies them with mr values broadcast from the other (Goto and van de Geijn, Anatomy of High-Performance Matrix
  Multiplication, 2008). Constant weights are packed into panels of nr columns, once, when the model is compiled. The
  epilogue runs on the tile while it is in registers.
- `contraction`, channelwise (depthwise Conv): a small tile moves along the innermost row, so that the weights of its
  channels stay in registers.
- `planes`, a depthwise Conv with channels first: one plane after the other, with a tile of a few rows in vectors along
  them.
- `windows`, a pool with channels last: rows in parallel, and a few vectors of channels in registers.
- `rows`, a row reduction (softmax, normalisation, mean): rows in parallel, each with vectors of partial results.
- `injective`, no anchor: everything is inlined into the last block, which runs in parallel and in vectors.

Without tuning, a heuristic chooses the tile of a contraction (see `ratings`). Tuners choose among the same tiles (see
`kernels.layer_kernels`). `blocks` has what all schedulers need.
"""
