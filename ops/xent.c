/* xent.c: the public wrapper of the cross-entropy of rows: checks, then cuts the rows over dc_parallel_for. */
#include "call.h"

enum { ELEMENTS_PER_PIECE = 64 << 10 }; /* some 40 us of arithmetic */

typedef struct xent_job {
  const dc__ops *ops;
  const dc_xent_args *args;
} xent_job;

static void xent_range(int64_t begin, int64_t end, void *ctx) {
  const xent_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->xent(j->args, begin, end);
  fp_leave(fp);
}

static int check_labels(const dc_xent_args *a) {
  for (int64_t r = 0; r < a->rows; r++) {
    const int64_t y = a->labels[r];
    if (y != a->ignore_index && (y < 0 || y >= a->classes))
      return DC_FAIL(DC_E_INVALID, "labels[%lld] = %lld is outside [0, %lld) and is not ignore_index = %lld",
                     (long long)r, (long long)y, (long long)a->classes, (long long)a->ignore_index);
  }
  return DC_OK;
}

static int check_xent(const dc_xent_args *a) {
  DC_TRY(check_low(a->dtype, "logits"));
  DC_TRY(check_count(a->rows));
  if (a->classes < 1) return DC_FAIL(DC_E_INVALID, "classes = %lld; it must be at least 1", (long long)a->classes);
  if (a->stride < a->classes || (a->rows > 0 && a->stride > INT64_MAX / 16 / a->rows))
    return DC_FAIL(DC_E_INVALID, "stride = %lld with classes = %lld and rows = %lld", (long long)a->stride,
                   (long long)a->classes, (long long)a->rows);
  if (!(a->label_smoothing >= 0.0f && a->label_smoothing <= 1.0f))
    return DC_FAIL(DC_E_INVALID, "label_smoothing = %g; it must be from 0 to 1", (double)a->label_smoothing);
  DC_TRY(check_array(a->logits, dc_dtype_size(a->dtype), a->rows, "logits"));
  DC_TRY(check_array(a->labels, sizeof *a->labels, a->rows, "labels"));
  DC_TRY(check_array(a->row_scale, sizeof *a->row_scale, 0, "row_scale"));
  DC_TRY(check_array(a->loss, sizeof *a->loss, 0, "loss"));
  return check_labels(a);
}

int dc_cross_entropy_rows(const dc_xent_args *args) {
  xent_job j = {.args = args};
  if (!args) return DC_FAIL(DC_E_INVALID, "args is NULL");
  DC_TRY(check_xent(args));
  j.ops = dc__ops_get();
  if (!j.ops) return dc_isa_current(NULL); /* the status of the variable that could not be understood */
  dc__count(DC_COUNTER_xent_calls, 1);
  const int64_t rows = ELEMENTS_PER_PIECE / args->classes;
  if (args->rows > 0) dc_parallel_for(args->rows, rows > 0 ? rows : 1, xent_range, &j);
  return DC_OK;
}
