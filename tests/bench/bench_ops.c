/* bench_ops.c: the speed of each op beside the limit of its memory pattern. One JSON line per case:
 *   op, dtype, n, threads, isa, rounds
 *   memory       "huge": dc_mem_alloc with different colors; "malloc": plain malloc
 *   median_s, q1_s, q3_s, min_s, max_s, limit_median_s   seconds
 *   gb_per_s     bytes that the op must move (no read-for-ownership) over the median
 *   ratio        median over rounds of limit / op, the two timed back to back; 1: the op costs what its traffic costs
 * The limit is a plain loop over the same arrays with the same reads and writes and no arithmetic beyond an add,
 * vectorised by the compiler for the processor that runs it, on the same threads. For copy it is libc's memcpy. Ops
 * that store past the caches beat it, because it does not.
 *
 *   cc -O3 -D_GNU_SOURCE -I. -Iops tests/bench/bench_ops.c -Lbuild/lib -ldeepc \
 *      -Wl,-rpath,$PWD/build/lib -o build/bench_ops
 *   build/bench_ops [--n N] [--rounds R] [--threads T] [--memory huge|malloc] [--only SUBSTRING]
 * Compare ratios of one run only: bandwidth of a shared machine drifts by 2x within minutes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ops/ops.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BEST_ISA __attribute__((target_clones("default", "avx2", "arch=icelake-server"), optimize("O3")))
#else
#define BEST_ISA
#endif

enum { ARRAYS = 8, MAX_ROUNDS = 101 };

typedef struct bench {
  void *at[ARRAYS]; /* of 4 * n bytes */
  int64_t n;
  double *partial;
  uint32_t sink;
} bench;

/* ---- limits ------------------------------------------------------------------------------------------------------ */
BEST_ISA static void loop_4r3w(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                               int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += g[i], v[i] += g[i];
}
BEST_ISA static void loop_4r3w_low(float *restrict p, const float *restrict g, float *restrict m, float *restrict v,
                                   uint16_t *restrict low, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += g[i], v[i] += g[i], low[i] = 1;
}
BEST_ISA static void loop_1r1w(float *restrict y, const float *restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = x[i] + 1.0f;
}
BEST_ISA static void loop_narrow(uint16_t *restrict y, const uint32_t *restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = (uint16_t)(x[i] >> 16);
}
BEST_ISA static void loop_widen(uint32_t *restrict y, const uint16_t *restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = (uint32_t)x[i] << 16;
}
BEST_ISA static void loop_scale(float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += 1.0f;
}
BEST_ISA static void loop_axpy(float *restrict y, const float *restrict x, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] += x[i];
}
BEST_ISA static void loop_3r2w(float *restrict p, const float *restrict g, float *restrict m, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += g[i];
}
BEST_ISA static void loop_3r2w_low(float *restrict p, const float *restrict g, float *restrict m,
                                   uint16_t *restrict low, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += g[i], low[i] = 1;
}
BEST_ISA static void loop_bf16(float *restrict p, const float *restrict g, uint16_t *restrict m, uint16_t *restrict v,
                               int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += 1, v[i] += 1;
}
BEST_ISA static void loop_8bit(float *restrict p, const float *restrict g, uint8_t *restrict m, uint8_t *restrict v,
                               int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += 1, v[i] += 1;
}
BEST_ISA static void loop_4bit(float *restrict p, const float *restrict g, uint8_t *restrict m, uint8_t *restrict v,
                               int64_t n) {
  for (int64_t k = 0; k < n; k += 128) {
    const int64_t end = n - k < 128 ? n - k : 128;
    for (int64_t i = 0; i < end; i++) p[k + i] += g[k + i];
    for (int64_t i = 0; i < end / 2; i++) m[k / 2 + i] += 1, v[k / 2 + i] += 1;
  }
}
/* The same of one state. */
BEST_ISA static void loop_one_bf16(float *restrict p, const float *restrict g, uint16_t *restrict m, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += 1;
}
BEST_ISA static void loop_one_8bit(float *restrict p, const float *restrict g, uint8_t *restrict m, int64_t n) {
  for (int64_t i = 0; i < n; i++) p[i] += g[i], m[i] += 1;
}
BEST_ISA static void loop_one_4bit(float *restrict p, const float *restrict g, uint8_t *restrict m, int64_t n) {
  for (int64_t k = 0; k < n; k += 128) {
    const int64_t end = n - k < 128 ? n - k : 128;
    for (int64_t i = 0; i < end; i++) p[k + i] += g[k + i];
    for (int64_t i = 0; i < end / 2; i++) m[k / 2 + i] += 1;
  }
}
BEST_ISA static uint32_t loop_read(const uint32_t *x, int64_t n) {
  uint32_t all = 0;
  for (int64_t i = 0; i < n; i++) all |= x[i];
  return all;
}
BEST_ISA static void loop_2r1w(float *restrict y, const float *restrict a, const float *restrict b, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];
}
BEST_ISA static void loop_2r1w_16(float *restrict y, const uint16_t *restrict a, const uint16_t *restrict b,
                                  int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = (float)(a[i] + b[i]);
}

