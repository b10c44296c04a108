// attention.cuh: bodies of dc_cuda_attention and its gradient: what the threads of one CUDA block do for one unit of
// work. Compiled as plain C++ too (tests/c/test_cuda_attention.cpp), where block_stand_in.h runs the threads in turn.
//
// A CUDA block has ATT_TILE rows of one side, a warp ATT_RUN of them: queries (forward, dq, dbias) or keys (dk and dv).
// Of the other side it meets ATT_RUNS runs of ATT_RUN rows at a time, a stage: those that at least one of its warps
// sees, wherever they lie. What a layout, causality, a window or groups hide from all four is neither read nor
// computed, and a warp leaves out the runs that its own rows do not see. A run is the inner dimension of one mma.
// Where shared memory has room for two stages the next one comes while this one is computed.
//
// Softmax streams over the stages (Milakov & Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135). Scores of 16
// bits are products of tensor cores with sums in fp32; probabilities and ds are rounded to 16 bits before they meet v,
// dout, q or k. fp32 is fused multiply-adds throughout. Threads hold scores as mma has its results, in both cases.
#ifndef DEEPC_CUDA_ATTENTION_CUH
#define DEEPC_CUDA_ATTENTION_CUH

#include "cuda/fused.cuh"
#include "cuda/warp.cuh"
#include "ref/philox.h"

