/* schedule_run.c: runs a pipeline schedule without computing anything: whether it ends, when, and with how much in
 * memory. Each rank goes through its actions in order, and waits at one until what it needs is there. */
#include "schedule.h"

#include <math.h>
#include <stdlib.h>

/* What happens to a micro-batch in a stage, once each. B is both of the latter. */
enum { STEP_F, STEP_GRAD, STEP_WEIGHT, STEPS };

typedef struct run {
  const dc_schedule *s;
  const double *cost, *hop; /* NULL: everything takes no time */
  int64_t *rank_of;         /* [stages] 1 + the rank that holds it; 0: not seen */
  int64_t *at;              /* [stages * micro_batches * STEPS] 1 + the action that does it; 0: none */
  int64_t *next;            /* [ranks] the action that a rank is at */
  dc_schedule_span *span;   /* [actions] of those before next[rank] */
} run;

/* For messages: "1F3". */
typedef struct name {
  char text[32];
} name;

static name run_name(const dc_schedule_action *a) {
  name out = {"?"};
  int64_t length;
  (void)dc_schedule_print(a, 1, out.text, sizeof out.text, &length);
  return out;
}

static int64_t *run_slot(const run *x, int64_t stage, int64_t micro, int step) {
  return &x->at[(stage * x->s->micro_batches + micro) * STEPS + step];
}

static int64_t run_rank(const run *x, int64_t stage) { return x->rank_of[stage] - 1; }

/* An action's place within its rank. */
static int64_t run_place(const run *x, int64_t rank, int64_t action) { return action - x->s->begin[rank]; }

/* ---- is every action there, once? -------------------------------------------------------------------------------- */
static int run_enter_step(const run *x, int64_t rank, int64_t action, int step) {
  const dc_schedule_action *a = &x->s->actions[action];
  int64_t *slot = run_slot(x, a->stage, a->micro, step);
  if (*slot)
    return DC_FAIL(DC_E_INVALID,
                   "rank %lld, action %lld (%s): micro-batch %d had that in stage %d, at action %lld (%s)",
                   (long long)rank, (long long)run_place(x, rank, action), run_name(a).text, a->micro, a->stage,
                   (long long)run_place(x, rank, *slot - 1), run_name(&x->s->actions[*slot - 1]).text);
  *slot = action + 1;
  return DC_OK;
}

static int run_enter(run *x, int64_t rank, int64_t action) {
  const dc_schedule_action *a = &x->s->actions[action];
  const long long place = run_place(x, rank, action);
  if (a->work < 0 || a->work >= DC_SCHEDULE_WORKS)
    return DC_FAIL(DC_E_INVALID, "rank %lld, action %lld: work %d is none; see enum dc_schedule_work", (long long)rank,
                   place, a->work);
  if (a->stage < 0 || a->stage >= x->s->stages || a->micro < 0 || a->micro >= x->s->micro_batches)
    return DC_FAIL(DC_E_INVALID, "rank %lld, action %lld: stage %d and micro-batch %d are not of %lld and %lld",
                   (long long)rank, place, a->stage, a->micro, (long long)x->s->stages, (long long)x->s->micro_batches);
  int64_t *holder = &x->rank_of[a->stage];
  if (!*holder) *holder = rank + 1;
  if (*holder != rank + 1)
    return DC_FAIL(DC_E_INVALID, "rank %lld, action %lld (%s): stage %d is on rank %lld", (long long)rank, place,
                   run_name(a).text, a->stage, (long long)(*holder - 1));
  switch (a->work) {
  case DC_SCHEDULE_F: return run_enter_step(x, rank, action, STEP_F);
  case DC_SCHEDULE_I: return run_enter_step(x, rank, action, STEP_GRAD);
  case DC_SCHEDULE_W: return run_enter_step(x, rank, action, STEP_WEIGHT);
  default: DC_TRY(run_enter_step(x, rank, action, STEP_GRAD)); return run_enter_step(x, rank, action, STEP_WEIGHT);
  }
}

