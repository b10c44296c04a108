/* activation.c: bodies of dc_swiglu and dc_gelu and their gradients: elements [begin, end) of the rows laid end to end,
 * a row at a time. Arrays without strides come as one long row.
 *
 * GELU by exp and two divisions took 0.59 ns an element (3 Mi elements, fp32, one thread, thread time) and was slower
 * than torch's (0.40); by the table of ref/activation.h it is faster than torch's: tests/bench/fused.py --only gelu. */
#include "cpu/activation.h"

/* What of row e / cols lies in [e, end): the row, its columns [from, to). */
typedef struct piece {
  int64_t row, from, to;
} piece;
DC_INLINE piece piece_at(int64_t e, int64_t end, int64_t cols) {
  const int64_t row = e / cols, from = e - row * cols, left = end - row * cols;
  return (piece){row, from, left < cols ? left : cols};
}

/* ---- SwiGLU ------------------------------------------------------------------------------------------------------ */
DC_INLINE void swiglu_step(const dc_swiglu_args *a, int dt, piece p, int64_t i, int r) {
  const vf gate = v_get(a->gate, dt, p.row * a->gate_stride + i, r);
  const vf up = v_get(a->up, dt, p.row * a->up_stride + i, r);
  v_put(a->out, dt, p.row * a->out_stride + i, r, v_mul(v_mul(gate, v_logistic(gate)), up));
}

DC_INLINE void swiglu_loop(const dc_swiglu_args *args, int dt, int64_t begin, int64_t end) {
  const dc_swiglu_args a = *args;
  for (int64_t e = begin; e < end;) {
    const piece p = piece_at(e, end, a.cols);
    int64_t i = p.from;
    for (; i + LANES <= p.to; i += LANES) {
      v_ahead(a.gate, dt, p.row * a.gate_stride + i, AHEAD);
      v_ahead(a.up, dt, p.row * a.up_stride + i, AHEAD);
      swiglu_step(&a, dt, p, i, LANES);
    }
    if (i < p.to) swiglu_step(&a, dt, p, i, (int)(p.to - i));
    e = p.row * a.cols + p.to;
  }
}

void DC_BODY(swiglu)(const dc_swiglu_args *a, int64_t begin, int64_t end) {
  switch (a->dtype) {
  case DC_F32: swiglu_loop(a, DC_F32, begin, end); return;
  case DC_BF16: swiglu_loop(a, DC_BF16, begin, end); return;
  default: swiglu_loop(a, DC_F16, begin, end); return;
  }
}

DC_INLINE void swiglu_grad_step(const dc_swiglu_grad_args *a, int dt, piece p, int64_t i, int r) {
  const vf d = v_get(a->dout, dt, p.row * a->dout_stride + i, r);
  const vf gate = v_get(a->gate, dt, p.row * a->gate_stride + i, r);
  const vf up = v_get(a->up, dt, p.row * a->up_stride + i, r);
  const v_logistics s = v_logistic2(gate);
  v_put(a->dup, dt, p.row * a->dup_stride + i, r, v_mul(d, v_mul(gate, s.at)));
  v_put(a->dgate, dt, p.row * a->dgate_stride + i, r, v_mul(v_mul(d, up), v_silu_slope(gate, s)));
}

DC_INLINE void swiglu_grad_loop(const dc_swiglu_grad_args *args, int dt, int64_t begin, int64_t end) {
  const dc_swiglu_grad_args a = *args;
  for (int64_t e = begin; e < end;) {
    const piece p = piece_at(e, end, a.cols);
    int64_t i = p.from;
    for (; i + LANES <= p.to; i += LANES) {
      v_ahead(a.dout, dt, p.row * a.dout_stride + i, AHEAD);
      v_ahead(a.gate, dt, p.row * a.gate_stride + i, AHEAD);
      v_ahead(a.up, dt, p.row * a.up_stride + i, AHEAD);
      swiglu_grad_step(&a, dt, p, i, LANES);
    }
    if (i < p.to) swiglu_grad_step(&a, dt, p, i, (int)(p.to - i));
    e = p.row * a.cols + p.to;
  }
}

void DC_BODY(swiglu_grad)(const dc_swiglu_grad_args *a, int64_t begin, int64_t end) {
  switch (a->dtype) {
  case DC_F32: swiglu_grad_loop(a, DC_F32, begin, end); return;
  case DC_BF16: swiglu_grad_loop(a, DC_BF16, begin, end); return;
  default: swiglu_grad_loop(a, DC_F16, begin, end); return;
  }
}

