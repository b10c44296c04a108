/* fuzz_zero.c: the files of zero/ on arbitrary bytes. The input is read as arguments: small ones, whose results are
 * checked against the definitions, and sometimes huge ones, which must give exact results or DC_E_OVERFLOW.
 *
 *   clang -g -O1 -std=c17 -fsanitize=fuzzer,address,undefined -Iops -I. tests/fuzz/fuzz_zero.c zero/partition.c
 *     zero/bucket.c zero/prefetch.c zero/estimate.c ops/base/base.c -o fuzz_zero && ./fuzz_zero -max_total_time=60
 *
 * tests/c/test_fuzz_zero.cpp includes this file and runs the same body over fixed seeds; so it is written in what C
 * and C++ share. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zero/zero.h"

/* Fails the body with the place of the broken rule. */
#define FUZZ_STR2(x) #x
#define FUZZ_STR(x) FUZZ_STR2(x)
#define RULE(cond)                                                    \
  do {                                                                \
    if (!(cond)) return "fuzz_zero.c:" FUZZ_STR(__LINE__) ": " #cond; \
  } while (0)
#define PASS_ON(expr)          \
  do {                         \
    const char *why_ = (expr); \
    if (why_) return why_;     \
  } while (0)

enum { FUZZ_PARAMS = 40, FUZZ_USES = 40, FUZZ_UNITS = 8 };

typedef struct fuzz_input {
  const uint8_t *data;
  size_t left;
} fuzz_input;

static uint64_t fuzz_take(fuzz_input *in, int bytes) {
  uint64_t v = 0;
  for (int i = 0; i < bytes && in->left > 0; i++, in->left--) v = v << 8 | *in->data++;
  return v;
}

/* Mostly a small number, sometimes an edge or any 64 bits. */
static int64_t fuzz_number(fuzz_input *in, int64_t small) {
  static const int64_t edge[] = {
      0, 1, -1, DC_BLOCK - 1, DC_BLOCK, DC_BLOCK + 1, INT64_MAX, INT64_MAX - 4095, INT64_MAX / 2, INT64_MIN};
  uint64_t kind = fuzz_take(in, 1);
  if (kind < 6) return edge[fuzz_take(in, 1) % (sizeof edge / sizeof edge[0])];
  if (kind < 8) {
    uint64_t any = fuzz_take(in, 8);
    int64_t v;
    memcpy(&v, &any, sizeof v);
    return v;
  }
  return (int64_t)(fuzz_take(in, 3) % (uint64_t)(small + 1));
}

/* ---- layout ------------------------------------------------------------------------------------------------------ */
/* What must hold whatever the sizes. */
static const char *fuzz_check_sizes(const dc_zero_layout *l, const int64_t *numel, int64_t nparams, int64_t world) {
  RULE(l->nparams == nparams && l->world == world);
  RULE(l->total >= 0 && l->total % world == 0 && l->total / world == l->shard_elems && l->shard_elems % DC_BLOCK == 0);
  RULE(l->bucket_elems > 0 && l->bucket_elems % world == 0 && (l->bucket_elems / world) % DC_BLOCK == 0);
  int64_t end = 0;
  for (int64_t p = 0; p < nparams; p++) {
    RULE(l->numel[p] == numel[p] && l->offset[p] % DC_ZERO_ALIGN == 0 && l->offset[p] >= end &&
         l->offset[p] - end < DC_ZERO_ALIGN);
    RULE(numel[p] <= l->total - l->offset[p]);
    end = l->offset[p] + numel[p];
  }
  RULE(l->total - end < world * DC_BLOCK);
  RULE(l->total == 0 ? l->nbuckets == 0 : l->nbuckets == (l->total - 1) / l->bucket_elems + 1);
  return NULL;
}

