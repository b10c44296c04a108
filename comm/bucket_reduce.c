/* bucket_reduce.c: the gradient reducer of bucket.h. Owns the state of a pass; borrows the communicator, the layout,
 * the accumulator and, until it lists them as released, the gradients. Assumes that nobody else makes steps on its
 * dc_comm between the first add of a pass and the end of finish.
 *
 * Buckets move in index order through three counters, reduced <= posted <= begun: [reduced, posted) wait for the
 * peers, [posted, begun) are being filled (later ones may be complete before earlier ones), from begun on nothing
 * has a slot yet. begun - reduced <= slots is the window. Every call first writes what the window takes, then makes
 * progress without blocking.
 *
 * Why nothing deadlocks. A rank blocks in two places only: W(s), a wait for step s that it has posted itself; and
 * B(t), a begin of step t with an empty window, every step before t done by itself, which waits for "done" of step t
 * - slots. In add it never blocks while the oldest step that it has begun lacks gradients of its own; in finish none
 * lacks any, because zeros stand for what has not come. Suppose a rank A is blocked for ever.
 *   A in W(s): some rank C has not posted s. If C is blocked, then in W(s') of a step that it has posted, so s' < s,
 *              or in B(t) with t <= s, because it has posted all before t and not s; B(t) waits for step t - slots < s.
 *   A in B(t): some rank C has not done u = t - slots. If C is blocked, then in W(s') with s' <= u, or in B(t') with
 *              t' <= u, because it has done all before t' and not u.
 * Give W(s) the height 2s and B(t) the height 2(t - slots) + 1. Along this chain the height falls strictly, so the
 * chain ends at a rank that is not blocked here: it computes, and by contract goes on to add or finish, which post
 * and mark done whatever they can. So every blocked rank goes on, whatever the orders of the ranks' gradients. The
 * one condition: a rank's backward must not itself wait for a peer that is blocked here. With equal orders it can't:
 * what A had when it blocked, a peer that came to the same place has as well, and posted. With different orders and
 * collectives inside backward it can, once gradients above the limit are pending; then the communicator's time-out
 * tells where every rank is. A rank that died or failed breaks the communicator, and that ends every wait.
 * With a ring nothing new blocks here: a full ring only stops reducing, and the caller, who waits for its peers on
 * other nodes bucket by bucket, in index order, prolongs the chain by links whose bucket falls as well.
 *
 * Copies into slots are dc_copy's, with streaming stores: a fifth faster for large buckets (docs/lab/collectives.md).
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bucket.h"
#include "bucket_tree.h"
#include "comm_impl.h"

/* A gather's chunk: what one rank wrote should still be in the caches when the others read it. */
#define GATHER_CHUNK ((int64_t)1 << 20)
/* Below this a copy is one memcpy, not a job for the threads. */
#define SMALL_COPY ((int64_t)64 << 10)
/* Elements of a 16-bit accumulator that are wide at a time: they should stay in a second-level cache. */
#define WIDE_PART ((int64_t)8 * DC_BLOCK)

typedef enum bucket_state { BUCKET_IDLE, BUCKET_OPEN, BUCKET_POSTED, BUCKET_REDUCED } bucket_state;
typedef struct bucket {
  bucket_state state;
  int64_t begin, end;   /* of the flat space */
  int64_t first, params; /* first parameter that touches it, how many with elements do */
  int64_t missing;      /* of those: not written yet */
  int64_t step;
  char *slot;
} bucket;

typedef enum param_state { PARAM_NONE, PARAM_GIVEN, PARAM_ABSENT, PARAM_WRITTEN } param_state;
typedef struct param {
  const char *grad;
  int64_t left; /* elements not written yet */
  int32_t dtype;
  param_state state;
} param;

typedef enum pass_state { PASS_CLOSED, PASS_OPEN, PASS_FAILED } pass_state;

struct dc_reducer {
  dc_reducer_config k;
  int64_t elem, acc_elem; /* bytes of the wire dtype, of acc's */
  int32_t slots;
  _Atomic uint32_t busy;
  pass_state state;
  int assign, norm;
  int64_t begun, posted, reduced, taken; /* taken: given back by the owner of a ring */
  int64_t pending_bytes; /* gradients that we still hold */
  int64_t free_head, free_tail; /* of freed[] */
  int64_t *freed;        /* [nparams] released parameters, in the order of their release */
  bucket *bucket;        /* [nbuckets] */
  param *param;          /* [nparams] */
  uint8_t *fused;        /* alone: [total / DC_BLOCK] 1: its partial was computed with the accumulation */
  int64_t leaves;        /* of the tree: micro-batches before this pass */
  int closed;            /* the tree's last pass is over */
  dc_lease *lease;       /* borrowed: where acc gets its memory before it is written, or NULL */
  char *leaf;            /* alone with a tree: [bucket_elems] of the wire dtype, a leaf that had to be made */
  float *wide;           /* acc_dtype not fp32: [WIDE_PART] */
  int error;
  char text[DC__TEXT];
};

/* ---- state ------------------------------------------------------------------------------------------------------- */
static const char *const reduce_state_name[] = {"idle", "open", "posted", "reduced"};

static int reduce_move(dc_reducer *r, bucket *b, bucket_state from, bucket_state to) {
  if (b->state != from)
    return DC_FAIL(DC_E_STATE, "bucket %lld is %s, but must be %s to become %s", (long long)(b - r->bucket),
                   reduce_state_name[b->state], reduce_state_name[from], reduce_state_name[to]);
  b->state = to;
  return DC_OK;
}

static int reduce_enter(dc_reducer *r) {
  if (!r) return DC_FAIL(DC_E_INVALID, "the reducer is NULL");
  if (atomic_exchange_explicit(&r->busy, 1, memory_order_acquire))
    return DC_FAIL(DC_E_STATE, "the reducer is in use by another thread; one call at a time");
  return DC_OK;
}