/* ---- GELU -------------------------------------------------------------------------------------------------------- */
DC_INLINE vf gelu_input(const void *x, int dt, int64_t at, const void *bias, int bias_dt, int64_t i, int r) {
  const vf v = v_get(x, dt, at, r);
  return bias ? v_add(v, v_get(bias, bias_dt, i, r)) : v;
}

DC_INLINE void gelu_step(const dc_gelu_args *a, int dt, int form, piece p, int64_t i, int r) {
  const vf x = gelu_input(a->x, dt, p.row * a->x_stride + i, a->bias, a->bias_dtype, i, r);
  v_put(a->out, dt, p.row * a->cols + i, r, v_gelu(x, form));
}

DC_INLINE void gelu_loop(const dc_gelu_args *args, int dt, int form, int64_t begin, int64_t end) {
  const dc_gelu_args a = *args;
  for (int64_t e = begin; e < end;) {
    const piece p = piece_at(e, end, a.cols);
    int64_t i = p.from;
    for (; i + LANES <= p.to; i += LANES) {
      v_ahead(a.x, dt, p.row * a.x_stride + i, AHEAD);
      gelu_step(&a, dt, form, p, i, LANES);
    }
    if (i < p.to) gelu_step(&a, dt, form, p, i, (int)(p.to - i));
    e = p.row * a.cols + p.to;
  }
}

DC_INLINE void gelu_form(const dc_gelu_args *a, int dt, int64_t begin, int64_t end) {
  if (a->form == DC_GELU_TANH) gelu_loop(a, dt, DC_GELU_TANH, begin, end);
  else gelu_loop(a, dt, DC_GELU_ERF, begin, end);
}

void DC_BODY(gelu)(const dc_gelu_args *a, int64_t begin, int64_t end) {
  switch (a->dtype) {
  case DC_F32: gelu_form(a, DC_F32, begin, end); return;
  case DC_BF16: gelu_form(a, DC_BF16, begin, end); return;
  default: gelu_form(a, DC_F16, begin, end); return;
  }
}

DC_INLINE void gelu_grad_step(const dc_gelu_grad_args *a, int dt, int form, piece p, int64_t i, int r, float *dbias) {
  const vf x = gelu_input(a->x, dt, p.row * a->x_stride + i, a->bias, a->bias_dtype, i, r);
  const vf d = v_mul(v_get(a->dout, dt, p.row * a->cols + i, r), v_gelu_slope(x, form));
  v_put(a->dx, dt, p.row * a->cols + i, r, d);
  if (dbias) v_store32(dbias + i, r, v_add(v_get(dbias, DC_F32, i, r), d));
}

DC_INLINE void gelu_grad_loop(const dc_gelu_grad_args *args, int dt, int form, int64_t begin, int64_t end,
                              float *dbias) {
  const dc_gelu_grad_args a = *args;
  for (int64_t e = begin; e < end;) {
    const piece p = piece_at(e, end, a.cols);
    int64_t i = p.from;
    for (; i + LANES <= p.to; i += LANES) {
      v_ahead(a.x, dt, p.row * a.x_stride + i, AHEAD);
      v_ahead(a.dout, dt, p.row * a.cols + i, AHEAD);
      gelu_grad_step(&a, dt, form, p, i, LANES, dbias);
    }
    if (i < p.to) gelu_grad_step(&a, dt, form, p, i, (int)(p.to - i), dbias);
    e = p.row * a.cols + p.to;
  }
}

DC_INLINE void gelu_grad_form(const dc_gelu_grad_args *a, int dt, int64_t begin, int64_t end, float *dbias) {
  if (a->form == DC_GELU_TANH) gelu_grad_loop(a, dt, DC_GELU_TANH, begin, end, dbias);
  else gelu_grad_loop(a, dt, DC_GELU_ERF, begin, end, dbias);
}

void DC_BODY(gelu_grad)(const dc_gelu_grad_args *a, int64_t begin, int64_t end, float *dbias) {
  switch (a->dtype) {
  case DC_F32: gelu_grad_form(a, DC_F32, begin, end, dbias); return;
  case DC_BF16: gelu_grad_form(a, DC_BF16, begin, end, dbias); return;
  default: gelu_grad_form(a, DC_F16, begin, end, dbias); return;
  }
}
