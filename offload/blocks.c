/* blocks.c: checksums of memory in blocks of equal size: what an array on disk is checked with when any part of it is
 * read (python/deepc/offload/array.py). The table of sums is the caller's. */
#include "offload.h"

static int blocks_check_arguments(const void *data, int64_t bytes, int64_t block_bytes, const void *sums) {
  if (bytes < 0 || block_bytes <= 0)
    return DC_FAIL(DC_E_INVALID, "%lld bytes in blocks of %lld; expected at least 0 and 1", (long long)bytes,
                   (long long)block_bytes);
  if (bytes > 0 && (!data || !sums)) return DC_FAIL(DC_E_INVALID, "data or sums is NULL");
  return DC_OK;
}

static size_t blocks_length(int64_t bytes, int64_t block_bytes, int64_t at) {
  return (size_t)(bytes - at < block_bytes ? bytes - at : block_bytes);
}

int dc_blocks_sum(const void *data, int64_t bytes, int64_t block_bytes, uint32_t *sums) {
  DC_TRY(blocks_check_arguments(data, bytes, block_bytes, sums));
  for (int64_t at = 0; at < bytes; at += block_bytes)
    *sums++ = dc_crc32c(0, (const char *)data + at, blocks_length(bytes, block_bytes, at));
  return DC_OK;
}

int dc_blocks_check(const void *data, int64_t bytes, int64_t block_bytes, const uint32_t *sums, int64_t *bad) {
  DC_TRY(blocks_check_arguments(data, bytes, block_bytes, sums));
  if (!bad) return DC_FAIL(DC_E_INVALID, "bad is NULL");
  *bad = -1;
  for (int64_t at = 0; at < bytes; at += block_bytes)
    if (dc_crc32c(0, (const char *)data + at, blocks_length(bytes, block_bytes, at)) != *sums++) {
      *bad = at / block_bytes;
      break;
    }
  return DC_OK;
}