#define F(k) ((float *)b->at[k] + lo)
#define H(k) ((uint16_t *)b->at[k] + lo)
#define U(k) ((uint32_t *)b->at[k] + lo)
#define LIMIT(name, call)                               \
  static void name(int64_t lo, int64_t hi, void *ctx) { \
    bench *b = ctx;                                     \
    call;                                               \
  }
LIMIT(limit_adamw, loop_4r3w(F(0), F(1), F(2), F(3), hi - lo))
LIMIT(limit_adamw_low, loop_4r3w_low(F(0), F(1), F(2), F(3), H(4), hi - lo))
LIMIT(limit_step, loop_3r2w(F(0), F(1), F(2), hi - lo))
LIMIT(limit_step_low, loop_3r2w_low(F(0), F(1), F(2), H(4), hi - lo))
LIMIT(limit_bf16, loop_bf16(F(0), F(1), H(2), H(3), hi - lo))
LIMIT(limit_8bit, loop_8bit(F(0), F(1), (uint8_t *)b->at[2] + lo, (uint8_t *)b->at[3] + lo, hi - lo))
LIMIT(limit_4bit, loop_4bit(F(0), F(1), (uint8_t *)b->at[2] + lo / 2, (uint8_t *)b->at[3] + lo / 2, hi - lo))
LIMIT(limit_one_bf16, loop_one_bf16(F(0), F(1), H(2), hi - lo))
LIMIT(limit_one_8bit, loop_one_8bit(F(0), F(1), (uint8_t *)b->at[2] + lo, hi - lo))
LIMIT(limit_one_4bit, loop_one_4bit(F(0), F(1), (uint8_t *)b->at[2] + lo / 2, hi - lo))
LIMIT(limit_copy, memcpy(F(1), F(0), (size_t)(hi - lo) * 4))
LIMIT(limit_cast, loop_1r1w(F(1), F(0), hi - lo))
LIMIT(limit_narrow, loop_narrow(H(1), U(0), hi - lo))
LIMIT(limit_widen, loop_widen(U(1), H(0), hi - lo))
LIMIT(limit_scale, loop_scale(F(0), hi - lo))
LIMIT(limit_axpy, loop_axpy(F(0), F(1), hi - lo))
LIMIT(limit_read, b->sink |= loop_read(U(0), hi - lo))
LIMIT(limit_read16, b->sink |= loop_read((const uint32_t *)b->at[0] + lo / 2, (hi - lo) / 2))
LIMIT(limit_reduce, loop_2r1w(F(2), F(0), F(1), hi - lo))
LIMIT(limit_reduce16, loop_2r1w_16(F(2), H(0), H(1), hi - lo))

/* ---- ops --------------------------------------------------------------------------------------------------------- */
static dc_adamw_args adamw_args(bench *b, int grad_dtype, int lowp) {
  return (dc_adamw_args){.struct_size = sizeof(dc_adamw_args),
                         .param = b->at[0],
                         .grad = b->at[1],
                         .exp_avg = b->at[2],
                         .exp_avg_sq = b->at[3],
                         .lowp = lowp >= 0 ? b->at[4] : NULL,
                         .n = b->n,
                         .step = 10,
                         .lr = 1e-3,
                         .beta1 = 0.9,
                         .beta2 = 0.999,
                         .eps = 1e-8,
                         .weight_decay = 0.01,
                         .grad_scale = 1.0,
                         .grad_dtype = grad_dtype,
                         .lowp_dtype = lowp >= 0 ? lowp : 0,
                         .flags = DC_ADAMW_DECOUPLED};
}

