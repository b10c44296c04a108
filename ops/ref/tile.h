/* tile.h: sizes of the products of small matrices that the scalar references and the vector bodies (cpu/tile.h) share.
 */
#ifndef DEEPC_OPS_TILE_H
#define DEEPC_OPS_TILE_H

#include <stdint.h>

/* Columns are padded to TILE_WIDTH, the widest panel; TILE_DIM elements of the inner dimension are packed at a time. */
enum { TILE_WIDTH = 32, TILE_DIM = 256 };

static inline int64_t tile_round(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

#endif
