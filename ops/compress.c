/* compress.c: the public wrappers of the compression ops (ops.h): sizes of payloads, checks, the split into ranges of
 * whole blocks, and the way back from top-k, which touches so few elements that it has no bodies per instruction set.
 */
#include "call.h"
#include "check_compress.h"

#include "ref/scalar.h"

/* A thread's share: whole blocks, about 256 Ki elements of 4 to 8 bytes. */
static int64_t compress_share(int64_t block) { return compress_blocks(block, (int64_t)256 << 10) * block; }

/* ---- blockwise quantisation -------------------------------------------------------------------------------------- */
int dc_quantize_bytes(int bits, int64_t block, int64_t n, int64_t *bytes) {
  return check_quantize_bytes(bits, block, n, bytes);
}

typedef struct quant_job {
  const dc__ops *ops;
  uint8_t *codes;
  float *scales;
  int bits, dt;
  int64_t block;
  char *x;
  float *error;
  float factor;
} quant_job;

/* Of checked arguments. The payload is const for the readers; they only read what the job points to. */
static int compress_quant_open(quant_job *j, const uint8_t *payload, int bits, int64_t block, const void *x, int dt,
                               int64_t n) {
  DC_TRY(dc__ops_table(&j->ops));
  j->scales = (float *)(uintptr_t)payload;
  j->codes = (uint8_t *)(uintptr_t)payload + 4 * compress_blocks(block, n);
  j->bits = bits, j->dt = dt, j->block = block, j->x = (char *)(uintptr_t)x;
  return DC_OK;
}

static void compress_quantize_range(int64_t begin, int64_t end, void *ctx) {
  const quant_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->quantize(j->codes + begin * j->bits / 8, j->scales + begin / j->block, j->bits, j->block,
                   j->x + check_bytes(j->dt, begin), j->dt, j->error ? j->error + begin : NULL, end - begin);
  fp_leave(fp);
}

int dc_quantize(uint8_t *payload, int bits, int64_t block, const void *x, int dt, float *error, int64_t n) {
  quant_job j = {.error = error};
  DC_TRY(check_quantize(payload, bits, block, x, dt, error, n));
  DC_TRY(compress_quant_open(&j, payload, bits, block, x, dt, n));
  dc__count(DC_COUNTER_quantize_calls, 1);
  if (n == 0) return DC_OK;
  const int64_t used = compress_code_bytes(bits, n);
  for (int64_t i = used; i < compress_round4(used); i++) j.codes[i] = 0;
  dc_parallel_for(n, compress_share(block), compress_quantize_range, &j);
  return DC_OK;
}

static void compress_dequantize_range(int64_t begin, int64_t end, void *ctx) {
  const quant_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->dequantize(j->x + check_bytes(j->dt, begin), j->dt, j->codes + begin * j->bits / 8,
                     j->scales + begin / j->block, j->bits, j->block, end - begin);
  fp_leave(fp);
}

int dc_dequantize(void *out, int dt, const uint8_t *payload, int bits, int64_t block, int64_t n) {
  quant_job j = {0};
  DC_TRY(check_dequantize(out, dt, payload, bits, block, n, "out"));
  DC_TRY(compress_quant_open(&j, payload, bits, block, out, dt, n));
  dc__count(DC_COUNTER_dequantize_calls, 1);
  if (n > 0) dc_parallel_for(n, compress_share(block), compress_dequantize_range, &j);
  return DC_OK;
}

static void compress_dequantize_add_range(int64_t begin, int64_t end, void *ctx) {
  const quant_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->dequantize_add((float *)j->x + begin, j->codes + begin * j->bits / 8, j->scales + begin / j->block, j->bits,
                         j->block, j->factor, end - begin);
  fp_leave(fp);
}

int dc_dequantize_add(float *acc, const uint8_t *payload, int bits, int64_t block, float factor, int64_t n) {
  quant_job j = {.factor = factor};
  DC_TRY(check_dequantize(acc, DC_F32, payload, bits, block, n, "acc"));
  DC_TRY(compress_quant_open(&j, payload, bits, block, acc, DC_F32, n));
  dc__count(DC_COUNTER_dequantize_calls, 1);
  if (n > 0) dc_parallel_for(n, compress_share(block), compress_dequantize_add_range, &j);
  return DC_OK;
}

