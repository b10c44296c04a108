/* xent.h: what the scalar reference and the vector bodies of dc_cross_entropy_rows share: the sum over a row, block
 * by block in fp64, and the numbers that a row's gradient is made of. Once a block or once a row, so these need no
 * vectors. */
#ifndef DEEPC_OPS_XENT_H
#define DEEPC_OPS_XENT_H

#include "ref/exp.h"

/* max and sum of e^(x - max) over the blocks so far (M. Milakov and N. Gimelshein, arXiv:1805.02867); total: of x, for
 * smoothing. */
typedef struct dc__online {
  float max;
  double sum, total;
} dc__online;

#define DC__ONLINE_EMPTY ((dc__online){-HUGE_VALF, 0.0, 0.0})

/* One more block: its maximum and its 16 sums. A block of -inf only adds nothing (and has no maximum to subtract). */
static inline void dc__online_add(dc__online *o, float max, const float *sums, const float *totals) {
  double lanes[16];
  for (int k = 0; k < 16; k++) lanes[k] = totals[k];
  o->total += dc__tree16(lanes);
  if (max == -HUGE_VALF) return;
  for (int k = 0; k < 16; k++) lanes[k] = sums[k];
  const double sum = dc__tree16(lanes);
  if (max <= o->max) {
    o->sum += sum * exp((double)max - (double)o->max);
  } else { /* also NaN */
    o->sum = sum + (o->sum == 0.0 ? 0.0 : o->sum * exp((double)o->max - (double)max));
    o->max = max;
  }
}

/* gradient of element j: factor * e^(x_j - max) - spread; at the label that minus `label`. */
typedef struct dc__row {
  float max, factor, spread, label;
} dc__row;

static inline dc__row dc__row_of(const dc_xent_args *a, int64_t r, const dc__online *o) {
  const float scale = a->row_scale ? a->scale * a->row_scale[r] : a->scale;
  return (dc__row){o->max, (float)((double)scale / o->sum), scale * (a->label_smoothing / (float)a->classes),
                   scale * (1.0f - a->label_smoothing)};
}

static inline float dc__row_loss(const dc_xent_args *a, const dc__online *o, float at_label) {
  const double smooth = a->label_smoothing, lse = (double)o->max + log(o->sum);
  double loss = lse - (1.0 - smooth) * (double)at_label;
  if (smooth != 0.0) loss -= smooth * (o->total / (double)a->classes);
  return dc__canonical_f32((float)loss);
}

static inline float dc__row_gradient(const dc__row *row, float x) {
  return fmaf(dc__exp_nonpos(x - row->max), row->factor, -row->spread);
}

#endif
