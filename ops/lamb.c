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

/* The blocks [from, to) of a tensor. */
static void lamb_blocks(const lamb_job *j, const dc_lamb_args *t, int64_t from, int64_t to) {
  const dc__lamb_coef c = dc__lamb_coef_of(t, j->apply);
  for (int64_t k = from; k < to; k++) {
    const int64_t edge = (t->first / DC_BLOCK + k) * DC_BLOCK - t->first;
    const int64_t begin = edge > 0 ? edge : 0, end = edge + DC_BLOCK < t->n ? edge + DC_BLOCK : t->n;
    if (j->apply) j->ops->lamb_apply(t, &c, begin, end);
    else j->ops->lamb_moments(t, &c, begin, end, &t->param_sums[k], &t->update_sums[k]);
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
  int rc = CHECK_LIST(dc_lamb_args, reserved, tensors, count, &list, &owned);
  if (rc == DC_OK) rc = lamb_run(list, count, apply);
  free(owned);
  return rc;
}

int dc_lamb_moments(const dc_lamb_args *tensors, int64_t count) { return lamb_call(tensors, count, 0); }
int dc_lamb_apply(const dc_lamb_args *tensors, int64_t count) { return lamb_call(tensors, count, 1); }
