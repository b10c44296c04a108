/* planner.c: the layouts that cost least, by branch and bound over planner_cost.c. */
#include "planner_cost.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct search {
  dc__planner p;
  dc__shape x;
  const dc_planner_space *space;
  dc_planner_found *found;
  int64_t capacity, count;
  int64_t *micros, nmicros; /* the sizes that a micro-batch may have, ascending */
  dc_planner_told told;
} search;

static int planner_allows(int64_t size, int64_t value) { return size == 0 || size == value; }
static int planner_has(int64_t mask, int64_t value) { return (int)(mask >> value & 1); }

/* What a layout has to be faster than to be kept. */
static double planner_bar(const search *s) {
  return s->count < s->capacity ? INFINITY : s->found[s->count - 1].cost.step;
}

/* Keeps it if it is among the fastest, by insertion: capacity is small. */
static void planner_keep(search *s, const dc_planner_found *f) {
  s->told.fitting++;
  if (f->cost.step >= planner_bar(s)) return;
  int64_t i = s->count < s->capacity ? s->count++ : s->count - 1;
  for (; i > 0 && s->found[i - 1].cost.step > f->cost.step; i--) s->found[i] = s->found[i - 1];
  s->found[i] = *f;
}

/* One layout. *fits: whether it does. */
static int planner_visit(search *s, const dc_planner_layout *l, int *fits) {
  dc_planner_found f = {.layout = *l};
  s->told.visited++;
  DC_TRY(dc__planner_cost(&s->p, &s->x, l, s->space->uneven != 0, &f.cost, NULL, NULL));
  *fits = f.cost.overflow <= 1;
  if (s->told.fastest.cost.step <= 0 || f.cost.step < s->told.fastest.cost.step) s->told.fastest = f;
  if (s->told.closest.cost.step <= 0 || f.cost.overflow < s->told.closest.cost.overflow) s->told.closest = f;
  if (*fits) planner_keep(s, &f);
  return DC_OK;
}

/* Whether the layout is legal; the reason is not asked for. */
static int planner_legal(const search *s, const dc_planner_layout *l) { return dc__shape_check(&s->p, l) == DC_OK; }

/* Stages, recomputation, offload: what does not change the shape. Offloading and computing again cost time and save
 * memory: where a layout fits without, those with are not looked at. */
static int planner_visit_states(search *s, dc_planner_layout *l) {
  const int exhaustive = s->space->exhaustive != 0;
  for (l->stage = 0; l->stage <= 3; l->stage++) {
    if (!planner_has(s->space->stages, l->stage)) continue;
    int fits_bare = 0;
    for (l->recompute = 0; l->recompute <= 1 && (exhaustive || !fits_bare); l->recompute++) {
      int fits = 0;
      if (!planner_has(s->space->recomputes, l->recompute)) continue;
      for (l->offload = 0; l->offload <= DC_OFFLOAD_PARAMS && (exhaustive || !fits); l->offload++) {
        if (!planner_has(s->space->offloads, l->offload) || !planner_legal(s, l)) continue;
        DC_TRY(planner_visit(s, l, &fits));
        fits_bare |= fits && l->offload == 0;
      }
    }
  }
  l->stage = l->recompute = l->offload = 0;
  return DC_OK;
}

/* Micro-batches, for a model that is cut. */
static int planner_visit_micro(search *s, dc_planner_layout *l, int64_t samples) {
  for (int64_t i = 0; i < s->nmicros && s->micros[i] <= samples; i++) {
    l->micro = s->micros[i];
    if (samples % l->micro) continue;
    l->accumulation = samples / l->micro;
    if (!planner_legal(s, l)) continue;
    if (!s->space->exhaustive && dc__planner_least(&s->p, &s->x, l, s->space->uneven != 0) >= planner_bar(s)) continue;
    DC_TRY(planner_visit_states(s, l));
  }
  return DC_OK;
}

