/* prefetch.c: when units are gathered and released around their uses, given the recorded order of uses.
 *
 * One forward scan with a pointer `ahead`: the uses before it have their unit gathered (in flight, or kept from an
 * earlier use), the uses from it on are not looked at yet. It stops at the first use whose unit can't come in, so
 * units arrive in the order of use and everything in flight is a prefix of what comes. Two facts follow and carry
 * the limits:
 *  - a unit that isn't there when it is needed means that nothing is in flight (ahead had stopped at it), so only kept
 *    units can be in its way; those with the farthest next use go first (Belady);
 *  - whether a unit is kept after use i depends on i alone (prefetch_keeps()), so the scan may count on it before it
 * happens. So after every action: gathered <= max(max_live, the unit needed now), and in flight <= prefetch_elems. O(n
 * log n). */
#include "zero.h"

#include <stdlib.h>
#include <string.h>

#define NEVER INT64_MAX

typedef struct kept {
  int64_t next_use, unit;
} kept;

typedef struct planner {
  const int64_t *use, *elems;
  int64_t nuse, nunits, prefetch, max_live, max_reuse;
  int64_t *next;   /* [nuse] the next use of the same unit, or NEVER */
  int64_t *prev;   /* [nuse] the use of the same unit before, or NEVER */
  int64_t *before; /* [nuse + 1] elements of all uses before i */
  uint8_t *live;   /* [nunits] 1: gathered */
  uint8_t *flying; /* [nunits] 1: gathered for a use that has not begun */
  kept *heap;      /* [nuse] kept units, farthest next use on top; entries whose unit is gone or was used are stale */
  int64_t heap_len, ahead, live_elems, flying_elems;
  dc_zero_action *out; /* NULL: count only */
  int64_t count;
} planner;

static void prefetch_act(planner *p, int kind, int64_t unit) {
  if (p->out) p->out[p->count] = (dc_zero_action){.kind = kind, .unit = unit};
  p->count++;
}

static void prefetch_gather(planner *p, int64_t unit) {
  p->live[unit] = 1;
  p->live_elems += p->elems[unit];
  prefetch_act(p, DC_ZERO_GATHER, unit);
}

static void prefetch_release(planner *p, int64_t unit) {
  p->live[unit] = 0;
  p->live_elems -= p->elems[unit];
  prefetch_act(p, DC_ZERO_RELEASE, unit);
}

/* Whether the unit of use i stays gathered until its next use. A unit above max_live never does: it is there alone. */
static int prefetch_keeps(const planner *p, int64_t i) {
  if (p->next[i] == NEVER || p->elems[p->use[i]] > p->max_live) return 0;
  return p->before[p->next[i]] - p->before[i + 1] <= p->max_reuse;
}

static void prefetch_heap_push(planner *p, kept k) {
  int64_t at = p->heap_len++;
  while (at > 0 && p->heap[(at - 1) / 2].next_use < k.next_use) {
    p->heap[at] = p->heap[(at - 1) / 2];
    at = (at - 1) / 2;
  }
  p->heap[at] = k;
}

static kept prefetch_heap_pop(planner *p) {
  kept top = p->heap[0], last = p->heap[--p->heap_len];
  int64_t at = 0;
  for (;;) {
    int64_t child = 2 * at + 1;
    if (child >= p->heap_len) break;
    if (child + 1 < p->heap_len && p->heap[child + 1].next_use > p->heap[child].next_use) child++;
    if (p->heap[child].next_use <= last.next_use) break;
    p->heap[at] = p->heap[child];
    at = child;
  }
  p->heap[at] = last;
  return top;
}

/* Releases kept units until `need` more elements fit. Called at use `now`, whose unit is missing: entries for uses
 * before `now` are stale (the unit was used since and pushed again, or released). */
static void prefetch_make_room(planner *p, int64_t now, int64_t need) {
  while (p->heap_len > 0 && p->live_elems > p->max_live - need) {
    kept k = prefetch_heap_pop(p);
    if (k.next_use >= now && p->live[k.unit]) prefetch_release(p, k.unit);
  }
}

/* Brings in the units of the coming uses as far as both limits allow. use[i] is about to compute. */
static void prefetch_fly_ahead(planner *p, int64_t i) {
  if (p->ahead <= i) p->ahead = i + 1;
  for (; p->ahead < p->nuse; p->ahead++) {
    int64_t unit = p->use[p->ahead];
    if (p->live[unit]) {
      /* There now, and there at this use only if the use before it keeps it. */
      if (prefetch_keeps(p, p->prev[p->ahead])) continue;
      break;
    }
    int fits = p->elems[unit] <= p->prefetch - p->flying_elems && p->elems[unit] <= p->max_live - p->live_elems;
    if (!fits) break;
    prefetch_gather(p, unit);
    p->flying[unit] = 1;
    p->flying_elems += p->elems[unit];
  }
}

