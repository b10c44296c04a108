/* table_amx.c: the table of amx_bf16: bodies of its own for what multiplies matrices, else those of avx512_bf16. Data
 * alone, as table.c is. */
#include "cpu/vec.h"

#define DC_OP(name, params) void dc__##name##_avx512_bf16 params;
#define DC_OP_TILES(name, params)
#include "ops.def"
#undef DC_OP

extern const dc__ops DC_BODY(ops);

const dc__ops DC_BODY(ops) = {
#define DC_OP(name, params) .name = dc__##name##_avx512_bf16,
#define DC_OP_TILES(name, params) .name = dc__##name##_amx_bf16,
#include "ops.def"
#undef DC_OP
};
