/* bucket_tree.c: the stack of bucket_tree.h, block by block, so that nodes that live only between two of the leaves
 * at hand stay in the first-level caches: memory sees each source once and each entry that changes once. Owns nothing.
 *
 * A leaf is not copied: it waits as what it is, and two of them are added in one pass over both. */
#include "bucket_tree.h"

/* Positions above the entries that one call needs for a moment: the leaves at hand are fewer than 2^9. */
enum { TEMPS = 9 };
_Static_assert(DC_COMM_MAX_RANKS < 1 << TEMPS, "a leaf of each rank must fit the nodes of a call");

typedef struct node {
  const void *at;
  int raw; /* 1: a leaf, of the job's dtype, in its owner's memory; 0: fp32 at the place of its position */
} node;

typedef struct stack {
  const dc__tree_job *job;
  int64_t begin, n;
  int depth;
  node node[DC__TREE_DEPTH + TEMPS];
  float (*temp)[DC_BLOCK];
} stack;

static float *tree_place(const stack *s, int position) {
  const dc__tree_job *j = s->job;
  return position < j->entries ? j->entry[position] + s->begin : s->temp[position - j->entries];
}

static double *tree_norm_of(const stack *s, int final, int position) {
  return final && position == 0 && s->job->partial ? s->job->partial + s->begin / DC_BLOCK : NULL;
}

/* A leaf alone at `position` becomes fp32. */
static int tree_settle(stack *s, int position, int final) {
  float *to = tree_place(s, position);
  DC_TRY(dc__reduce_acc_here(to, &s->node[position].at, 1, s->job->dt, s->n, 1, tree_norm_of(s, final, position)));
  s->node[position] = (node){.at = to};
  return DC_OK;
}

/* node[position] = node[position] + right. Of two nodes the left one is never the smaller, so a raw one has a raw one
 * at its right. */
static int tree_merge(stack *s, int position, node right, int final) {
  float *to = tree_place(s, position);
  double *partial = tree_norm_of(s, final, position);
  node *left = &s->node[position];
  const int dt = right.raw ? s->job->dt : DC_F32;
  const void *both[2] = {left->at, right.at};
  if (left->raw) DC_TRY(dc__reduce_acc_here(to, both, 2, dt, s->n, 1, partial));
  else DC_TRY(dc__reduce_acc_here(to, &right.at, 1, dt, s->n, 0, partial));
  *left = (node){.at = to};
  return DC_OK;
}

static int tree_push(stack *s, int k) {
  const dc__tree_job *j = s->job;
  const int final = j->last && k == j->nsrc - 1;
  int merges = final ? s->depth : __builtin_ctzll((unsigned long long)(j->leaves + k + 1));
  node right = {.at = (const char *)j->src[k] + s->begin * (int64_t)dc_dtype_size(j->dt), .raw = 1};
  if (merges == 0) {
    s->node[s->depth++] = right;
    return final ? tree_settle(s, 0, 1) : DC_OK;
  }
  for (; merges > 0; merges--) {
    DC_TRY(tree_merge(s, s->depth - 1, right, final));
    right = s->node[s->depth - 1];
    if (merges > 1) s->depth--;
  }
  return DC_OK;
}

static int tree_push_block(const dc__tree_job *j, int64_t begin, int64_t n, float (*temp)[DC_BLOCK]) {
  stack s = {.job = j, .begin = begin, .n = n, .depth = dc__tree_nodes(j->leaves), .temp = temp};
  for (int p = 0; p < s.depth; p++) s.node[p] = (node){.at = tree_place(&s, p)};
  for (int k = 0; k < j->nsrc; k++) DC_TRY(tree_push(&s, k));
  for (int p = 0; p < s.depth; p++)
    if (s.node[p].raw) DC_TRY(tree_settle(&s, p, 0));
  return DC_OK;
}

static void tree_push_range(int64_t begin, int64_t end, void *ctx) {
  float temp[TEMPS][DC_BLOCK]; /* only what is used is touched */
  for (int64_t at = begin; at < end; at += DC_BLOCK)
    if (tree_push_block(ctx, at, end - at < DC_BLOCK ? end - at : DC_BLOCK, temp) != DC_OK) return;
}

int dc__tree_push(const dc__tree_job *job, int64_t n) {
  int isa;
  const int after = dc__tree_nodes(job->leaves + job->nsrc), before = dc__tree_nodes(job->leaves);
  if (before > job->entries || (!job->last && after > job->entries))
    return DC_FAIL(DC_E_STATE, "%lld micro-batches and then %d more need %d gradient buffers, there are %d",
                   (long long)job->leaves, job->nsrc, after > before ? after : before, job->entries);
  DC_TRY(dc_isa_current(&isa)); /* all that can fail below */
  const int64_t bytes = (int64_t)dc_dtype_size(job->dt) * job->nsrc + 8;
  const int64_t blocks = ((int64_t)512 << 10) / bytes / DC_BLOCK;
  dc_parallel_for(n, (blocks > 0 ? blocks : 1) * DC_BLOCK, tree_push_range, (void *)(uintptr_t)job);
  return DC_OK;
}
