// adamw_table.h: the host's part of dc_cuda_adamw and dc_cuda_step: from the caller's list of tensors (validated) to
// the tables that one launch each takes. Plain C++, so that tests/c/test_cuda_bodies.cpp runs it too.
#ifndef DEEPC_CUDA_ADAMW_TABLE_H
#define DEEPC_CUDA_ADAMW_TABLE_H

#include <string.h>

#include "adamw_coef.h"
#include "cuda/bodies.cuh"
#include "step_coef.h"

namespace dc_gpu {

inline bool wide_aligned(const void *p, int dt) { return (uintptr_t)p % (ADAMW_WIDTH * (dt == DC_F32 ? 4 : 2)) == 0; }

inline AdamwTensor make_row(const dc_adamw_args *t) {
  AdamwTensor row;
  memset(&row, 0, sizeof row);
  row.param = t->param;
  row.grad = t->grad;
  row.exp_avg = t->exp_avg;
  row.exp_avg_sq = t->exp_avg_sq;
  row.max_exp_avg_sq = t->max_exp_avg_sq;
  row.lowp = t->lowp;
  row.n = t->n;
  row.coef = dc__adamw_coef_of(t);
  row.param_dtype = (int8_t)t->param_dtype;
  row.grad_dtype = (int8_t)t->grad_dtype;
  row.state_dtype = (int8_t)t->state_dtype;
  row.lowp_dtype = (int8_t)(t->lowp ? t->lowp_dtype : DC_F32);
  row.vectors = wide_aligned(t->param, t->param_dtype) && wide_aligned(t->grad, t->grad_dtype) &&
                wide_aligned(t->exp_avg, t->state_dtype) && wide_aligned(t->exp_avg_sq, t->state_dtype) &&
                wide_aligned(t->max_exp_avg_sq, t->state_dtype) && wide_aligned(t->lowp, row.lowp_dtype);
  return row;
}

inline dc_adamw_args adamw_args_of(const dc_step_args &t) {
  dc_adamw_args a;
  memset(&a, 0, sizeof a);
  a.struct_size = sizeof a;
  a.param = t.param, a.grad = t.grad, a.exp_avg = t.state[0], a.exp_avg_sq = t.state[1];
  a.max_exp_avg_sq = t.state[2], a.lowp = t.lowp, a.n = t.n, a.step = t.step;
  a.lr = t.lr, a.beta1 = t.beta1, a.beta2 = t.beta2, a.eps = t.eps, a.weight_decay = t.weight_decay;
  a.grad_scale = t.grad_scale;
  a.param_dtype = t.param_dtype, a.grad_dtype = t.grad_dtype, a.state_dtype = t.state_dtype;
  a.lowp_dtype = t.lowp_dtype, a.flags = t.flags & DC_STEP_DECOUPLED ? DC_ADAMW_DECOUPLED : 0;
  return a;
}

inline int64_t chunks_of(int64_t n) { return (n + ADAMW_CHUNK - 1) / ADAMW_CHUNK; }

inline StepTensor make_row(const dc_step_args *t) {
  StepTensor row;
  memset(&row, 0, sizeof row);
  row.param = t->param;
  row.grad = t->grad;
  row.state = t->state[0];
  row.lowp = t->lowp;
  row.n = t->n;
  row.coef = dc__step_coef_of(t);
  row.param_dtype = (int8_t)t->param_dtype;
  row.grad_dtype = (int8_t)t->grad_dtype;
  row.state_dtype = (int8_t)t->state_dtype;
  row.lowp_dtype = (int8_t)(t->lowp ? t->lowp_dtype : DC_F32);
  row.rule = (int8_t)t->rule;
  row.nesterov = (t->flags & DC_STEP_NESTEROV) != 0;
  row.vectors = wide_aligned(t->param, t->param_dtype) && wide_aligned(t->grad, t->grad_dtype) &&
                wide_aligned(t->state[0], t->state_dtype) && wide_aligned(t->lowp, row.lowp_dtype);
  return row;
}

// Adds the tensors from `from` on until the table or the grid is full; returns the index of the first that did not fit.
// blocks(t): those of the grid that it takes, 0 if it is not for this table; row(t): its row.
template <class Table, class Args, class Blocks, class Row>
int64_t fill_rows(Table *table, const Args *tensors, int64_t from, int64_t count, Blocks blocks, Row row) {
  const int32_t room = (int32_t)(sizeof table->tensor / sizeof *table->tensor);
  memset(table, 0, sizeof *table);
  int64_t i = from;
  for (; i < count && table->count < room; i++) {
    const int64_t mine = blocks(tensors[i]);
    if (mine == 0) continue;
    const int64_t next = table->first[table->count] + mine;
    if (next > INT32_MAX) break;
    table->tensor[table->count++] = row(tensors[i]);
    table->first[table->count] = (int32_t)next;
  }
  return i;
}

// Which tensors of a call a table takes. A call of dc_cuda_step may have others: Adam's, and those with a format.
inline bool belongs(const dc_adamw_args &) { return true; }
inline bool belongs(const dc_step_args &t) { return t.format == DC_STATE_NEAREST && t.rule != DC_RULE_ADAMW; }

template <class Table, class Args> int64_t fill_table(Table *table, const Args *tensors, int64_t from, int64_t count) {
  return fill_rows(
      table, tensors, from, count, [](const Args &t) { return belongs(t) ? chunks_of(t.n) : 0; },
      [](const Args &t) { return make_row(&t); });
}

} // namespace dc_gpu
#endif
