"""Small HLO modules, each with something to do for the pass of its name."""

from __future__ import annotations

_ADD = "add { p = f32[] parameter(0)\n q = f32[] parameter(1)\n ROOT s = f32[] add(p, q) }\n"
_LESS = (
    "less { p = f32[] parameter(0)\n q = f32[] parameter(1)\n ROOT s = pred[] compare(p, q), direction=LT }\n"
)


def _module(entry: str, before: str = "") -> str:
    return f"HloModule m\n{before}ENTRY e {{\n{entry}\n}}\n"


def _loop(body: str, start: str = "0", bound: str = "10") -> str:
    """A loop over (counter, x, y) with counter < bound; `body` computes `next`, the new y."""
    state = "(s32[], f32[4], f32[4])"
    return (
        f"HloModule m\ncondition {{\n t = {state} parameter(0)\n i = s32[] get-tuple-element(t), index=0\n"
        f" b = s32[] constant({bound})\n ROOT c = pred[] compare(i, b), direction=LT\n}}\n"
        f"body {{\n t = {state} parameter(0)\n i = s32[] get-tuple-element(t), index=0\n"
        f" x = f32[4] get-tuple-element(t), index=1\n y = f32[4] get-tuple-element(t), index=2\n"
        f" o = s32[] constant(1)\n j = s32[] add(i, o)\n{body}\n ROOT r = {state} tuple(j, x, next)\n}}\n"
        f"ENTRY e {{\n a = f32[4] parameter(0)\n b = f32[4] parameter(1)\n z = s32[] constant({start})\n"
        f" t = {state} tuple(z, a, b)\n w = {state} while(t), condition=condition, body=body\n"
        f" ROOT r = f32[4] get-tuple-element(w), index=2\n}}\n"
    )


