/* bucket.c: how the flat space is cut into buckets, a bucket into slices, and which parameters lie in a bucket.
 * Assumes the invariants that dc_zero_layout_make established: bucket_elems and total are multiples of world *
 * DC_BLOCK. */
#include "walk.h"

int dc_zero_bucket(const dc_zero_layout *l, int64_t b, int64_t *begin, int64_t *end) {
  if (!l || !begin || !end) return DC_FAIL(DC_E_INVALID, "layout, begin or end is NULL");
  if (b < 0 || b >= l->nbuckets)
    return DC_FAIL(DC_E_INVALID, "bucket %lld is outside of [0, %lld)", (long long)b, (long long)l->nbuckets);
  int64_t at = b * l->bucket_elems; /* <= total: no overflow */
  int64_t left = l->total - at;
  *begin = at;
  *end = at + (left < l->bucket_elems ? left : l->bucket_elems);
  return DC_OK;
}

int dc_zero_slice(const dc_zero_layout *l, int64_t b, int64_t r, int64_t *begin, int64_t *end, int64_t *shard_begin) {
  if (!l || !begin || !end || !shard_begin) return DC_FAIL(DC_E_INVALID, "layout, begin, end or shard_begin is NULL");
  if (r < 0 || r >= l->world)
    return DC_FAIL(DC_E_INVALID, "rank %lld is outside of [0, %lld)", (long long)r, (long long)l->world);
  int64_t first, last;
  DC_TRY(dc_zero_bucket(l, b, &first, &last));
  int64_t slice = (last - first) / l->world;
  *begin = first + r * slice;
  *end = *begin + slice;
  *shard_begin = first / l->world; /* every bucket before is full */
  return DC_OK;
}

int64_t dc__zero_first_param(const dc_zero_layout *l, int64_t flat) {
  int64_t lo = 0, hi = l->nparams;
  while (lo < hi) {
    int64_t mid = lo + (hi - lo) / 2;
    if (l->offset[mid] + l->numel[mid] > flat) hi = mid;
    else lo = mid + 1;
  }
  return lo;
}

int dc_zero_pieces(const dc_zero_layout *l, int64_t b, dc_zero_piece *pieces, int64_t capacity, int64_t *count) {
  if (!count) return DC_FAIL(DC_E_INVALID, "count is NULL");
  int64_t begin, end;
  DC_TRY(dc_zero_bucket(l, b, &begin, &end));
  int64_t first = dc__zero_first_param(l, begin), n = 0;
  for (int64_t p = first; p < l->nparams && l->offset[p] < end; p++) n += l->numel[p] > 0;
  if (pieces) {
    if (capacity < n)
      return DC_FAIL(DC_E_INVALID, "capacity is %lld, but bucket %lld has %lld pieces; ask with pieces == NULL first",
                     (long long)capacity, (long long)b, (long long)n);
    int64_t k = 0;
    for (int64_t p = first; p < l->nparams && l->offset[p] < end; p++) {
      if (l->numel[p] == 0) continue;
      int64_t param_end = l->offset[p] + l->numel[p];
      int64_t from = l->offset[p] > begin ? l->offset[p] : begin;
      int64_t to = param_end < end ? param_end : end;
      pieces[k++] = (dc_zero_piece){
          .param = p, .param_begin = from - l->offset[p], .flat_begin = from, .len = to - from};
    }
  }
  *count = n;
  return DC_OK;
}