/* Element `flat` in all views of it. */
static const char *fuzz_check_element(const dc_zero_layout *l, int64_t flat) {
  int64_t rank, index, begin, end, from, to, shard;
  RULE(dc_zero_locate(l, flat, &rank, &index) == DC_OK);
  RULE(rank >= 0 && rank < l->world && index >= 0 && index < l->shard_elems);
  RULE(dc_zero_bucket(l, flat / l->bucket_elems, &begin, &end) == DC_OK);
  RULE(begin <= flat && flat < end && end <= l->total && end - begin <= l->bucket_elems);
  RULE(dc_zero_slice(l, flat / l->bucket_elems, rank, &from, &to, &shard) == DC_OK);
  RULE(begin <= from && from <= flat && flat < to && to <= end && (end - begin) / l->world == to - from);
  RULE(index == shard + (flat - from));
  return NULL;
}

/* Segments of all ranks, put back into the flat space, are the parameters; so are the pieces of all buckets. */
static const char *fuzz_check_cover(const dc_zero_layout *l, uint8_t *seen) {
  dc_zero_segment *segment = NULL;
  dc_zero_piece *piece = NULL;
  int64_t count = 0, covered = 0, wanted = 0;
  for (int64_t p = 0; p < l->nparams; p++) wanted += l->numel[p];
  memset(seen, 0, (size_t)l->total);
  for (int64_t r = 0; r < l->world; r++) {
    RULE(dc_zero_segments(l, r, NULL, 0, &count) == DC_OK);
    segment = (dc_zero_segment *)malloc((size_t)(count + 1) * sizeof *segment);
    RULE(segment && dc_zero_segments(l, r, segment, count, &count) == DC_OK);
    int64_t last = 0;
    for (int64_t k = 0; k < count; k++) {
      const dc_zero_segment s = segment[k];
      RULE(s.len > 0 && s.shard_begin >= last && s.param >= 0 && s.param < l->nparams);
      RULE(s.param_begin >= 0 && s.param_begin + s.len <= l->numel[s.param] &&
           s.flat_begin == l->offset[s.param] + s.param_begin);
      last = s.shard_begin + s.len;
      for (int64_t i = 0; i < s.len; i += s.len > 1 ? s.len - 1 : 1) { /* both ends */
        int64_t rank, index;
        RULE(dc_zero_locate(l, s.flat_begin + i, &rank, &index) == DC_OK && rank == r && index == s.shard_begin + i);
      }
      for (int64_t i = 0; i < s.len; i++) RULE(seen[s.flat_begin + i]++ == 0);
      covered += s.len;
    }
    RULE(last <= l->shard_elems);
    free(segment);
  }
  RULE(covered == wanted);
  for (int64_t b = 0; b < l->nbuckets; b++) {
    int64_t begin, end;
    RULE(dc_zero_bucket(l, b, &begin, &end) == DC_OK && dc_zero_pieces(l, b, NULL, 0, &count) == DC_OK);
    piece = (dc_zero_piece *)malloc((size_t)(count + 1) * sizeof *piece);
    RULE(piece && dc_zero_pieces(l, b, piece, count, &count) == DC_OK);
    for (int64_t k = 0; k < count; k++) {
      const dc_zero_piece s = piece[k];
      RULE(s.len > 0 && s.flat_begin >= begin && s.flat_begin + s.len <= end &&
           s.flat_begin == l->offset[s.param] + s.param_begin);
      for (int64_t i = 0; i < s.len; i++) RULE(seen[s.flat_begin + i]++ == 1);
      covered -= s.len;
    }
    free(piece);
  }
  RULE(covered == 0);
  return NULL;
}