/* Schedules, for sizes that are given. */
static int planner_visit_schedules(search *s, dc_planner_layout *l) {
  const int64_t batch = s->p.model->batch;
  if (batch % l->dp) return DC_OK;
  for (l->schedule = 0; l->schedule < DC_SCHEDULE_COUNT; l->schedule++) {
    if (l->pp == 1 ? l->schedule != DC_SCHEDULE_1F1B : !planner_has(s->space->schedules, l->schedule)) continue;
    const int chunked = l->schedule == DC_SCHEDULE_INTERLEAVED || l->schedule == DC_SCHEDULE_ZB_V;
    const int64_t most = l->schedule == DC_SCHEDULE_INTERLEAVED ? 8 : 2;
    for (l->chunks = chunked ? 2 : 1; l->chunks <= (chunked ? most : 1); l->chunks *= 2) {
      if (l->pp * l->chunks > s->p.blocks && l->pp * l->chunks > 1) break;
      if (dc__shape_set(&s->p, &s->x, l) != DC_OK) break; /* more pieces than blocks */
      DC_TRY(planner_visit_micro(s, l, batch / l->dp));
    }
  }
  return DC_OK;
}

static int planner_visit_sizes(search *s) {
  const int64_t n = s->p.ranks;
  dc_planner_layout l = {.chunks = 1, .micro = 1, .accumulation = 1};
  for (l.pp = 1; l.pp <= n && (l.pp == 1 || l.pp <= s->p.blocks); l.pp++) {
    if (n % l.pp || !planner_allows(s->space->pp, l.pp)) continue;
    for (l.tp = 1; l.tp <= n / l.pp && l.tp <= s->p.model->heads; l.tp++) {
      if (n / l.pp % l.tp || !planner_allows(s->space->tp, l.tp) || s->p.model->kv_heads % l.tp) continue;
      for (l.sp = 1; l.sp <= n / (l.pp * l.tp) && l.sp * l.tp <= s->p.model->heads; l.sp++) {
        if (n / (l.pp * l.tp) % l.sp || !planner_allows(s->space->sp, l.sp) || s->p.model->heads % (l.tp * l.sp))
          continue;
        l.dp = n / (l.pp * l.tp * l.sp);
        if (!planner_allows(s->space->dp, l.dp)) continue;
        const int64_t experts = s->p.model->experts > 0 ? s->p.model->experts : 1;
        for (l.ep = 1; l.ep <= l.dp * l.sp && l.ep <= experts; l.ep++) {
          if (l.dp * l.sp % l.ep || experts % l.ep || !planner_allows(s->space->ep, l.ep)) continue;
          DC_TRY(planner_visit_schedules(s, &l));
        }
      }
    }
  }
  return DC_OK;
}

/* The divisors of a step's samples up to what a layout may have (dc__shape_check), once: a replica's are among them,
 * and a loop over all sizes would take minutes where samples are many. */
static int planner_find_micros(search *s) {
  const int64_t batch = s->p.model->batch, most = batch < DC_PLANNER_MAX_RANKS ? batch : DC_PLANNER_MAX_RANKS;
  for (int fill = 0; fill < 2; fill++) {
    int64_t n = 0;
    for (int64_t micro = 1; micro <= most; micro++) {
      if (batch % micro || !planner_allows(s->space->micro, micro)) continue;
      if (fill) s->micros[n] = micro;
      n++;
    }
    s->nmicros = n;
    if (!fill && !(s->micros = calloc((size_t)n + 1, sizeof *s->micros)))
      return DC_FAIL(DC_E_NOMEM, "no memory for %lld sizes of micro-batches", (long long)n);
  }
  return DC_OK;
}

int dc_planner_search(const dc_planner_nodes *nodes, int64_t kinds, const dc_planner_model *model,
                      const dc_planner_space *space, dc_planner_found *found, int64_t capacity, dc_planner_told *told) {
  if (!space || !found || !told || capacity < 1)
    return DC_FAIL(DC_E_INVALID, "space, found or told is NULL, or capacity %lld is below 1", (long long)capacity);
  search s = {.space = space, .found = found, .capacity = capacity};
  DC_TRY(dc__planner_open(&s.p, nodes, kinds, model));
  const int64_t pieces = s.p.blocks > 1 ? s.p.blocks : 1;
  int rc = dc__shape_open(&s.x, pieces, pieces, s.p.ranks);
  if (rc == DC_OK) rc = planner_find_micros(&s);
  if (rc == DC_OK) rc = planner_visit_sizes(&s);
  free(s.micros);
  dc__shape_close(&s.x);
  dc__planner_close(&s.p);
  s.told.found = s.count;
  *told = s.told;
  return rc;
}