static int reduce_leave(dc_reducer *r, int rc) {
  atomic_store_explicit(&r->busy, 0, memory_order_release);
  return rc;
}

static int reduce_failed(const dc_reducer *r) { return DC_FAIL(r->error, "the reducer failed before: %s", r->text); }

static void reduce_release(dc_reducer *r, int64_t p) {
  param *x = &r->param[p];
  r->pending_bytes -= r->k.layout->numel[p] * (int64_t)dc_dtype_size(x->dtype);
  x->grad = NULL;
  x->state = PARAM_WRITTEN; /* or given up, in a pass that failed */
  r->freed[r->free_tail++] = p;
}

/* Ends everything with this error: gradients go back to their owners, and the peers are told, so that none waits for
 * us. */
static int reduce_fail(dc_reducer *r, int rc) {
  snprintf(r->text, sizeof r->text, "%s", dc_last_error());
  r->error = rc;
  r->state = PASS_FAILED;
  for (int64_t p = 0; p < r->k.layout->nparams; p++)
    if (r->param[p].state == PARAM_GIVEN) reduce_release(r, p);
  if (r->k.comm && !dc_comm_error(r->k.comm)[0]) dc_comm_abort(r->k.comm, r->text);
  return DC_FAIL(rc, "%s", r->text);
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */
static int reduce_copy_in(void *to, const void *from, int64_t bytes) {
  if (bytes >= SMALL_COPY) return dc_copy(to, from, bytes);
  memcpy(to, from, (size_t)bytes);
  return DC_OK;
}

static int reduce_write_slot(dc_reducer *r, bucket *b, const param *x, int64_t from, int64_t at, int64_t n) {
  char *to = b->slot + (at - b->begin) * r->elem;
  if (x->state == PARAM_ABSENT) {
    memset(to, 0, (size_t)(n * r->elem));
    return DC_OK;
  }
  const char *grad = x->grad + from * (int64_t)dc_dtype_size(x->dtype);
  dc__count(DC_COUNTER_bucket_bytes_in, n * r->elem);
  if (x->dtype == r->k.dtype && r->k.pre_scale == 1.0f) return reduce_copy_in(to, grad, n * r->elem);
  return dc_cast(to, r->k.dtype, grad, x->dtype, r->k.pre_scale, n);
}

/* acc[at, at + n) is about to be written. */
static int reduce_need_acc(dc_reducer *r, int64_t at, int64_t n) {
  return r->lease ? dc_lease_need(r->lease, (size_t)(at * r->acc_elem), (size_t)(n * r->acc_elem)) : DC_OK;
}

static char *reduce_acc_at(const dc_reducer *r, int64_t at) { return (char *)r->k.acc + at * r->acc_elem; }

/* acc[at, at + n) gets or adds the sum of src[], as dc_reduce_acc. In 16 bits the sum with what was there is made in
 * fp32 and rounded once, and the norm is that of what is kept. */
static int reduce_into_acc(dc_reducer *r, int64_t at, const void *const *src, int nsrc, int dt, int64_t n,
                           double *partial) {
  if (r->k.acc_dtype == DC_F32) return dc_reduce_acc((float *)r->k.acc + at, src, nsrc, dt, n, r->assign, partial);
  const int64_t size = (int64_t)dc_dtype_size(dt);
  for (int64_t begin = 0; begin < n; begin += WIDE_PART) {
    const int64_t len = n - begin < WIDE_PART ? n - begin : WIDE_PART;
    const void *part[DC_COMM_MAX_RANKS];
    char *acc = reduce_acc_at(r, at + begin);
    for (int k = 0; k < nsrc; k++) part[k] = (const char *)src[k] + begin * size;
    if (!r->assign) DC_TRY(dc_cast(r->wide, DC_F32, acc, r->k.acc_dtype, 1.0f, len));
    DC_TRY(dc_reduce_acc(r->wide, part, nsrc, dt, len, r->assign, NULL));
    DC_TRY(dc_cast(acc, r->k.acc_dtype, r->wide, DC_F32, 1.0f, len));
    if (partial) DC_TRY(dc_sqnorm(acc, r->k.acc_dtype, len, partial + begin / DC_BLOCK));
  }
  return DC_OK;
}

/* Alone: the same of pre_scale times one gradient, without the norm. */
static int reduce_scale_into_acc(dc_reducer *r, int64_t at, const char *grad, int dt, int64_t n) {
  const int64_t size = (int64_t)dc_dtype_size(dt);
  if (r->assign) return dc_cast(reduce_acc_at(r, at), r->k.acc_dtype, grad, dt, r->k.pre_scale, n);
  if (r->k.acc_dtype == DC_F32) return dc_axpy((float *)r->k.acc + at, r->k.pre_scale, grad, dt, n);
  for (int64_t begin = 0; begin < n; begin += WIDE_PART) {
    const int64_t len = n - begin < WIDE_PART ? n - begin : WIDE_PART;
    char *acc = reduce_acc_at(r, at + begin);
    DC_TRY(dc_cast(r->wide, DC_F32, acc, r->k.acc_dtype, 1.0f, len));
    DC_TRY(dc_axpy(r->wide, r->k.pre_scale, grad + begin * size, dt, len));
    DC_TRY(dc_cast(acc, r->k.acc_dtype, r->wide, DC_F32, 1.0f, len));
  }
  return DC_OK;
}

/* Pushes the next leaves of elements [at, at + n) of acc. */
static int reduce_push_leaves(dc_reducer *r, const void *const *src, int nsrc, int64_t at, int64_t n, double *partial) {
  float *entry[DC__TREE_DEPTH];
  const int64_t elems = r->k.own_all || r->k.ring ? r->k.layout->total : r->k.layout->shard_elems;
  for (int i = 0; i < r->k.tree; i++) entry[i] = (i ? r->k.tree_acc + (i - 1) * elems : (float *)r->k.acc) + at;
  const dc__tree_job job = {.entry = entry,
                            .entries = r->k.tree,
                            .leaves = r->leaves,
                            .src = src,
                            .nsrc = nsrc,
                            .dt = r->k.dtype,
                            .last = r->norm || r->k.ring,
                            .partial = partial};
  return dc__tree_push(&job, n);
}

/* Alone with a tree: the gradient as it would lie in a slot is the leaf. */
static int reduce_push_alone(dc_reducer *r, const param *x, const char *grad, int64_t at, int64_t n) {
  const void *leaf = grad;
  if (x->state == PARAM_ABSENT) {
    memset(r->leaf, 0, (size_t)(n * r->elem));
    leaf = r->leaf;
  } else if (x->dtype != r->k.dtype || r->k.pre_scale != 1.0f) {
    DC_TRY(dc_cast(r->leaf, r->k.dtype, grad, x->dtype, r->k.pre_scale, n));
    leaf = r->leaf;
  }
  return reduce_push_leaves(r, &leaf, 1, at, n, NULL);
}

/* Alone: acc[at, at + n) from the gradient. Blocks that lie inside get their partial on the way, the others when the
 * bucket is complete. */
static int reduce_write_acc(dc_reducer *r, const param *x, int64_t from, int64_t at, int64_t n) {
  int64_t size = (int64_t)dc_dtype_size(x->dtype);
  if (r->k.tree) return reduce_push_alone(r, x, x->grad ? x->grad + from * size : NULL, at, n);
  if (x->state == PARAM_ABSENT) {
    if (r->assign) memset(reduce_acc_at(r, at), 0, (size_t)(n * r->acc_elem));
    return DC_OK;
  }
  const char *grad = x->grad + from * size;
  if (r->k.pre_scale != 1.0f) return reduce_scale_into_acc(r, at, grad, x->dtype, n);
  int64_t head = (DC_BLOCK - at % DC_BLOCK) % DC_BLOCK;
  int64_t blocks = n > head ? (n - head) / DC_BLOCK : 0;
  if (!r->norm || blocks == 0) {
    const void *all = grad;
    return reduce_into_acc(r, at, &all, 1, x->dtype, n, NULL);
  }
  int64_t cut[4] = {0, head, head + blocks * DC_BLOCK, n}, block = (at + head) / DC_BLOCK;
  for (int i = 0; i < 3; i++) {
    const void *part = grad + cut[i] * size;
    double *partial = i == 1 ? r->k.partial + block : NULL;
    DC_TRY(reduce_into_acc(r, at + cut[i], &part, 1, x->dtype, cut[i + 1] - cut[i], partial));
  }
  memset(r->fused + block, 1, (size_t)blocks);
  return DC_OK;
}

/* Writes the part of parameter p that lies in bucket b. */
static int reduce_put(dc_reducer *r, bucket *b, int64_t p) {
  const dc_zero_layout *l = r->k.layout;
  param *x = &r->param[p];
  int64_t offset = l->offset[p], end = offset + l->numel[p];
  int64_t at = offset > b->begin ? offset : b->begin, n = (end < b->end ? end : b->end) - at;
  DC_TRY(r->k.comm ? reduce_write_slot(r, b, x, at - offset, at, n) : reduce_write_acc(r, x, at - offset, at, n));
  b->missing--;
  x->left -= n;
  if (x->left > 0) return DC_OK;
  if (x->state == PARAM_GIVEN) reduce_release(r, p);
  x->state = PARAM_WRITTEN;
  return DC_OK;
}

static void reduce_zero_range(dc_reducer *r, bucket *b, int64_t at, int64_t n) {
  if (n <= 0) return;
  if (r->k.comm) memset(b->slot + (at - b->begin) * r->elem, 0, (size_t)(n * r->elem));
  else if (r->assign)
    for (int64_t i = 0; i < (r->k.tree ? r->k.tree : 1); i++)
      memset(i ? (char *)(r->k.tree_acc + (i - 1) * r->k.layout->total + at) : reduce_acc_at(r, at), 0,
             (size_t)(n * r->acc_elem));
}

/* What is in no parameter is zero and counts as zero in the norm. */
static void reduce_zero_padding(dc_reducer *r, bucket *b) {
  const dc_zero_layout *l = r->k.layout;
  int64_t at = b->begin;
  for (int64_t p = b->first; p < l->nparams && l->offset[p] < b->end; p++) {
    reduce_zero_range(r, b, at, l->offset[p] - at);
    if (l->offset[p] + l->numel[p] > at) at = l->offset[p] + l->numel[p];
  }
  reduce_zero_range(r, b, at, b->end - at);
}

/* ---- buckets ----------------------------------------------------------------------------------------------------- */
/* Gives bucket b its slot (blocks if begin does), and writes what is already there for it. */
static int reduce_open_bucket(dc_reducer *r, int64_t index) {
  const dc_zero_layout *l = r->k.layout;
  bucket *b = &r->bucket[index];
  DC_TRY(reduce_move(r, b, BUCKET_IDLE, BUCKET_OPEN));
  if (r->k.comm) {
    void *slot;
    DC_TRY(dc_exchange_begin(r->k.comm, &b->step, &slot));
    b->slot = slot;
  } else {
    DC_TRY(reduce_need_acc(r, b->begin, b->end - b->begin));
  }
  b->missing = b->params;
  reduce_zero_padding(r, b);
  for (int64_t p = b->first; p < l->nparams && l->offset[p] < b->end; p++) {
    param_state s = r->param[p].state;
    if (l->numel[p] > 0 && (s == PARAM_GIVEN || s == PARAM_ABSENT)) DC_TRY(reduce_put(r, b, p));
  }
  return DC_OK;
}

static int reduce_open_next(dc_reducer *r) {
  DC_TRY(reduce_open_bucket(r, r->begun));
  r->begun++;
  return DC_OK;
}

/* [*begin, *end) of the flat space is our part of the bucket, acc has it from *at on. */
static int reduce_own_slice(const dc_reducer *r, int64_t index, int64_t *begin, int64_t *end, int64_t *at) {
  const dc_zero_layout *l = r->k.layout;
  *begin = *at = r->bucket[index].begin, *end = r->bucket[index].end;
  if (!r->k.own_all) DC_TRY(dc_zero_slice(l, index, r->k.rank, begin, end, at));
  if (r->k.ring) *at = index % r->k.ring * (r->k.own_all ? l->bucket_elems : l->bucket_elems / l->world);
  return DC_OK;
}

/* Where our slice of this bucket will be added gets its memory as soon as our own gradients are there, not when the
 * last peer's are: what the heap looks like then depends on this rank alone, as the memory estimate assumes. */
static int reduce_need_own_slice(dc_reducer *r, int64_t index) {
  int64_t begin, end, at;
  if (!r->lease) return DC_OK;
  DC_TRY(reduce_own_slice(r, index, &begin, &end, &at));
  return reduce_need_acc(r, at, end - begin);
}

static int reduce_post_next(dc_reducer *r) {
  bucket *b = &r->bucket[r->posted];
  const dc_call call = {.op = DC_CALL_BUCKET, .dtype = r->k.dtype, .count = b->end - b->begin, .tag = r->posted};
  DC_TRY(reduce_move(r, b, BUCKET_OPEN, BUCKET_POSTED));
  DC_TRY(dc_exchange_post(r->k.comm, &call));
  DC_TRY(reduce_need_own_slice(r, r->posted));
  r->posted++;
  return DC_OK;
}

static int reduce_has_room(const dc_reducer *r) { return !r->k.ring || r->reduced - r->taken < r->k.ring; }

/* Reduces our part of the oldest bucket, which all ranks have posted, and gives its slot back. */
static int reduce_next(dc_reducer *r) {
  const dc_zero_layout *l = r->k.layout;
  bucket *b = &r->bucket[r->reduced];
  int64_t begin, end, at;
  DC_TRY(reduce_own_slice(r, r->reduced, &begin, &end, &at));
  const void *src[DC_COMM_MAX_RANKS];
  for (int64_t k = 0; k < l->world; k++)
    src[k] = (const char *)dc_exchange_peer(r->k.comm, (int)k, b->step) + (begin - b->begin) * r->elem;
  double *partial = r->norm && r->k.partial ? r->k.partial + at / DC_BLOCK : NULL;
  if (r->k.tree) DC_TRY(reduce_push_leaves(r, src, (int)l->world, at, end - begin, partial));
  else DC_TRY(reduce_into_acc(r, at, src, (int)l->world, r->k.dtype, end - begin, partial));
  DC_TRY(reduce_move(r, b, BUCKET_POSTED, BUCKET_REDUCED));
  DC_TRY(dc_exchange_done(r->k.comm, b->step));
  DC_TRY(reduce_move(r, b, BUCKET_REDUCED, BUCKET_IDLE));
  dc__count(DC_COUNTER_buckets_reduced, 1);
  dc__count(DC_COUNTER_bucket_bytes_reduced, (end - begin) * r->elem * l->world);
  r->reduced++;
  return DC_OK;
}

/* Does everything that can be done without waiting for a peer. */
static int reduce_progress(dc_reducer *r) {
  for (int moved = 1; moved;) {
    int ready = 1;
    moved = 0;
    while (r->posted < r->begun && r->bucket[r->posted].missing == 0) DC_TRY(reduce_post_next(r));
    while (r->reduced < r->posted && reduce_has_room(r) && ready) {
      DC_TRY(dc_exchange_test(r->k.comm, r->bucket[r->reduced].step, &ready));
      if (ready) DC_TRY(reduce_next(r));
    }
    for (ready = 1; ready && r->begun < r->k.layout->nbuckets && r->begun - r->reduced < r->slots;) {
      DC_TRY(dc_exchange_can_begin(r->k.comm, &ready));
      if (!ready) break;
      DC_TRY(reduce_open_next(r));
      moved = 1;
    }
  }
  return DC_OK;
}

/* Waits for the peers in one of the two ways of the file head, then goes on; *possible is 0 if the oldest bucket still
 * lacks gradients of this rank, or the ring is full. */
static int reduce_wait_once(dc_reducer *r, int *possible) {
  *possible = reduce_has_room(r);
  if (!*possible) return DC_OK;
  if (r->reduced < r->posted) {
    DC_TRY(dc_exchange_wait(r->k.comm, r->bucket[r->reduced].step));
    DC_TRY(reduce_next(r));
  } else if (r->reduced == r->begun && r->begun < r->k.layout->nbuckets) {
    DC_TRY(reduce_open_next(r));
  } else {
    *possible = 0;
    return DC_OK;
  }
  return reduce_progress(r);
}

/* ---- alone: no peers, no slots ----------------------------------------------------------------------------------- */
static int reduce_close_alone(dc_reducer *r, bucket *b) {
  DC_TRY(reduce_move(r, b, BUCKET_OPEN, BUCKET_POSTED));
  int64_t last = b->end / DC_BLOCK;
  for (int64_t k = b->begin / DC_BLOCK, run; r->norm && r->k.partial && k < last; k += run) {
    for (run = 0; k + run < last && !r->fused[k + run];) run++;
    if (run) DC_TRY(dc_sqnorm(reduce_acc_at(r, k * DC_BLOCK), r->k.acc_dtype, run * DC_BLOCK, r->k.partial + k));
    while (k + run < last && r->fused[k + run]) run++;
  }
  DC_TRY(reduce_move(r, b, BUCKET_POSTED, BUCKET_REDUCED));
  dc__count(DC_COUNTER_buckets_reduced, 1);
  r->reduced++;
  return DC_OK;
}

/* ---- a pass ------------------------------------------------------------------------------------------------------ */
/* Whether the pass fits the tree. */
static int reduce_check_leaves(const dc_reducer *r, int assign, int norm) {
  if (!assign && r->closed)
    return DC_FAIL(DC_E_STATE,
                   "the step's last micro-batches were added (norm was asked for); the next pass must assign");
  int64_t leaves = (assign ? 0 : r->leaves) + r->k.layout->world;
  if (leaves < 0 || leaves >= (int64_t)1 << 31)
    return DC_FAIL(DC_E_OVERFLOW, "%lld micro-batches in one step are too many", (long long)leaves);
  if (!norm && dc__tree_nodes(leaves) > r->k.tree)
    return DC_FAIL(DC_E_STATE,
                   "after %lld micro-batches the tree has %d nodes, but the reducer was created with tree = %d; "
                   "create it for the number of passes that a step has",
                   (long long)leaves, dc__tree_nodes(leaves), r->k.tree);
  return DC_OK;
}

static int reduce_begin_pass(dc_reducer *r, int assign, int norm) {
  const dc_zero_layout *l = r->k.layout;
  if (r->state == PASS_FAILED) return reduce_failed(r);
  if (r->state == PASS_OPEN) return DC_FAIL(DC_E_STATE, "a pass is open; call dc_reducer_finish before the next one");
  if (norm && !r->k.partial && !r->k.tree && l->total > 0)
    return DC_FAIL(DC_E_INVALID, "norm is asked for, but the reducer was created with partial == NULL");
  if (r->k.ring && (!assign || norm))
    return DC_FAIL(DC_E_INVALID, "a reducer with a ring assigns and makes no norm, got assign %d, norm %d", assign,
                   norm);
  if (r->k.tree && !r->k.ring) DC_TRY(reduce_check_leaves(r, assign, norm));
  if (assign) r->leaves = 0;
  r->closed = 0;
  for (int64_t p = 0; p < l->nparams; p++) r->param[p] = (param){.left = l->numel[p]};
  for (int64_t b = 0; b < l->nbuckets; b++) r->bucket[b].state = BUCKET_IDLE;
  if (r->fused) memset(r->fused, 0, (size_t)(l->total / DC_BLOCK));
  r->assign = assign != 0;
  r->norm = norm != 0;
  r->begun = r->posted = r->reduced = r->taken = r->pending_bytes = r->free_head = r->free_tail = 0;
  r->state = PASS_OPEN;
  return DC_OK;
}

/* Alone there is a place for everything: a bucket opens when its first gradient comes and closes with its last. */
static int reduce_put_alone(dc_reducer *r, int64_t index, int64_t p) {
  bucket *b = &r->bucket[index];
  if (b->state == BUCKET_IDLE)
    DC_TRY(reduce_open_bucket(r, index)); /* writes p as well: it is the only one that waits */
  else DC_TRY(reduce_put(r, b, p));
  return b->missing == 0 ? reduce_close_alone(r, b) : DC_OK;
}

/* Writes parameter p, which has just come, into the open buckets. None of its buckets is posted: p was missing
 * there. */
static int reduce_put_everywhere(dc_reducer *r, int64_t p) {
  const dc_zero_layout *l = r->k.layout;
  int64_t first = l->offset[p] / l->bucket_elems, last = (l->offset[p] + l->numel[p] - 1) / l->bucket_elems;
  if (r->k.comm && last >= r->begun) last = r->begun - 1;
  for (int64_t i = first; i <= last; i++)
    DC_TRY(r->k.comm ? reduce_put(r, &r->bucket[i], p) : reduce_put_alone(r, i, p));
  return DC_OK;
}

static int reduce_help(dc_reducer *r) {
  DC_TRY(reduce_progress(r));
  for (int possible = 1; possible && r->pending_bytes > r->k.pending_limit_bytes;)
    DC_TRY(reduce_wait_once(r, &possible));
  return DC_OK;
}

static int reduce_check_gradient(const dc_reducer *r, int64_t p, const void *grad, int dtype) {
  const dc_zero_layout *l = r->k.layout;
  if (p < 0 || p >= l->nparams)
    return DC_FAIL(DC_E_INVALID, "parameter %lld is outside of [0, %lld)", (long long)p, (long long)l->nparams);
  if (dtype != DC_F32 && dtype != DC_BF16 && dtype != DC_F16)
    return DC_FAIL(DC_E_DTYPE, "the gradient of parameter %lld has dtype %d (%s); expected fp32, bf16 or fp16",
                   (long long)p, dtype, dc_dtype_name(dtype));
  if (l->numel[p] > 0 && !grad) return DC_FAIL(DC_E_INVALID, "the gradient of parameter %lld is NULL", (long long)p);
  if ((uintptr_t)grad % dc_dtype_size(dtype))
    return DC_FAIL(DC_E_INVALID, "the gradient of parameter %lld at %p is not aligned to its element of %d bytes",
                   (long long)p, grad, (int)dc_dtype_size(dtype));
  if (r->state == PASS_OPEN && r->param[p].state != PARAM_NONE)
    return DC_FAIL(DC_E_STATE, "parameter %lld was added twice in one pass; add the sum of its gradients once",
                   (long long)p);
  return DC_OK;
}

static int reduce_add_gradient(dc_reducer *r, int64_t p, const void *grad, int dtype) {
  int64_t numel = r->k.layout->numel[p];
  param *x = &r->param[p];
  x->grad = grad;
  x->dtype = dtype;
  x->state = PARAM_GIVEN;
  r->pending_bytes += numel * (int64_t)dc_dtype_size(dtype);
  if (numel == 0) reduce_release(r, p);
  else DC_TRY(reduce_put_everywhere(r, p));
  return r->k.comm ? reduce_help(r) : DC_OK;
}

/* Zeros for what has not come, now where there is a place and later as buckets open. */
static int reduce_give_zeros(dc_reducer *r) {
  for (int64_t p = 0; p < r->k.layout->nparams; p++) {
    if (r->param[p].state != PARAM_NONE) continue;
    r->param[p].state = r->k.layout->numel[p] > 0 ? PARAM_ABSENT : PARAM_WRITTEN;
    if (r->k.layout->numel[p] > 0) DC_TRY(reduce_put_everywhere(r, p));
  }
  return DC_OK;
}

/* *done is 0 if a ring has to be emptied before the pass can go on. */
static int reduce_finish_pass(dc_reducer *r, int *done) {
  int64_t nbuckets = r->k.layout->nbuckets, before = r->reduced;
  DC_TRY(reduce_give_zeros(r));
  if (r->k.comm) DC_TRY(reduce_progress(r));
  for (int possible = 1; r->k.comm && possible && r->reduced < nbuckets;) {
    if (r->k.ring && r->reduced > before) break;
    DC_TRY(reduce_wait_once(r, &possible));
  }
  *done = r->reduced == nbuckets;
  if (!*done && !r->k.ring)
    return DC_FAIL(DC_E_STATE, "only %lld of %lld buckets were reduced at the end of a pass", (long long)r->reduced,
                   (long long)nbuckets);
  return DC_OK;
}

/* ---- gather ------------------------------------------------------------------------------------------------------ */
typedef struct gathering {
  dc_reducer *r;
  char *flat;
  int64_t elem, chunk, chunks; /* bytes of an element, elements of a chunk of the shards, how many of them */
  int dtype;
} gathering;

/* Copies elements of chunk k of `rank`'s shard between the flat space and a slot, where they lie one after the
 * other. */
static int reduce_move_chunk(const gathering *g, int64_t k, int64_t rank, char *slot, int into_slot) {
  const dc_zero_layout *l = g->r->k.layout;
  int64_t at = k * g->chunk, end = at + g->chunk < l->shard_elems ? at + g->chunk : l->shard_elems;
  while (at < end) {
    int64_t begin, stop, shard_begin;
    DC_TRY(dc_zero_slice(l, at / (l->bucket_elems / l->world), rank, &begin, &stop, &shard_begin));
    int64_t skip = at - shard_begin, n = stop - begin - skip;
    if (n > end - at) n = end - at;
    char *flat = g->flat + (begin + skip) * g->elem;
    DC_TRY(into_slot ? reduce_copy_in(slot, flat, n * g->elem) : reduce_copy_in(flat, slot, n * g->elem));
    slot += n * g->elem;
    at += n;
  }
  return DC_OK;
}

static int reduce_send_chunk(const gathering *g, int64_t k) {
  const dc_zero_layout *l = g->r->k.layout;
  int64_t step, left = l->shard_elems - k * g->chunk;
  void *slot;
  const dc_call call = {
      .op = DC_CALL_ALL_GATHER, .dtype = g->dtype, .count = left < g->chunk ? left : g->chunk, .tag = k};
  DC_TRY(dc_exchange_begin(g->r->k.comm, &step, &slot));
  DC_TRY(reduce_move_chunk(g, k, g->r->k.rank, slot, 1));
  return dc_exchange_post(g->r->k.comm, &call);
}

static int reduce_receive_chunk(const gathering *g, int64_t k, int64_t step) {
  const dc_reducer *r = g->r;
  int64_t world = r->k.layout->world, left = r->k.layout->shard_elems - k * g->chunk;
  DC_TRY(dc_exchange_wait(r->k.comm, step));
  for (int64_t i = 1; i < world; i++) {
    int64_t peer = (r->k.rank + i) % world; /* every rank starts elsewhere */
    DC_TRY(reduce_move_chunk(g, k, peer, (char *)(uintptr_t)dc_exchange_peer(r->k.comm, (int)peer, step), 0));
    dc__count(DC_COUNTER_gather_bytes, (left < g->chunk ? left : g->chunk) * g->elem);
  }
  return dc_exchange_done(r->k.comm, step);
}

/* Chunks are sent as far ahead as slots are free; the one to be received next is always out. Steps in flight are
 * consecutive, so the step of chunk k is the first one plus k. */
static int reduce_gather_chunks(const gathering *g) {
  dc_comm *c = g->r->k.comm;
  int64_t sent = 0, first = c->begun - c->base;
  for (int64_t k = 0; k < g->chunks; k++) {
    for (; sent < g->chunks; sent++) {
      int ready = 1;
      if (sent > k) DC_TRY(dc_exchange_can_begin(c, &ready));
      if (!ready) break;
      DC_TRY(reduce_send_chunk(g, sent));
    }
    DC_TRY(reduce_receive_chunk(g, k, first + k));
  }
  return DC_OK;
}

static int reduce_gather(dc_reducer *r, void *flat, int dtype) {
  const dc_zero_layout *l = r->k.layout;
  gathering g = {.r = r, .flat = flat, .elem = (int64_t)dc_dtype_size(dtype), .dtype = dtype};
  int64_t room = r->k.comm->slot_bytes < GATHER_CHUNK ? r->k.comm->slot_bytes : GATHER_CHUNK;
  g.chunk = room / g.elem;
  g.chunks = l->shard_elems / g.chunk + (l->shard_elems % g.chunk != 0);
  return reduce_gather_chunks(&g);
}

/* ---- create, free ------------------------------------------------------------------------------------------------ */
static int reduce_check_comm(const dc_reducer_config *k) {
  const dc_zero_layout *l = k->layout;
  if (!k->comm)
    return l->world == 1
               ? DC_OK
               : DC_FAIL(DC_E_INVALID, "comm is NULL, but the layout has a world of %lld", (long long)l->world);
  if (l->world == 1 && !k->ring) return DC_FAIL(DC_E_INVALID, "comm must be NULL for a layout with a world of 1");
  if (dc_comm_size(k->comm) != l->world || dc_comm_rank(k->comm) != k->rank)
    return DC_FAIL(DC_E_INVALID, "the reducer is rank %d of %lld, but its communicator is rank %d of %d", k->rank,
                   (long long)l->world, dc_comm_rank(k->comm), dc_comm_size(k->comm));
  int64_t elem = (int64_t)dc_dtype_size(k->dtype);
  if (l->bucket_elems > k->comm->slot_bytes / elem)
    return DC_FAIL(DC_E_INVALID,
                   "a bucket of %lld %s elements does not fit a slot of %lld bytes; open the communicator with "
                   "larger slots or make the layout with smaller buckets",
                   (long long)l->bucket_elems, dc_dtype_name(k->dtype), (long long)k->comm->slot_bytes);
  return DC_OK;
}

static int reduce_check_config(const dc_reducer_config *k) {
  if (!k->layout) return DC_FAIL(DC_E_INVALID, "layout is NULL");
  const dc_zero_layout *l = k->layout;
  if (k->dtype != DC_F32 && k->dtype != DC_BF16 && k->dtype != DC_F16)
    return DC_FAIL(DC_E_DTYPE, "gradients can't travel as dtype %d (%s); expected fp32, bf16 or fp16", k->dtype,
                   dc_dtype_name(k->dtype));
  if (k->rank < 0 || k->rank >= l->world)
    return DC_FAIL(DC_E_INVALID, "rank %d is outside of [0, %lld)", k->rank, (long long)l->world);
  if (k->own_all != 0 && k->own_all != 1) return DC_FAIL(DC_E_INVALID, "own_all is %d; expected 0 or 1", k->own_all);
  if (!isfinite(k->pre_scale)) return DC_FAIL(DC_E_INVALID, "pre_scale is %g; it must be finite", (double)k->pre_scale);
  if (k->pending_limit_bytes < 0)
    return DC_FAIL(DC_E_INVALID, "pending_limit_bytes is %lld; it must be >= 0", (long long)k->pending_limit_bytes);
  if (!k->acc && l->total > 0) return DC_FAIL(DC_E_INVALID, "acc is NULL");
  if (k->tree < 0 || k->tree > DC__TREE_DEPTH || (k->tree > 1 && (!k->tree_acc || k->ring)))
    return DC_FAIL(DC_E_INVALID, "tree is %d; expected 0 to %d, with tree_acc if > 1, and 0 or 1 with a ring", k->tree,
                   DC__TREE_DEPTH);
  if (k->acc_dtype != DC_F32 && k->acc_dtype != DC_BF16 && k->acc_dtype != DC_F16)
    return DC_FAIL(DC_E_DTYPE, "gradients can't be accumulated as dtype %d (%s); expected fp32, bf16 or fp16",
                   k->acc_dtype, dc_dtype_name(k->acc_dtype));
  if (k->acc_dtype != DC_F32 && (k->tree || k->ring))
    return DC_FAIL(DC_E_INVALID, "acc_dtype is %s, but sums of a tree or a ring are fp32; leave it fp32",
                   dc_dtype_name(k->acc_dtype));
  if (k->ring < 0 || (k->ring && (!k->comm || k->partial)))
    return DC_FAIL(DC_E_INVALID, "ring is %d; expected 0, or a number > 0 with a comm and without partial", k->ring);
  return reduce_check_comm(k);
}

static int reduce_index_buckets(dc_reducer *r) {
  const dc_zero_layout *l = r->k.layout;
  for (int64_t i = 0, p = 0; i < l->nbuckets; i++) {
    bucket *b = &r->bucket[i];
    DC_TRY(dc_zero_bucket(l, i, &b->begin, &b->end));
    DC_TRY(dc_zero_pieces(l, i, NULL, 0, &b->params));
    while (p < l->nparams && l->offset[p] + l->numel[p] <= b->begin) p++; /* ends rise: see dc_zero_layout */
    b->first = p;
  }
  return DC_OK;
}

static void reduce_destroy(dc_reducer *r) {
  free(r->wide);
  free(r->leaf);
  free(r->fused);
  free(r->freed);
  free(r->param);
  free(r->bucket);
  free(r);
}

int dc_reducer_create(const dc_reducer_config *given, dc_reducer **out) {
  dc_reducer_config taken;
  const dc_reducer_config *config = &taken;
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  DC_TRY(DC__SIZED(dc_reducer_config, tree_acc, given, &taken));
  DC_TRY(reduce_check_config(config));
  const dc_zero_layout *l = config->layout;
  dc_reducer *r = calloc(1, sizeof *r);
  if (!r) return DC_FAIL(DC_E_NOMEM, "no memory for a reducer");
  r->k = *config;
  r->elem = (int64_t)dc_dtype_size(config->dtype);
  r->acc_elem = (int64_t)dc_dtype_size(config->acc_dtype);
  r->slots = config->comm ? config->comm->slots : 0;
  r->bucket = calloc((size_t)l->nbuckets + 1, sizeof *r->bucket); /* + 1: never a request for 0 bytes */
  r->param = calloc((size_t)l->nparams + 1, sizeof *r->param);
  r->freed = calloc((size_t)l->nparams + 1, sizeof *r->freed);
  if (!config->comm) r->fused = calloc((size_t)(l->total / DC_BLOCK) + 1, 1);
  if (!config->comm && config->tree) r->leaf = calloc((size_t)l->bucket_elems, (size_t)r->elem);
  if (config->acc_dtype != DC_F32) r->wide = calloc((size_t)WIDE_PART, sizeof *r->wide);
  int rc = DC_OK;
  if (!r->bucket || !r->param || !r->freed || (!config->comm && !r->fused) ||
      (!config->comm && config->tree && !r->leaf) || (config->acc_dtype != DC_F32 && !r->wide))
    rc = DC_FAIL(DC_E_NOMEM, "no memory for a reducer of %lld parameters in %lld buckets", (long long)l->nparams,
                 (long long)l->nbuckets);
  if (rc == DC_OK) rc = reduce_index_buckets(r);
  if (rc != DC_OK) {
    reduce_destroy(r);
    return rc;
  }
  *out = r;
  return DC_OK;
}

int dc_reducer_lease(dc_reducer *r, dc_lease *lease) {
  DC_TRY(reduce_enter(r));
  if (r->state == PASS_OPEN)
    return reduce_leave(r, DC_FAIL(DC_E_STATE, "dc_reducer_lease: a pass is open; lease between passes"));
  r->lease = lease;
  return reduce_leave(r, DC_OK);
}

int dc_reducer_free(dc_reducer *r) {
  if (!r) return DC_OK;
  DC_TRY(reduce_enter(r));
  /* Steps that are begun can't be taken back: without this the peers would wait for us until the time-out. */
  if (r->state == PASS_OPEN && r->k.comm && r->begun > r->reduced)
    dc_comm_abort(r->k.comm, "its gradient reducer was freed inside a pass");
  reduce_destroy(r);
  return DC_OK;
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */
int dc_reducer_begin(dc_reducer *r, int assign, int norm) {
  DC_TRY(reduce_enter(r));
  return reduce_leave(r, reduce_begin_pass(r, assign, norm));
}

static int reduce_add_checked(dc_reducer *r, int64_t param, const void *grad, int dtype) {
  if (r->state == PASS_FAILED) return reduce_failed(r);
  DC_TRY(reduce_check_gradient(r, param, grad, dtype));
  if (r->state == PASS_CLOSED && r->k.ring) return DC_FAIL(DC_E_STATE, "no pass is open; with a ring begin it first");
  if (r->state == PASS_CLOSED) DC_TRY(reduce_begin_pass(r, 1, r->k.partial != NULL || r->k.tree));
  int rc = reduce_add_gradient(r, param, grad, dtype);
  return rc == DC_OK ? rc : reduce_fail(r, rc);
}

int dc_reducer_add(dc_reducer *r, int64_t param, const void *grad, int dtype) {
  DC_TRY(reduce_enter(r));
  return reduce_leave(r, reduce_add_checked(r, param, grad, dtype));
}

int dc_reducer_released(dc_reducer *r, int64_t *params, int64_t capacity, int64_t *count) {
  if (!count || capacity < 0 || (capacity > 0 && !params))
    return DC_FAIL(DC_E_INVALID, "count or params is NULL, or capacity %lld < 0", (long long)capacity);
  DC_TRY(reduce_enter(r));
  int64_t n = r->free_tail - r->free_head;
  if (n > capacity) n = capacity;
  if (n > 0) memcpy(params, r->freed + r->free_head, (size_t)n * sizeof *params);
  r->free_head += n;
  *count = n;
  return reduce_leave(r, DC_OK);
}

static int reduce_finish_checked(dc_reducer *r) {
  if (r->state == PASS_FAILED) return reduce_failed(r);
  if (r->state == PASS_CLOSED) return DC_FAIL(DC_E_STATE, "no pass is open; call dc_reducer_begin first");
  if (r->k.ring && r->reduced < r->k.layout->nbuckets &&
      !reduce_has_room(r)) /* the caller's mistake: nothing is lost by it */
    return DC_FAIL(DC_E_STATE, "the ring of %d buckets is full at bucket %lld; give buckets back before finish",
                   r->k.ring, (long long)r->reduced);
  int done, rc = reduce_finish_pass(r, &done);
  if (rc != DC_OK) return reduce_fail(r, rc);
  if (!done) return DC_OK;
  r->state = PASS_CLOSED;
  r->closed = r->norm;
  if (r->k.tree && !r->k.ring) r->leaves += r->k.layout->world;
  return DC_OK;
}

int dc_reducer_finish(dc_reducer *r) {
  DC_TRY(reduce_enter(r));
  return reduce_leave(r, reduce_finish_checked(r));
}

int dc_reducer_in_pass(const dc_reducer *r) { return r && r->state == PASS_OPEN; }

static int reduce_reduced_checked(dc_reducer *r, int64_t *count) {
  if (r->state == PASS_FAILED) return reduce_failed(r);
  if (r->state == PASS_OPEN && r->k.comm) {
    int rc = reduce_progress(r);
    if (rc != DC_OK) return reduce_fail(r, rc);
  }
  *count = r->reduced;
  return DC_OK;
}

int dc_reducer_reduced(dc_reducer *r, int64_t *count) {
  if (!count) return DC_FAIL(DC_E_INVALID, "count is NULL");
  DC_TRY(reduce_enter(r));
  return reduce_leave(r, reduce_reduced_checked(r, count));
}

static int reduce_give_back(dc_reducer *r, int64_t count) {
  if (!r->k.ring) return DC_FAIL(DC_E_STATE, "this reducer has no ring: nothing is given back");
  if (count < r->taken || count > r->reduced)
    return DC_FAIL(DC_E_INVALID, "buckets [0, %lld) can't be given back: %lld were before, %lld are reduced",
                   (long long)count, (long long)r->taken, (long long)r->reduced);
  r->taken = count;
  return DC_OK;
}

int dc_reducer_give_back(dc_reducer *r, int64_t count) {
  DC_TRY(reduce_enter(r));
  return reduce_leave(r, reduce_give_back(r, count));
}

static int reduce_gather_checked(dc_reducer *r, void *flat, int dtype) {
  if (r->state == PASS_FAILED) return reduce_failed(r);
  if (r->state == PASS_OPEN) return DC_FAIL(DC_E_STATE, "a pass is open; call dc_reducer_finish before gather");
  if (dc_dtype_size(dtype) == 0) return DC_FAIL(DC_E_DTYPE, "%d is not a dtype", dtype);
  if (r->k.layout->total > 0 && !flat) return DC_FAIL(DC_E_INVALID, "flat is NULL");
  if (!r->k.comm) return DC_OK;
  int rc = reduce_gather(r, flat, dtype);
  return rc == DC_OK ? rc : reduce_fail(r, rc);
}

int dc_reducer_gather(dc_reducer *r, void *flat, int dtype) {
  DC_TRY(reduce_enter(r));
  return reduce_leave(r, reduce_gather_checked(r, flat, dtype));
}
