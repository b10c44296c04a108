/* dispatch.c: owns the op tables (one per instruction set), the choice among them, and the public wrappers:
 * each validates, counts, computes what all elements share, and splits its range over dc_parallel_for.
 *
 * The tables are constant (cpu/table.c; here the scalar one): no code of an instruction set runs before cpuid. Grains
 * are multiples of DC_BLOCK so that reduction blocks are never cut and vector starts stay aligned as the arrays are. */
#include "adamw_coef.h"
#include "call.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/scalar.h"

#if defined(DEEPC_X86_BODIES) /* how many: 1 AVX2's, 2 AVX-512's as well, 4 all (CMakeLists.txt) */
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
extern const dc__ops dc__ops_avx2, dc__ops_avx512, dc__ops_avx512_bf16, dc__ops_amx_bf16;
#endif

/* ---- instruction sets -------------------------------------------------------------------------------------------- */
static const dc__ops dispatch_scalar = {
#define DC_OP(name, params) .name = dc__##name##_scalar,
#include "ops.def"
#undef DC_OP
};
static const dc__ops *const dispatch_table[DC_ISA_COUNT] = {
    [DC_ISA_SCALAR] = &dispatch_scalar,
#if defined(DEEPC_X86_BODIES)
    [DC_ISA_AVX2] = &dc__ops_avx2,
#if DEEPC_X86_BODIES > 1
    [DC_ISA_AVX512] = &dc__ops_avx512,
#endif
#if DEEPC_X86_BODIES > 2
    [DC_ISA_AVX512_BF16] = &dc__ops_avx512_bf16,
    [DC_ISA_AMX_BF16] = &dc__ops_amx_bf16,
#endif
#endif
};
#if defined(DEEPC_X86_BODIES) && DEEPC_X86_BODIES > 2
/* AVX512-BF16 whose VDPBF16PS makes half as many products a cycle as VFMADD does: Intel's (docs/lab/kernels.md). What
 * multiplies matrices goes by floats. */
#define DC_OP(name, params) void dc__##name##_avx512_bf16 params;
#define DC_OP_TILES(name, params) void dc__##name##_avx512 params;
#include "ops.def"
#undef DC_OP
static const dc__ops dispatch_floats = {
#define DC_OP(name, params) .name = dc__##name##_avx512_bf16,
#define DC_OP_TILES(name, params) .name = dc__##name##_avx512,
#include "ops.def"
#undef DC_OP
};
#endif
static int dispatch_have[DC_ISA_COUNT];
static int dispatch_left_out = -1;
#if defined(DEEPC_X86_BODIES)
static int dispatch_slow_pairs; /* this processor is such a one */
#endif
static pthread_once_t dispatch_once = PTHREAD_ONCE_INIT;
static _Atomic int dispatch_isa = -1; /* released and acquired: who reads it sees what the detection wrote */
static _Atomic int dispatch_named; /* by DEEPC_ISA or dc_isa_force: then it is that set and no mixture */
int64_t dc__prefetch_ahead = 2048; /* see cpu/vec.h */

static const char *const dispatch_isa_names[DC_ISA_COUNT] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

#if defined(DEEPC_X86_BODIES)
/* The register state that the kernel saves (XCR0): a processor may have AVX-512 and the kernel not. */
static unsigned dispatch_isa_saved_state(void) {
  unsigned lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return lo;
}

/* Intel SDM vol. 1, 18.3: tiles and their bf16 products. Their state is large, so Linux (5.16 and later) gives it to
 * processes that ask, for all threads and what they fork (ARCH_REQ_XCOMP_PERM of XTILEDATA). */
