// bodies.cuh: what one CUDA thread does, for every op, as functions of (thread, threads). The __global__ wrappers in
// *.cu only number the threads. It compiles as plain C++ too, so that tests/c/test_cuda_bodies.cpp runs every index
// computation, tail and rounding on the CPU against the reference; only the wrappers and the shuffles need a GPU.
//
// Numerics: the operations of ops/ref in their order, each as its own intrinsic (__fmaf_rn, __fmul_rn ..), so that no
// compiler fuses or splits them; denormals kept, NaN stored as the canonical one. Loops stride over the grid with
// 64-bit indices. No pointer is __restrict__: in place is allowed where ops.h says so, and a thread reads all it needs
// before it writes there.
#ifndef DEEPC_CUDA_BODIES_CUH
#define DEEPC_CUDA_BODIES_CUH

#include "ops.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define DC_GPU __device__ __forceinline__
#define DC_UNROLL _Pragma("unroll")
#define DC_UNROLL_2 _Pragma("unroll 2")
#define DC_UNROLL_8 _Pragma("unroll 8")
#else
#include "cuda/host_stand_in.h"
#define DC_GPU inline
#define DC_UNROLL
#define DC_UNROLL_2
#define DC_UNROLL_8
#endif

namespace dc_gpu {

enum { WARP = 32 };

// ---- memory: vectors of up to 16 bytes, one instruction each -------------------------------------------------------
#if defined(__CUDACC__)
// Stores go through __stwb (a plain store, written back): the compiler breaks up a store of a struct after arithmetic.
template <class Word> DC_GPU void store_word(void *to, const void *from) {
  Word word;
  memcpy(&word, from, sizeof word);
  __stwb(static_cast<Word *>(to), word);
}
DC_GPU void load_bytes16(void *to, const void *from) { *static_cast<uint4 *>(to) = *static_cast<const uint4 *>(from); }
DC_GPU void load_bytes8(void *to, const void *from) { *static_cast<uint2 *>(to) = *static_cast<const uint2 *>(from); }
DC_GPU void store_bytes16(void *to, const void *from) { store_word<uint4>(to, from); }
DC_GPU void store_bytes8(void *to, const void *from) { store_word<uint2>(to, from); }
DC_GPU void load_bytes4(void *to, const void *from) {
  const uint32_t word = *static_cast<const uint32_t *>(from);
  memcpy(to, &word, sizeof word);
}
DC_GPU void store_bytes4(void *to, const void *from) { store_word<uint32_t>(to, from); }
DC_GPU void load_bytes2(void *to, const void *from) {
  const uint16_t word = *static_cast<const uint16_t *>(from);
  memcpy(to, &word, sizeof word);
}
DC_GPU void store_bytes2(void *to, const void *from) { store_word<uint16_t>(to, from); }
#endif

// W elements of type T side by side. 16-byte alignment, because in registers it costs nothing.
template <class T, int W> struct alignas(16) Pack {
  T x[W];
};

template <class T, int W> DC_GPU Pack<T, W> load(const T *p) {
  Pack<T, W> v;
  if constexpr (sizeof(T) * W == 16) load_bytes16(v.x, p);
  else if constexpr (W > 1 && sizeof(T) * W == 8) load_bytes8(v.x, p);
  else {
    static_assert(W == 1, "vectors are of 8 or 16 bytes");
    v.x[0] = *p;
  }
  return v;
}

template <class T, int W> DC_GPU void store(T *p, const Pack<T, W> &v) {
  if constexpr (sizeof(T) * W == 16) store_bytes16(p, v.x);
  else if constexpr (W > 1 && sizeof(T) * W == 8) store_bytes8(p, v.x);
  else *p = v.x[0];
}

template <int N> struct Width {
  static constexpr int value = N;
};

// Calls each(Width<V>, i) for the whole vectors of [0, n) that fall to this thread, then each(Width<1>, i) for the
// rest.
template <int V, class F> DC_GPU void for_each(int64_t n, int64_t thread, int64_t threads, F each) {
  const int64_t vectors = n / V;
  for (int64_t k = thread; k < vectors; k += threads) each(Width<V>(), k * V);
  if constexpr (V > 1)
    for (int64_t i = vectors * V + thread; i < n; i += threads) each(Width<1>(), i);
}

// V elements side by side, aligned to 16 bytes or to all of them, in as many vectors as they need.
template <class T, int V> DC_GPU void load_wide(T *to, const T *p) {
  constexpr int W = sizeof(T) * V > 16 ? 16 / (int)sizeof(T) : V;
  DC_UNROLL
  for (int k = 0; k < V; k += W) {
    const Pack<T, W> part = load<T, W>(p + k);
    DC_UNROLL
    for (int j = 0; j < W; j++) to[k + j] = part.x[j];
  }
}
template <class T, int V> DC_GPU void store_wide(T *p, const T *from) {
  constexpr int W = sizeof(T) * V > 16 ? 16 / (int)sizeof(T) : V;
  DC_UNROLL
  for (int k = 0; k < V; k += W) {
    Pack<T, W> part;
    DC_UNROLL
    for (int j = 0; j < W; j++) part.x[j] = from[k + j];
    store<T, W>(p + k, part);
  }
}

// ---- dtypes: how an element is stored, the type that arithmetic has, and the way between ---------------------------
DC_GPU float canonical(float f) { return f != f ? __uint_as_float(0x7fc00000u) : f; }
DC_GPU double canonical(double d) { return d != d ? __longlong_as_double(0x7ff8000000000000ll) : d; }

DC_GPU float up_bf16(uint16_t h) { return __uint_as_float((uint32_t)h << 16); }
DC_GPU uint16_t down_bf16(float f) {
  const uint32_t u = __float_as_uint(f);
  return f != f ? 0x7fc0 : (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
DC_GPU float up_f16(uint16_t h) { return __half2float(__ushort_as_half(h)); }
DC_GPU uint16_t down_f16(float f) { return f != f ? 0x7e00 : __half_as_ushort(__float2half_rn(f)); }

// fp32 arithmetic of a reduction, in the order of ops/ref/reduce.c. The comparisons are spelled out: fminf drops a NaN.
struct Float32Steps {
  typedef float wide;
  static DC_GPU float step(int op, float a, float b) {
    switch (op) {
    case DC_RED_MIN: return a != a || a < b ? a : b;
    case DC_RED_MAX: return a != a || a > b ? a : b;
    case DC_RED_PROD: return __fmul_rn(a, b);
    default: return __fadd_rn(a, b);
    }
  }
  static DC_GPU float times(float s, double share) { return __fmul_rn(s, (float)share); }
};

struct F32 : Float32Steps {
  typedef float stored;
  static DC_GPU float up(float f) { return f; }
  static DC_GPU float down(float f) { return canonical(f); }
};
struct BF16 : Float32Steps {
  typedef uint16_t stored;
  static constexpr bool brain = true;
  static DC_GPU float up(uint16_t h) { return up_bf16(h); }
  static DC_GPU uint16_t down(float f) { return down_bf16(f); }
};
struct F16 : Float32Steps {
  typedef uint16_t stored;
  static constexpr bool brain = false;
  static DC_GPU float up(uint16_t h) { return up_f16(h); }
  static DC_GPU uint16_t down(float f) { return down_f16(f); }
};
// Two elements of T in a register, the first in the lower half, rounded to nearest even; of a NaN some NaN.
template <class T> DC_GPU uint32_t pair_of(float low, float high) {
#if defined(__CUDACC__)
  uint32_t pair;
  if constexpr (T::brain) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return (uint32_t)T::down(low) | (uint32_t)T::down(high) << 16;
#endif
}
// T::down of V elements, aligned to all of them: of 16 bits two at a time, which is a third of the work.
template <class T, int V> DC_GPU void down_all(typename T::stored *to, const float *from) {
  bool odd = !(sizeof(typename T::stored) == 2 && V % 2 == 0);
  if constexpr (sizeof(typename T::stored) == 2 && V % 2 == 0) {
    DC_UNROLL
    for (int j = 0; j < V; j += 2) {
      const uint32_t pair = pair_of<T>(from[j], from[j + 1]);
      to[j] = (uint16_t)pair, to[j + 1] = (uint16_t)(pair >> 16);
      odd = odd || from[j] != from[j] || from[j + 1] != from[j + 1]; // a NaN, which has bits of its own here
    }
  }
  if (odd) {
    DC_UNROLL
    for (int j = 0; j < V; j++) to[j] = T::down(from[j]);
  }
}
// Calls f(tag) with the type of a floating dtype that was checked before; on the host.
template <class F> auto with_low(int dt, F f) {
  switch (dt) {
  case DC_F32: return f(F32());
  case DC_BF16: return f(BF16());
  default: return f(F16());
  }
}
struct F64 {
  typedef double stored, wide;
  static DC_GPU double up(double d) { return d; }
  static DC_GPU double down(double d) { return canonical(d); }
  static DC_GPU double step(int op, double a, double b) {
    switch (op) {
    case DC_RED_MIN: return a != a || a < b ? a : b;
    case DC_RED_MAX: return a != a || a > b ? a : b;
    case DC_RED_PROD: return __dmul_rn(a, b);
    default: return __dadd_rn(a, b);
    }
  }
  static DC_GPU double times(double s, double share) { return __dmul_rn(s, share); }
};
// Integers wrap around, through the unsigned 64-bit type.
template <class I> struct Int {
  typedef I stored, wide;
  static DC_GPU I up(I i) { return i; }
  static DC_GPU I down(I i) { return i; }
  static DC_GPU I step(int op, I a, I b) {
    switch (op) {
    case DC_RED_MIN: return a < b ? a : b;
    case DC_RED_MAX: return a > b ? a : b;
    case DC_RED_PROD: return (I)((uint64_t)a * (uint64_t)b);
    case DC_RED_BAND: return (I)(a & b);
    case DC_RED_BOR: return (I)(a | b);
    case DC_RED_BXOR: return (I)(a ^ b);
    default: return (I)((uint64_t)a + (uint64_t)b);
    }
  }
  static DC_GPU I times(I s, double) { return s; } // the launcher refuses averages of integers
};

// Elements of a vector when the widest array moves 16 bytes at a time.
template <class A, class B> constexpr int vector_width() {
  const int a = (int)sizeof(typename A::stored), b = (int)sizeof(typename B::stored);
  return 16 / (a > b ? a : b);
}

// ---- cast, scale, axpy ---------------------------------------------------------------------------------------------
template <class D, class S, int V>
DC_GPU void cast(typename D::stored *dst, const typename S::stored *src, float scale, int64_t n, int64_t thread,
                 int64_t threads) {
  for_each<V>(n, thread, threads, [=](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<typename S::stored, W> in = load<typename S::stored, W>(src + i);
    Pack<typename D::stored, W> out;
    float x[W];
    DC_UNROLL
    for (int j = 0; j < W; j++) x[j] = __fmul_rn(scale, S::up(in.x[j]));
    down_all<D, W>(out.x, x);
    store<typename D::stored, W>(dst + i, out);
  });
}

template <class X, int V>
DC_GPU void axpy(float *y, float a, const typename X::stored *x, int64_t n, int64_t thread, int64_t threads) {
  for_each<V>(n, thread, threads, [=](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    const Pack<typename X::stored, W> in = load<typename X::stored, W>(x + i);
    Pack<float, W> sum = load<float, W>(y + i);
    DC_UNROLL
    for (int j = 0; j < W; j++) sum.x[j] = canonical(__fmaf_rn(a, X::up(in.x[j]), sum.x[j]));
    store<float, W>(y + i, sum);
  });
}

// ---- sums of many accumulators (ops.h: 32 of fp64 a block, fused.h: 64 of fp32 a row) ------------------------------
// Element i goes to accumulator i % A. A thread loads 16 bytes at a time: V neighbours, which have V neighbouring
// accumulators of their own; so A / V threads, "lanes", share a block or a row. Lane t has elements t * V + A * k on.
enum { BLOCK_SUMS = 32, ROW_SUMS = 64 };
template <class T, int A> struct Lane {
  static constexpr int width = 16 / (int)sizeof(typename T::stored), count = A / width;
};

// V elements in fp32, aligned to all of them.
template <class T, int V> DC_GPU void get_whole(float *to, const typename T::stored *p) {
  typename T::stored raw[V];
  load_wide<typename T::stored, V>(raw, p);
  DC_UNROLL
  for (int j = 0; j < V; j++) to[j] = T::up(raw[j]);
}
// Elements [i, i + V) of n in fp32, zero past the end; in vectors where WIDE says that p + i is aligned for them.
template <class T, int V, bool WIDE> DC_GPU void get(float *to, const typename T::stored *p, int64_t i, int64_t n) {
  if (WIDE && i + V <= n) get_whole<T, V>(to, p + i);
  else {
    DC_UNROLL
    for (int j = 0; j < V; j++) to[j] = i + j < n ? T::up(p[i + j]) : 0.0f;
  }
}
template <class T, int V, bool WIDE> DC_GPU void put(typename T::stored *p, int64_t i, int64_t n, const float *from) {
  typename T::stored raw[V];
  down_all<T, V>(raw, from);
  if (WIDE && i + V <= n) {
    store_wide<typename T::stored, V>(p + i, raw);
  } else {
    DC_UNROLL
    for (int j = 0; j < V; j++)
      if (i + j < n) p[i + j] = raw[j];
  }
}

// Several vectors of a row at once, ROW_SUMS elements apart: all loads are under way before the first is used, which a
// compiler can't arrange over a branch or a store. Where Ahead<T, WIDE>::fits says no, `get` has the elements.
enum { AHEAD = 4 };
template <class T, bool WIDE> struct Ahead {
  static constexpr int V = Lane<T, ROW_SUMS>::width;
  typename T::stored raw[AHEAD][V];
  static DC_GPU bool fits(int64_t i, int64_t n) { return WIDE && i + (AHEAD - 1) * ROW_SUMS + V <= n; }
  DC_GPU void load(const typename T::stored *p) {
    DC_UNROLL
    for (int b = 0; b < AHEAD; b++) load_wide<typename T::stored, V>(raw[b], p + b * ROW_SUMS);
  }
  DC_GPU void get(float *to, int b) const {
    DC_UNROLL
    for (int j = 0; j < V; j++) to[j] = T::up(raw[b][j]);
  }
};

DC_GPU float plus(float a, float b) { return __fadd_rn(a, b); }
DC_GPU double plus(double a, double b) { return __dadd_rn(a, b); }

// The tree of ops.h over the V accumulators of each of L lanes; the sum is lane 0's x[0]. down(v, k): the v of the lane
// that is k further; every lane makes the same calls.
template <int V, int L, class N, class Down> DC_GPU N lane_tree(N *x, Down down) {
  constexpr int A = V * L, SIXTEEN = 16 / V; // lanes of 16 accumulators
  static_assert(A == 16 || A == 32 || A == 64, "as ops.h and fused.h say");
  DC_UNROLL
  for (int further = SIXTEEN; further < L; further *= 2) {
    DC_UNROLL
    for (int j = 0; j < V; j++) x[j] = plus(x[j], down(x[j], further));
  }
  DC_UNROLL
  for (int width = 8; width >= V; width /= 2) {
    DC_UNROLL
    for (int j = 0; j < V; j++) x[j] = plus(x[j], down(x[j], width / V));
  }
  DC_UNROLL
  for (int width = V / 2; width > 0; width /= 2) {
    DC_UNROLL
    for (int j = 0; j < width; j++) x[j] = plus(x[j], x[j + width]);
  }
  return x[0];
}

// Elements of `block`; 0 or less past the end.
DC_GPU int64_t block_length(int64_t n, int64_t block) {
  const int64_t left = n - block * DC_BLOCK;
  return left < DC_BLOCK ? left : DC_BLOCK;
}

// The square of an fp32 is exact in fp64, so the fused form has the bits of the separate one.
DC_GPU double add_square(double sum, float f) { return __fma_rn((double)f, (double)f, sum); }

// sum[Lane<T, BLOCK_SUMS>::width]: this lane's accumulators of `block`.
template <class T, bool WIDE>
DC_GPU void sqnorm_lane(double *sum, const typename T::stored *x, int64_t n, int64_t block, int lane) {
  constexpr int V = Lane<T, BLOCK_SUMS>::width;
  const int64_t length = block_length(n, block);
  const typename T::stored *p = x + block * DC_BLOCK;
  DC_UNROLL
  for (int j = 0; j < V; j++) sum[j] = 0.0;
  DC_UNROLL_8
  for (int64_t i = lane * V; i < length; i += BLOCK_SUMS) {
    float f[V];
    get<T, V, WIDE>(f, p, i, length);
    DC_UNROLL
    for (int j = 0; j < V; j++) sum[j] = add_square(sum[j], f[j]);
  }
}

// ---- reductions over arrays ----------------------------------------------------------------------------------------
// The source pointers travel as a kernel parameter: 64 bytes for up to 8 sources, what a parameter may hold for more.
template <int CAPACITY> struct Sources {
  const void *p[CAPACITY];
};
// More than that: in device memory.
struct SourceList {
  const void *const *p;
};
// Parameters of a kernel beyond 4 KiB need a driver of 530 or later; deepc's kernels run on 525.
enum { PARAMETER_BYTES = 4096, FEW_SOURCES = 8, MANY_SOURCES = 500 };
static_assert(sizeof(Sources<MANY_SOURCES>) + 64 <= PARAMETER_BYTES, "the other parameters need room too");

template <class T, int V, class Src>
DC_GPU void reduce(typename T::stored *dst, const Src &src, int nsrc, int op, double share, int64_t n, int64_t thread,
                   int64_t threads) {
  typedef typename T::stored stored;
  for_each<V>(n, thread, threads, [=, &src](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    typename T::wide sum[W];
    Pack<stored, W> in = load<stored, W>(static_cast<const stored *>(src.p[0]) + i);
    DC_UNROLL
    for (int j = 0; j < W; j++) sum[j] = T::up(in.x[j]);
    for (int k = 1; k < nsrc; k++) {
      in = load<stored, W>(static_cast<const stored *>(src.p[k]) + i);
      DC_UNROLL
      for (int j = 0; j < W; j++) sum[j] = T::step(op, sum[j], T::up(in.x[j]));
    }
    Pack<stored, W> out;
    DC_UNROLL
    for (int j = 0; j < W; j++) out.x[j] = T::down(op == DC_RED_AVG ? T::times(sum[j], share) : sum[j]);
    store<stored, W>(dst + i, out);
  });
}

template <class S, int V, class Src>
DC_GPU void reduce_acc(float *acc, const Src &src, int nsrc, int assign, int64_t n, int64_t thread, int64_t threads) {
  typedef typename S::stored stored;
  for_each<V>(n, thread, threads, [=, &src](auto width, int64_t i) {
    constexpr int W = decltype(width)::value;
    Pack<float, W> sum;
    Pack<stored, W> in = load<stored, W>(static_cast<const stored *>(src.p[0]) + i);
    DC_UNROLL
    for (int j = 0; j < W; j++) sum.x[j] = S::up(in.x[j]);
    for (int k = 1; k < nsrc; k++) {
      in = load<stored, W>(static_cast<const stored *>(src.p[k]) + i);
      DC_UNROLL
      for (int j = 0; j < W; j++) sum.x[j] = __fadd_rn(sum.x[j], S::up(in.x[j]));
    }
    if (!assign) {
      const Pack<float, W> old = load<float, W>(acc + i);
      DC_UNROLL
      for (int j = 0; j < W; j++) sum.x[j] = __fadd_rn(old.x[j], sum.x[j]);
    }
    DC_UNROLL
    for (int j = 0; j < W; j++) sum.x[j] = canonical(sum.x[j]);
    store<float, W>(acc + i, sum);
  });
}

// The same for one lane of one block, with the lane's sums of squares. Two packs at a time: the compiler can't move
// loads of the sources above the stores to acc, so we do.
template <class S, bool WIDE, class Src>
DC_GPU void reduce_acc_lane(double *square, float *acc, const Src &src, int nsrc, int assign, int64_t n, int64_t block,
                            int lane) {
  constexpr int V = Lane<S, BLOCK_SUMS>::width, BATCH = 2;
  typedef typename S::stored stored;
  const int64_t length = block_length(n, block), base = block * DC_BLOCK;
  DC_UNROLL
  for (int j = 0; j < V; j++) square[j] = 0.0;
  for (int64_t first = lane * V; first < length; first += BATCH * BLOCK_SUMS) {
    float sum[BATCH][V], next[V];
    for (int k = 0; k < nsrc; k++) {
      const stored *p = static_cast<const stored *>(src.p[k]) + base;
      DC_UNROLL
      for (int b = 0; b < BATCH; b++) {
        get<S, V, WIDE>(next, p, first + b * BLOCK_SUMS, length);
        DC_UNROLL
        for (int j = 0; j < V; j++) sum[b][j] = k == 0 ? next[j] : __fadd_rn(sum[b][j], next[j]);
      }
    }
    DC_UNROLL
    for (int b = 0; b < BATCH; b++) {
      const int64_t i = first + b * BLOCK_SUMS;
      if (i >= length) break;
      if (!assign) {
        get<F32, V, WIDE>(next, acc + base, i, length);
        DC_UNROLL
        for (int j = 0; j < V; j++) sum[b][j] = __fadd_rn(next[j], sum[b][j]);
      }
      put<F32, V, WIDE>(acc + base, i, length, sum[b]);
      DC_UNROLL
      for (int j = 0; j < V; j++) square[j] = add_square(square[j], canonical(sum[b][j])); // past the end: zero
    }
  }
}

// ---- AdamW: many tensors of any dtypes in one launch; a chunk of one tensor per CUDA block -------------------------
enum { ADAMW_CHUNK = 4096, ADAMW_WIDTH = 4, ADAMW_TENSORS = 37 };

struct AdamwTensor {
  void *param;
  const void *grad;
  void *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *lowp; // the last two may be NULL
  int64_t n;
  dc__adamw_coef coef;
  int8_t param_dtype, grad_dtype, state_dtype, lowp_dtype;
  int32_t vectors; // every array is aligned to ADAMW_WIDTH of its elements
};

// What a launch takes of many tensors. Chunks of tensor t are blocks [first[t], first[t + 1]) of the grid; every tensor
// of the table has one at least.
template <class Tensor, int TENSORS> struct TensorTable {
  Tensor tensor[TENSORS];
  int32_t first[TENSORS + 1];
  int32_t count;
};
typedef TensorTable<AdamwTensor, ADAMW_TENSORS> AdamwTable;
static_assert(sizeof(AdamwTable) <= PARAMETER_BYTES, "fewer tensors a launch");

// The tensor of a table that block `block` of the grid belongs to.
template <class Table> DC_GPU int adamw_find(const Table &table, int32_t block) {
  int lo = 0, hi = table.count - 1;
  while (lo < hi) {
    const int mid = (lo + hi + 1) / 2;
    if (table.first[mid] <= block) lo = mid;
    else hi = mid - 1;
  }
  return lo;
}

// W elements as they lie in memory. Loading and unpacking are apart, so that all loads are under way before the first
// is used.
template <int W> struct Raw {
  Pack<float, W> wide;      // fp32
  Pack<uint16_t, W> narrow; // bf16, fp16
};

template <int W> DC_GPU Raw<W> load_raw(const void *p, int dtype, int64_t i) {
  Raw<W> raw;
  if (dtype == DC_F32) raw.wide = load<float, W>(static_cast<const float *>(p) + i);
  else raw.narrow = load<uint16_t, W>(static_cast<const uint16_t *>(p) + i);
  return raw;
}

template <int W> DC_GPU void unpack(float *to, const Raw<W> &raw, int dtype) {
  DC_UNROLL
  for (int j = 0; j < W; j++)
    to[j] = dtype == DC_F32 ? raw.wide.x[j] : dtype == DC_BF16 ? up_bf16(raw.narrow.x[j]) : up_f16(raw.narrow.x[j]);
}

template <int W> DC_GPU void store_as(void *p, int dtype, int64_t i, const float *from) {
  if (dtype == DC_F32) {
    Pack<float, W> out;
    DC_UNROLL
    for (int j = 0; j < W; j++) out.x[j] = canonical(from[j]);
    store<float, W>(static_cast<float *>(p) + i, out);
  } else {
    Pack<uint16_t, W> out;
    DC_UNROLL
    for (int j = 0; j < W; j++) out.x[j] = dtype == DC_BF16 ? down_bf16(from[j]) : down_f16(from[j]);
    store<uint16_t, W>(static_cast<uint16_t *>(p) + i, out);
  }
}

template <int W> DC_GPU void adamw_elements(const AdamwTensor &t, int64_t i) {
  const Raw<W> raw_p = load_raw<W>(t.param, t.param_dtype, i), raw_g = load_raw<W>(t.grad, t.grad_dtype, i);
  const Raw<W> raw_m = load_raw<W>(t.exp_avg, t.state_dtype, i), raw_v = load_raw<W>(t.exp_avg_sq, t.state_dtype, i);
  float p[W], g[W], m[W], v[W];
  unpack<W>(p, raw_p, t.param_dtype);
  unpack<W>(g, raw_g, t.grad_dtype);
  unpack<W>(m, raw_m, t.state_dtype);
  unpack<W>(v, raw_v, t.state_dtype);
  const dc__adamw_coef &c = t.coef;
  DC_UNROLL
  for (int j = 0; j < W; j++) {
    float grad = __fmul_rn(c.grad_scale, g[j]);
    if (c.l2 != 0.0f) grad = __fmaf_rn(c.l2, p[j], grad);
    p[j] = __fmul_rn(p[j], c.decay);
    m[j] = __fmaf_rn(c.one_minus_b1, __fsub_rn(grad, m[j]), m[j]);
    v[j] = __fmaf_rn(c.one_minus_b2, __fmul_rn(grad, grad), __fmul_rn(c.b2, v[j]));
  }
  store_as<W>(t.exp_avg, t.state_dtype, i, m);
  store_as<W>(t.exp_avg_sq, t.state_dtype, i, v);
  if (t.max_exp_avg_sq) {
    float largest[W];
    unpack<W>(largest, load_raw<W>(t.max_exp_avg_sq, t.state_dtype, i), t.state_dtype);
    DC_UNROLL
    for (int j = 0; j < W; j++) v[j] = Float32Steps::step(DC_RED_MAX, largest[j], v[j]);
    store_as<W>(t.max_exp_avg_sq, t.state_dtype, i, v);
  }
  DC_UNROLL
  for (int j = 0; j < W; j++) {
    const float denominator = __fmaf_rn(__fsqrt_rn(v[j]), c.inv_sqrt_bc2, c.eps);
    p[j] = __fmaf_rn(c.step_size_neg, __fdiv_rn(m[j], denominator), p[j]);
  }
  store_as<W>(t.param, t.param_dtype, i, p);
  if (t.lowp) store_as<W>(t.lowp, t.lowp_dtype, i, p);
}

// Block `block` of the grid, of which this is thread `thread` of `threads`.
DC_GPU void adamw(const AdamwTable &table, int32_t block, int thread, int threads) {
  const int which = adamw_find(table, block);
  const AdamwTensor &t = table.tensor[which];
  const int64_t begin = (int64_t)(block - table.first[which]) * ADAMW_CHUNK;
  const int64_t left = t.n - begin, length = left < ADAMW_CHUNK ? left : (int64_t)ADAMW_CHUNK;
  if (t.vectors)
    for_each<ADAMW_WIDTH>(length, thread, threads,
                          [&, begin](auto width, int64_t i) { adamw_elements<decltype(width)::value>(t, begin + i); });
  else for_each<1>(length, thread, threads, [&, begin](auto, int64_t i) { adamw_elements<1>(t, begin + i); });
}

// ---- dc_step: the other rules, in the same way ---------------------------------------------------------------------
enum { STEP_TENSORS = 37 };

struct StepTensor {
  void *param;
  const void *grad;
  void *state, *lowp; // either may be NULL
  int64_t n;
  dc__step_coef coef;
  int8_t param_dtype, grad_dtype, state_dtype, lowp_dtype;
  int8_t rule, nesterov, vectors; // vectors: every array is aligned to ADAMW_WIDTH of its elements
};

typedef TensorTable<StepTensor, STEP_TENSORS> StepTable;
static_assert(sizeof(StepTable) <= PARAMETER_BYTES, "fewer tensors a launch");

// p after the step; s is the rule's state, kept: it has one.
DC_GPU float step_rule(int rule, bool kept, bool nesterov, const dc__step_coef &c, float p, float g, float &s) {
  if (rule == DC_RULE_LION) {
    const float u = __fmaf_rn(c.b1, s, __fmul_rn(c.one_minus_b1, g));
    s = __fmaf_rn(c.b2, s, __fmul_rn(c.one_minus_b2, g));
    return u != u ? u : __fadd_rn(__fmul_rn(p, c.decay), u == 0.0f ? 0.0f : u < 0.0f ? c.rate : -c.rate);
  }
  if (c.l2 != 0.0f) g = __fmaf_rn(c.l2, p, g);
  if (rule == DC_RULE_ADAGRAD) {
    s = __fadd_rn(s, __fmul_rn(g, g));
    return __fadd_rn(p, __fdiv_rn(__fmul_rn(c.rate, g), __fadd_rn(__fsqrt_rn(s), c.eps)));
  }
  if (kept) {
    s = __fmaf_rn(c.one_minus_b2, g, __fmul_rn(c.b1, s));
    g = nesterov ? __fmaf_rn(c.b1, s, g) : s;
  }
  return __fmaf_rn(c.rate, g, p);
}

template <int W> DC_GPU void step_elements(const StepTensor &t, int64_t i) {
  const Raw<W> raw_p = load_raw<W>(t.param, t.param_dtype, i), raw_g = load_raw<W>(t.grad, t.grad_dtype, i);
  float p[W], g[W], s[W] = {};
  if (t.state) unpack<W>(s, load_raw<W>(t.state, t.state_dtype, i), t.state_dtype);
  unpack<W>(p, raw_p, t.param_dtype);
  unpack<W>(g, raw_g, t.grad_dtype);
  DC_UNROLL
  for (int j = 0; j < W; j++)
    p[j] = step_rule(t.rule, t.state, t.nesterov, t.coef, p[j], __fmul_rn(t.coef.grad_scale, g[j]), s[j]);
  if (t.state) store_as<W>(t.state, t.state_dtype, i, s);
  store_as<W>(t.param, t.param_dtype, i, p);
  if (t.lowp) store_as<W>(t.lowp, t.lowp_dtype, i, p);
}

DC_GPU void step(const StepTable &table, int32_t block, int thread, int threads) {
  const int which = adamw_find(table, block);
  const StepTensor &t = table.tensor[which];
  const int64_t begin = (int64_t)(block - table.first[which]) * ADAMW_CHUNK;
  const int64_t left = t.n - begin, length = left < ADAMW_CHUNK ? left : (int64_t)ADAMW_CHUNK;
  if (t.vectors)
    for_each<ADAMW_WIDTH>(length, thread, threads,
                          [&, begin](auto width, int64_t i) { step_elements<decltype(width)::value>(t, begin + i); });
  else for_each<1>(length, thread, threads, [&, begin](auto, int64_t i) { step_elements<1>(t, begin + i); });
}

} // namespace dc_gpu
#endif