static const char *fuzz_check_layout(fuzz_input *in, const dc_zero_layout *l, const int64_t *numel, int64_t nparams,
                                     int64_t world) {
  PASS_ON(fuzz_check_sizes(l, numel, nparams, world));
  int64_t rank, index;
  RULE(dc_zero_locate(l, l->total, &rank, &index) == DC_E_INVALID);
  for (int i = 0; i < 4 && l->total > 0; i++) {
    int64_t flat = (int64_t)(fuzz_take(in, 8) % (uint64_t)l->total);
    PASS_ON(fuzz_check_element(l, i == 0 ? 0 : i == 1 ? l->total - 1 : flat));
  }
  if (l->total == 0 || l->total > 300000) return NULL;
  uint8_t *seen = (uint8_t *)malloc((size_t)l->total);
  if (!seen) return NULL;
  const char *why = fuzz_check_cover(l, seen);
  free(seen);
  return why;
}

static const char *fuzz_layout(fuzz_input *in) {
  int64_t numel[FUZZ_PARAMS], nparams = (int64_t)(fuzz_take(in, 1) % (FUZZ_PARAMS + 1)), bad = 0;
  int64_t world = fuzz_number(in, 9), bucket = fuzz_number(in, 60000);
  for (int64_t p = 0; p < nparams; p++) {
    numel[p] = fuzz_number(in, 9000);
    bad |= numel[p] < 0;
  }
  dc_zero_layout *l = NULL;
  int rc = dc_zero_layout_make(numel, nparams, world, bucket, &l);
  if (world < 1 || bucket < 1) {
    RULE(rc == DC_E_INVALID && !l);
    return NULL;
  }
  if (rc != DC_OK) {
    RULE(!l && (rc == DC_E_OVERFLOW || (bad && rc == DC_E_INVALID)));
    return NULL;
  }
  RULE(!bad && l);
  const char *why = fuzz_check_layout(in, l, numel, nparams, world);
  dc_zero_layout_free(l);
  return why;
}

/* ---- prefetch ---------------------------------------------------------------------------------------------------- */
typedef struct fuzz_play {
  const int64_t *use, *elems;
  int64_t nuse, at, live_elems, flying_elems, prefetch, max_live;
  int live[FUZZ_UNITS], flying[FUZZ_UNITS];
} fuzz_play;

static const char *fuzz_act(fuzz_play *g, dc_zero_action a) {
  int64_t u = a.unit;
  if (a.kind == DC_ZERO_GATHER) {
    RULE(!g->live[u] && g->at < g->nuse);
    int64_t now = g->use[g->at];
    g->live[u] = 1;
    g->live_elems += g->elems[u];
    RULE(g->live_elems <= g->max_live || (now == u && g->live_elems == g->elems[u]));
    if (now == u) return NULL;
    g->flying[u] = 1;
    g->flying_elems += g->elems[u];
    RULE(g->flying_elems - (g->flying[now] ? g->elems[now] : 0) <= g->prefetch);
  } else if (a.kind == DC_ZERO_USE) {
    RULE(g->at < g->nuse && g->use[g->at] == u && g->live[u]);
    if (g->flying[u]) g->flying_elems -= g->elems[u];
    g->flying[u] = 0;
    g->at++;
  } else {
    RULE(a.kind == DC_ZERO_RELEASE && g->live[u] && !g->flying[u]);
    g->live[u] = 0;
    g->live_elems -= g->elems[u];
  }
  return NULL;
}