static int dispatch_isa_has_tiles(unsigned state) {
  enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, TILE_STATE = 3 << 17, REQUEST = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d;
  if ((state & TILE_STATE) != TILE_STATE || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  if ((d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return 0;
#if defined(__linux__)
  return syscall(SYS_arch_prctl, (long)REQUEST, (long)TILE_DATA) == 0;
#else
  return 0;
#endif
}

/* Intel SDM vol. 1, 14.3, 14.7.1, 15.2: the bits to test before AVX, AVX2 and AVX-512. */
static void dispatch_isa_detect_x86(void) {
  enum { FMA = 1 << 12, OSXSAVE = 1 << 27, AVX = 1 << 28, F16C = 1 << 29, AVX2 = 1 << 5 };
  const unsigned avx512_fdqbwvl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, ymm_state = 0x6, zmm_state = 0xe6;
  unsigned a, b, c, d;
  /* AuthenticAMD, HygonGenuine. Zen 4's own prefetchers are good: what a far one fetches beside them takes their room.
   */
  if (!__get_cpuid(0, &a, &b, &c, &d)) return;
  if (c == signature_AMD_ecx || c == 0x656e6975) dc__prefetch_ahead = 128;
  dispatch_slow_pairs = c == signature_INTEL_ecx;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return;
  const unsigned need = FMA | OSXSAVE | AVX | F16C;
  if ((c & need) != need) return;
  const unsigned state = dispatch_isa_saved_state();
  if ((state & ymm_state) != ymm_state || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  const unsigned subleaves = a;
  dispatch_have[DC_ISA_AVX2] = (b & AVX2) != 0;
#if defined(DEEPC_EMULATED) /* by functions over AVX2's: tests/c/emulated */
  for (int isa = DC_ISA_AVX512; isa < DC_ISA_COUNT; isa++) dispatch_have[isa] = dispatch_have[DC_ISA_AVX2];
  return;
#endif
  dispatch_have[DC_ISA_AVX512] = dispatch_have[DC_ISA_AVX2] && (b & avx512_fdqbwvl) == avx512_fdqbwvl &&
                                 (state & zmm_state) == zmm_state;
  if (!dispatch_have[DC_ISA_AVX512] || subleaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
  dispatch_have[DC_ISA_AVX512_BF16] = (a >> 5) & 1;
  if (dispatch_have[DC_ISA_AVX512_BF16]) dispatch_have[DC_ISA_AMX_BF16] = dispatch_isa_has_tiles(state);
}
#endif

static void dispatch_isa_detect(void) {
  dispatch_have[DC_ISA_SCALAR] = 1;
#if defined(DEEPC_X86_BODIES)
  dispatch_isa_detect_x86();
#endif
  for (int isa = 0; isa < DC_ISA_COUNT; isa++) {
    if (!dispatch_have[isa]) continue;
    dispatch_left_out = dispatch_table[isa] ? -1 : isa;
    dispatch_have[isa] = dispatch_table[isa] != NULL;
  }
}

const char *dc_isa_name(int isa) { return isa >= 0 && isa < DC_ISA_COUNT ? dispatch_isa_names[isa] : "?"; }

int dc_isa_available(int isa) {
  pthread_once(&dispatch_once, dispatch_isa_detect);
  return isa >= 0 && isa < DC_ISA_COUNT && dispatch_have[isa];
}

int dc_isa_left_out(void) {
  pthread_once(&dispatch_once, dispatch_isa_detect);
  return dispatch_left_out;
}

/* "scalar, avx2": what this processor can run, for messages. */
static const char *dispatch_isa_available_names(char *buf, size_t size) {
  buf[0] = 0;
  for (int isa = 0; isa < DC_ISA_COUNT; isa++) {
    if (!dc_isa_available(isa)) continue;
    if (buf[0]) strncat(buf, ", ", size - strlen(buf) - 1);
    strncat(buf, dispatch_isa_names[isa], size - strlen(buf) - 1);
  }
  return buf;
}

static int dispatch_isa_from_env(const char *value, int *isa) {
  char names[64];
  for (int i = 0; i < DC_ISA_COUNT; i++) {
    if (strcmp(value, dispatch_isa_names[i]) != 0) continue;
    if (!dc_isa_available(i))
      return DC_FAIL(DC_E_ENV, "DEEPC_ISA=%s: this processor or this binary cannot run it; choose one of: %s", value,
                     dispatch_isa_available_names(names, sizeof names));
    *isa = i;
    return DC_OK;
  }
  return DC_FAIL(DC_E_ENV, "DEEPC_ISA=%s is not an instruction set; choose one of: %s, or unset it for the best", value,
                 dispatch_isa_available_names(names, sizeof names));
}

int dc_isa_current(int *isa) {
  int now = atomic_load_explicit(&dispatch_isa, memory_order_acquire);
  if (now < 0) {
    const char *value = getenv("DEEPC_ISA");
    if (value && value[0]) {
      DC_TRY(dispatch_isa_from_env(value, &now));
      atomic_store_explicit(&dispatch_named, 1, memory_order_relaxed);
    } else {
      for (now = DC_ISA_COUNT - 1; !dc_isa_available(now);) now--;
    }
    atomic_store_explicit(&dispatch_isa, now, memory_order_release);
  }
  if (isa) *isa = now;
  return DC_OK;
}

int dc_isa_force(int isa) {
  char names[64];
  if (isa == DC_ISA_BEST) {
    atomic_store_explicit(&dispatch_named, 0, memory_order_relaxed);
    atomic_store_explicit(&dispatch_isa, -1, memory_order_release);
    return DC_OK;
  }
  if (!dc_isa_available(isa))
    return DC_FAIL(DC_E_UNSUPPORTED, "instruction set %d (%s) cannot run here; available: %s", isa, dc_isa_name(isa),
                   dispatch_isa_available_names(names, sizeof names));
  atomic_store_explicit(&dispatch_named, 1, memory_order_relaxed);
  atomic_store_explicit(&dispatch_isa, isa, memory_order_release);
  return DC_OK;
}

int dc__ops_table(const dc__ops **ops) {
  int isa;
  DC_TRY(dc_isa_current(&isa));
  *ops = dispatch_table[isa];
#if defined(DEEPC_X86_BODIES) && DEEPC_X86_BODIES > 2
  if (isa == DC_ISA_AVX512_BF16 && dispatch_slow_pairs && !atomic_load_explicit(&dispatch_named, memory_order_relaxed))
    *ops = &dispatch_floats;
#endif
  return DC_OK;
}

/* ---- elementwise ops --------------------------------------------------------------------------------------------- */
typedef struct cast_job {
  const dc__ops *ops;
  char *dst;
  const char *src;
  int ddt, sdt, stream;
  float scale;
} cast_job;

static void dispatch_cast_range(int64_t begin, int64_t end, void *ctx) {
  const cast_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->cast(j->dst + check_bytes(j->ddt, begin), j->ddt, j->src + check_bytes(j->sdt, begin), j->sdt, j->scale,
               end - begin, j->stream);
  fp_leave(fp);
}

int dc_cast(void *dst, int ddt, const void *src, int sdt, float scale, int64_t n) {
  cast_job j = {.dst = dst, .src = src, .ddt = ddt, .sdt = sdt, .scale = scale};
  DC_TRY(check_cast(dst, ddt, src, sdt, n));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_cast_calls, 1);
  j.stream = dst != src && check_bytes(ddt, n) >= CALL_STREAM_BYTES;
  if (n > 0) dc_parallel_for(n, call_grain(8), dispatch_cast_range, &j);
  return DC_OK;
}

typedef struct scale_job {
  const dc__ops *ops;
  char *x;
  int dt;
  float a;
} scale_job;

static void dispatch_scale_range(int64_t begin, int64_t end, void *ctx) {
  const scale_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->scale(j->x + check_bytes(j->dt, begin), j->dt, j->a, end - begin);
  fp_leave(fp);
}

int dc_scale(void *x, int dt, float a, int64_t n) {
  scale_job j = {.x = x, .dt = dt, .a = a};
  DC_TRY(check_scale(x, dt, n));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_scale_calls, 1);
  if (n > 0) dc_parallel_for(n, call_grain(8), dispatch_scale_range, &j);
  return DC_OK;
}

typedef struct axpy_job {
  const dc__ops *ops;
  float *y;
  float a;
  const char *x;
  int xdt;
} axpy_job;

static void dispatch_axpy_range(int64_t begin, int64_t end, void *ctx) {
  const axpy_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->axpy(j->y + begin, j->a, j->x + check_bytes(j->xdt, begin), j->xdt, end - begin);
  fp_leave(fp);
}

int dc_axpy(float *y, float a, const void *x, int xdt, int64_t n) {
  axpy_job j = {.y = y, .a = a, .x = x, .xdt = xdt};
  DC_TRY(check_axpy(y, x, xdt, n));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_axpy_calls, 1);
  if (n > 0) dc_parallel_for(n, call_grain(12), dispatch_axpy_range, &j);
  return DC_OK;
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */
typedef struct sqnorm_job {
  const dc__ops *ops;
  const char *x;
  int dt;
  double *partial;
} sqnorm_job;

static void dispatch_sqnorm_range(int64_t begin, int64_t end, void *ctx) {
  const sqnorm_job *j = ctx;
  const unsigned fp = fp_enter();
  j->ops->sqnorm(j->x + check_bytes(j->dt, begin), j->dt, end - begin, j->partial + begin / DC_BLOCK);
  fp_leave(fp);
}

int dc_sqnorm(const void *x, int dt, int64_t n, double *partial) {
  sqnorm_job j = {.x = x, .dt = dt, .partial = partial};
  DC_TRY(check_sqnorm(x, dt, n, partial));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_sqnorm_calls, 1);
  if (n > 0) dc_parallel_for(n, call_grain(4), dispatch_sqnorm_range, &j);
  return DC_OK;
}

double dc_sum_partials(const double *partial, int64_t blocks) {
  const unsigned fp = fp_enter();
  double sum = 0;
  for (int64_t k = 0; k < blocks; k++) sum += partial[k];
  fp_leave(fp);
  return sum;
}

/* ---- copy -------------------------------------------------------------------------------------------------------- */
typedef struct copy_job {
  const dc__ops *ops;
  char *dst;
  const char *src;
  int stream;
} copy_job;

static void dispatch_copy_range(int64_t begin, int64_t end, void *ctx) {
  const copy_job *j = ctx;
  j->ops->copy(j->dst + begin, j->src + begin, end - begin, j->stream);
}

int dc_copy(void *dst, const void *src, int64_t bytes) {
  copy_job j = {.dst = dst, .src = src, .stream = bytes >= CALL_STREAM_BYTES};
  DC_TRY(check_copy(dst, src, bytes));
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_copy_calls, 1);
  if (bytes > 0) dc_parallel_for(bytes, call_grain(1), dispatch_copy_range, &j);
  return DC_OK;
}

/* ---- reductions over arrays -------------------------------------------------------------------------------------- */
/* Every range makes its own shifted copy of the source pointers, on its stack: 8 KiB at most. */
typedef struct reduce_job {
  const dc__ops *ops;
  char *dst;
  const void *const *src;
  int nsrc, dt, op, assign, stream;
  double *partial;
} reduce_job;

static void dispatch_reduce_shift(const reduce_job *j, int64_t begin, const void **at) {
  for (int k = 0; k < j->nsrc; k++) at[k] = (const char *)j->src[k] + check_bytes(j->dt, begin);
}

static void dispatch_reduce_range(int64_t begin, int64_t end, void *ctx) {
  const reduce_job *j = ctx;
  const void *at[CHECK_MAX_SOURCES];
  const unsigned fp = fp_enter();
  dispatch_reduce_shift(j, begin, at);
  j->ops->reduce(j->dst + check_bytes(j->dt, begin), at, j->nsrc, j->dt, j->op, end - begin, j->stream);
  fp_leave(fp);
}

static void dispatch_reduce_acc_range(int64_t begin, int64_t end, void *ctx) {
  const reduce_job *j = ctx;
  const void *at[CHECK_MAX_SOURCES];
  const unsigned fp = fp_enter();
  dispatch_reduce_shift(j, begin, at);
  j->ops->reduce_acc((float *)j->dst + begin, at, j->nsrc, j->dt, end - begin, j->assign,
                     j->partial ? j->partial + begin / DC_BLOCK : NULL, j->stream);
  fp_leave(fp);
}

int dc_reduce(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n) {
  reduce_job j = {.dst = dst, .src = src, .nsrc = nsrc, .dt = dt, .op = op};
  DC_TRY(check_reduce(dst, src, nsrc, dt, op, n));
  j.stream = check_bytes(dt, n) >= CALL_STREAM_BYTES;
  for (int k = 0; n > 0 && k < nsrc; k++)
    if (dst == src[k]) j.stream = 0; /* its lines are in the cache: they were read */
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_reduce_calls, 1);
  if (n > 0) dc_parallel_for(n, call_grain((int64_t)check_size(dt) * (nsrc + 1)), dispatch_reduce_range, &j);
  return DC_OK;
}

