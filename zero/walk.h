/* walk.h: what partition.c and bucket.c share: finding parameters in the flat space. */
#ifndef DEEPC_ZERO_WALK_H
#define DEEPC_ZERO_WALK_H

#include "zero.h"

/* The first parameter that has an element at or after `flat` (its end is beyond it), or nparams. O(log nparams). */
int64_t dc__zero_first_param(const dc_zero_layout *l, int64_t flat);

#endif