static int op_adamw(bench *b) {
  const dc_adamw_args t = adamw_args(b, DC_F32, -1);
  return dc_adamw(&t, 1);
}
static int op_adamw_low(bench *b) {
  const dc_adamw_args t = adamw_args(b, DC_F32, DC_BF16);
  return dc_adamw(&t, 1);
}
/* The shapes of GPT-2's 148 tensors in small: cut into 12 x 12 + 4 unequal pieces, as one call. */
static int op_adamw_tensors(bench *b) {
  dc_adamw_args t[148];
  const int64_t big = b->n / 40, small = b->n / 2000 < 768 ? b->n / 2000 : 768;
  int64_t at = 0;
  for (int k = 0; k < 148; k++) {
    const int64_t len = k == 147 ? b->n - at : k % 4 == 0 ? big : small;
    t[k] = adamw_args(b, DC_F32, -1);
    t[k].param = (float *)b->at[0] + at, t[k].grad = (float *)b->at[1] + at;
    t[k].exp_avg = (float *)b->at[2] + at, t[k].exp_avg_sq = (float *)b->at[3] + at;
    t[k].n = len;
    at += len;
  }
  return dc_adamw(t, 148);
}
static int op_step(bench *b, int rule, int lowp) {
  const dc_step_args t = {.struct_size = sizeof(dc_step_args),
                          .param = b->at[0],
                          .grad = b->at[1],
                          .state = {b->at[2]},
                          .lowp = lowp >= 0 ? b->at[4] : NULL,
                          .n = b->n,
                          .step = 10,
                          .rule = rule,
                          .lr = 1e-3,
                          .beta1 = 0.9,
                          .beta2 = rule == DC_RULE_SGD ? 0.0 : 0.99,
                          .eps = 1e-8,
                          .weight_decay = 0.01,
                          .grad_scale = 1.0,
                          .lowp_dtype = lowp >= 0 ? lowp : 0};
  return dc_step(&t, 1);
}
/* A rule with states in a format; the scales take the place of lowp. */
static int op_packed(bench *b, int rule, int format) {
  const int adamw = rule == DC_RULE_ADAMW;
  const dc_step_args t = {.struct_size = sizeof(dc_step_args),
                          .param = b->at[0],
                          .grad = b->at[1],
                          .state = {b->at[2], adamw ? b->at[3] : NULL},
                          .scale = {b->at[4], (float *)b->at[4] + b->n / 2},
                          .n = b->n,
                          .step = 10,
                          .rule = rule,
                          .lr = 1e-3,
                          .beta1 = 0.9,
                          .beta2 = rule == DC_RULE_SGD ? 0.0 : 0.999,
                          .eps = 1e-8,
                          .weight_decay = 0.01,
                          .grad_scale = 1.0,
                          .state_dtype = DC_BF16,
                          .flags = adamw ? DC_STEP_DECOUPLED : 0,
                          .format = format};
  return dc_step(&t, 1);
}
#define PACKED(name, rule)                                                                  \
  static int op_##name##_bf16(bench *b) { return op_packed(b, rule, DC_STATE_STOCHASTIC); } \
  static int op_##name##_8bit(bench *b) { return op_packed(b, rule, DC_STATE_8BIT); }       \
  static int op_##name##_4bit(bench *b) { return op_packed(b, rule, DC_STATE_4BIT); }
PACKED(packed, DC_RULE_ADAMW)
PACKED(packed_lion, DC_RULE_LION)
PACKED(packed_adagrad, DC_RULE_ADAGRAD)
PACKED(packed_sgd, DC_RULE_SGD)
static int op_lion(bench *b) { return op_step(b, DC_RULE_LION, -1); }
static int op_adagrad(bench *b) { return op_step(b, DC_RULE_ADAGRAD, -1); }
static int op_sgd(bench *b) { return op_step(b, DC_RULE_SGD, -1); }
static int op_lion_low(bench *b) { return op_step(b, DC_RULE_LION, DC_BF16); }
static int op_copy(bench *b) { return dc_copy(b->at[1], b->at[0], b->n * 4); }
static int op_cast(bench *b) { return dc_cast(b->at[1], DC_F32, b->at[0], DC_F32, 0.5f, b->n); }
static int op_narrow(bench *b) { return dc_cast(b->at[1], DC_BF16, b->at[0], DC_F32, 1.0f, b->n); }
static int op_narrow_f16(bench *b) { return dc_cast(b->at[1], DC_F16, b->at[0], DC_F32, 1.0f, b->n); }
static int op_widen(bench *b) { return dc_cast(b->at[1], DC_F32, b->at[0], DC_BF16, 1.0f, b->n); }
static int op_scale(bench *b) { return dc_scale(b->at[0], DC_F32, 1.0f, b->n); }
static int op_axpy(bench *b) { return dc_axpy(b->at[0], 0.0f, b->at[1], DC_F32, b->n); }
static int op_sqnorm(bench *b) { return dc_sqnorm(b->at[0], DC_F32, b->n, b->partial); }
static int op_sqnorm16(bench *b) { return dc_sqnorm(b->at[0], DC_BF16, b->n, b->partial); }
static int op_reduce(bench *b) { return dc_reduce(b->at[2], (const void *const *)b->at, 2, DC_F32, DC_RED_SUM, b->n); }
static int op_reduce_acc(bench *b) {
  return dc_reduce_acc(b->at[2], (const void *const *)b->at, 2, DC_F32, b->n, 1, b->partial);
}
static int op_reduce_acc16(bench *b) {
  return dc_reduce_acc(b->at[2], (const void *const *)b->at, 2, DC_BF16, b->n, 1, b->partial);
}