int dc__reduce_here(void *dst, const void *const *src, int nsrc, int dt, int op, int64_t n, int stream) {
  reduce_job j = {.dst = dst, .src = src, .nsrc = nsrc, .dt = dt, .op = op, .stream = stream};
  DC_TRY(dc__ops_table(&j.ops));
  if (n > 0) dispatch_reduce_range(0, n, &j);
  return DC_OK;
}

int dc__reduce_acc_here(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial) {
  reduce_job j = {.dst = (char *)acc, .src = src, .nsrc = nsrc, .dt = dt, .assign = assign, .partial = partial};
  DC_TRY(dc__ops_table(&j.ops));
  if (n > 0) dispatch_reduce_acc_range(0, n, &j);
  return DC_OK;
}

int dc__copy_here(void *dst, const void *src, int64_t bytes, int stream) {
  const dc__ops *ops;
  DC_TRY(dc__ops_table(&ops));
  if (bytes > 0) ops->copy(dst, src, bytes, stream);
  return DC_OK;
}

int dc_reduce_acc(float *acc, const void *const *src, int nsrc, int dt, int64_t n, int assign, double *partial) {
  reduce_job j = {.dst = (char *)acc, .src = src, .nsrc = nsrc, .dt = dt, .assign = assign != 0, .partial = partial};
  DC_TRY(check_reduce_acc(acc, src, nsrc, dt, n, partial));
  j.stream = j.assign && check_bytes(DC_F32, n) >= CALL_STREAM_BYTES;
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_reduce_calls, 1);
  if (n > 0) dc_parallel_for(n, call_grain((int64_t)check_size(dt) * nsrc + 4), dispatch_reduce_acc_range, &j);
  return DC_OK;
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */
/* All tensors form one flat line of elements, each tensor padded to ADAMW_PAD, so that cut points (multiples of the
 * grain) fall on whole cache lines of an aligned tensor. */
