/* lamb.c: dc_lamb_moments and dc_lamb_apply: they validate, count, and split all tensors over the threads as one line
 * of elements, cut at edges of blocks. */
#include "call.h"
#include "lamb_coef.h"

#include <stdlib.h>

enum { LAMB_GRAIN = 8 * DC_BLOCK };

typedef struct lamb_job {
  const dc__ops *ops;
  const dc_lamb_args *tensor;
  int64_t count;
  int apply;
} lamb_job;

/* A tensor's place on the line: whole blocks of its numbers. */
static int64_t lamb_line(const dc_lamb_args *t) { return dc_lamb_blocks(t->first, t->n) * DC_BLOCK; }

/* Where states have a format: the arguments of step_packed. */
static dc_step_args lamb_as_step(const dc_lamb_args *t) {
  return (dc_step_args){.struct_size = sizeof(dc_step_args),
                        .param = t->param,
                        .grad = t->grad,
                        .state = {t->state[0], t->state[1]},
                        .lowp = t->lowp,
                        .n = t->n,
                        .step = t->step,
                        .beta1 = t->beta1,
                        .beta2 = t->beta2,
                        .rule = DC__RULE_LAMB,
                        .param_dtype = t->param_dtype,
                        .grad_dtype = t->grad_dtype,
                        .state_dtype = DC_BF16,
                        .lowp_dtype = t->lowp_dtype,
                        .format = t->format,
                        .first = t->first,
                        .scale = {t->scale[0], t->scale[1]}};
}

/* The blocks [from, to) of a tensor. */
static void lamb_blocks(const lamb_job *j, const dc_lamb_args *t, int64_t from, int64_t to) {
  const dc__packed_coef c = {.lamb = dc__lamb_coef_of(t, j->apply)};
  const dc_step_args packed = lamb_as_step(t);
  for (int64_t k = from; k < to; k++) {
    const int64_t edge = (t->first / DC_BLOCK + k) * DC_BLOCK - t->first;
    const int64_t begin = edge > 0 ? edge : 0, end = edge + DC_BLOCK < t->n ? edge + DC_BLOCK : t->n;
    const int formed = t->format != DC_STATE_NEAREST;
    if (j->apply && formed) j->ops->step_packed(&packed, &c, begin, end);
    else if (j->apply) j->ops->lamb_apply(t, &c.lamb, begin, end);
    else if (formed) j->ops->lamb_packed_sums(&packed, &c, begin, end, &t->param_sums[k], &t->update_sums[k]);
    else j->ops->lamb_moments(t, &c.lamb, begin, end, &t->param_sums[k], &t->update_sums[k]);
  }
}

static void lamb_range(int64_t begin, int64_t end, void *ctx) {
  const lamb_job *j = ctx;
  int64_t start = 0; /* of tensor t on the line; a multiple of DC_BLOCK, as cuts are */
  const unsigned fp = fp_enter();
  for (const dc_lamb_args *t = j->tensor; start < end && t < j->tensor + j->count; start += lamb_line(t), t++) {
    const int64_t lo = begin > start ? begin - start : 0, line = lamb_line(t),
                  hi = end - start < line ? end - start : line;
    if (lo < hi) lamb_blocks(j, t, lo / DC_BLOCK, (hi + DC_BLOCK - 1) / DC_BLOCK);
  }
  fp_leave(fp);
}

static int lamb_run(const dc_lamb_args *tensors, int64_t count, int apply) {
  lamb_job j = {.tensor = tensors, .count = count, .apply = apply};
  int64_t line = 0;
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_lamb(&tensors[k], k, apply));
    if (__builtin_add_overflow(line, lamb_line(&tensors[k]), &line))
      return DC_FAIL(DC_E_OVERFLOW, "the elements of %lld tensors overflow 64 bits", (long long)count);
  }
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_lamb_calls, 1);
  if (line > 0) dc_parallel_for(line, LAMB_GRAIN, lamb_range, &j);
  return DC_OK;
}

static int lamb_call(const dc_lamb_args *tensors, int64_t count, int apply) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_lamb_args, format, tensors, count, &list, &owned);
  if (rc == DC_OK) rc = lamb_run(list, count, apply);
  free(owned);
  return rc;
}

int dc_lamb_moments(const dc_lamb_args *tensors, int64_t count) { return lamb_call(tensors, count, 0); }
int dc_lamb_apply(const dc_lamb_args *tensors, int64_t count) { return lamb_call(tensors, count, 1); }
