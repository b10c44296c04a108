/* tell.c: see tell.h. Owns every sentence about ranks and calls but those that only one caller has. */
#include "tell.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

#include "flight.h"
#include "message.h"

/* ---- calls ------------------------------------------------------------------------------------------------------- */
/* ---- text -------------------------------------------------------------------------------------------------------- */
static const char *tell_red_name(int op) {
  static const char *const name[] = {"sum", "avg", "min", "max", "prod", "band", "bor", "bxor"};
  return op >= 0 && op < (int)(sizeof name / sizeof *name) ? name[op] : "?";
}

void dc__tell_call(dc__text *t, const dc_call *k, int64_t seq, const char *where) {
  const int op = k->op % DC__ALGO; /* without the forced row that a fingerprint carries */
  text_add(t, "%s(", dc_call_name(op));
  if (op != DC_CALL_BARRIER && op != DC_CALL_SEGMENT) text_add(t, "%s", dc_dtype_name(k->dtype));
  if (op == DC_CALL_SEGMENT) text_add(t, "bytes %lld", (long long)k->count);
  else if (op != DC_CALL_BARRIER && op != DC_CALL_ALL_TO_ALLV)
    text_add(t, ", count %lld", (long long)k->count); /* that has many */
  if (op == DC_CALL_ALL_REDUCE || op == DC_CALL_REDUCE_SCATTER || op == DC_CALL_REDUCE)
    text_add(t, ", %s", tell_red_name(k->red_op));
  if (op == DC_CALL_BROADCAST || op == DC_CALL_REDUCE || op == DC_CALL_GATHER || op == DC_CALL_SCATTER)
    text_add(t, ", root %d", k->root);
  if (k->tag) text_add(t, "%stag %lld", op == DC_CALL_BARRIER ? "" : ", ", (long long)k->tag);
  text_add(t, ") [call %lld%s%s]", (long long)seq, where[0] ? " at " : "", where);
}

void dc__tell_own_call(dc__text *t, const dc_comm *c) {
  char where[DC__WHERE];
  dc__where_text(c->where, where);
  dc__tell_call(t, &c->call, c->seq, where);
}

/* ---- what ranks have shown --------------------------------------------------------------------------------------- */
static dc_call tell_unpack(const uint64_t w[DC__CALL_WORDS]) {
  return (dc_call){.op = (uint16_t)w[0],
                   .dtype = (uint8_t)(w[0] >> 16),
                   .red_op = (uint8_t)(w[0] >> 24),
                   .root = (int32_t)(w[0] >> 32),
                   .count = (int64_t)w[1],
                   .tag = (int64_t)w[2]};
}

typedef struct tell_record {
  uint64_t w[DC__CALL_WORDS];
  uint32_t seq;
  char where[DC__WHERE];
} tell_record;

/* acquire: what is read after this is read after the words. */
static void tell_copy(const dc_comm *c, const dc__cell *cell, tell_record *x) {
  for (int i = 0; i < DC__CALL_WORDS; i++) x->w[i] = atomic_load_explicit(&cell->call[i], memory_order_acquire);
  x->seq = atomic_load_explicit(&cell->seq, memory_order_acquire);
  dc__where_text(c->wheres[cell - c->cell].w, x->where);
}

static void tell_add(dc__text *t, const dc_comm *c, const tell_record *x) {
  const dc_call call = tell_unpack(x->w);
  dc__tell_call(t, &call, c->seq + (int32_t)(x->seq - (uint32_t)c->seq), x->where);
}

static void tell_cell(dc__text *t, const dc_comm *c, const dc__cell *cell) {
  tell_record x;
  tell_copy(c, cell, &x);
  tell_add(t, c, &x);
}

/* The cell that `rank` posted last, NULL if it has posted nothing; *posted: its steps, modulo 2^32. */
static const dc__cell *tell_last_cell(const dc_comm *c, int rank, uint32_t *posted) {
  const dc__cell *last = NULL;
  *posted = 0;
  for (int s = 0; s < c->cells; s++) {
    const dc__cell *cell = dc__cell_of(c, rank, s);
    uint32_t v = atomic_load_explicit(&cell->posted, memory_order_acquire);
    if (v == 0 || (last && !dc__at_least(v, *posted))) continue;
    *posted = v;
    last = cell;
  }
  return last;
}

