/* table.c: puts the bodies of one instruction set into its table. */
#include "cpu/vec.h"

void DC_BODY(ops_fill)(dc__ops *table);

void DC_BODY(ops_fill)(dc__ops *table) {
#define DC_OP(name, params) table->name = DC_BODY(name);
#include "ops.def"
#undef DC_OP
}
