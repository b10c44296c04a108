/* norm.c: scalar reference of dc_norm and dc_norm_grad, rows [begin, end). */
#include "ref/activation.h"

static const char *norm_row_of(const void *p, int dt, int64_t stride, int64_t k) {
  return (const char *)p + k * stride * (int64_t)dc_dtype_size(dt);
}

static float norm_mean_of(const void *s, int dt, int64_t cols) {
  float a[64] = {0};
  for (int64_t i = 0; i < cols; i++) a[i % 64] += dc__get(s, dt, i);
  return dc__tree64(a) / (float)cols;
}

static float norm_rstd_of(const void *s, int dt, int64_t cols, float mean, float eps) {
  float a[64] = {0};
  for (int64_t i = 0; i < cols; i++) {
    const float d = dc__get(s, dt, i) - mean;
    a[i % 64] = fmaf(d, d, a[i % 64]);
  }
  return 1.0f / sqrtf(dc__tree64(a) / (float)cols + eps);
}

static float norm_weight_at(const void *weight, int dt, float offset, int64_t i) {
  return weight ? dc__get(weight, dt, i) + offset : 1.0f;
}

void dc__norm_scalar(const dc_norm_args *a, int64_t begin, int64_t end) {
  for (int64_t k = begin; k < end; k++) {
    const void *s = norm_row_of(a->x, a->dtype, a->x_stride, k);
    void *y = (char *)a->y + k * a->cols * (int64_t)dc_dtype_size(a->dtype);
    if (a->residual) {
      const void *residual = norm_row_of(a->residual, a->dtype, a->residual_stride, k);
      void *sum = (char *)a->sum + k * a->cols * (int64_t)dc_dtype_size(a->dtype);
      for (int64_t i = 0; i < a->cols; i++)
        dc__put(sum, a->dtype, i, dc__get(s, a->dtype, i) + dc__get(residual, a->dtype, i));
      s = sum;
    }
    const float mean = a->mean ? norm_mean_of(s, a->dtype, a->cols) : 0.0f;
    const float rstd = norm_rstd_of(s, a->dtype, a->cols, mean, a->eps);
    if (a->mean) a->mean[k] = dc__canonical_f32(mean);
    a->rstd[k] = dc__canonical_f32(rstd);
    for (int64_t i = 0; i < a->cols; i++) {
      const float h = (dc__get(s, a->dtype, i) - mean) * rstd,
                  w = norm_weight_at(a->weight, a->weight_dtype, a->offset, i);
      dc__put(y, a->dtype, i, a->bias ? fmaf(h, w, dc__get(a->bias, a->weight_dtype, i)) : h * w);
    }
  }
}

void dc__norm_grad_scalar(const dc_norm_grad_args *a, int64_t begin, int64_t end, float *dweight, float *dbias) {
  for (int64_t k = begin; k < end; k++) {
    const void *x = norm_row_of(a->x, a->dtype, a->x_stride, k), *dy = norm_row_of(a->dy, a->dtype, a->cols, k);
    const void *dsum = a->dsum ? norm_row_of(a->dsum, a->dtype, a->cols, k) : NULL;
    void *dx = (char *)a->dx + k * a->cols * (int64_t)dc_dtype_size(a->dtype);
    const float mean = a->mean ? a->mean[k] : 0.0f, rstd = a->rstd[k];
    float along[64] = {0}, level[64] = {0};
    for (int64_t i = 0; i < a->cols; i++) {
      const float h = (dc__get(x, a->dtype, i) - mean) * rstd;
      const float g = dc__get(dy, a->dtype, i) * norm_weight_at(a->weight, a->weight_dtype, a->offset, i);
      along[i % 64] = fmaf(g, h, along[i % 64]);
      if (a->mean) level[i % 64] += g;
    }
    const float slope = dc__tree64(along) / (float)a->cols, base = a->mean ? dc__tree64(level) / (float)a->cols : 0.0f;
    for (int64_t i = 0; i < a->cols; i++) {
      const float d = dc__get(dy, a->dtype, i), h = (dc__get(x, a->dtype, i) - mean) * rstd;
      const float g = d * norm_weight_at(a->weight, a->weight_dtype, a->offset, i), t = fmaf(-slope, h, g - base);
      dc__put(dx, a->dtype, i, dsum ? fmaf(t, rstd, dc__get(dsum, a->dtype, i)) : t * rstd);
      if (dweight) dweight[i] = fmaf(d, h, dweight[i]);
      if (dbias) dbias[i] += d;
    }
  }
}

void dc__fold_rows_scalar(void *out, int dt, const float *partial, int64_t rows, int64_t stride, int64_t begin,
                          int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    float sum[8] = {0};
    for (int64_t k = 0; k < rows; k++) sum[k % 8] += partial[k * stride + i];
    for (int width = 4; width > 0; width /= 2)
      for (int j = 0; j < width; j++) sum[j] += sum[j + width];
    dc__put(out, dt, i, sum[0]);
  }
}
