/* stand_in_cuda.h: what a test sees of stand_in_cuda.c, and tells it. */
#ifndef DEEPC_TESTS_STAND_IN_CUDA_H
#define DEEPC_TESTS_STAND_IN_CUDA_H

#include <stdint.h>

enum { STAND_IN_CREATE = 1, STAND_IN_MAP, STAND_IN_ACCESS, STAND_IN_SYNC, STAND_IN_SET };

/* The variable `stand_in_cuda` of the library. */
struct stand_in_cuda {
  int64_t room;             /* bytes that the GPU has left */
  int64_t able;             /* it has virtual memory management */
  int64_t shut_down;        /* the driver is */
  int64_t pieces, creates;  /* of physical memory: that a handle or a mapping holds; made so far */
  int64_t mapped, reserved; /* bytes of memory and of addresses */
  int64_t contexts;         /* references to primary ones */
  int64_t current;          /* contexts that were pushed and not popped */
  int64_t syncs, sets;      /* calls */
  int64_t unsynced;         /* unmappings while something had been written since the last wait */
  int64_t fails;            /* the call that fails once, */
  int64_t after;            /* after so many that go well, */
  int64_t error;            /* and with what */
};

#endif
