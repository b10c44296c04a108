/* gather.c: bytes of gathered parameters (ZeRO-3, streamed mode) into the storage that was made for them. */
#include "zero.h"

int dc_zero_gather(void *dst, const void *src, int64_t bytes) {
  DC_TRY(dc_copy(dst, src, bytes));
  dc__count(DC_COUNTER_gather_bytes, bytes);
  return DC_OK;
}