SNIPPETS: dict[str, str] = {
    "algsimp": _module(
        " x = f32[4] parameter(0)\n y = f32[4] parameter(1)\n a = f32[4] exponential(x)\n b = f32[4] exponential(y)\n"
        " ROOT r = f32[4] multiply(a, b)"
    ),
    "cse": _module(
        " x = f32[4] parameter(0)\n a = f32[4] exponential(x)\n b = f32[4] exponential(x)\n ROOT r = f32[4] add(a, b)"
    ),
    "constant_folding": _module(
        " x = f32[2,2] parameter(0)\n a = f32[2,2] constant({{1, 2}, {3, 4}})\n"
        " d = f32[2,2] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n ROOT r = f32[2,2] add(x, d)"
    ),
    "reshape-mover": _module(
        " x = f32[2,3] parameter(0)\n y = f32[2,3] parameter(1)\n a = f32[6] reshape(x)\n b = f32[6] reshape(y)\n"
        " ROOT r = f32[6] add(a, b)"
    ),
    "transpose-folding": _module(
        " x = f32[3,2] parameter(0)\n y = f32[3,4] parameter(1)\n t = f32[2,3] transpose(x), dimensions={1,0}\n"
        " ROOT r = f32[2,4] dot(t, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    ),
    "dot_decomposer": _module(
        " x = f32[2,3,4] parameter(0)\n y = f32[5,4,3] parameter(1)\n"
        " ROOT r = f32[2,5] dot(x, y), lhs_contracting_dims={1,2}, rhs_contracting_dims={2,1}"
    ),
    "gemv-rewriter": _module(
        " x = f32[3,4] parameter(0)\n y = f32[4] parameter(1)\n"
        " ROOT r = f32[3] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    ),
    "batch-dot-simplification": _module(
        " x = f32[1,3,4] parameter(0)\n y = f32[1,4,5] parameter(1)\n"
        " ROOT r = f32[1,3,5] dot(x, y), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2},"
        " rhs_contracting_dims={1}"
    ),
    "call-inliner": _module(
        " x = f32[4] parameter(0)\n ROOT r = f32[4] call(x), to_apply=f",
        "f { p = f32[4] parameter(0)\n ROOT n = f32[4] negate(p) }\n",
    ),
    "flatten-call-graph": _module(
        " x = f32[4] parameter(0)\n a = f32[4] call(x), to_apply=f\n ROOT r = f32[4] call(a), to_apply=f",
        "f { p = f32[4] parameter(0)\n ROOT n = f32[4] exponential(p) }\n",
    ),
    "map-inline": _module(
        " x = f32[4] parameter(0)\n y = f32[4] parameter(1)\n ROOT r = f32[4] map(x, y), dimensions={0}, to_apply=add",
        _ADD,
    ),
    "cse_barrier_expander": _module(
        " x = f32[4] parameter(0)\n b = f32[4] opt-barrier(x)\n ROOT r = f32[4] negate(b)"
    ),
    "batchnorm_expander": _module(
        " x = f32[2,3] parameter(0)\n s = f32[3] parameter(1)\n o = f32[3] parameter(2)\n m = f32[3] parameter(3)\n"
        " v = f32[3] parameter(4)\n"
        " ROOT r = f32[2,3] batch-norm-inference(x, s, o, m, v), epsilon=0.001, feature_index=1"
    ),
    "logistic-expander": _module(" x = f32[4] parameter(0)\n ROOT r = f32[4] logistic(x)"),
    "conditional-to-select": _module(
        " c = pred[] parameter(0)\n x = f32[4] parameter(1)\n"
        " ROOT r = f32[4] map(x), dimensions={0}, to_apply=chooses",
        "yes { p = f32[] parameter(0)\n ROOT n = f32[] negate(p) }\n"
        "no { p = f32[] parameter(0)\n ROOT n = f32[] exponential(p) }\n"
        "chooses { p = f32[] parameter(0)\n z = f32[] constant(0)\n l = pred[] compare(p, z), direction=LT\n"
        " ROOT n = f32[] conditional(l, p, p), true_computation=yes, false_computation=no }\n",
    ),
    "simplify-conditional": _module(
        " x = f32[4] parameter(0)\n c = pred[] constant(true)\n"
        " ROOT r = f32[4] conditional(c, x, x), true_computation=yes, false_computation=no",
        "yes { p = f32[4] parameter(0)\n ROOT n = f32[4] negate(p) }\n"
        "no { p = f32[4] parameter(0)\n ROOT n = f32[4] exponential(p) }\n",
    ),
    "topk-decomposer": _module(
        " x = f32[8] parameter(0)\n ROOT r = (f32[3], s32[3]) topk(x), k=3, largest=true"
    ),
    "topk-rewriter": _module(
        " x = f32[2,8] parameter(0)\n i = s32[2,8] iota(), iota_dimension=1\n"
        " s = (f32[2,8], s32[2,8]) sort(x, i), dimensions={1}, is_stable=true, to_apply=more\n"
        " v = f32[2,8] get-tuple-element(s), index=0\n j = s32[2,8] get-tuple-element(s), index=1\n"
        " a = f32[2,3] slice(v), slice={[0:2], [0:3]}\n b = s32[2,3] slice(j), slice={[0:2], [0:3]}\n"
        " ROOT r = (f32[2,3], s32[2,3]) tuple(a, b)",
        "more { p = f32[] parameter(0)\n q = f32[] parameter(1)\n v = s32[] parameter(2)\n w = s32[] parameter(3)\n"
        " ROOT s = pred[] compare(p, q), direction=GT, type=TOTALORDER }\n",
    ),
    "gather_expander": _module(
        " x = f32[8,4] parameter(0)\n i = s32[1,1] parameter(1)\n"
        " ROOT r = f32[1,4] gather(x, i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0},"
        " index_vector_dim=1, slice_sizes={1,4}"
    ),
    "gather_simplifier": _module(
        " x = f32[8,4] parameter(0)\n i = s32[2,3] parameter(1)\n"
        " ROOT r = f32[2,3,4] gather(x, i), offset_dims={2}, collapsed_slice_dims={0}, start_index_map={0},"
        " index_vector_dim=2, slice_sizes={1,4}"
    ),
    "batched_gather_scatter_normalizer": _module(
        " x = f32[3,8] parameter(0)\n i = s32[3,2,1] parameter(1)\n"
        " ROOT r = f32[3,2] gather(x, i), offset_dims={}, collapsed_slice_dims={1}, start_index_map={1},"
        " operand_batching_dims={0}, start_indices_batching_dims={0}, index_vector_dim=2, slice_sizes={1,1}"
    ),
    "scatter_simplifier": _module(
        " x = f32[8,4] parameter(0)\n i = s32[2,3] parameter(1)\n u = f32[2,3,4] parameter(2)\n"
        " ROOT r = f32[8,4] scatter(x, i, u), update_window_dims={2}, inserted_window_dims={0},"
        " scatter_dims_to_operand_dims={0}, index_vector_dim=2, to_apply=add",
        _ADD,
    ),
    "scatter_expander": _module(
        " x = f32[8,4] parameter(0)\n i = s32[1] parameter(1)\n u = f32[4] parameter(2)\n"
        " ROOT r = f32[8,4] scatter(x, i, u), update_window_dims={0}, inserted_window_dims={0},"
        " scatter_dims_to_operand_dims={0}, index_vector_dim=0, to_apply=add",
        _ADD,
    ),
    "select_and_scatter_expander": _module(
        " x = f32[4] parameter(0)\n u = f32[2] parameter(1)\n z = f32[] constant(0)\n"
        " ROOT r = f32[4] select-and-scatter(x, u, z), window={size=2 stride=2}, select=most, scatter=add",
        _ADD
        + "most { p = f32[] parameter(0)\n q = f32[] parameter(1)\n ROOT s = pred[] compare(p, q), direction=GE }\n",
    ),
    "reduce-window-rewriter": _module(
        " x = f32[1024] parameter(0)\n z = f32[] constant(0)\n"
        " ROOT r = f32[1024] reduce-window(x, z), window={size=1024 pad=1023_0}, to_apply=add",
        _ADD,
    ),
    "reduce-window-resizer": _module(
        " x = f32[16] parameter(0)\n z = f32[] constant(0)\n"
        " ROOT r = f32[15] reduce-window(x, z), window={size=2}, to_apply=add",
        _ADD,
    ),
    "cholesky_expander": _module(
        " x = f32[3,3] parameter(0)\n d = f32[3,3] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
        " ROOT r = f32[3,3] cholesky(d), lower=true"
    ),
    "triangular_solve_expander": _module(
        " x = f32[3,3] parameter(0)\n y = f32[3,2] parameter(1)\n ROOT r = f32[3,2] triangular-solve(x, y),"
        " left_side=true, lower=true, unit_diagonal=false, transpose_a=NO_TRANSPOSE"
    ),
    "rng-bit-generator-expander": _module(
        " s = u64[2] parameter(0)\n ROOT r = (u64[2], u32[4]) rng-bit-generator(s), algorithm=rng_philox"
    ),
    "comparison-expander": _module(
        " x = f32[4] parameter(0)\n y = f32[4] parameter(1)\n"
        " ROOT r = pred[4] compare(x, y), direction=LT, type=TOTALORDER"
    ),
    "convolution-group-converter": _module(
        " x = f32[4,8,8,4] parameter(0)\n w = f32[8,8,4,4] parameter(1)\n"
        " ROOT r = f32[2,1,1,4] convolution(x, w), window={size=8x8}, dim_labels=b01f_01io->b01f, batch_group_count=2"
    ),
    "convolution-canonicalization": _module(
        " x = f32[4,8,8,1] parameter(0)\n w = f32[8,4,3,3] parameter(1)\n"
        " ROOT r = f32[1,8,6,6] convolution(x, w), window={size=3x3}, dim_labels=f01b_oi01->bf01"
    ),
    "operand_upcaster": _module(
        " x = s8[2,3] parameter(0)\n y = s8[3,4] parameter(1)\n"
        " ROOT r = s32[2,4] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    ),
    "result_caster": _module(
        " x = bf16[2,3] parameter(0)\n y = bf16[3,4] parameter(1)\n"
        " ROOT r = s32[2,4] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    ),
    "change-op-data-type": _module(
        " x = f16[2,3] parameter(0)\n y = f16[3,4] parameter(1)\n"
        " ROOT r = f16[2,4] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    ),
    "float-normalization-bf16": _module(" x = bf16[4] parameter(0)\n ROOT r = bf16[4] exponential(x)"),
    "bitcast_dtypes_expander": _module(" x = f32[4] parameter(0)\n ROOT r = u8[4,4] bitcast-convert(x)"),
    "stochastic_convert_decomposer": _module(
        " x = f32[4] parameter(0)\n u = u32[4] parameter(1)\n ROOT r = s32[4] stochastic-convert(x, u)"
    ),
    "all-reduce-promotion": _module(
        " x = bf16[4] parameter(0)\n ROOT r = bf16[4] all-reduce(x), replica_groups={{0}}, to_apply=addu",
        "addu { p = bf16[] parameter(0)\n q = bf16[] parameter(1)\n ROOT s = bf16[] add(p, q) }\n",
    ),
    "dynamic_padder": _module(
        " x = f32[4] parameter(0)\n n = s32[] parameter(1)\n d = f32[<=4] set-dimension-size(x, n), dimensions={0}\n"
        " z = f32[] constant(0)\n ROOT r = f32[] reduce(d, z), dimensions={0}, to_apply=add",
        _ADD,
    ),
    "qr_expander": _module(
        ' x = f32[3,3] parameter(0)\n ROOT r = (f32[3,3], f32[3]) custom-call(x), custom_call_target="Qr"'
    ),
    "eigh_expander": _module(
        ' x = f32[3,3] parameter(0)\n ROOT r = (f32[3,3], f32[3]) custom-call(x), custom_call_target="Eigh",'
        ' backend_config="1,1,15,1e-5"'
    ),
    "while-loop-invariant-code-motion": _loop(
        " e = f32[4] exponential(x)\n next = f32[4] add(y, e)", bound="10"
    ),
    "simplify-while-loops": _loop(" next = f32[4] multiply(y, x)", bound="1"),
}
