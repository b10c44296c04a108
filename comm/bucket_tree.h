/* bucket_tree.h: the order in which the gradients of micro-batches are added when the sum must not depend on the layout
 * (docs/determinism.md). Included by the reducer only.
 *
 * Micro-batches are the leaves 0, 1, 2, ... of a binary tree that grows like a binary counter: a leaf is pushed on a
 * stack, and as long as the two topmost nodes cover equally many leaves they become one, left + right. After c leaves
 * the stack holds one node per bit of c that is set, the largest at the bottom. The end of the step adds up what is
 * left from the top down. So which two numbers meet depends on nothing but their indices and the number of leaves:
 * not on how many leaves arrive at a time. */
#ifndef DEEPC_BUCKET_TREE_H
#define DEEPC_BUCKET_TREE_H

#include "bucket.h"

/* A stack that many leaves fit: 2^31 of them. */
enum { DC__TREE_DEPTH = 32 };

/* Nodes on the stack after `leaves` leaves. */
static inline int dc__tree_nodes(int64_t leaves) { return __builtin_popcountll((unsigned long long)leaves); }

typedef struct dc__tree_job {
  float *const *entry; /* [entries] the nodes, bottom first: [n] fp32 each, written in place */
  int entries; /* >= 1, and >= dc__tree_nodes(leaves + nsrc) unless `last` */
  int nsrc, dt; /* 1 <= nsrc <= DC_COMM_MAX_RANKS; fp32, bf16, fp16 */
  int64_t leaves; /* pushed before; 0: the entries are not read */
  const void *const *src; /* [nsrc] of [n], the next leaves in the order of their index */
  int last; /* 1: these are the step's last leaves, entry[0] gets the whole sum */
  double *partial; /* `last` only, NULL or squared-norm partials of entry[0], as dc_sqnorm */
} dc__tree_job;

/* Pushes the leaves. Additions are in fp32. All arrays are borrowed for the call; sources do not overlap entries. */
int dc__tree_push(const dc__tree_job *job, int64_t n);

#endif