static int run_check_complete(const run *x) {
  static const char *const lacks[STEPS] = {"F", "B or I", "B or W"};
  for (int64_t stage = 0; stage < x->s->stages; stage++) {
    if (!x->rank_of[stage])
      return DC_FAIL(DC_E_INVALID, "no rank has stage %lld: micro-batch 0 has no F in it", (long long)stage);
    for (int64_t micro = 0; micro < x->s->micro_batches; micro++)
      for (int step = 0; step < STEPS; step++)
        if (!*run_slot(x, stage, micro, step))
          return DC_FAIL(DC_E_INVALID, "rank %lld has no %s of micro-batch %lld in stage %lld",
                         (long long)run_rank(x, stage), lacks[step], (long long)micro, (long long)stage);
  }
  return DC_OK;
}

static int run_index(run *x) {
  for (int64_t rank = 0; rank < x->s->ranks; rank++)
    for (int64_t i = x->s->begin[rank]; i < x->s->begin[rank + 1]; i++) DC_TRY(run_enter(x, rank, i));
  return run_check_complete(x);
}

/* ---- in time ----------------------------------------------------------------------------------------------------- */
/* The actions that one waits for, -1 for none: one of its own rank, and the one whose message it receives. */
typedef struct needs {
  int64_t own, received;
  int64_t boundary; /* the message crosses from this stage to the next, or back */
} needs;

static needs run_needs(const run *x, const dc_schedule_action *a) {
  needs n = {.own = -1, .received = -1};
  if (a->work == DC_SCHEDULE_F) {
    if (a->stage > 0) n.received = *run_slot(x, a->stage - 1, a->micro, STEP_F) - 1;
    n.boundary = a->stage - 1;
  } else if (a->work == DC_SCHEDULE_W) {
    n.own = *run_slot(x, a->stage, a->micro, STEP_GRAD) - 1;
  } else {
    n.own = *run_slot(x, a->stage, a->micro, STEP_F) - 1;
    if (a->stage < x->s->stages - 1) n.received = *run_slot(x, a->stage + 1, a->micro, STEP_GRAD) - 1;
    n.boundary = a->stage;
  }
  return n;
}

static int run_ended(const run *x, int64_t action) {
  return action < 0 || action < x->next[run_rank(x, x->s->actions[action].stage)];
}

/* Whether the action that `rank` is at can start; if so, *start. */
static int run_can_start(const run *x, int64_t rank, double *start) {
  const int64_t at = x->next[rank];
  const needs n = run_needs(x, &x->s->actions[at]);
  if (!run_ended(x, n.own) || !run_ended(x, n.received)) return 0;
  *start = at > x->s->begin[rank] ? x->span[at - 1].end : 0;
  if (n.received >= 0) {
    const int crosses = run_rank(x, x->s->actions[n.received].stage) != rank;
    *start = fmax(*start, x->span[n.received].end + (crosses && x->hop ? x->hop[n.boundary] : 0));
  }
  return 1;
}

static double run_cost(const run *x, const dc_schedule_action *a) {
  return x->cost ? x->cost[(int64_t)a->stage * DC_SCHEDULE_WORKS + a->work] : 0;
}

/* The first rank that waits for ever, or -1; one that waits for itself before others, since that tells more. */
static int64_t run_stuck(const run *x) {
  int64_t found = -1;
  for (int64_t rank = x->s->ranks - 1; rank >= 0; rank--) {
    if (x->next[rank] == x->s->begin[rank + 1]) continue;
    if (!run_ended(x, run_needs(x, &x->s->actions[x->next[rank]]).own)) return rank;
    found = rank;
  }
  return found;
}

static int run_fail_stuck(const run *x, int64_t rank) {
  const int64_t at = x->next[rank];
  const dc_schedule_action *a = &x->s->actions[at];
  const needs n = run_needs(x, a);
  const int64_t need = run_ended(x, n.own) ? n.received : n.own;
  const dc_schedule_action *b = &x->s->actions[need];
  const int64_t other = run_rank(x, b->stage);
  if (other == rank)
    return DC_FAIL(DC_E_INVALID,
                   "rank %lld, action %lld (%s) of micro-batch %d needs %s, which is behind it, action %lld",
                   (long long)rank, (long long)run_place(x, rank, at), run_name(a).text, a->micro, run_name(b).text,
                   (long long)run_place(x, rank, need));
  return DC_FAIL(DC_E_INVALID,
                 "deadlock: rank %lld waits at action %lld (%s) of micro-batch %d for %s, action %lld of rank %lld,"
                 " which waits at action %lld (%s)",
                 (long long)rank, (long long)run_place(x, rank, at), run_name(a).text, a->micro, run_name(b).text,
                 (long long)run_place(x, other, need), (long long)other, (long long)run_place(x, other, x->next[other]),
                 run_name(&x->s->actions[x->next[other]]).text);
}