/* What `rank` did last, from what it has shown. */
void dc__tell_position(dc__text *t, const dc_comm *c, int rank) {
  uint32_t posted, done = atomic_load_explicit(&c->h->seat[rank].done, memory_order_acquire);
  const dc__cell *cell = tell_last_cell(c, rank, &posted);
  if (!cell) {
    text_add(t, "has called nothing yet");
    return;
  }
  text_add(t, posted == done ? "has finished " : "is in ");
  tell_cell(t, c, cell);
}

void dc__tell_step(dc__text *t, const dc_comm *c, int rank, int64_t step) {
  tell_cell(t, c, dc__cell_of(c, rank, step));
}

/* ---- how two calls differ ---------------------------------------------------------------------------------------- */
/* What `rank` called as `step`; false if its cell is another step's, or becomes that meanwhile: a rank that waits for
 * nobody may run ahead and fill it again. */
static bool tell_read(const dc_comm *c, int rank, int64_t step, tell_record *x) {
  const dc__cell *cell = dc__cell_of(c, rank, step);
  if (!dc__holds(c, rank, step)) return false;
  tell_copy(c, cell, x);
  return atomic_load_explicit(&cell->filling, memory_order_relaxed) == (uint32_t)(step + 1);
}

static bool tell_same(const tell_record *a, const tell_record *b) { return memcmp(a->w, b->w, sizeof a->w) == 0; }

/* "rank 0, rank 2" of those that have posted the same call as rank `of`, whose record is `f`; returns how many. */
static int tell_callers(dc__text *t, const dc_comm *c, int64_t step, int of, const tell_record *f) {
  int n = 0;
  for (int r = 0; r < c->size; r++) {
    tell_record x;
    if (r != of && (!tell_read(c, r, step, &x) || !tell_same(f, &x))) continue;
    if (n++ >= 16) continue;
    text_add(t, n == 1 ? " " : ", ");
    text_add_rank(t, c, r);
  }
  if (n > 16) text_add(t, " and %d more", n - 16);
  return n;
}

/* The first step at which the calls of a and b differ, with both; -1 if that is too long ago. */
static int64_t tell_first_difference(const dc_comm *c, int64_t step, int a, int b, tell_record f[2]) {
  for (int64_t s = step - c->cells + 1 > 0 ? step - c->cells + 1 : 0; s <= step; s++)
    if (tell_read(c, a, s, &f[0]) && tell_read(c, b, s, &f[1]) && !tell_same(&f[0], &f[1])) return s;
  return -1;
}

void dc__tell_mismatch(dc__text *t, const dc_comm *c, int64_t now, int a, int b) {
  int told = 0;
  const int of[2] = {a, b};
  tell_record f[2];
  const int64_t found = tell_first_difference(c, now, a, b, f), step = found < 0 ? now : found;
  text_add(t, "ranks called different collectives in group %s (step %lld%s):", c->label, (long long)(step - c->base),
           found < 0 ? "; the first difference was earlier, in calls that are not kept any more" : "");
  for (int side = 0; side < 2; side++) {
    /* nobody fills a cell of `now` again: we have not done it */
    if (found < 0) tell_read(c, of[side], now, &f[side]);
    told += tell_callers(t, c, step, of[side], &f[side]);
    text_add(t, " called ");
    tell_add(t, c, &f[side]);
    text_add(t, side ? "." : ";");
  }
  if (told < c->size) text_add(t, " Others have not arrived or called something else again.");
  text_add(
      t, " All ranks of a group must make the same calls in the same order with the same dtype, count and reduction.");
}

