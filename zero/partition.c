/* partition.c: the flat space and who owns which element of it. Owns the layout's memory (one allocation) and the
 * search of a parameter by flat offset; buckets and slices are bucket.c's. A layout is checked once, when made: the
 * functions below may assume its invariants (offsets rise, ends rise, everything fits int64).
 *
 * The order of ranks inside a bucket is round-robin by slice, not one range per rank over the whole space, because
 * then a bucket that has just been filled gives every rank an equal share of the reduction at once. */
#include "walk.h"

#include <stdlib.h>

typedef struct layout_block {
  dc_zero_layout layout; /* first: dc_zero_layout_free gets its address */
  int64_t table[];       /* offset[nparams], numel[nparams] */
} layout_block;

/* *out = v rounded up to a multiple of m > 0; v >= 0. */
static int partition_round_up(int64_t v, int64_t m, int64_t *out) {
  int64_t rest = v % m;
  if (rest == 0) {
    *out = v;
    return DC_OK;
  }
  if (__builtin_add_overflow(v, m - rest, out))
    return DC_FAIL(DC_E_OVERFLOW, "%lld elements can't be rounded up to a multiple of %lld in 64 bits", (long long)v,
                   (long long)m);
  return DC_OK;
}

/* Lays the parameters out one after the other; *end is the end of the last one. */
static int partition_place_params(const int64_t *numel, int64_t nparams, int64_t *offset, int64_t *size, int64_t *end) {
  int64_t at = 0;
  for (int64_t i = 0; i < nparams; i++) {
    if (numel[i] < 0)
      return DC_FAIL(DC_E_INVALID, "parameter %lld has %lld elements; a count is >= 0", (long long)i,
                     (long long)numel[i]);
    DC_TRY(partition_round_up(at, DC_ZERO_ALIGN, &at));
    offset[i] = at;
    size[i] = numel[i];
    if (__builtin_add_overflow(at, numel[i], &at))
      return DC_FAIL(DC_E_OVERFLOW, "parameter %lld of %lld elements ends beyond 64 bits of the flat space",
                     (long long)i, (long long)numel[i]);
  }
  *end = at;
  return DC_OK;
}

/* Sets total and the bucket sizes from the end of the last parameter. */
static int partition_cut_buckets(dc_zero_layout *l, int64_t end, int64_t bucket_wish) {
  int64_t unit;
  if (__builtin_mul_overflow(l->world, (int64_t)DC_BLOCK, &unit))
    return DC_FAIL(DC_E_OVERFLOW, "world %lld times the block of %d elements overflows", (long long)l->world, DC_BLOCK);
  DC_TRY(partition_round_up(end, unit, &l->total));
  /* A wish beyond the total means "one bucket"; clipping first keeps the rounding from overflowing. */
  int64_t most = l->total > unit ? l->total : unit;
  DC_TRY(partition_round_up(bucket_wish < most ? bucket_wish : most, unit, &l->bucket_elems));
  l->nbuckets = l->total / l->bucket_elems + (l->total % l->bucket_elems != 0);
  l->shard_elems = l->total / l->world;
  return DC_OK;
}

int dc_zero_layout_make(const int64_t *numel, int64_t nparams, int64_t world, int64_t bucket_elems,
                        dc_zero_layout **out) {
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL; give the address of a dc_zero_layout pointer");
  if (nparams < 0) return DC_FAIL(DC_E_INVALID, "nparams is %lld; it must be >= 0", (long long)nparams);
  if (nparams > 0 && !numel) return DC_FAIL(DC_E_INVALID, "numel is NULL with %lld parameters", (long long)nparams);
  if (world < 1) return DC_FAIL(DC_E_INVALID, "world is %lld; it must be >= 1", (long long)world);
  if (bucket_elems < 1) return DC_FAIL(DC_E_INVALID, "bucket_elems is %lld; it must be >= 1", (long long)bucket_elems);
  int64_t bytes;
  if (__builtin_mul_overflow(nparams, (int64_t)(2 * sizeof(int64_t)), &bytes) ||
      __builtin_add_overflow(bytes, (int64_t)sizeof(layout_block), &bytes))
    return DC_FAIL(DC_E_OVERFLOW, "the tables of %lld parameters don't fit in 64 bits", (long long)nparams);
  layout_block *block = malloc((size_t)bytes);
  if (!block)
    return DC_FAIL(DC_E_NOMEM, "no memory for the layout of %lld parameters (%lld bytes)", (long long)nparams,
                   (long long)bytes);
  dc_zero_layout *l = &block->layout;
  *l = (dc_zero_layout){.nparams = nparams, .world = world, .offset = block->table, .numel = block->table + nparams};
  int64_t end = 0;
  int rc = partition_place_params(numel, nparams, block->table, block->table + nparams, &end);
  if (rc == DC_OK) rc = partition_cut_buckets(l, end, bucket_elems);
  if (rc != DC_OK) {
    free(block);
    return rc;
  }
  *out = l;
  return DC_OK;
}