/* ---- the average of 1-bit payloads ------------------------------------------------------------------------------- */
typedef struct average_job {
  const dc__ops *ops;
  uint8_t *codes;
  float *scales;
  const uint8_t *rows;
  int64_t block, count, stride, offset;
  float factor, *error;
} average_job;

static void compress_average_range(int64_t begin, int64_t end, void *ctx) {
  const average_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->average_signs(j->codes + begin / 8, j->scales + begin / j->block, j->block, j->rows, j->count, j->stride,
                        j->offset, begin / j->block, j->error + begin, j->factor, end - begin);
  fp_leave(fp);
}

int dc_average_signs(uint8_t *payload, int64_t block, const uint8_t *rows, int64_t count, int64_t stride, float factor,
                     float *error, int64_t n) {
  average_job j = {.rows = rows, .block = block, .count = count, .stride = stride, .factor = factor, .error = error};
  DC_TRY(check_average_signs(payload, block, rows, count, stride, error, n));
  if (n == 0) return DC_OK;
  DC_TRY(dc__ops_table(&j.ops));
  j.scales = (float *)(uintptr_t)payload, j.offset = 4 * compress_blocks(block, n), j.codes = payload + j.offset;
  dc__count(DC_COUNTER_quantize_calls, 1);
  for (int64_t i = (n + 7) / 8; i < compress_round4((n + 7) / 8); i++) j.codes[i] = 0;
  dc_parallel_for(n, compress_share(block), compress_average_range, &j);
  return DC_OK;
}

/* ---- top-k ------------------------------------------------------------------------------------------------------- */
/* Chosen elements in all. */
static int64_t compress_topk_chosen(int64_t block, int64_t k, int64_t n) {
  const int64_t rest = n % block;
  return n / block * k + (rest < k ? rest : k);
}

int dc_topk_bytes(int64_t block, int64_t k, int64_t n, int64_t *bytes) {
  DC_TRY(compress_check_block(block, DC_TOPK_BLOCK_MAX));
  if (k < 1 || k > block)
    return DC_FAIL(DC_E_INVALID, "k = %lld; it must be from 1 to the block of %lld", (long long)k, (long long)block);
  DC_TRY(check_count(n));
  if (!bytes) return DC_FAIL(DC_E_INVALID, "bytes is NULL");
  *bytes = compress_round4(compress_topk_chosen(block, k, n) * 6);
  return DC_OK;
}

typedef struct topk_job {
  const dc__ops *ops;
  float *values;
  uint16_t *index;
  int64_t block, k, n;
  char *x;
  int dt;
  float *error;
  float factor;
} topk_job;

static int compress_topk_open(topk_job *j, const uint8_t *payload, int64_t block, int64_t k, const void *x, int dt,
                              int64_t n, int64_t *bytes, const char *what) {
  DC_TRY(dc_topk_bytes(block, k, n, bytes));
  DC_TRY(compress_check_payload(payload, *bytes, x, dt, n, what));
  DC_TRY(dc__ops_table(&j->ops));
  j->values = (float *)(uintptr_t)payload;
  j->index = (uint16_t *)(j->values + compress_topk_chosen(block, k, n));
  j->block = block, j->k = k, j->n = n, j->x = (char *)(uintptr_t)x, j->dt = dt;
  return DC_OK;
}

static void compress_topk_range(int64_t begin, int64_t end, void *ctx) {
  const topk_job *j = ctx;
  const int64_t at = begin / j->block * j->k;
  const unsigned fp = fp_enter();
  j->ops->topk(j->values + at, j->index + at, j->x + check_bytes(j->dt, begin), j->dt,
               j->error ? j->error + begin : NULL, j->block, j->k, end - begin);
  fp_leave(fp);
}

