/* take.h: how a struct that may grow is taken (base.h, "structs that may grow"), for base.c and for libdeepc_cuda.so,
 * which shares no code with it at run time. The includer says how a failure is recorded: TAKE_FAIL(status, format,
 * ...). */
#ifndef DEEPC_BASE_TAKE_H
#define DEEPC_BASE_TAKE_H

#include <string.h>

#include "base/base.h"

/* Arguments as those of dc__take_struct. */
static inline int take_struct(void *taken, size_t known, size_t least, const void *given, const char *name) {
  size_t size;
  if (!given) return TAKE_FAIL(DC_E_INVALID, "%s is NULL", name);
  memcpy(&size, given, sizeof size);
  if (size < least)
    return TAKE_FAIL(DC_E_INVALID, "%s.struct_size is %zu: set it to sizeof(%s), which is %zu in this version", name,
                     size, name, known);
  if (size > known)
    return TAKE_FAIL(DC_E_INVALID,
                     "%s.struct_size is %zu, this libdeepc (%s) knows %zu bytes: the caller was built for a newer one",
                     name, size, DC_VERSION_STRING, known);
  memset(taken, 0, known);
  memcpy(taken, given, size);
  return DC_OK;
}

#endif