namespace dc_gpu {

enum { ATT_THREADS = 128, ATT_TILE = 64, ATT_RUN = 16, ATT_RUNS = ATT_TILE / ATT_RUN };
enum { ATT_AHEAD = 2 * ATT_THREADS }; // runs that are looked at together
enum { ATT_NONE = 1 << 30 }; // the first row of no run: behind the last of every array
enum { ATT_SUMS = 128, ATT_P_PITCH = ATT_TILE + 4 }; // columns of a result at most, in a unit; see AttPlan
#define ATT_LOG2E 1.44269504088896341f
#define ATT_LOWEST (-268435456.0f) // -2^28 and 2^30: see ref/attention.h
#define ATT_HIGHEST 1073741824.0f

// ---- what is seen --------------------------------------------------------------------------------------------------
struct AttSight { // of one head
  const uint8_t *layout; // NULL: all blocks
  const int32_t *q_group, *k_group; // NULL: one group
  const void *bias;
  int64_t bias_at, bias_row, far; // elements; far: the diagonal
  int across, rows, keys, diagonal, window, bias_dtype; // across: blocks of keys
  uint32_t inverse; // of the runs in a block, times 2^32; 0: one
  bool causal, sloped;
  float slope, unit; // in units of scores before they are scaled
  uint32_t key[2], who[2], threshold; // dropout: see ref/attention.h
  float kept; // the share that dropout keeps
};

// PLAIN: a layout and causality are all that there is (att_plain), so that the compiler leaves out the rest.
template <bool PLAIN, class Args> DC_GPU AttSight att_sight(const Args &a, uint32_t threshold, int64_t b, int64_t h) {
  const dc_attention_mask &m = a.mask;
  const int64_t least = -((int64_t)1 << 30), most = (int64_t)1 << 30; // beyond all rows, keys and windows
  AttSight s;
  s.rows = (int)a.rows, s.keys = (int)a.keys, s.far = a.diagonal;
  s.diagonal = (int)(a.diagonal < least ? least : a.diagonal > most ? most : a.diagonal);
  s.causal = a.causal != 0, s.window = (int)m.window;
  const int block = m.layout ? (int)m.block : (int)ATT_RUN;
  s.across = (s.keys + block - 1) / block,
  s.inverse = block == ATT_RUN ? 0 : 0xffffffffu / (uint32_t)(block / ATT_RUN) + 1;
  const int64_t of_head = m.layout_heads == 1 ? 0 : h;
  s.layout = m.layout ? m.layout + of_head * ((s.rows + block - 1) / block) * s.across : nullptr;
  s.q_group = m.q_group ? m.q_group + b * a.rows : nullptr;
  s.k_group = m.k_group ? m.k_group + b * a.keys : nullptr;
  s.sloped = m.slope != nullptr;
  s.slope = m.slope ? __fdiv_rn(m.slope[h], a.scale) : 0.0f, s.unit = __frcp_rn(a.scale);
  s.bias = m.bias, s.bias_dtype = m.bias_dtype, s.bias_row = m.bias_stride[2];
  s.bias_at = b * m.bias_stride[0] + h * m.bias_stride[1];
  s.key[0] = (uint32_t)m.dropout.seed, s.key[1] = (uint32_t)(m.dropout.seed >> 32);
  s.who[0] = (uint32_t)(m.dropout.head + h), s.who[1] = (uint32_t)(m.dropout.batch + b);
  s.threshold = threshold, s.kept = (float)(65536 - (int)threshold) / 65536.0f;
  if constexpr (PLAIN) {
    s.q_group = s.k_group = nullptr, s.bias = nullptr, s.sloped = false, s.window = 0;
    s.threshold = 0, s.kept = 1.0f;
  }
  return s;
}
template <class Args> bool att_plain(const Args &a) { // on the host
  const dc_attention_mask &m = a.mask;
  return !m.q_group && !m.slope && !m.bias && m.window == 0 && dc__philox_threshold(m.dropout.rate) == 0;
}

enum AttPart { ATT_HIDDEN, ATT_SOME, ATT_WHOLE };
DC_GPU void att_span(const int32_t *group, int begin, int end, int *low, int *high) {
  *low = *high = group[begin];
  for (int i = begin + 1; i < end; i++) {
    *low = group[i] < *low ? group[i] : *low;
    *high = group[i] > *high ? group[i] : *high;
  }
}
// The number of the layout's block that row or key x, at the beginning of a run, is in.
DC_GPU int att_block_of(const AttSight &s, int x) {
  const uint32_t run = (uint32_t)x / ATT_RUN;
  return (int)(s.inverse ? high_half(run, s.inverse) : run);
}
// Whether there are queries [i, i + ATT_RUN) and keys [j, j + ATT_RUN), and the layout shows them to each other.
DC_GPU bool att_shown(const AttSight &s, int i, int j) {
  if (i >= s.rows || j >= s.keys) return false;
  return !s.layout || s.layout[(int64_t)att_block_of(s, i) * s.across + att_block_of(s, j)];
}
// Of queries [i, i + ATT_RUN) and keys [j, j + ATT_RUN) that are shown.
DC_GPU int att_part(const AttSight &s, int i, int j) {
  const int first = i + s.diagonal, last = first + ATT_RUN - 1, j_last = j + ATT_RUN - 1;
  if (s.causal && j > last) return ATT_HIDDEN;
  if (s.window && j_last <= first - s.window) return ATT_HIDDEN;
  int part = j_last < s.keys && i + ATT_RUN <= s.rows ? ATT_WHOLE : ATT_SOME;
  if ((s.causal && j_last > first) || (s.window && j <= last - s.window)) part = ATT_SOME;
  if (!s.q_group) return part;
  int q_low, q_high, k_low, k_high;
  att_span(s.q_group, i, i + ATT_RUN < s.rows ? i + ATT_RUN : s.rows, &q_low, &q_high);
  att_span(s.k_group, j, j_last < s.keys ? j_last + 1 : s.keys, &k_low, &k_high);
  if (q_low > k_high || k_low > q_high) return ATT_HIDDEN;
  return q_low == q_high && k_low == k_high ? part : (int)ATT_SOME;
}
// In a block that is not hidden.
DC_GPU bool att_visible(const AttSight &s, int i, int j) {
  if (i >= s.rows || j >= s.keys || (s.causal && j > i + s.diagonal)) return false;
  if (s.window && j <= i + s.diagonal - s.window) return false;
  return !s.q_group || s.q_group[i] == s.k_group[j];
}
// Score x of query i and key j with its biases.
DC_GPU float att_biased(const AttSight &s, float x, int i, int j) {
  if (s.bias) {
    const int64_t at = s.bias_at + i * s.bias_row + j;
    if (s.bias_dtype != DC_U8) x = __fmaf_rn(read(s.bias, s.bias_dtype, at), s.unit, x);
    else if (static_cast<const uint8_t *>(s.bias)[at] == 0) x = -INFINITY;
  }
  return s.sloped ? __fmaf_rn(s.slope, __fsub_rn((float)j, (float)(i + s.far)), x) : x;
}

// Philox4x32-10 of counter (j8, i): bit k: dropout keeps query i's probability of key 8 * j8 + k.
DC_GPU uint32_t att_keeps(const AttSight &s, int j8, int i) {
  uint32_t c[4] = {(uint32_t)j8, (uint32_t)i, s.who[0], s.who[1]}, k0 = s.key[0], k1 = s.key[1], bits = 0;
  DC_UNROLL
  for (int r = 0; r < DC__PHILOX_ROUNDS; r++) {
    const uint32_t high_a = high_half(DC__PHILOX_M0, c[0]), low_a = DC__PHILOX_M0 * c[0];
    const uint32_t high_b = high_half(DC__PHILOX_M1, c[2]), low_b = DC__PHILOX_M1 * c[2];
    c[0] = high_b ^ c[1] ^ k0, c[1] = low_b, c[2] = high_a ^ c[3] ^ k1, c[3] = low_a;
    k0 += DC__PHILOX_W0, k1 += DC__PHILOX_W1;
  }
  DC_UNROLL
  for (int w = 0; w < 4; w++) {
    bits |= (uint32_t)((c[w] & 0xffffu) >= s.threshold) << (2 * w);
    bits |= (uint32_t)((c[w] >> 16) >= s.threshold) << (2 * w + 1);
  }
  return bits;
}

// ---- shared memory -------------------------------------------------------------------------------------------------
// Operands of a product over `dim`: left (the block's own rows) and right (a stage's), pieces of `width` columns. Where
// shared memory has room for all columns (whole), the own rows stay there. Results have at most ATT_SUMS columns a
// unit, for registers; `groups` units make the scores of one tile, each for itself, where dim is above that.
struct AttPlan {
  int64_t units, heads, tiles;
  int width, pitch, groups, sums, sums_pitch; // sums: the columns of a result; pitches in elements
  int left[2], right[2], operand, p, bytes; // where they lie; left and right of one product or of two
  int next; // of what a stage has: so many bytes on lies the other stage's; 0: there is one
  uint32_t threshold;
  bool whole, wide, wide_out; // wide: rows may be read, or written, 16 bytes at a time
};
struct AttRuns {
  uint32_t mask[ATT_AHEAD / WARP]; // of candidates: whether something is seen
  uint32_t part[ATT_AHEAD]; // of those of which something is: what the four warps see, a byte each
  int first[ATT_AHEAD], count; // and their first rows
  float lse[2][ATT_TILE], delta[2][ATT_TILE]; // of the queries of two stages (dk and dv), or sums (dbias)
};
enum { ATT_RUNS_BYTES = (sizeof(AttRuns) + 127) / 128 * 128 };
// Bytes of shared memory that a block may have, and that two blocks on one processor have each. Defaults: what every
// GPU from sm_80 on gives.
struct AttRoom {
  int most = 96 << 10, half = 48 << 10;
};

enum AttKind { ATT_FORWARD, ATT_DQ, ATT_DKV, ATT_DBIAS };
inline AttPlan att_plan(AttKind kind, int64_t own_rows, int64_t heads, int64_t dim, int size,
                        AttRoom room) { // on the host
  AttPlan p = {};
  const int columns = dim <= 64 ? 64 : dim <= 128 ? 128 : 256, pad = 16 / size, products = kind == ATT_FORWARD ? 1 : 2;
  p.sums = columns < ATT_SUMS ? columns : (int)ATT_SUMS, p.sums_pitch = p.sums + pad;
  p.groups = kind == ATT_DBIAS ? 1 : columns / p.sums;
  for (int depth = kind == ATT_DBIAS ? 1 : 2; depth >= 0; depth--) { // stages at a time; 0: pieces of columns
    int at = ATT_RUNS_BYTES;
    const auto take = [&at](int bytes) {
      const int begin = at;
      at += bytes;
      return begin;
    };
    p.whole = depth > 0, p.width = p.whole ? columns : 64, p.pitch = p.width + pad;
    const int tile = ATT_TILE * p.pitch * size, sums = ATT_TILE * p.sums_pitch * size;
    for (int k = 0; k < 2; k++) p.left[k] = k == 0 || (p.whole && k < products) ? take(tile) : p.left[0];
    if (size == 4 && kind != ATT_DBIAS) p.p = take(ATT_TILE * ATT_P_PITCH * 4);
    const int stage = at;
    for (int k = 0; k < 2; k++) p.right[k] = k == 0 || (p.whole && k < products) ? take(tile) : p.right[0];
    if (kind == ATT_FORWARD || (!p.whole && kind != ATT_DBIAS)) p.operand = take(sums);
    p.next = depth == 2 ? at - stage : 0;
    p.bytes = at + p.next;
    if (p.bytes <= (depth == 2 ? room.half : room.most)) break;
  }
  p.heads = heads, p.tiles = (own_rows + ATT_TILE - 1) / ATT_TILE;
  p.units = p.tiles * heads * p.groups;
  return p;
}
// Whether rows may be read or written 16 bytes at a time.
inline bool att_wide(const void *p, const int64_t *stride, int64_t dim, int size) {
  const int64_t all = stride[0] | stride[1] | stride[2] | dim;
  return (uintptr_t)p % 16 == 0 && all * size % 16 == 0;
}
// What is the same of both calls; `size` gets the bytes of an element.
template <class Args> AttPlan att_plan_of(AttKind kind, const Args &a, int *size, AttRoom room) {
  const bool keys = kind == ATT_DKV;
  *size = a.dtype == DC_F32 ? 4 : 2;
  AttPlan p = att_plan(kind, keys ? a.keys : a.rows, keys ? a.kv_heads : a.heads, a.dim, *size, room);
  p.units *= a.batch, p.threshold = (uint32_t)dc__philox_threshold(a.mask.dropout.rate);
  p.wide = att_wide(a.q, a.q_stride, a.dim, *size) && att_wide(a.k, a.k_stride, a.dim, *size) &&
           att_wide(a.v, a.v_stride, a.dim, *size);
  return p;
}
inline AttPlan att_forward_plan(const dc_attention_args &a, AttRoom room) {
  int size;
  AttPlan p = att_plan_of(ATT_FORWARD, a, &size, room);
  p.wide_out = att_wide(a.out, a.out_stride, a.dim, size);
  return p;
}
inline AttPlan att_grad_plan(AttKind kind, const dc_attention_grad_args &a, AttRoom room) {
  int size;
  AttPlan p = att_plan_of(kind, a, &size, room);
  const bool keys = kind == ATT_DKV;
  p.wide = p.wide && att_wide(a.dout, a.dout_stride, a.dim, size);
  p.wide_out = keys ? att_wide(a.dk, a.dk_stride, a.dim, size) && att_wide(a.dv, a.dv_stride, a.dim, size)
                    : att_wide(a.dq, a.dq_stride, a.dim, size);
  return p;
}
template <class S> DC_GPU S *att_at(char *room, int at) { return reinterpret_cast<S *>(room + at); }
// Of fp32: where this warp's probabilities lie while they are multiplied.
DC_GPU float *att_room_of_p(char *room, const AttPlan &plan) {
  return att_at<float>(room, plan.p) + block_thread() / WARP * ATT_RUN * ATT_P_PITCH;
}

// Rows of an array, `dim` elements each.
template <class S> struct AttRows {
  const S *at;
  int64_t stride;
  int count, dim;
  bool wide;
};
template <class S>
DC_GPU AttRows<S> att_rows(const void *p, const int64_t *stride, int64_t b, int64_t h, int64_t count, int64_t dim,
                           bool wide) {
  return AttRows<S>{static_cast<const S *>(p) + b * stride[0] + h * stride[1], stride[2], (int)count, (int)dim, wide};
}
DC_GPU int att_round(int n) { return (n + ATT_RUN - 1) / ATT_RUN * ATT_RUN; }
// What all threads have begun to copy is there for all.
DC_GPU void att_here(void) {
  copies_wait();
  block_sync();
}
// Of columns from `column` on: how many are there, at most `most`; whole runs, zeros behind the last.
DC_GPU int att_width(int dim, int column, int most) {
  const int left = att_round(dim) - column;
  return left < 0 ? 0 : left < most ? left : most;
}

// ATT_TILE rows, runs that begin at row first(run) of the array (ATT_NONE: no run), columns from `column` on, come to
// shared memory: they are there after copies_wait, and for others after a barrier. A copy is a handful of instructions:
// they are a large part of all (docs/lab/attention.md).
template <class S, class R>
DC_GPU void att_fill(S *to, int pitch, int width, const AttRows<S> &x, int column, R first) {
  constexpr int V = 16 / (int)sizeof(S);
  int log = 0; // of the vectors across, a power of two: the last ones may have nothing to do
  while (V << log < width) log++;
  const int thread = block_thread(), begin = thread >> log, step = ATT_THREADS >> log;
  const int c = (thread & ((1 << log) - 1)) * V, columns = x.dim - column - c;
  if (c >= width || begin >= ATT_RUN) return;
  const int count = columns > 0 ? x.count : 0;
  const uint32_t stride = (uint32_t)x.stride; // below 2^31: CHECK_ROW_STRIDE
  const S *from = x.at + column + c;
  S *place = to + begin * pitch + c;
  const auto copy = [&](S *at, int row) {
    copy_ahead16(at, from + (row < count ? (uint64_t)(uint32_t)row * stride : 0), row < count);
  };
  if (x.wide && step >= ATT_RUN) { // a thread has one row of each run
    DC_UNROLL
    for (int run = 0; run < ATT_RUNS; run++) copy(place + run * ATT_RUN * pitch, first(run) + begin);
    return;
  }
  for (int run = 0; run < ATT_RUNS; run++)
    for (int r = begin; r < ATT_RUN; r += step) {
      const int row = first(run) + r;
      S *at = place + (run * ATT_RUN + r - begin) * pitch;
      if (x.wide) copy(at, row);
      else
        for (int k = 0; k < V; k++) at[k] = row < count && k < columns ? from[row * x.stride + k] : (S)0;
    }
}

// ---- stages --------------------------------------------------------------------------------------------------------
struct AttStage {
  const int *first; // [ATT_RUNS] rows of the runs, in shared memory, or ATT_NONE
  uint32_t parts; // what this warp sees of each, a byte each
  DC_GPU int part(int run) const { return (int)(parts >> (8 * run) & 255u); }
  DC_GPU int row(int r) const { return first[r / ATT_RUN] + r % ATT_RUN; }
  DC_GPU bool all(void) const { return ((parts - 0x01010101u) & ~parts & 0x80808080u) == 0; } // none is hidden
  DC_GPU bool whole(void) const { return parts == ATT_WHOLE * 0x01010101u; }
};
DC_GPU AttStage att_stage(const AttRuns *runs, int at) {
  const int warp = block_thread() / WARP;
  AttStage t;
  t.first = runs->first + at, t.parts = 0;
  DC_UNROLL
  for (int k = 0; k < ATT_RUNS; k++) t.parts |= (runs->part[at + k] >> (8 * warp) & 255u) << (8 * k);
  return t;
}

// The runs of [begin, begin + ATT_AHEAD), up to `end`, of which the rows from `own` on see something. A thread has one
// candidate of each half.
template <bool TURNED> DC_GPU void att_look(AttRuns *runs, const AttSight &s, int own, int begin, int end) {
  const int thread = block_thread();
  uint32_t seen[2] = {0, 0}, shown = 0; // shown: bit ATT_RUNS * half + warp; all of the layout is under way at once
  DC_UNROLL
  for (int half = 0; half < 2; half++) {
    const int candidate = begin + half * ATT_THREADS + thread, run = candidate * ATT_RUN;
    DC_UNROLL
    for (int warp = 0; warp < ATT_RUNS; warp++) {
      const int mine = own + warp * ATT_RUN;
      const bool yes = candidate < end && (TURNED ? att_shown(s, run, mine) : att_shown(s, mine, run));
      shown |= (uint32_t)yes << (ATT_RUNS * half + warp);
    }
  }
  block_sync(); // the stages before have been read
  DC_UNROLL
  for (int half = 0; half < 2; half++) {
    const int run = (begin + half * ATT_THREADS + thread) * ATT_RUN;
    for (int warp = 0; warp < ATT_RUNS; warp++) {
      const int mine = own + warp * ATT_RUN;
      if (shown >> (ATT_RUNS * half + warp) & 1u)
        seen[half] |= (uint32_t)(TURNED ? att_part(s, run, mine) : att_part(s, mine, run)) << (8 * warp);
    }
    const uint32_t mask = ballot(seen[half] != 0);
    if (thread % WARP == 0) runs->mask[(half * ATT_THREADS + thread) / WARP] = mask;
  }
  block_sync();
  DC_UNROLL
  for (int half = 0; half < 2; half++) {
    const int candidate = half * ATT_THREADS + thread, word = candidate / WARP;
    int at = bits_of(runs->mask[word] & ((1u << thread % WARP) - 1u));
    for (int k = 0; k < word; k++) at += bits_of(runs->mask[k]);
    if (seen[half]) runs->part[at] = seen[half], runs->first[at] = (begin + candidate) * ATT_RUN;
    at += seen[half] != 0;
    if (candidate == ATT_AHEAD - 1) {
      runs->count = at;
      for (; at % ATT_RUNS; at++) runs->part[at] = 0, runs->first[at] = ATT_NONE;
    }
  }
  block_sync();
}

// use(stage, k) for the runs from number `begin` to `end` of which the rows from `own` on see something, after
// load(stage, k) has begun to bring it: what is in place number k, 0 or 1, is there for all threads then. TURNED: the
// runs are of queries, `own` is a key.
template <bool TURNED, class L, class F>
DC_GPU void att_each_stage(AttRuns *runs, const AttPlan &plan, const AttSight &s, int own, int begin, int end, L load,
                           F use) {
  const bool two = plan.next != 0;
  for (int c = begin; c < end; c += ATT_AHEAD) {
    att_look<TURNED>(runs, s, own, c, end);
    const int count = runs->count;
    if (two && count > 0) load(att_stage(runs, 0), 0);
    for (int at = 0, k = 0; at < count; at += ATT_RUNS, k = two && !k) {
      const AttStage t = att_stage(runs, at);
      if (!two) {
        block_sync(); // the stage before has been read
        load(t, 0);
      }
      copies_wait();
      block_sync(); // and the stage before has been read
      if (two && at + ATT_RUNS < count) {
        load(att_stage(runs, at + ATT_RUNS), !k);
        warp_sync(); // lanes with nothing to bring are back first, and products are the whole warp's
      }
      use(t, k);
    }
  }
}
// The runs of keys that queries [i, i + ATT_TILE) may see, by causality and the window; of queries, that may see keys
// [j, j + ATT_TILE).
DC_GPU void att_key_runs(const AttSight &s, int i, int *begin, int *end) {
  const int least = s.window ? i + s.diagonal - s.window + 1 : 0, past = s.causal ? i + ATT_TILE + s.diagonal : s.keys;
  *begin = least > 0 ? least / ATT_RUN : 0;
  *end = past < 0 ? 0 : att_round(past < s.keys ? past : s.keys) / ATT_RUN;
}
DC_GPU void att_query_runs(const AttSight &s, int j, int *begin, int *end) {
  const int least = s.causal ? j - s.diagonal : 0, past = s.window ? j + ATT_TILE - s.diagonal + s.window : s.rows;
  *begin = least > 0 ? least / ATT_RUN : 0;
  *end = past < 0 ? 0 : att_round(past < s.rows ? past : s.rows) / ATT_RUN;
}

// ---- products ------------------------------------------------------------------------------------------------------
// A thread's part of 16 rows and ATT_TILE columns, as mma has it: x[n][e] is column 8 n + 2 q + e % 2 of row g + 8 (e /
// 2).
typedef float AttTile[ATT_TILE / 8][4];

template <int N> DC_GPU void att_clear(float (&x)[N][4]) {
  DC_UNROLL
  for (int n = 0; n < N; n++) {
    DC_UNROLL
    for (int e = 0; e < 4; e++) x[n][e] = 0.0f;
  }
}

// x += left right^T over `width` columns of the two; left: the warp's rows. Runs that the warp does not see stay; ALL:
// there are none.
template <class T, bool ALL>
DC_GPU void att_scores(AttTile &x, const typename T::stored *left, const typename T::stored *right, int pitch,
                       int width, const AttStage &t) {
  const int lane = block_thread() % WARP;
  if constexpr (sizeof(typename T::stored) == 2) {
    const typename T::stored *a_row = left + lane % 16 * pitch + lane / 16 * 8;
    const typename T::stored *b_row = right + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8;
    DC_UNROLL_2
    for (int c = 0; c < width; c += 16) {
      uint32_t a[4], b[4];
      load_matrices<false>(a, a_row + c);
      DC_UNROLL
      for (int run = 0; run < ATT_RUNS; run++) {
        if (!ALL && t.part(run) == ATT_HIDDEN) continue;
        load_matrices<false>(b, b_row + run * ATT_RUN * pitch + c);
        mma<T>(x[2 * run], a, b[0], b[1]);
        mma<T>(x[2 * run + 1], a, b[2], b[3]);
      }
    }
  } else {
    const int g = lane / 4, q = lane % 4;
    for (int c = 0; c < width; c += 4) {
      const Pack<float, 4> a0 = load<float, 4>(left + g * pitch + c), a1 = load<float, 4>(left + (g + 8) * pitch + c);
      DC_UNROLL
      for (int n = 0; n < ATT_TILE / 8; n++) {
        if (!ALL && t.part(n / 2) == ATT_HIDDEN) continue;
        DC_UNROLL
        for (int e = 0; e < 2; e++) {
          const Pack<float, 4> b = load<float, 4>(right + (8 * n + 2 * q + e) * pitch + c);
          DC_UNROLL
          for (int k = 0; k < 4; k++) {
            x[n][e] = __fmaf_rn(a0.x[k], b.x[k], x[n][e]);
            x[n][2 + e] = __fmaf_rn(a1.x[k], b.x[k], x[n][2 + e]);
          }
        }
      }
    }
  }
}

template <class T>
DC_GPU void att_scores(AttTile &x, const typename T::stored *left, const typename T::stored *right, int pitch,
                       int width, const AttStage &t) {
  if (t.all()) att_scores<T, true>(x, left, right, pitch, width, t);
  else att_scores<T, false>(x, left, right, pitch, width, t);
}

// sum += p right, p being 16 rows of ATT_TILE columns; right: ATT_TILE rows, `width` columns. room: of fp32, where the
// warp's p lies meanwhile. ALL: no run is hidden, and right has all columns.
template <class T, int N, bool ALL>
DC_GPU void att_add(float (&sum)[N][4], const AttTile &p, const typename T::stored *right, int pitch, int width,
                    const AttStage &t, float *room) {
  const int lane = block_thread() % WARP;
  warp_sync(); // masks have branched; and what was in `room` has been read
  if constexpr (sizeof(typename T::stored) == 2) {
    const typename T::stored *b_row = right + lane % 16 * pitch + lane / 16 * 8;
    DC_UNROLL
    for (int run = 0; run < ATT_RUNS; run++) {
      if (!ALL && t.part(run) == ATT_HIDDEN) continue;
      const float (&low)[4] = p[2 * run], (&high)[4] = p[2 * run + 1];
      const uint32_t a[4] = {pair_of<T>(low[0], low[1]), pair_of<T>(low[2], low[3]), pair_of<T>(high[0], high[1]),
                             pair_of<T>(high[2], high[3])};
      DC_UNROLL
      for (int n = 0; n < N; n += 2) {
        uint32_t b[4];
        if (!ALL && 8 * n >= width) break;
        load_matrices<true>(b, b_row + run * ATT_RUN * pitch + 8 * n);
        mma<T>(sum[n], a, b[0], b[1]);
        mma<T>(sum[n + 1], a, b[2], b[3]);
      }
    }
  } else {
    const int g = lane / 4, q = lane % 4;
    DC_UNROLL
    for (int n = 0; n < ATT_TILE / 8; n++) {
      DC_UNROLL
      for (int e = 0; e < 4; e++) room[(g + e / 2 * 8) * ATT_P_PITCH + 8 * n + 2 * q + e % 2] = p[n][e];
    }
    warp_sync();
    for (int c = 0; c < ATT_TILE; c += 4) {
      if (!ALL && t.part(c / ATT_RUN) == ATT_HIDDEN) continue;
      const Pack<float, 4> a0 = load<float, 4>(room + g * ATT_P_PITCH + c);
      const Pack<float, 4> a1 = load<float, 4>(room + (g + 8) * ATT_P_PITCH + c);
      DC_UNROLL
      for (int k = 0; k < 4; k++) {
        DC_UNROLL
        for (int n = 0; n < N; n++) {
          if (!ALL && 8 * n >= width) break;
          const Pack<float, 2> b = load<float, 2>(right + (c + k) * pitch + 8 * n + 2 * q);
          DC_UNROLL
          for (int e = 0; e < 4; e++) sum[n][e] = __fmaf_rn(b.x[e % 2], e < 2 ? a0.x[k] : a1.x[k], sum[n][e]);
        }
      }
    }
  }
}

template <class T, int N>
DC_GPU void att_add(float (&sum)[N][4], const AttTile &p, const typename T::stored *right, int pitch, int width,
                    const AttStage &t, float *room) {
  if (t.all() && width == 8 * N) att_add<T, N, true>(sum, p, right, pitch, width, t, room);
  else att_add<T, N, false>(sum, p, right, pitch, width, t, room);
}

// x = left right^T, number k of the plan's products: of what is in shared memory where all columns fit, in place
// `place`; else by pieces of columns. own: the block's first row of `left`. All threads of the block come here.
template <class T>
DC_GPU void att_product(AttTile &x, char *room, const AttPlan &plan, int k, int place,
                        const AttRows<typename T::stored> &left, const AttRows<typename T::stored> &right, int own,
                        const AttStage &t) {
  typedef typename T::stored S;
  S *l = att_at<S>(room, plan.left[k]), *r = att_at<S>(room, plan.right[k] + place * plan.next);
  const int mine = block_thread() / WARP * ATT_RUN * plan.pitch;
  att_clear(x);
  if (plan.whole) {
    att_scores<T>(x, l + mine, r, plan.pitch, att_round(left.dim), t);
    return;
  }
  for (int column = 0; column < left.dim; column += plan.width) {
    const int width = att_width(left.dim, column, plan.width);
    block_sync(); // what was there has been read
    att_fill(l, plan.pitch, width, left, column, [=](int run) { return own + run * ATT_RUN; });
    att_fill(r, plan.pitch, width, right, column, [&](int run) { return t.first[run]; });
    att_here();
    att_scores<T>(x, l + mine, r, plan.pitch, width, t);
  }
}
// Where all columns fit: the block's own rows, once. att_each_stage waits for them.
template <class S> DC_GPU void att_stay(char *room, const AttPlan &plan, int k, const AttRows<S> &left, int own) {
  if (plan.whole)
    att_fill(att_at<S>(room, plan.left[k]), plan.pitch, att_round(left.dim), left, 0,
             [=](int run) { return own + run * ATT_RUN; });
}
// The same of a stage's rows.
template <class S>
DC_GPU void att_bring(char *room, const AttPlan &plan, int k, int place, const AttRows<S> &right, const AttStage &t) {
  if (plan.whole)
    att_fill(att_at<S>(room, plan.right[k] + place * plan.next), plan.pitch, att_round(right.dim), right, 0,
             [&](int run) { return t.first[run]; });
}

// What a stage's rows are multiplied by, columns [first, first + width): beside what att_bring has.
template <class S>
DC_GPU void att_operand(char *room, const AttPlan &plan, int place, const AttRows<S> &x, int first, int width,
                        const AttStage &t) {
  att_fill(att_at<S>(room, plan.operand + place * plan.next), plan.sums_pitch, width, x, first,
           [&](int run) { return t.first[run]; });
}

// ---- scores to probabilities ---------------------------------------------------------------------------------------
// 16-bit scores are in units of log 2: e^x is one instruction then.
template <class T> DC_GPU float att_units(void) { return sizeof(typename T::stored) == 2 ? ATT_LOG2E : 1.0f; }
template <class T> DC_GPU float att_exp(float x) {
  if constexpr (sizeof(typename T::stored) == 2) return exp2_fast(x);
  else return exp_nonpos(x);
}

// This thread's rows and columns. own: the warp's first row.
template <bool TURNED> struct AttPlace {
  int own, g, q;
  DC_GPU explicit AttPlace(int tile) {
    const int lane = block_thread() % WARP;
    own = tile * ATT_TILE + block_thread() / WARP * ATT_RUN, g = lane / 4, q = lane % 4;
  }
  DC_GPU int row(int e) const { return own + g + e / 2 * 8; }
  DC_GPU int column(const AttStage &t, int n, int e) const { return t.first[n / 2] + n % 2 * 8 + 2 * q + e % 2; }
  DC_GPU int query(const AttStage &t, int n, int e) const { return TURNED ? column(t, n, e) : row(e); }
  DC_GPU int key(const AttStage &t, int n, int e) const { return TURNED ? row(e) : column(t, n, e); }
};

// Scores with their biases; -inf of what is hidden.
template <bool TURNED>
DC_GPU void att_mask(AttTile &x, const AttSight &s, const AttPlace<TURNED> &at, const AttStage &t) {
  const bool biased = s.sloped || s.bias;
  if (t.whole() && !biased) return;
  DC_UNROLL
  for (int n = 0; n < ATT_TILE / 8; n++) {
    const int part = t.part(n / 2);
    if (part == ATT_WHOLE && !biased) continue;
    DC_UNROLL
    for (int e = 0; e < 4; e++) {
      const int i = at.query(t, n, e), j = at.key(t, n, e);
      if (part == ATT_HIDDEN || (part == ATT_SOME && !att_visible(s, i, j))) x[n][e] = -INFINITY;
      else if (biased) x[n][e] = att_biased(s, x[n][e], i, j);
    }
  }
}

// keep[n]: bit e: dropout keeps x[n][e]. Random numbers come for 8 keys at a time: lanes that need the same ones share
// them, one making a quarter (queries down) or an eighth (keys down) and passing on a bit a number.
template <bool TURNED>
DC_GPU void att_dropout(uint32_t (&keep)[ATT_TILE / 8], const AttSight &s, const AttPlace<TURNED> &at,
                        const AttStage &t) {
  const int lane = block_thread() % WARP;
  uint32_t mine = 0;
  DC_UNROLL
  for (int k = 0; k < 4; k++) {
    const int n = TURNED ? at.g : at.q + k / 2 * 4; // k: of keys down, 2 * (the query's parity) + 8 keys further
    const int e = TURNED ? k % 2 * 2 + k / 2 : k % 2 * 2;
    if (t.part(n / 2) == ATT_HIDDEN) continue;
    const int first = t.first[n / 2] + n % 2 * 8;
    const int i = TURNED ? first + 2 * at.q + e % 2 : at.own + at.g + e / 2 * 8;
    mine |= att_keeps(s, (TURNED ? at.own + e / 2 * 8 : first) / 8, i) << (8 * k);
  }
  DC_UNROLL
  for (int n = 0; n < ATT_TILE / 8; n++) {
    const uint32_t bits = from_lane(mine, TURNED ? n * 4 + at.q : (lane & ~3) | (n & 3));
    keep[n] = 0;
    DC_UNROLL
    for (int e = 0; e < 4; e++) {
      const int bit = TURNED ? 8 * (2 * (e % 2) + e / 2) + at.g : 8 * (2 * (n / 4) + e / 2) + 2 * at.q + e % 2;
      keep[n] |= (bits >> bit & 1u) << e;
    }
  }
}

// Two neighbours of a row.
template <class T> DC_GPU void att_put(typename T::stored *row, int column, int dim, bool wide, float x, float y) {
  typedef typename T::stored S;
  const S two[2] = {T::down(x), T::down(y)};
  if (wide && column < dim) {
    if constexpr (sizeof(S) == 2) store_bytes4(row + column, two);
    else store_bytes8(row + column, two);
    return;
  }
  for (int k = 0; k < 2; k++)
    if (column + k < dim) row[column + k] = two[k];
}
// A result's columns from `first` on, times by[row / 8]. A unit that has met no run of the other side still has copies
// of its own rows under way: no block ends before they are there.
template <class T, int N, bool TURNED>
DC_GPU void att_give(void *p, const int64_t *stride, int64_t b, int64_t h, int count, int dim, int first,
                     const AttPlace<TURNED> &at, const float (&sum)[N][4], const float (&by)[2], bool wide) {
  typedef typename T::stored S;
  copies_wait();
  DC_UNROLL
  for (int r = 0; r < 2; r++) {
    const int i = at.row(2 * r);
    if (i >= count) continue;
    S *row = static_cast<S *>(p) + b * stride[0] + h * stride[1] + i * stride[2];
    DC_UNROLL
    for (int n = 0; n < N; n++)
      att_put<T>(row, first + 8 * n + 2 * at.q, dim, wide, __fmul_rn(sum[n][2 * r], by[r]),
                 __fmul_rn(sum[n][2 * r + 1], by[r]));
  }
}

struct AttUnit {
  int64_t b, h;
  int tile, first; // first: column of the results
};
DC_GPU AttUnit att_unit(const AttPlan &plan, int64_t unit) {
  const int64_t rest = unit / plan.groups;
  AttUnit u;
  u.first = (int)(unit % plan.groups) * plan.sums;
  u.tile = (int)(plan.tiles - 1 - rest % plan.tiles); // of causal queries the last see most: they begin
  u.h = rest / plan.tiles % plan.heads, u.b = rest / plan.tiles / plan.heads;
  return u;
}

// ---- forward: ATT_TILE queries -------------------------------------------------------------------------------------
template <class T, int N, bool PLAIN>
DC_GPU void att_forward(const dc_attention_args &a, const AttPlan &plan, char *room, int64_t unit) {
  typedef typename T::stored S;
  const AttUnit u = att_unit(plan, unit);
  const int64_t kv = u.h * a.kv_heads / a.heads;
  const AttSight s = att_sight<PLAIN>(a, plan.threshold, u.b, u.h);
  const AttPlace<false> at(u.tile);
  const int dim = (int)a.dim, own = u.tile * ATT_TILE, width = att_width(dim, u.first, plan.sums);
  const auto q = att_rows<S>(a.q, a.q_stride, u.b, u.h, a.rows, dim, plan.wide);
  const auto k = att_rows<S>(a.k, a.k_stride, u.b, kv, a.keys, dim, plan.wide);
  const auto v = att_rows<S>(a.v, a.v_stride, u.b, kv, a.keys, dim, plan.wide);
  const float scale = __fmul_rn(a.scale, att_units<T>());
  float out[N][4], max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  att_clear(out);
  att_here(); // the unit before has been read
  att_stay(room, plan, 0, q, own);
  int begin, end;
  att_key_runs(s, own, &begin, &end);
  const auto load = [&](const AttStage &t, int place) {
    att_bring(room, plan, 0, place, k, t);
    att_operand(room, plan, place, v, u.first, width, t);
  };
  att_each_stage<false>(att_at<AttRuns>(room, 0), plan, s, own, begin, end, load, [&](const AttStage &t, int place) {
    AttTile x;
    att_product<T>(x, room, plan, 0, place, q, k, own, t);
    if (t.parts == 0) return;
    att_mask(x, s, at, t);
    DC_UNROLL
    for (int r = 0; r < 2; r++) {
      float top = -INFINITY, part[4] = {0.0f, 0.0f, 0.0f, 0.0f}; // sums that do not wait for each other
      DC_UNROLL
      for (int n = 0; n < ATT_TILE / 8; n++) top = fmaxf(top, fmaxf(x[n][2 * r], x[n][2 * r + 1])); // without NaNs
      top = fmaxf(top, from_lane_beside(top, 1));
      top = fmaxf(top, from_lane_beside(top, 2));
      top = fmaxf(fmaxf(ATT_LOWEST * att_units<T>(), max[r]), __fmul_rn(top, scale));
      top = top < ATT_HIGHEST * att_units<T>() ? top : __uint_as_float(0x7fc00000u);
      DC_UNROLL
      for (int n = 0; n < ATT_TILE / 8; n++) {
        DC_UNROLL
        for (int e = 2 * r; e < 2 * r + 2; e++) {
          x[n][e] = att_exp<T>(__fmaf_rn(x[n][e], scale, -top));
          part[n % 2 * 2 + e % 2] = __fadd_rn(part[n % 2 * 2 + e % 2], x[n][e]);
        }
      }
      const float keep = att_exp<T>(__fsub_rn(max[r], top));
      sum[r] = __fmaf_rn(sum[r], keep, __fadd_rn(__fadd_rn(part[0], part[1]), __fadd_rn(part[2], part[3])));
      max[r] = top;
      DC_UNROLL
      for (int n = 0; n < N; n++) {
        DC_UNROLL
        for (int e = 2 * r; e < 2 * r + 2; e++) out[n][e] = __fmul_rn(out[n][e], keep);
      }
    }
    if (s.threshold) {
      uint32_t keep[ATT_TILE / 8];
      att_dropout(keep, s, at, t);
      DC_UNROLL
      for (int n = 0; n < ATT_TILE / 8; n++) {
        DC_UNROLL
        for (int e = 0; e < 4; e++) x[n][e] = keep[n] >> e & 1u ? x[n][e] : 0.0f;
      }
    }
    const S *values = att_at<S>(room, plan.operand + place * plan.next);
    att_add<T, N>(out, x, values, plan.sums_pitch, width, t, att_room_of_p(room, plan));
  });
  float by[2];
  DC_UNROLL
  for (int r = 0; r < 2; r++) {
    sum[r] = __fadd_rn(sum[r], from_lane_beside(sum[r], 1));
    sum[r] = __fadd_rn(sum[r], from_lane_beside(sum[r], 2));
    by[r] = sum[r] == 0.0f ? 0.0f : __frcp_rn(__fmul_rn(sum[r], s.kept));
    const int i = at.row(2 * r);
    if (u.first == 0 && at.q == 0 && i < s.rows)
      a.lse[(u.b * a.heads + u.h) * a.rows + i] =
          sum[r] == 0.0f ? INFINITY : canonical(__fadd_rn(__fdiv_rn(max[r], att_units<T>()), logf(sum[r])));
  }
  att_give<T, N>(a.out, a.out_stride, u.b, u.h, s.rows, dim, u.first, at, out, by, plan.wide_out);
}

// ---- gradient ------------------------------------------------------------------------------------------------------
// sum(dout * out) of a query, in every lane of the warp that has it.
template <class T> DC_GPU float att_delta(const dc_attention_grad_args &a, int64_t b, int64_t h, int64_t i) {
  typedef typename T::stored S;
  const S *dout = static_cast<const S *>(a.dout) + b * a.dout_stride[0] + h * a.dout_stride[1] + i * a.dout_stride[2];
  const S *out = static_cast<const S *>(a.out) + b * a.out_stride[0] + h * a.out_stride[1] + i * a.out_stride[2];
  float sum = 0.0f;
  for (int c = block_thread() % WARP; c < a.dim; c += WARP) sum = __fmaf_rn(T::up(dout[c]), T::up(out[c]), sum);
  for (int distance = WARP / 2; distance > 0; distance /= 2) sum = __fadd_rn(sum, from_lane_beside(sum, distance));
  return sum;
}

// Query i's log of the sum, in the units of scores, and its delta; of none (behind the last) what makes its
// probabilities 0.
template <class T>
DC_GPU void att_query(const dc_attention_grad_args &a, const float *deltas, int64_t b, int64_t h, int i, float *lse,
                      float *delta) {
  const int64_t of_head = (b * a.heads + h) * a.rows;
  const bool there = i < a.rows;
  *lse = there ? __fmul_rn(a.lse[of_head + i], att_units<T>()) : INFINITY;
  *delta = there ? deltas[of_head + i] : 0.0f;
}

// Scores x and dp = dout v^T become the probabilities that dropout kept (before they are divided by its share) and ds
// before it is scaled. lse(n, e), delta(n, e): the query's.
template <class T, bool TURNED, class L, class D>
DC_GPU void att_slopes(AttTile &x, AttTile &dp, const AttSight &s, const AttPlace<TURNED> &at, const AttStage &t,
                       float scale, L lse, D delta) {
  uint32_t keep[ATT_TILE / 8];
  const float factor = __frcp_rn(s.kept);
  att_mask(x, s, at, t);
  if (s.threshold) att_dropout(keep, s, at, t);
  DC_UNROLL
  for (int n = 0; n < ATT_TILE / 8; n++) {
    DC_UNROLL
    for (int e = 0; e < 4; e++) {
      const float y = __fmaf_rn(x[n][e], scale, -lse(n, e));
      const float p = x[n][e] == -INFINITY ? 0.0f : att_exp<T>(not_above_0(y));
      const bool kept = !s.threshold || (keep[n] >> e & 1u);
      const float d = s.threshold ? (kept ? __fmul_rn(dp[n][e], factor) : 0.0f) : dp[n][e];
      dp[n][e] = p == 0.0f ? 0.0f : __fmul_rn(p, __fsub_rn(d, delta(n, e)));
      x[n][e] = kept ? p : 0.0f;
    }
  }
}

// dq of ATT_TILE queries. deltas: of all queries, [batch, heads, rows].
template <class T, int N, bool PLAIN>
DC_GPU void att_grad_q(const dc_attention_grad_args &a, const AttPlan &plan, const float *deltas, char *room,
                       int64_t unit) {
  typedef typename T::stored S;
  const AttUnit u = att_unit(plan, unit);
  const int64_t kv = u.h * a.kv_heads / a.heads;
  const AttSight s = att_sight<PLAIN>(a, plan.threshold, u.b, u.h);
  const AttPlace<false> at(u.tile);
  const int dim = (int)a.dim, own = u.tile * ATT_TILE, width = att_width(dim, u.first, plan.sums);
  const auto q = att_rows<S>(a.q, a.q_stride, u.b, u.h, a.rows, dim, plan.wide);
  const auto dout = att_rows<S>(a.dout, a.dout_stride, u.b, u.h, a.rows, dim, plan.wide);
  const auto k = att_rows<S>(a.k, a.k_stride, u.b, kv, a.keys, dim, plan.wide);
  const auto v = att_rows<S>(a.v, a.v_stride, u.b, kv, a.keys, dim, plan.wide);
  const float scale = __fmul_rn(a.scale, att_units<T>());
  float dq[N][4], lse[2], delta[2];
  att_clear(dq);
  DC_UNROLL
  for (int r = 0; r < 2; r++) att_query<T>(a, deltas, u.b, u.h, at.row(2 * r), &lse[r], &delta[r]);
  att_here(); // the unit before has been read
  att_stay(room, plan, 0, q, own);
  att_stay(room, plan, 1, dout, own);
  int begin, end;
  att_key_runs(s, own, &begin, &end);
  const auto load = [&](const AttStage &t, int place) {
    att_bring(room, plan, 0, place, k, t);
    att_bring(room, plan, 1, place, v, t);
    if (!plan.whole) att_operand(room, plan, place, k, u.first, width, t);
  };
  att_each_stage<false>(att_at<AttRuns>(room, 0), plan, s, own, begin, end, load, [&](const AttStage &t, int place) {
    AttTile x, dp;
    const S *keys = plan.whole ? att_at<S>(room, plan.right[0] + place * plan.next) + u.first
                               : att_at<S>(room, plan.operand);
    const int pitch = plan.whole ? plan.pitch : plan.sums_pitch;
    att_product<T>(x, room, plan, 0, place, q, k, own, t);
    att_product<T>(dp, room, plan, 1, place, dout, v, own, t);
    if (t.parts == 0) return;
    att_slopes<T>(
        x, dp, s, at, t, scale, [&](int, int e) { return lse[e / 2]; }, [&](int, int e) { return delta[e / 2]; });
    att_add<T, N>(dq, dp, keys, pitch, width, t, att_room_of_p(room, plan));
  });
  const float by[2] = {a.scale, a.scale};
  att_give<T, N>(a.dq, a.dq_stride, u.b, u.h, s.rows, dim, u.first, at, dq, by, plan.wide_out);
}

// dk and dv of ATT_TILE keys; plan.heads: of keys. The heads of queries that share them come one after the other.
template <class T, int N, bool PLAIN>
DC_GPU void att_grad_kv(const dc_attention_grad_args &a, const AttPlan &plan, const float *deltas, char *room,
                        int64_t unit) {
  typedef typename T::stored S;
  const AttUnit u = att_unit(plan, unit);
  const int64_t group = a.heads / a.kv_heads;
  const AttPlace<true> at(u.tile);
  const int dim = (int)a.dim, own = u.tile * ATT_TILE, width = att_width(dim, u.first, plan.sums);
  const auto k = att_rows<S>(a.k, a.k_stride, u.b, u.h, a.keys, dim, plan.wide);
  const auto v = att_rows<S>(a.v, a.v_stride, u.b, u.h, a.keys, dim, plan.wide);
  const float scale = __fmul_rn(a.scale, att_units<T>());
  AttRuns *runs = att_at<AttRuns>(room, 0);
  float *mine = att_room_of_p(room, plan);
  float dk[N][4], dv[N][4];
  att_clear(dk);
  att_clear(dv);
  att_here(); // the unit before has been read
  att_stay(room, plan, 0, k, own);
  att_stay(room, plan, 1, v, own);
  float kept = 1.0f;
  for (int64_t h = u.h * group; h < (u.h + 1) * group; h++) {
    const AttSight s = att_sight<PLAIN>(a, plan.threshold, u.b, h);
    const auto q = att_rows<S>(a.q, a.q_stride, u.b, h, a.rows, dim, plan.wide);
    const auto dout = att_rows<S>(a.dout, a.dout_stride, u.b, h, a.rows, dim, plan.wide);
    int begin, end;
    kept = s.kept;
    att_query_runs(s, own, &begin, &end);
    const auto load = [&](const AttStage &t, int place) {
      const int r = block_thread();
      att_bring(room, plan, 0, place, q, t);
      att_bring(room, plan, 1, place, dout, t);
      if (!plan.whole) att_operand(room, plan, place, dout, u.first, width, t);
      if (r < ATT_TILE) att_query<T>(a, deltas, u.b, h, t.row(r), &runs->lse[place][r], &runs->delta[place][r]);
    };
    att_each_stage<true>(runs, plan, s, own, begin, end, load, [&](const AttStage &t, int place) {
      AttTile x, dp;
      const S *queries = att_at<S>(room, plan.right[0] + place * plan.next) + u.first;
      const S *slopes = att_at<S>(room, plan.right[1] + place * plan.next) + u.first;
      if (!plan.whole) queries = slopes = att_at<S>(room, plan.operand);
      const int pitch = plan.whole ? plan.pitch : plan.sums_pitch;
      att_product<T>(x, room, plan, 0, place, k, q, own, t);
      att_product<T>(dp, room, plan, 1, place, v, dout, own, t);
      if (t.parts != 0) {
        att_slopes<T>(
            x, dp, s, at, t, scale, [&](int n, int e) { return runs->lse[place][8 * n + 2 * at.q + e % 2]; },
            [&](int n, int e) { return runs->delta[place][8 * n + 2 * at.q + e % 2]; });
        att_add<T, N>(dv, x, slopes, pitch, width, t, mine);
      }
      if (!plan.whole) {
        block_sync(); // dout has been read
        att_operand(room, plan, place, q, u.first, width, t);
        att_here();
      }
      if (t.parts != 0) att_add<T, N>(dk, dp, queries, pitch, width, t, mine);
    });
  }
  const float by_k[2] = {a.scale, a.scale}, factor = __frcp_rn(kept), by_v[2] = {factor, factor};
  att_give<T, N>(a.dk, a.dk_stride, u.b, u.h, (int)a.keys, dim, u.first, at, dk, by_k, plan.wide_out);
  att_give<T, N>(a.dv, a.dv_stride, u.b, u.h, (int)a.keys, dim, u.first, at, dv, by_v, plan.wide_out);
}

// ---- gradient of the bias ------------------------------------------------------------------------------------------
// Of ATT_TILE keys and as many queries, or all where these share it: a unit has all that is summed into its elements,
// entry of the batch by entry and head by head, so that sums have one order. Scores are made once more for it.
struct AttBiasUnits {
  int64_t entries, heads, query_tiles, key_tiles; // 1 of what shares the elements
};
inline AttBiasUnits att_bias_units(const dc_attention_grad_args &a) { // on the host
  const int64_t query_tiles = (a.rows + ATT_TILE - 1) / ATT_TILE, key_tiles = (a.keys + ATT_TILE - 1) / ATT_TILE;
  return AttBiasUnits{a.dbias_stride[0] ? a.batch : 1, a.dbias_stride[1] ? a.heads : 1,
                      a.dbias_stride[2] ? query_tiles : 1, key_tiles};
}
inline int64_t att_bias_count(const AttBiasUnits &n) { return n.entries * n.heads * n.query_tiles * n.key_tiles; }

// What the tiles of queries from i on and keys from j on see of each other: a stage with the four runs of keys, each in
// its place. False: nothing, for the whole block.
DC_GPU bool att_bias_stage(AttRuns *runs, const AttSight &s, int i, int j, AttStage *t) {
  const int thread = block_thread(), run = thread / ATT_RUNS, warp = thread % ATT_RUNS;
  block_sync(); // the tile before has been read
  if (run < ATT_RUNS) {
    const int row = i + warp * ATT_RUN, key = j + run * ATT_RUN;
    const int part = att_shown(s, row, key) ? att_part(s, row, key) : (int)ATT_HIDDEN;
    reinterpret_cast<uint8_t *>(runs->part)[thread] = (uint8_t)part;
    if (warp == 0) runs->first[run] = j + run * ATT_RUN;
  }
  block_sync();
  *t = att_stage(runs, 0);
  uint32_t any = 0;
  DC_UNROLL
  for (int k = 0; k < ATT_RUNS; k++) any |= runs->part[k];
  return any != 0;
}

template <class T>
DC_GPU void att_grad_bias(const dc_attention_grad_args &a, const AttPlan &plan, const AttBiasUnits &n_units,
                          const float *deltas, char *room, int64_t unit) {
  typedef typename T::stored S;
  const int j = (int)(unit % n_units.key_tiles) * ATT_TILE;
  const int64_t query_tile = unit / n_units.key_tiles % n_units.query_tiles;
  const int64_t head = unit / n_units.key_tiles / n_units.query_tiles % n_units.heads;
  const int64_t entry = unit / n_units.key_tiles / n_units.query_tiles / n_units.heads;
  const bool one_entry = n_units.entries > 1 || a.batch == 1, one_head = n_units.heads > 1 || a.heads == 1;
  const bool one_tile = a.dbias_stride[2] != 0;
  const int dim = (int)a.dim, tiles = (int)plan.tiles;
  const float scale = __fmul_rn(a.scale, att_units<T>());
  AttRuns *runs = att_at<AttRuns>(room, 0);
  AttTile sum;
  att_clear(sum);
  for (int64_t b = one_entry ? entry : 0; b < (one_entry ? entry + 1 : a.batch); b++)
    for (int64_t h = one_head ? head : 0; h < (one_head ? head + 1 : a.heads); h++) {
      const int64_t kv = h * a.kv_heads / a.heads;
      const AttSight s = att_sight<false>(a, plan.threshold, b, h);
      const auto q = att_rows<S>(a.q, a.q_stride, b, h, a.rows, dim, plan.wide);
      const auto dout = att_rows<S>(a.dout, a.dout_stride, b, h, a.rows, dim, plan.wide);
      const auto k = att_rows<S>(a.k, a.k_stride, b, kv, a.keys, dim, plan.wide);
      const auto v = att_rows<S>(a.v, a.v_stride, b, kv, a.keys, dim, plan.wide);
      for (int tile = one_tile ? (int)query_tile : 0; tile < (one_tile ? (int)query_tile + 1 : tiles); tile++) {
        const AttPlace<false> at(tile);
        const int own = tile * ATT_TILE;
        AttStage t;
        AttTile x, dp;
        if (!att_bias_stage(runs, s, own, j, &t)) continue;
        att_stay(room, plan, 0, q, own);
        att_stay(room, plan, 1, dout, own);
        att_bring(room, plan, 0, 0, k, t);
        att_bring(room, plan, 1, 0, v, t);
        att_here();
        att_product<T>(x, room, plan, 0, 0, q, k, own, t);
        att_product<T>(dp, room, plan, 1, 0, dout, v, own, t);
        if (t.parts == 0) continue;
        float lse[2], delta[2];
        DC_UNROLL
        for (int r = 0; r < 2; r++) att_query<T>(a, deltas, b, h, at.row(2 * r), &lse[r], &delta[r]);
        att_slopes<T>(
            x, dp, s, at, t, scale, [&](int, int e) { return lse[e / 2]; }, [&](int, int e) { return delta[e / 2]; });
        DC_UNROLL
        for (int n = 0; n < ATT_TILE / 8; n++) {
          DC_UNROLL
          for (int e = 0; e < 4; e++) sum[n][e] = __fadd_rn(sum[n][e], dp[n][e]);
        }
      }
    }
  float *to = a.dbias + entry * a.dbias_stride[0] + head * a.dbias_stride[1];
  const AttPlace<false> at((int)query_tile);
  if (one_tile) {
    DC_UNROLL
    for (int n = 0; n < ATT_TILE / 8; n++) {
      DC_UNROLL
      for (int e = 0; e < 4; e++) {
        const int i = at.row(e), key = j + 8 * n + 2 * at.q + e % 2;
        if (i >= a.rows || key >= a.keys || sum[n][e] == 0.0f) continue; // what is hidden is left as it is
        float *p = to + i * a.dbias_stride[2] + key;
        *p = __fadd_rn(*p, sum[n][e]);
      }
    }
    return;
  }
  // over the rows: of a thread, of the lanes with its columns, of the warps
  float *parts = runs->lse[0]; // of both stages: the four warps' sums of half of the keys
  for (int half = 0; half < 2; half++) {
    block_sync(); // the half before has been read
    DC_UNROLL
    for (int n = 0; n < ATT_TILE / 8; n++) {
      if (n / 4 != half) continue;
      DC_UNROLL
      for (int e = 0; e < 2; e++) {
        float all = __fadd_rn(sum[n][e], sum[n][2 + e]);
        for (int distance = 4; distance < WARP; distance *= 2) all = __fadd_rn(all, from_lane_beside(all, distance));
        if (at.g == 0) parts[block_thread() / WARP * 32 + n % 4 * 8 + 2 * at.q + e] = all;
      }
    }
    block_sync();
    const int thread = block_thread(), key = j + half * 32 + thread;
    if (thread >= 32 || key >= a.keys) continue;
    float all = parts[thread];
    for (int warp = 1; warp < ATT_RUNS; warp++) all = __fadd_rn(all, parts[warp * 32 + thread]);
    if (all != 0.0f) to[key] = __fadd_rn(to[key], all);
  }
}

} // namespace dc_gpu
#endif
