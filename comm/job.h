/* job.h: what the files of the collectives share: one call as a job, and the rows of the algorithm table. */
#ifndef DEEPC_JOB_H
#define DEEPC_JOB_H

#include "comm_impl.h"

typedef struct dc__job {
  dc_comm *c;
  const char *in;
  char *out;
  int64_t count;               /* elements of one part */
  int64_t esz;                 /* bytes of one element */
  int in_parts, out_parts;     /* parts of the larger ranks' in and out: 1 or size */
  const int64_t *in_counts;    /* all_to_allv: [size]; NULL otherwise */
  const int64_t *out_counts;
  const int64_t **theirs;      /* all_to_allv: theirs[r] = in_counts of rank r; NULL before they are exchanged */
  int64_t longest;             /* all_to_allv: elements of the longest block of any pair */
  dc_call call;
} dc__job;

/* Ways to run a call. The number of a row travels in the fingerprint, so that ranks which force different rows are
 * told. */
typedef struct dc__algo {
  int op; /* dc_call_op */
  const char *name, *what;
  int (*run)(const dc__job *);
} dc__algo;

/* ---- coll_staged.c: through the slots ---------------------------------------------------------------------------- */
int dc__staged(const dc__job *j);
int dc__two_phase(const dc__job *j);

/* ---- coll_direct.c: where the buffers lie ------------------------------------------------------------------------ */
/* What ranks tell each other at the start of a large call, in their slots. */
typedef struct dc__info {
  uint64_t in, out;         /* addresses in the owner's process */
  int32_t in_seg, out_seg;  /* segment in which they lie, -1: none */
  int64_t in_off, out_off;  /* and where in it */
  uint64_t mapped;          /* segments that the owner has mapped */
} dc__info;

typedef struct dc__view {
  dc__info of[DC_COMM_MAX_RANKS];
} dc__view;

/* One exchange step in which every rank shows its buffers. */
int dc__meet(const dc__job *j, dc__view *v);
/* True if the call can run directly: everything it needs is mapped, or the kernel lets us read and write peers' memory.
 */
bool dc__reachable(const dc__job *j, const dc__view *v);
/* True if it needs no help of the kernel: what peers reach lies in segments that all ranks have mapped. */
bool dc__all_mapped(const dc__job *j, const dc__view *v);
int dc__direct(const dc__job *j, const dc__view *v);
/* Gives the communicator's scratch memory back. */
void dc__direct_close(dc_comm *c);

/* ---- coll.c: which way a call runs ------------------------------------------------------------------------------- */
void dc__choices_make(dc_comm *c);
int dc__force_algos(dc_comm *c);

static inline bool dc__reduces(int op) {
  op %= DC__ALGO;
  return op == DC_CALL_ALL_REDUCE || op == DC_CALL_REDUCE_SCATTER || op == DC_CALL_REDUCE;
}
static inline int64_t dc__min64(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