static void prefetch_run_uses(planner *p) {
  memset(p->live, 0, (size_t)p->nunits);
  memset(p->flying, 0, (size_t)p->nunits);
  p->heap_len = p->ahead = p->live_elems = p->flying_elems = p->count = 0;
  for (int64_t i = 0; i < p->nuse; i++) {
    int64_t unit = p->use[i];
    if (!p->live[unit]) {
      prefetch_make_room(p, i, p->elems[unit]);
      prefetch_gather(p, unit);
    }
    if (p->flying[unit]) {
      p->flying[unit] = 0;
      p->flying_elems -= p->elems[unit];
    }
    prefetch_fly_ahead(p, i);
    prefetch_act(p, DC_ZERO_USE, unit);
    if (prefetch_keeps(p, i)) prefetch_heap_push(p, (kept){.next_use = p->next[i], .unit = unit});
    else prefetch_release(p, unit);
  }
}

static int prefetch_check_args(const int64_t *use, int64_t nuse, const int64_t *elems, int64_t nunits,
                               const int64_t limits[3]) {
  static const char *const names[3] = {"prefetch_elems", "max_live_elems", "max_reuse_elems"};
  if (nuse < 0 || nunits < 0)
    return DC_FAIL(DC_E_INVALID, "nuse is %lld and nunits %lld; both must be >= 0", (long long)nuse, (long long)nunits);
  if ((nuse > 0 && !use) || (nunits > 0 && !elems)) return DC_FAIL(DC_E_INVALID, "use or elems is NULL");
  for (int i = 0; i < 3; i++)
    if (limits[i] < 0) return DC_FAIL(DC_E_INVALID, "%s is %lld; it must be >= 0", names[i], (long long)limits[i]);
  for (int64_t u = 0; u < nunits; u++)
    if (elems[u] < 0)
      return DC_FAIL(DC_E_INVALID, "unit %lld has %lld elements; a count is >= 0", (long long)u, (long long)elems[u]);
  for (int64_t i = 0; i < nuse; i++)
    if (use[i] < 0 || use[i] >= nunits)
      return DC_FAIL(DC_E_INVALID, "use %lld is of unit %lld, outside of [0, %lld)", (long long)i, (long long)use[i],
                     (long long)nunits);
  return DC_OK;
}

/* Fills next[], prev[] and before[]. `last` is scratch of [nunits]. */
static int prefetch_index_uses(planner *p, int64_t *last) {
  p->before[0] = 0;
  for (int64_t i = 0; i < p->nuse; i++)
    if (__builtin_add_overflow(p->before[i], p->elems[p->use[i]], &p->before[i + 1]))
      return DC_FAIL(DC_E_OVERFLOW, "the elements of the first %lld uses don't fit in 64 bits", (long long)(i + 1));
  for (int64_t u = 0; u < p->nunits; u++) last[u] = NEVER;
  for (int64_t i = p->nuse - 1; i >= 0; i--) {
    p->next[i] = last[p->use[i]];
    last[p->use[i]] = i;
    p->prev[i] = NEVER;
    if (p->next[i] != NEVER) p->prev[p->next[i]] = i;
  }
  return DC_OK;
}

static int prefetch_make_plan(planner *p, int64_t *last, dc_zero_action *actions, int64_t capacity, int64_t *count) {
  DC_TRY(prefetch_index_uses(p, last));
  prefetch_run_uses(p);
  if (actions) {
    if (capacity < p->count)
      return DC_FAIL(DC_E_INVALID, "capacity is %lld, but there are %lld actions; 3 * nuse is always enough",
                     (long long)capacity, (long long)p->count);
    p->out = actions;
    prefetch_run_uses(p);
  }
  *count = p->count;
  return DC_OK;
}

int dc_zero_prefetch(const int64_t *use, int64_t nuse, const int64_t *elems, int64_t nunits, int64_t prefetch_elems,
                     int64_t max_live_elems, int64_t max_reuse_elems, dc_zero_action *actions, int64_t capacity,
                     int64_t *count) {
  if (!count) return DC_FAIL(DC_E_INVALID, "count is NULL");
  const int64_t limits[3] = {prefetch_elems, max_live_elems, max_reuse_elems};
  DC_TRY(prefetch_check_args(use, nuse, elems, nunits, limits));
  planner p = {.use = use,
               .elems = elems,
               .nuse = nuse,
               .nunits = nunits,
               .prefetch = prefetch_elems,
               .max_live = max_live_elems,
               .max_reuse = max_reuse_elems};
  p.next = calloc((size_t)nuse + 1, sizeof *p.next);
  p.prev = calloc((size_t)nuse + 1, sizeof *p.prev);
  p.before = calloc((size_t)nuse + 1, sizeof *p.before);
  p.heap = calloc((size_t)nuse + 1, sizeof *p.heap);
  p.live = calloc((size_t)nunits + 1, 1);
  p.flying = calloc((size_t)nunits + 1, 1);
  int64_t *last = calloc((size_t)nunits + 1, sizeof *last);
  int rc;
  if (!p.next || !p.prev || !p.before || !p.heap || !p.live || !p.flying || !last)
    rc = DC_FAIL(DC_E_NOMEM, "no memory to plan %lld uses of %lld units", (long long)nuse, (long long)nunits);
  else rc = prefetch_make_plan(&p, last, actions, capacity, count);
  free(last);
  free(p.flying);
  free(p.live);
  free(p.heap);
  free(p.before);
  free(p.prev);
  free(p.next);
  return rc;
}