typedef struct bench_case {
  const char *op, *dtype;
  int (*run)(bench *);
  dc_range_fn limit;
  int bytes; /* per element, that must move */
} bench_case;

static const bench_case cases[] = {
    {"adamw", "fp32", op_adamw, limit_adamw, 28},
    {"adamw_148_tensors", "fp32", op_adamw_tensors, limit_adamw, 28},
    {"adamw_lowp", "fp32->bf16", op_adamw_low, limit_adamw_low, 30},
    {"packed_adamw", "bf16 states", op_packed_bf16, limit_bf16, 20},
    {"packed_adamw", "8-bit states", op_packed_8bit, limit_8bit, 16},
    {"packed_adamw", "4-bit states", op_packed_4bit, limit_4bit, 14},
    {"packed_lion", "bf16 states", op_packed_lion_bf16, limit_one_bf16, 16},
    {"packed_lion", "8-bit states", op_packed_lion_8bit, limit_one_8bit, 14},
    {"packed_lion", "4-bit states", op_packed_lion_4bit, limit_one_4bit, 13},
    {"packed_adagrad", "bf16 states", op_packed_adagrad_bf16, limit_one_bf16, 16},
    {"packed_adagrad", "8-bit states", op_packed_adagrad_8bit, limit_one_8bit, 14},
    {"packed_adagrad", "4-bit states", op_packed_adagrad_4bit, limit_one_4bit, 13},
    {"packed_sgd_momentum", "bf16 states", op_packed_sgd_bf16, limit_one_bf16, 16},
    {"packed_sgd_momentum", "8-bit states", op_packed_sgd_8bit, limit_one_8bit, 14},
    {"packed_sgd_momentum", "4-bit states", op_packed_sgd_4bit, limit_one_4bit, 13},
    {"step_lion", "fp32", op_lion, limit_step, 20},
    {"step_lion_lowp", "fp32->bf16", op_lion_low, limit_step_low, 22},
    {"step_adagrad", "fp32", op_adagrad, limit_step, 20},
    {"step_sgd_momentum", "fp32", op_sgd, limit_step, 20},
    {"reduce_acc_norm_2", "fp32", op_reduce_acc, limit_reduce, 12},
    {"reduce_acc_norm_2", "bf16", op_reduce_acc16, limit_reduce16, 8},
    {"reduce_sum_2", "fp32", op_reduce, limit_reduce, 12},
    {"sqnorm", "fp32", op_sqnorm, limit_read, 4},
    {"sqnorm", "bf16", op_sqnorm16, limit_read16, 2},
    {"copy", "bytes", op_copy, limit_copy, 8},
    {"cast", "fp32->fp32", op_cast, limit_cast, 8},
    {"cast", "fp32->bf16", op_narrow, limit_narrow, 6},
    {"cast", "fp32->fp16", op_narrow_f16, limit_narrow, 6},
    {"cast", "bf16->fp32", op_widen, limit_widen, 6},
    {"scale", "fp32", op_scale, limit_scale, 8},
    {"axpy", "fp32", op_axpy, limit_axpy, 12},
};

