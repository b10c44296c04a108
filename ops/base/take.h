/* take.h: how a struct that may grow is taken (base.h, "structs that may grow"), for base.c and for libdeepc_cuda.so,
 * which shares no code with it at run time. */
#ifndef DEEPC_BASE_TAKE_H
#define DEEPC_BASE_TAKE_H

#include <stdio.h>
#include <string.h>

#include "base/base.h"

enum { TAKE_WHY = 256 }; /* bytes of a reason */

/* Arguments as those of dc__take_struct. A failure is not recorded, but told in `why`. */
static inline int take_struct(void *taken, size_t known, size_t least, const void *given, const char *name,
                              char why[TAKE_WHY]) {
  size_t size;
  if (!given) {
    snprintf(why, TAKE_WHY, "%s is NULL", name);
    return DC_E_INVALID;
  }
  memcpy(&size, given, sizeof size);
  if (size < least) {
    snprintf(why, TAKE_WHY, "%s.struct_size is %zu: set it to sizeof(%s), which is %zu in this version", name, size,
             name, known);
    return DC_E_INVALID;
  }
  if (size > known) {
    snprintf(why, TAKE_WHY,
             "%s.struct_size is %zu, this libdeepc (%s) knows %zu bytes: the caller was built for a newer one", name,
             size, DC_VERSION_STRING, known);
    return DC_E_INVALID;
  }
  memset(taken, 0, known);
  memcpy(taken, given, size);
  return DC_OK;
}

#endif