void dc_zero_layout_free(dc_zero_layout *layout) { free(layout); }

int dc_zero_locate(const dc_zero_layout *l, int64_t flat, int64_t *rank, int64_t *shard_index) {
  if (!l || !rank || !shard_index) return DC_FAIL(DC_E_INVALID, "layout, rank or shard_index is NULL");
  if (flat < 0 || flat >= l->total)
    return DC_FAIL(DC_E_INVALID, "flat element %lld is outside of [0, %lld)", (long long)flat, (long long)l->total);
  int64_t begin, end;
  DC_TRY(dc_zero_bucket(l, flat / l->bucket_elems, &begin, &end));
  int64_t slice = (end - begin) / l->world;
  *rank = (flat - begin) / slice;
  *shard_index = begin / l->world + (flat - begin) % slice;
  return DC_OK;
}

/* Emits segments one by one, merging what is contiguous in both spaces; with out == NULL it only counts. */
typedef struct emitter {
  dc_zero_segment *out;
  dc_zero_segment last;
  int64_t count;
} emitter;

static void partition_emit(emitter *e, dc_zero_segment s) {
  dc_zero_segment *p = &e->last;
  /* Of one rank's elements, those that are next to each other in the flat space are so in the shard. */
  int joins = e->count > 0 && p->param == s.param && p->flat_begin + p->len == s.flat_begin;
  if (joins) p->len += s.len;
  else {
    *p = s;
    e->count++;
  }
  if (e->out) e->out[e->count - 1] = *p;
}

/* The segments of flat range [begin, end), which lies at shard_begin of the shard. One search per range, so all of
 * a shard costs nbuckets * log(nparams) + segments. */
static void partition_emit_range(const dc_zero_layout *l, int64_t begin, int64_t end, int64_t shard_begin, emitter *e) {
  for (int64_t p = dc__zero_first_param(l, begin); p < l->nparams && l->offset[p] < end; p++) {
    int64_t param_end = l->offset[p] + l->numel[p];
    int64_t from = l->offset[p] > begin ? l->offset[p] : begin;
    int64_t to = param_end < end ? param_end : end;
    if (from >= to) continue; /* no elements */
    partition_emit(e, (dc_zero_segment){.param = p,
                                        .param_begin = from - l->offset[p],
                                        .flat_begin = from,
                                        .shard_begin = shard_begin + (from - begin),
                                        .len = to - from});
  }
}

static int partition_walk_segments(const dc_zero_layout *l, int64_t r, emitter *e) {
  for (int64_t b = 0; b < l->nbuckets; b++) {
    int64_t begin, end, shard_begin;
    DC_TRY(dc_zero_slice(l, b, r, &begin, &end, &shard_begin));
    partition_emit_range(l, begin, end, shard_begin, e);
  }
  return DC_OK;
}

int dc_zero_segments(const dc_zero_layout *l, int64_t r, dc_zero_segment *segments, int64_t capacity, int64_t *count) {
  if (!l || !count) return DC_FAIL(DC_E_INVALID, "layout or count is NULL");
  if (r < 0 || r >= l->world)
    return DC_FAIL(DC_E_INVALID, "rank %lld is outside of [0, %lld)", (long long)r, (long long)l->world);
  emitter counted = {0};
  DC_TRY(partition_walk_segments(l, r, &counted));
  if (segments) {
    if (capacity < counted.count)
      return DC_FAIL(DC_E_INVALID, "capacity is %lld, but rank %lld has %lld segments; ask with segments == NULL first",
                     (long long)capacity, (long long)r, (long long)counted.count);
    emitter written = {.out = segments};
    DC_TRY(partition_walk_segments(l, r, &written));
  }
  *count = counted.count;
  return DC_OK;
}