/* ---- how a rank ended -------------------------------------------------------------------------------------------- */
/* The wait status of a zombie: the last field of /proc/PID/stat. */
static bool tell_zombie_status(int pid, int *status) {
  char path[64], buf[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *f = fopen(path, "re");
  size_t n = f ? fread(buf, 1, sizeof buf - 1, f) : 0;
  if (f) fclose(f);
  buf[n] = 0;
  const char *comm_end = strrchr(buf, ')'), *last = strrchr(buf, ' ');
  return comm_end && strncmp(comm_end, ") Z", 3) == 0 && last && sscanf(last, "%d", status) == 1;
}

/* The same of a process that its parent has collected: since Linux 6.15 the pidfd keeps it (PIDFD_GET_INFO). */
static bool tell_pidfd_status(int pidfd, int *status) {
  struct {
    uint64_t mask, cgroup;
    uint32_t ids[11];
    int32_t exit_code;
  } info = {.mask = 1u << 3 /* PIDFD_INFO_EXIT */};
  if (ioctl(pidfd, _IOWR(0xFF, 11, info), &info) || !(info.mask & 1u << 3)) return false;
  *status = info.exit_code;
  return true;
}

/* How a process ended, where that can still be read. */
static void tell_death(dc__text *t, int pid, int pidfd) {
  int status = 0;
  /* the zombie once more: it may have been collected by neither look, between them */
  if (!tell_zombie_status(pid, &status) && !tell_pidfd_status(pidfd, &status) && !tell_zombie_status(pid, &status)) {
    text_add(t, " died: it was killed or exited without leaving the group");
  } else if (status & 0x7f) {
    text_add(t, " died: killed by signal %d (%s)", status & 0x7f, strsignal(status & 0x7f));
  } else {
    text_add(t, " died: it exited with code %d without leaving the group", (status >> 8) & 0xff);
  }
}

void dc__tell_end(dc__text *t, const dc_comm *c, int rank) {
  /* closing takes its messages back first */
  const bool closes = c->messages && atomic_load_explicit(&c->messages[rank].closed, memory_order_seq_cst);
  if (closes || atomic_load_explicit(&c->h->seat[rank].left, memory_order_acquire)) text_add(t, " left the group");
  else tell_death(t, c->h->seat[rank].pid, c->pidfd[rank]);
}

/* ---- messages ---------------------------------------------------------------------------------------------------- */
/* ---- text -------------------------------------------------------------------------------------------------------- */
void dc__tell_message(dc__text *t, const dc_comm *c, const dc_call *k, uint64_t seq, const char *where) {
  text_add(t, "%s(%s, count %lld, tag %lld, %s ", k->op == DC_CALL_SEND ? "send" : "recv", dc_dtype_name(k->dtype),
           (long long)k->count, (long long)k->tag, k->op == DC_CALL_SEND ? "to" : "from");
  if (k->root >= 0 && k->root < c->size) text_add_rank(t, c, k->root);
  else text_add(t, "any source");
  text_add(t, ") [message call %llu%s%s]", (unsigned long long)seq, where[0] ? " at " : "", where);
}

void dc__tell_where(const dc_comm *c, int rank, uint16_t row, char where[DC__WHERE]) {
  const p2p_seat *s = &c->messages[rank];
  const uint32_t k = row % P2P_WHERES, gen = row / P2P_WHERES;
  dc__where_text(s->row[k], where);
  /* acquire before and after: a text that changed meanwhile has another generation */
  if (!row || atomic_load_explicit(&s->row_gen[k], memory_order_acquire) != gen) where[0] = 0;
}

void dc__tell_message_position(dc__text *t, const dc_comm *c, int rank) {
  uint64_t w[P2P_LAST_WORDS];
  char where[DC__WHERE];
  dc_call k;
  for (int i = 0; i < P2P_LAST_WORDS; i++)
    w[i] = atomic_load_explicit(&c->messages[rank].last[i], memory_order_relaxed);
  memcpy(&k, &w[P2P_LAST_CALL], sizeof k);
  if (!k.op) {
    text_add(t, "has sent and received nothing yet");
    return;
  }
  text_add(t, w[P2P_LAST_WAITS] ? "waits for messages, its last call is "
                                : "does not wait for messages, its last call was ");
  dc__tell_where(c, rank, (uint16_t)w[P2P_LAST_WHERE], where);
  dc__tell_message(t, c, &k, w[P2P_LAST_SEQ], where);
}
