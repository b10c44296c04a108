/* check_compress.h: what the compression ops demand of their arguments (ops.h), for the CPU's wrappers and for the CUDA
 * launchers. As check.h, which its includer has included. */
#ifndef DEEPC_OPS_CHECK_COMPRESS_H
#define DEEPC_OPS_CHECK_COMPRESS_H

#include "ops.h"
#include "payload.h"

enum { MIN_BLOCK = 64, MAX_BLOCK = 1 << 20 };

static inline int compress_check_block(int64_t block, int64_t most) {
  if (block >= MIN_BLOCK && block <= most && block % MIN_BLOCK == 0) return DC_OK;
  return CHECK_FAIL(DC_E_INVALID, "block = %lld; it must be a multiple of %d from %d to %lld", (long long)block,
                    (int)MIN_BLOCK, (int)MIN_BLOCK, (long long)most);
}

static inline int compress_check_payload(const void *payload, int64_t bytes, const void *x, int dt, int64_t n,
                                         const char *what) {
  DC_TRY(check_low(dt, what));
  DC_TRY(check_array(payload, sizeof(float), n, "payload"));
  DC_TRY(check_array(x, check_size(dt), n, what));
  if (n > 0 && check_overlap(payload, bytes, x, check_bytes(dt, n)))
    return CHECK_FAIL(DC_E_INVALID, "payload and %s overlap", what);
  return DC_OK;
}

static inline int compress_check_error(const void *payload, int64_t bytes, const void *x, int dt, const float *error,
                                       int64_t n) {
  if (!error || n == 0) return DC_OK;
  DC_TRY(check_array(error, sizeof *error, n, "error"));
  if (check_overlap(error, check_bytes(DC_F32, n), x, check_bytes(dt, n)))
    return CHECK_FAIL(DC_E_INVALID, "error and x overlap");
  if (check_overlap(error, check_bytes(DC_F32, n), payload, bytes))
    return CHECK_FAIL(DC_E_INVALID, "error and payload overlap");
  return DC_OK;
}

/* *bytes: of the payload of n elements. */
static inline int check_quantize_bytes(int bits, int64_t block, int64_t n, int64_t *bytes) {
  if (bits != 8 && bits != 4 && bits != 1) return CHECK_FAIL(DC_E_INVALID, "bits = %d; there are 8, 4 and 1", bits);
  DC_TRY(compress_check_block(block, MAX_BLOCK));
  DC_TRY(check_count(n));
  if (!bytes) return CHECK_FAIL(DC_E_INVALID, "bytes is NULL");
  *bytes = 4 * compress_blocks(block, n) + compress_round4(compress_code_bytes(bits, n));
  return DC_OK;
}

static inline int check_quantize(const void *payload, int bits, int64_t block, const void *x, int dt,
                                 const float *error, int64_t n) {
  int64_t bytes = 0;
  DC_TRY(check_quantize_bytes(bits, block, n, &bytes));
  DC_TRY(compress_check_payload(payload, bytes, x, dt, n, "x"));
  return compress_check_error(payload, bytes, x, dt, error, n);
}

/* what: "out" or "acc". */
static inline int check_dequantize(const void *out, int dt, const void *payload, int bits, int64_t block, int64_t n,
                                   const char *what) {
  int64_t bytes = 0;
  DC_TRY(check_quantize_bytes(bits, block, n, &bytes));
  return compress_check_payload(payload, bytes, out, dt, n, what);
}

static inline int check_average_signs(const void *payload, int64_t block, const void *rows, int64_t count,
                                      int64_t stride, const float *error, int64_t n) {
  int64_t bytes = 0;
  DC_TRY(check_quantize_bytes(1, block, n, &bytes));
  if (count < 1) return CHECK_FAIL(DC_E_INVALID, "count = %lld; it must be at least 1", (long long)count);
  if (stride < bytes || stride % 4 || stride > INT64_MAX / count)
    return CHECK_FAIL(DC_E_INVALID,
                      "stride = %lld; it must be a multiple of 4, and payloads of %lld elements have %lld",
                      (long long)stride, (long long)n, (long long)bytes);
  DC_TRY(compress_check_payload(payload, bytes, error, DC_F32, n, "error"));
  DC_TRY(check_array(rows, sizeof(float), n, "rows"));
  if (n == 0) return DC_OK;
  const int64_t all = (count - 1) * stride + bytes;
  if (check_overlap(rows, all, error, check_bytes(DC_F32, n)))
    return CHECK_FAIL(DC_E_INVALID, "rows and error overlap");
  if (check_overlap(rows, all, payload, bytes)) return CHECK_FAIL(DC_E_INVALID, "rows and payload overlap");
  return DC_OK;
}

static inline int check_rotate(const float *x, int64_t n) {
  DC_TRY(check_count(n));
  return check_array(x, sizeof *x, n, "x");
}

#endif