/* Lets all ranks go as far as they can, until all are done. */
static int run_all(run *x) {
  for (int64_t rank = 0; rank < x->s->ranks; rank++) x->next[rank] = x->s->begin[rank];
  int64_t moved;
  do {
    moved = 0;
    for (int64_t rank = 0; rank < x->s->ranks; rank++) {
      double start;
      while (x->next[rank] < x->s->begin[rank + 1] && run_can_start(x, rank, &start)) {
        const int64_t at = x->next[rank]++;
        x->span[at] = (dc_schedule_span){start, start + run_cost(x, &x->s->actions[at])};
        moved++;
      }
    }
  } while (moved);
  const int64_t stuck = run_stuck(x);
  return stuck < 0 ? DC_OK : run_fail_stuck(x, stuck);
}

/* ---- memory of a run --------------------------------------------------------------------------------------------- */
static int run_check_shape(const dc_schedule *s) {
  if (!s || !s->begin) return DC_FAIL(DC_E_INVALID, "schedule or its begin is NULL");
  if (s->ranks < 1 || s->stages < 1 || s->micro_batches < 1)
    return DC_FAIL(DC_E_INVALID, "a schedule of %lld ranks, %lld stages and %lld micro-batches; each must be >= 1",
                   (long long)s->ranks, (long long)s->stages, (long long)s->micro_batches);
  if (s->begin[0] != 0) return DC_FAIL(DC_E_INVALID, "begin[0] is %lld; it must be 0", (long long)s->begin[0]);
  for (int64_t r = 0; r < s->ranks; r++)
    if (s->begin[r + 1] < s->begin[r])
      return DC_FAIL(DC_E_INVALID, "begin[%lld] is %lld, below begin[%lld], which is %lld", (long long)(r + 1),
                     (long long)s->begin[r + 1], (long long)r, (long long)s->begin[r]);
  if (s->begin[s->ranks] > 0 && !s->actions) return DC_FAIL(DC_E_INVALID, "actions is NULL");
  return DC_OK;
}

static void run_close(run *x) {
  free(x->span);
  free(x->next);
  free(x->at);
  free(x->rank_of);
}

static int run_open(const dc_schedule *s, const double *cost, const double *hop, run *x) {
  *x = (run){.s = s, .cost = cost, .hop = hop};
  int64_t slots;
  if (__builtin_mul_overflow(s->stages, s->micro_batches, &slots) || __builtin_mul_overflow(slots, STEPS, &slots))
    return DC_FAIL(DC_E_OVERFLOW, "%lld micro-batches in %lld stages are more than 64 bits count",
                   (long long)s->micro_batches, (long long)s->stages);
  x->rank_of = calloc((size_t)s->stages, sizeof *x->rank_of);
  x->at = calloc((size_t)slots, sizeof *x->at);
  x->next = calloc((size_t)s->ranks, sizeof *x->next);
  x->span = calloc((size_t)s->begin[s->ranks] + 1, sizeof *x->span);
  if (x->rank_of && x->at && x->next && x->span) return DC_OK;
  run_close(x);
  return DC_FAIL(DC_E_NOMEM, "no memory to run %lld micro-batches through %lld stages", (long long)s->micro_batches,
                 (long long)s->stages);
}

/* Runs the schedule to its end; on DC_OK *x is owned: run_close. */
static int run_make(const dc_schedule *s, const double *cost, const double *hop, run *x) {
  DC_TRY(run_check_shape(s));
  DC_TRY(run_open(s, cost, hop, x));
  int rc = run_index(x);
  if (rc == DC_OK) rc = run_all(x);
  if (rc != DC_OK) run_close(x);
  return rc;
}

