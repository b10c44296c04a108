/* xent.c: the public wrapper of the cross-entropy of rows: checks, then cuts the rows over dc_parallel_for. */
#include "call.h"

enum { XENT_PIECE = 64 << 10 }; /* some 40 us of arithmetic */

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

static int xent_check_labels(const dc_xent_args *a) {
  for (int64_t r = 0; r < a->rows; r++) {
    const int64_t y = a->labels[r];
    if (y != a->ignore_index && (y < 0 || y >= a->classes))
      return DC_FAIL(DC_E_INVALID, "labels[%lld] = %lld is outside [0, %lld) and is not ignore_index = %lld",
                     (long long)r, (long long)y, (long long)a->classes, (long long)a->ignore_index);
  }
  return DC_OK;
}

int dc_cross_entropy_rows(const dc_xent_args *args) {
  dc_xent_args a;
  xent_job j = {.args = &a};
  DC_TRY(check_xent(args, &a));
  DC_TRY(xent_check_labels(&a));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_xent_calls, 1);
  const int64_t rows = XENT_PIECE / a.classes;
  if (a.rows > 0) dc_parallel_for(a.rows, rows > 0 ? rows : 1, xent_range, &j);
  return DC_OK;
}
