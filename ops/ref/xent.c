/* xent.c: scalar reference of dc_cross_entropy_rows. */
#include "ref/xent.h"

static void xent_add(dc__online *o, const void *x, int dt, int64_t begin, int64_t end) {
  float sums[16] = {0}, totals[16] = {0}, max = -HUGE_VALF;
  for (int64_t i = begin; i < end; i++) max = dc__max_f32(max, dc__get(x, dt, i));
  for (int64_t i = begin; i < end; i++) {
    const float v = dc__get(x, dt, i);
    sums[(i - begin) % 16] += dc__exp_nonpos(v - max);
    totals[(i - begin) % 16] += v;
  }
  dc__online_add(o, max, sums, totals);
}

static void xent_row(const dc_xent_args *a, int64_t r) {
  char *x = (char *)a->logits + (int64_t)dc_dtype_size(a->dtype) * r * a->stride;
  const int64_t n = a->classes, label = a->labels[r];
  if (label == a->ignore_index) {
    if (a->loss) a->loss[r] = 0.0f;
    if (a->gradient) memset(x, 0, (size_t)n * dc_dtype_size(a->dtype));
    return;
  }
  dc__online o = DC__ONLINE_EMPTY;
  for (int64_t i = 0; i < n; i += DC_BLOCK) xent_add(&o, x, a->dtype, i, n - i < DC_BLOCK ? n : i + DC_BLOCK);
  const float at_label = dc__get(x, a->dtype, label);
  if (a->loss) a->loss[r] = dc__row_loss(a, &o, at_label);
  if (!a->gradient) return;
  const dc__row row = dc__row_of(a, r, &o);
  for (int64_t i = 0; i < n; i++) dc__put(x, a->dtype, i, dc__row_gradient(&row, dc__get(x, a->dtype, i)));
  dc__put(x, a->dtype, label, dc__row_gradient(&row, at_label) - row.label);
}

void dc__xent_scalar(const dc_xent_args *a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) xent_row(a, r);
}