static const char *fuzz_prefetch(fuzz_input *in) {
  int64_t use[FUZZ_USES], elems[FUZZ_UNITS], nunits = 1 + (int64_t)(fuzz_take(in, 1) % FUZZ_UNITS);
  int64_t nuse = (int64_t)(fuzz_take(in, 1) % (FUZZ_USES + 1)), count = -1, again = -1;
  int64_t prefetch = fuzz_number(in, 60), max_live = fuzz_number(in, 60), reuse = fuzz_number(in, 60);
  int bad = prefetch < 0 || max_live < 0 || reuse < 0;
  for (int64_t u = 0; u < nunits; u++) {
    elems[u] = fuzz_number(in, 20);
    bad |= elems[u] < 0;
  }
  for (int64_t i = 0; i < nuse; i++) use[i] = (int64_t)(fuzz_take(in, 1) % (uint64_t)nunits);
  dc_zero_action action[3 * FUZZ_USES];
  int rc = dc_zero_prefetch(use, nuse, elems, nunits, prefetch, max_live, reuse, NULL, 0, &count);
  if (rc != DC_OK) {
    RULE(count == -1 && (rc == DC_E_OVERFLOW || (bad && rc == DC_E_INVALID)));
    return NULL;
  }
  RULE(!bad && count >= 0 && count <= 3 * nuse);
  RULE(dc_zero_prefetch(use, nuse, elems, nunits, prefetch, max_live, reuse, action, count, &again) == DC_OK &&
       again == count);
  fuzz_play g;
  memset(&g, 0, sizeof g);
  g.use = use, g.elems = elems, g.nuse = nuse, g.prefetch = prefetch, g.max_live = max_live;
  for (int64_t i = 0; i < count; i++) {
    RULE(action[i].unit >= 0 && action[i].unit < nunits);
    PASS_ON(fuzz_act(&g, action[i]));
  }
  RULE(g.at == nuse && g.live_elems == 0 && g.flying_elems == 0);
  return NULL;
}

/* ---- estimate ---------------------------------------------------------------------------------------------------- */
static const char *fuzz_estimate(fuzz_input *in) {
  dc_zero_bytes_in b;
  dc_zero_bytes out;
  memset(&b, 0, sizeof b);
  b.total = fuzz_number(in, 1000000), b.shard = fuzz_number(in, 100000), b.frozen = fuzz_number(in, 1000);
  b.world = fuzz_number(in, 8), b.ranks_per_node = fuzz_number(in, 8), b.slots = fuzz_number(in, 4);
  b.bucket_elems = fuzz_number(in, 65536);
  b.stage = (int32_t)(fuzz_take(in, 1) % 5), b.param_size = (int32_t)fuzz_take(in, 1),
  b.grad_wire_size = (int32_t)fuzz_take(in, 1);
  b.master = (int32_t)(fuzz_take(in, 1) & 1), b.state_size = (int32_t)fuzz_take(in, 4),
  b.nstates = (int32_t)fuzz_take(in, 4);
  b.resident = (int32_t)(fuzz_take(in, 1) & 1), b.exchange = fuzz_number(in, 10000);
  int rc = dc_zero_estimate(&b, &out);
  if (rc != DC_OK) {
    RULE(rc == DC_E_INVALID || rc == DC_E_OVERFLOW);
    return NULL;
  }
  RULE(out.params_private >= 0 && out.params_shared >= 0 && out.grads_private >= 0 && out.master_private >= 0 &&
       out.states_private >= 0 && out.staging_shared >= 0 && out.exchange_private == b.exchange);
  RULE((out.params_private == 0) == (b.stage == 3 && (b.resident || (b.shard == 0 && b.frozen == 0))) ||
       b.total + b.frozen == 0);
  RULE(out.rank_total ==
       out.params_private + out.grads_private + out.master_private + out.states_private + out.exchange_private);
  RULE(out.node_total == b.ranks_per_node * out.rank_total + out.params_shared + out.staging_shared);
  return NULL;
}

/* NULL, or the rule that was broken. */
static const char *fuzz_zero_one(const uint8_t *data, size_t size) {
  fuzz_input in = {data, size};
  switch (fuzz_take(&in, 1) % 4) {
  case 0: return fuzz_prefetch(&in);
  case 1: return fuzz_estimate(&in);
  default: return fuzz_layout(&in);
  }
}

#ifndef FUZZ_ZERO_NO_MAIN
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const char *why = fuzz_zero_one(data, size);
  if (!why) return 0;
  fprintf(stderr, "%s\nlast error: %s\n", why, dc_last_error());
  abort(); /* how libFuzzer is told; this is no code of the library */
}
#endif