/* ---- timing ------------------------------------------------------------------------------------------------------ */
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *v, int n) {
  qsort(v, (size_t)n, sizeof *v, by_value);
  return n % 2 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

static void fill(bench *b) { /* finite, not denormal, second moments positive */
  for (int k = 0; k < 5; k++)
    for (int64_t i = 0; i < b->n; i++) ((float *)b->at[k])[i] = 0.5f + (float)((i * 7 + k) % 1000) * 1e-3f;
}

static int run_case(const bench_case *c, bench *b, int rounds, int threads, const char *memory) {
  double op[MAX_ROUNDS], limit[MAX_ROUNDS], ratio[MAX_ROUNDS];
  int isa;
  if (dc_isa_current(&isa) != DC_OK) return 1;
  fill(b);
  for (int r = -1; r < rounds; r++) { /* round -1 warms up */
    const double t0 = now();
    dc_parallel_for(b->n, 8 * DC_BLOCK, c->limit, b);
    const double t1 = now();
    if (c->run(b) != DC_OK) return 1;
    const double t2 = now();
    if (r < 0) continue;
    limit[r] = t1 - t0, op[r] = t2 - t1, ratio[r] = limit[r] / op[r];
  }
  const double mid = median(op, rounds);
  printf("{\"op\": \"%s\", \"dtype\": \"%s\", \"n\": %lld, \"threads\": %d, \"memory\": \"%s\", \"isa\": \"%s\", "
         "\"rounds\": %d, "
         "\"median_s\": %.9f, \"q1_s\": %.9f, \"q3_s\": %.9f, \"min_s\": %.9f, \"max_s\": %.9f, \"gb_per_s\": %.2f, "
         "\"limit_median_s\": %.9f, \"ratio\": "
         "%.3f}\n",
         c->op, c->dtype, (long long)b->n, threads, memory, dc_isa_name(isa), rounds, mid, op[rounds / 4],
         op[(rounds - 1) - rounds / 4], op[0], op[rounds - 1], (double)c->bytes * (double)b->n / mid * 1e-9,
         median(limit, rounds), median(ratio, rounds));
  fflush(stdout);
  return 0;
}

static int allocate(bench *b, int huge) {
  for (int k = 0; k < 5; k++) {
    if (huge && dc_mem_alloc((size_t)b->n * 4, k, &b->at[k]) != DC_OK) return 1;
    if (!huge && !(b->at[k] = malloc((size_t)b->n * 4))) return 1;
  }
  b->partial = malloc((size_t)(dc_sqnorm_blocks(b->n) + 1) * sizeof *b->partial);
  return !b->partial;
}

static void release(bench *b, int huge) {
  for (int k = 0; k < 5; k++) {
    if (huge) dc_mem_free(b->at[k]);
    else free(b->at[k]);
  }
  free(b->partial);
}

static int run_memory(const char *memory, int64_t n, int rounds, int threads, const char *only) {
  bench b = {.n = n};
  const int huge = strcmp(memory, "huge") == 0;
  int failed = allocate(&b, huge);
  for (size_t k = 0; !failed && k < sizeof cases / sizeof *cases; k++)
    for (int t = threads ? threads : 1; !failed && t <= (threads ? threads : 2); t++) {
      char name[64];
      snprintf(name, sizeof name, "%s %s", cases[k].op, cases[k].dtype);
      if (only && !strstr(name, only)) continue;
      failed = dc_set_num_threads(t) != DC_OK || run_case(&cases[k], &b, rounds, t, memory);
    }
  if (failed) fprintf(stderr, "bench_ops: %s\n", dc_last_error());
  release(&b, huge);
  return failed;
}

int main(int argc, char **argv) {
  int64_t n = (int64_t)16 << 20;
  int rounds = 7, threads = 0;
  const char *memory = NULL, *only = NULL;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (!strcmp(argv[i], "--n")) n = atoll(argv[i + 1]);
    if (!strcmp(argv[i], "--rounds")) rounds = atoi(argv[i + 1]);
    if (!strcmp(argv[i], "--threads")) threads = atoi(argv[i + 1]);
    if (!strcmp(argv[i], "--memory")) memory = argv[i + 1];
    if (!strcmp(argv[i], "--only")) only = argv[i + 1];
  }
  if (n < 1 || rounds < 5 || rounds > MAX_ROUNDS) {
    fprintf(stderr, "bench_ops: --n must be >= 1, --rounds 5 to %d\n", MAX_ROUNDS);
    return 2;
  }
  int failed = 0;
  if (!memory || !strcmp(memory, "huge")) failed |= run_memory("huge", n, rounds, threads, only);
  if (!memory || !strcmp(memory, "malloc")) failed |= run_memory("malloc", n, rounds, threads, only);
  return failed;
}
