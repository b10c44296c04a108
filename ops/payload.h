/* payload.h: the sizes of what blockwise codecs write (ops.h): a scale per block, then codes, filled up to four bytes.
 */
#ifndef DEEPC_OPS_PAYLOAD_H
#define DEEPC_OPS_PAYLOAD_H

#include <stdint.h>

static inline int64_t compress_blocks(int64_t block, int64_t n) { return (n + block - 1) / block; }
static inline int64_t compress_round4(int64_t bytes) { return (bytes + 3) & ~(int64_t)3; }
/* Bytes of n codes of a blockwise payload, without what fills the last four. */
static inline int64_t compress_code_bytes(int bits, int64_t n) { return (n * bits + 7) / 8; }

#endif
