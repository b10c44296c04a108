/* table.c: the bodies of one instruction set as a table. Data alone, without code: it is compiled with the flags of its
 * instruction set, so that a function here would not run on processors that lack it, and all tables are looked at
 * before the processor is. */
#include "cpu/vec.h"

extern const dc__ops DC_BODY(ops);

const dc__ops DC_BODY(ops) = {
#define DC_OP(name, params) .name = DC_BODY(name),
#include "ops.def"
#undef DC_OP
};