static int64_t run_peak(const dc_schedule *s, int64_t rank) {
  int64_t alive = 0, peak = 0;
  for (int64_t i = s->begin[rank]; i < s->begin[rank + 1]; i++) {
    const int work = s->actions[i].work;
    alive += (work == DC_SCHEDULE_F) - (work == DC_SCHEDULE_B || work == DC_SCHEDULE_W);
    if (alive > peak) peak = alive;
  }
  return peak;
}

int dc_schedule_check(const dc_schedule *schedule, int64_t *peak) {
  run x;
  DC_TRY(run_make(schedule, NULL, NULL, &x));
  run_close(&x);
  for (int64_t rank = 0; peak && rank < schedule->ranks; rank++) peak[rank] = run_peak(schedule, rank);
  return DC_OK;
}

static int run_check_times(const char *what, const double *times, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!isfinite(times[i]) || times[i] < 0)
      return DC_FAIL(DC_E_INVALID, "%s[%lld] is %g; a time is finite and >= 0", what, (long long)i, times[i]);
  return DC_OK;
}

static dc_schedule_load run_load(const run *x, int64_t rank) {
  const int64_t begin = x->s->begin[rank], end = x->s->begin[rank + 1];
  dc_schedule_load load = {.peak = run_peak(x->s, rank)};
  if (begin == end) return load;
  load.first = x->span[begin].start;
  load.last = x->span[end - 1].end;
  for (int64_t i = begin; i < end; i++) load.busy += run_cost(x, &x->s->actions[i]);
  return load;
}

int dc_schedule_simulate(const dc_schedule *schedule, const double *cost, const double *hop, dc_schedule_span *spans,
                         dc_schedule_load *loads, double *makespan) {
  DC_TRY(run_check_shape(schedule));
  if (!cost || !makespan) return DC_FAIL(DC_E_INVALID, "cost or makespan is NULL");
  DC_TRY(run_check_times("cost", cost, schedule->stages * DC_SCHEDULE_WORKS));
  if (hop) DC_TRY(run_check_times("hop", hop, schedule->stages - 1));
  run x;
  DC_TRY(run_make(schedule, cost, hop, &x));
  double all = 0;
  for (int64_t rank = 0; rank < schedule->ranks; rank++) {
    const dc_schedule_load load = run_load(&x, rank);
    all = fmax(all, load.last);
    if (loads) loads[rank] = load;
  }
  for (int64_t i = 0; spans && i < schedule->begin[schedule->ranks]; i++) spans[i] = x.span[i];
  *makespan = all;
  run_close(&x);
  return DC_OK;
}

/* ---- many kinds and sizes ---------------------------------------------------------------------------------------- */
/* Makes the schedule into actions, of which each rank has `each`, and begin. */
static int run_fill(int kind, const dc_schedule *s, int64_t chunks, int64_t each, dc_schedule_action *actions,
                    int64_t *begin) {
  for (int64_t rank = 0; rank < s->ranks; rank++) {
    int64_t count;
    begin[rank + 1] = begin[rank] + each;
    DC_TRY(dc_schedule_actions(kind, s->ranks, chunks, s->micro_batches, rank, actions + begin[rank], each, &count));
  }
  return DC_OK;
}

int dc_schedule_predict(int kind, int64_t ranks, int64_t chunks, int64_t micro_batches, const double *cost,
                        const double *hop, dc_schedule_load *loads, double *makespan) {
  int64_t each;
  DC_TRY(dc_schedule_actions(kind, ranks, chunks, micro_batches, 0, NULL, 0, &each));
  /* Fewer than 2^20 ranks of fewer than 2^31 actions. */
  dc_schedule_action *actions = calloc((size_t)(ranks * each), sizeof *actions);
  int64_t *begin = calloc((size_t)ranks + 1, sizeof *begin);
  const dc_schedule s = {actions, begin, ranks, ranks * chunks, micro_batches};
  int rc;
  if (!actions || !begin)
    rc = DC_FAIL(DC_E_NOMEM, "no memory for the %lld actions of %lld ranks", (long long)(ranks * each),
                 (long long)ranks);
  else rc = run_fill(kind, &s, chunks, each, actions, begin);
  if (rc == DC_OK) rc = dc_schedule_simulate(&s, cost, hop, NULL, loads, makespan);
  free(begin);
  free(actions);
  return rc;
}
