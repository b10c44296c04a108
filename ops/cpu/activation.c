/* activation.c: bodies of dc_swiglu and dc_gelu and their gradients: elements [begin, end) of the rows laid end to end,
 * a row at a time. Arrays without strides come as one long row. GELU looks a table up (ref/activation.h): exp and two
 * divisions took 0.59 ns an element, torch 0.40 (docs/lab/kernels.md). */
#include "cpu/activation.h"

/* What of row e / cols lies in [e, end): the row, its columns [from, to). */
typedef struct piece {
  int64_t row, from, to;
} piece;
DC_INLINE piece activation_piece_at(int64_t e, int64_t end, int64_t cols) {
  const int64_t row = e / cols, from = e - row * cols, left = end - row * cols;
  return (piece){row, from, left < cols ? left : cols};
}

/* step(r) of r elements from i on, in piece p, for the elements [begin, end) of rows of `cols`. */
#define EACH_PIECE(begin, end, cols, step)             \
  for (int64_t e = begin; e < end;) {                  \
    const piece p = activation_piece_at(e, end, cols); \
    int64_t i = p.from;                                \
    for (; i + LANES <= p.to; i += LANES) step(LANES); \
    if (i < p.to) step((int)(p.to - i));               \
    e = p.row * cols + p.to;                           \
  }

/* ---- SwiGLU ------------------------------------------------------------------------------------------------------ */
DC_INLINE void swiglu_step(const dc_swiglu_args *a, int dt, piece p, int64_t i, int r) {
  v_ahead(a->gate, dt, p.row * a->gate_stride + i, AHEAD);
  v_ahead(a->up, dt, p.row * a->up_stride + i, AHEAD);
  const vf gate = v_get(a->gate, dt, p.row * a->gate_stride + i, r);
  const vf up = v_get(a->up, dt, p.row * a->up_stride + i, r);
  v_put(a->out, dt, p.row * a->out_stride + i, r, v_mul(v_mul(gate, v_logistic(gate)), up));
}

DC_INLINE void swiglu_loop(const dc_swiglu_args *args, int dt, int64_t begin, int64_t end) {
  const dc_swiglu_args a = *args;
#define STEP(r) swiglu_step(&a, dt, p, i, r)
  EACH_PIECE(begin, end, a.cols, STEP)
#undef STEP
}

void DC_BODY(swiglu)(const dc_swiglu_args *a, int64_t begin, int64_t end) {
  DC_FOR_LOW(a->dtype, DT, swiglu_loop(a, DT, begin, end));
}

DC_INLINE void swiglu_grad_step(const dc_swiglu_grad_args *a, int dt, piece p, int64_t i, int r) {
  v_ahead(a->dout, dt, p.row * a->dout_stride + i, AHEAD);
  v_ahead(a->gate, dt, p.row * a->gate_stride + i, AHEAD);
  v_ahead(a->up, dt, p.row * a->up_stride + i, AHEAD);
  const vf d = v_get(a->dout, dt, p.row * a->dout_stride + i, r);
  const vf gate = v_get(a->gate, dt, p.row * a->gate_stride + i, r);
  const vf up = v_get(a->up, dt, p.row * a->up_stride + i, r);
  const v_logistics s = v_logistic2(gate);
  v_put(a->dup, dt, p.row * a->dup_stride + i, r, v_mul(d, v_mul(gate, s.at)));
  v_put(a->dgate, dt, p.row * a->dgate_stride + i, r, v_mul(v_mul(d, up), v_silu_slope(gate, s)));
}

DC_INLINE void swiglu_grad_loop(const dc_swiglu_grad_args *args, int dt, int64_t begin, int64_t end) {
  const dc_swiglu_grad_args a = *args;
#define STEP(r) swiglu_grad_step(&a, dt, p, i, r)
  EACH_PIECE(begin, end, a.cols, STEP)
#undef STEP
}

void DC_BODY(swiglu_grad)(const dc_swiglu_grad_args *a, int64_t begin, int64_t end) {
  DC_FOR_LOW(a->dtype, DT, swiglu_grad_loop(a, DT, begin, end));
}

/* ---- GELU -------------------------------------------------------------------------------------------------------- */
DC_INLINE vf gelu_input(const void *x, int dt, int64_t at, const void *bias, int bias_dt, int64_t i, int r) {
  const vf v = v_get(x, dt, at, r);
  return bias ? v_add(v, v_get(bias, bias_dt, i, r)) : v;
}

DC_INLINE void gelu_step(const dc_gelu_args *a, int dt, int form, piece p, int64_t i, int r) {
  v_ahead(a->x, dt, p.row * a->x_stride + i, AHEAD);
  const vf x = gelu_input(a->x, dt, p.row * a->x_stride + i, a->bias, a->bias_dtype, i, r);
  v_put(a->out, dt, p.row * a->cols + i, r, v_gelu(x, form));
}

DC_INLINE void gelu_loop(const dc_gelu_args *args, int dt, int form, int64_t begin, int64_t end) {
  const dc_gelu_args a = *args;
#define STEP(r) gelu_step(&a, dt, form, p, i, r)
  EACH_PIECE(begin, end, a.cols, STEP)
#undef STEP
}

DC_INLINE void gelu_form(const dc_gelu_args *a, int dt, int64_t begin, int64_t end) {
  if (a->form == DC_GELU_TANH) gelu_loop(a, dt, DC_GELU_TANH, begin, end);
  else gelu_loop(a, dt, DC_GELU_ERF, begin, end);
}

void DC_BODY(gelu)(const dc_gelu_args *a, int64_t begin, int64_t end) {
  DC_FOR_LOW(a->dtype, DT, gelu_form(a, DT, begin, end));
}

DC_INLINE void gelu_grad_step(const dc_gelu_grad_args *a, int dt, int form, piece p, int64_t i, int r, float *dbias) {
  v_ahead(a->x, dt, p.row * a->x_stride + i, AHEAD);
  v_ahead(a->dout, dt, p.row * a->cols + i, AHEAD);
  const vf x = gelu_input(a->x, dt, p.row * a->x_stride + i, a->bias, a->bias_dtype, i, r);
  const vf d = v_mul(v_get(a->dout, dt, p.row * a->cols + i, r), v_gelu_slope(x, form));
  v_put(a->dx, dt, p.row * a->cols + i, r, d);
  if (dbias) v_store32(dbias + i, r, v_add(v_get(dbias, DC_F32, i, r), d));
}

DC_INLINE void gelu_grad_loop(const dc_gelu_grad_args *args, int dt, int form, int64_t begin, int64_t end,
                              float *dbias) {
  const dc_gelu_grad_args a = *args;
#define STEP(r) gelu_grad_step(&a, dt, form, p, i, r, dbias)
  EACH_PIECE(begin, end, a.cols, STEP)
#undef STEP
}

DC_INLINE void gelu_grad_form(const dc_gelu_grad_args *a, int dt, int64_t begin, int64_t end, float *dbias) {
  if (a->form == DC_GELU_TANH) gelu_grad_loop(a, dt, DC_GELU_TANH, begin, end, dbias);
  else gelu_grad_loop(a, dt, DC_GELU_ERF, begin, end, dbias);
}

void DC_BODY(gelu_grad)(const dc_gelu_grad_args *a, int64_t begin, int64_t end, float *dbias) {
  DC_FOR_LOW(a->dtype, DT, gelu_grad_form(a, DT, begin, end, dbias));
}