enum { ADAMW_PAD = 64, ADAMW_GRAIN = 8 * DC_BLOCK };

typedef struct adamw_job {
  const dc__ops *ops;
  const dc_adamw_args *tensor;
  int64_t count;
} adamw_job;

static int64_t dispatch_adamw_padded(int64_t n) { return (n + ADAMW_PAD - 1) / ADAMW_PAD * ADAMW_PAD; }

/* The tensors of one group share their scalars; two pow() per small tensor would be most of its time. */
static int dispatch_adamw_same_coef(const dc_adamw_args *a, const dc_adamw_args *b) {
  return a->step == b->step && a->lr == b->lr && a->beta1 == b->beta1 && a->beta2 == b->beta2 && a->eps == b->eps &&
         a->weight_decay == b->weight_decay && a->grad_scale == b->grad_scale && a->flags == b->flags;
}

static void dispatch_adamw_range(int64_t begin, int64_t end, void *ctx) {
  const adamw_job *j = ctx;
  const dc_adamw_args *last = NULL;
  dc__adamw_coef coef;
  int64_t start = 0; /* of tensor t on the line */
  const unsigned fp = fp_enter();
  for (const dc_adamw_args *t = j->tensor; start < end && t < j->tensor + j->count;
       start += dispatch_adamw_padded(t->n), t++) {
    const int64_t lo = begin > start ? begin - start : 0, hi = end - start < t->n ? end - start : t->n;
    if (lo >= hi) continue;
    if (!last || !dispatch_adamw_same_coef(last, t)) coef = dc__adamw_coef_of(t);
    last = t;
    j->ops->adamw(t, &coef, lo, hi);
  }
  fp_leave(fp);
}

static int dispatch_adamw_run(const dc_adamw_args *tensors, int64_t count) {
  adamw_job j = {.tensor = tensors, .count = count};
  int64_t line = 0, elements = 0;
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_adamw(&tensors[k], k));
    if (__builtin_add_overflow(line, dispatch_adamw_padded(tensors[k].n), &line))
      return DC_FAIL(DC_E_OVERFLOW, "the elements of %lld tensors overflow 64 bits", (long long)count);
    elements += tensors[k].n;
  }
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_adamw_calls, 1);
  dc__count(DC_COUNTER_adamw_elements, elements);
  if (line > 0) dc_parallel_for(line, ADAMW_GRAIN, dispatch_adamw_range, &j);
  return DC_OK;
}

int dc_adamw(const dc_adamw_args *tensors, int64_t count) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_adamw_args, flags, tensors, count, &list, &owned);
  if (rc == DC_OK) rc = dispatch_adamw_run(list, count);
  free(owned);
  return rc;
}