int dc_topk(uint8_t *payload, int64_t block, int64_t k, const void *x, int dt, float *error, int64_t n) {
  topk_job j = {.error = error};
  int64_t bytes;
  DC_TRY(compress_topk_open(&j, payload, block, k, x, dt, n, &bytes, "x"));
  DC_TRY(compress_check_error(payload, bytes, x, dt, error, n));
  dc__count(DC_COUNTER_topk_calls, 1);
  if (n == 0) return DC_OK;
  if (compress_topk_chosen(block, k, n) % 2) j.index[compress_topk_chosen(block, k, n)] = 0;
  dc_parallel_for(n, compress_share(block), compress_topk_range, &j);
  return DC_OK;
}

/* The payload came from elsewhere: an index is an address to write to. */
static int compress_topk_check_indices(const topk_job *j) {
  for (int64_t begin = 0; begin < j->n; begin += j->block) {
    const int64_t len = j->n - begin < j->block ? j->n - begin : j->block, take = len < j->k ? len : j->k;
    const uint16_t *index = j->index + begin / j->block * j->k;
    int64_t most = 0;
    for (int64_t i = 0; i < take; i++) most = index[i] > most ? index[i] : most;
    if (most >= len)
      return DC_FAIL(DC_E_INVALID,
                     "payload: index %lld in the block at element %lld, which has %lld elements: it is no payload of "
                     "dc_topk with block = %lld, k = %lld, n = %lld",
                     (long long)most, (long long)begin, (long long)len, (long long)j->block, (long long)j->k,
                     (long long)j->n);
  }
  return DC_OK;
}

static void compress_topk_spread_range(int64_t begin, int64_t end, void *ctx) {
  const topk_job *j = ctx;
  const unsigned fp = fp_enter();
  memset(j->x + check_bytes(j->dt, begin), 0, (size_t)check_bytes(j->dt, end - begin));
  for (int64_t block = begin; block < end; block += j->block) {
    const int64_t len = end - block < j->block ? end - block : j->block, take = len < j->k ? len : j->k;
    const int64_t at = block / j->block * j->k;
    for (int64_t i = at; i < at + take; i++) dc__put(j->x, j->dt, block + j->index[i], j->values[i]);
  }
  fp_leave(fp);
}

int dc_topk_spread(void *out, int dt, const uint8_t *payload, int64_t block, int64_t k, int64_t n) {
  topk_job j = {0};
  int64_t bytes;
  DC_TRY(compress_topk_open(&j, payload, block, k, out, dt, n, &bytes, "out"));
  DC_TRY(compress_topk_check_indices(&j));
  dc__count(DC_COUNTER_dequantize_calls, 1);
  if (n > 0) dc_parallel_for(n, compress_share(block), compress_topk_spread_range, &j);
  return DC_OK;
}

int dc_topk_add(float *acc, const uint8_t *payload, int64_t block, int64_t k, float factor, int64_t n) {
  topk_job j = {.factor = factor};
  int64_t bytes;
  DC_TRY(compress_topk_open(&j, payload, block, k, acc, DC_F32, n, &bytes, "acc"));
  DC_TRY(compress_topk_check_indices(&j));
  dc__count(DC_COUNTER_dequantize_calls, 1);
  const unsigned fp = fp_enter();
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t len = n - begin < block ? n - begin : block, take = len < k ? len : k, at = begin / block * k;
    for (int64_t i = at; i < at + take; i++) {
      float *to = acc + begin + j.index[i];
      *to = dc__canonical_f32(fmaf(j.values[i], factor, *to));
    }
  }
  fp_leave(fp);
  return DC_OK;
}

/* ---- rotation ---------------------------------------------------------------------------------------------------- */
typedef struct rotate_job {
  const dc__ops *ops;
  float *x;
} rotate_job;

static void compress_rotate_range(int64_t begin, int64_t end, void *ctx) {
  const rotate_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->rotate(j->x + begin, end - begin);
  fp_leave(fp);
}

int dc_rotate(float *x, int64_t n) {
  rotate_job j = {.x = x};
  DC_TRY(check_rotate(x, n));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_rotate_calls, 1);
  if (n > 0) dc_parallel_for(n, compress_share(DC_ROTATE_BLOCK), compress_rotate_range, &j);
  return DC_OK;
}
