/* fault.c: see fault.h. Owns the words `broken`, `status` and `text` of the shared header, and what this process knows
 * of the deaths of others. A communicator breaks once; the first rank that says so writes the text for all. */
#include "fault.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "message.h"
#include "team.h"
#include "tell.h"

enum { UNREACHABLE_MS = 1000 }; /* a dying process loses its memory some time before its pidfd says that it is dead */

static void fault_nap(int64_t ns) {
  const struct timespec t = {0, (long)ns};
  nanosleep(&t, NULL);
}

int dc__broken(dc_comm *c) {
  dc__header *h = c->h;
  uint32_t state = atomic_load_explicit(&h->broken, memory_order_acquire); /* pairs with the release in dc__break */
  if (__builtin_expect(state == DC__SOUND, 1)) return DC_OK;
  /* bounded: the rank that writes the text may be killed meanwhile */
  for (int i = 0; state == DC__BREAKING && i < 1000; i++) {
    fault_nap(1000000);
    state = atomic_load_explicit(&h->broken, memory_order_acquire);
  }
  if (state == DC__BREAKING)
    return DC_FAIL(DC_E_PEER_DIED, "group %s: a rank died while it reported an error", c->label);
  return DC_FAIL(h->status, "%.*s", DC__TEXT - 1, h->text); /* not written again */
}

void dc__wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

void dc__wake_all(dc_comm *c) {
  for (int r = 0; r < c->size; r++) {
    dc__wake(&c->h->seat[r].done);
    for (int s = 0; s < c->cells; s++) dc__wake(&dc__cell_of(c, r, s)->posted);
    if (!c->messages) continue; /* while it opens */
    /* so that who is about to sleep for messages does not: its futex compares */
    atomic_fetch_add_explicit(&c->messages[r].bell, 1, memory_order_seq_cst);
    dc__wake(&c->messages[r].bell);
  }
  for (int i = 0; c->team && i < c->team->teams * 2 * c->cells; i++) dc__wake(&c->team->lines[i].posted);
}

int dc__break(dc_comm *c, int status, const char *fmt, ...) {
  char s[DC__TEXT];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(s, sizeof s, fmt, ap);
  va_end(ap);
  uint32_t sound = DC__SOUND;
  /* seq_cst: see dc__await_calm() */
  if (atomic_compare_exchange_strong_explicit(&c->h->broken, &sound, DC__BREAKING, memory_order_seq_cst,
                                              memory_order_acquire)) {
    memcpy(c->h->text, s, sizeof s);
    c->h->status = status;
    /* release: who sees BROKEN sees status and text */
    atomic_store_explicit(&c->h->broken, DC__BROKEN, memory_order_release);
    /* A peer that is about to sleep now may miss this; it looks again after DC__LOOK_NS. */
    dc__wake_all(c);
  }
  return dc__broken(c);
}

/* ---- who is gone ------------------------------------------------------------------------------------------------- */
void dc__look_at_peers(dc_comm *c) {
  struct pollfd p[DC_COMM_MAX_RANKS];
  for (int r = 0; r < c->size; r++)
    p[r] = (struct pollfd){.fd = r == c->rank || dc__is_dead(c, r) ? -1 : c->pidfd[r], .events = POLLIN};
  if (poll(p, (nfds_t)c->size, 0) <= 0) return;
  for (int r = 0; r < c->size; r++) /* readable once the process is a zombie */
    if (p[r].revents) atomic_store_explicit(&c->dead[r], 1, memory_order_relaxed);
}

bool dc__look_at_peer(dc_comm *c, int rank) {
  struct pollfd p = {.fd = c->pidfd[rank], .events = POLLIN};
  if (!dc__is_dead(c, rank) && poll(&p, 1, 0) > 0 && p.revents)
    atomic_store_explicit(&c->dead[rank], 1, memory_order_relaxed);
  return dc__is_dead(c, rank);
}

int dc__break_lost(dc_comm *c, int rank, const dc__text *mine, const dc__text *theirs) {
  dc__text t = {.n = 0};
  text_add(&t, "group %s: ", c->label);
  text_add_pid(&t, c, rank);
  dc__tell_end(&t, c, rank);
  text_add(&t, "; ");
  text_add_rank(&t, c, c->rank);
  text_add(&t, " waits for it in %s; ", mine->s);
  text_add_rank(&t, c, rank);
  text_add(&t, " %s", theirs->s);
  return dc__break(c, DC_E_PEER_DIED, "%s", t.s);
}

int dc__unreachable(dc_comm *c, const char *why) {
  struct pollfd p[DC_COMM_MAX_RANKS];
  for (int r = 0; r < c->size; r++) p[r] = (struct pollfd){.fd = r == c->rank ? -1 : c->pidfd[r], .events = POLLIN};
  while (poll(p, (nfds_t)c->size, UNREACHABLE_MS) < 0 && errno == EINTR) continue;
  dc__look_at_peers(c);
  for (int r = 0; r < c->size; r++) {
    if (!dc__is_dead(c, r)) continue;
    dc__text mine = {.n = 0}, theirs = {.n = 0};
    dc__tell_own_call(&mine, c);
    dc__tell_position(&theirs, c, r);
    return dc__break_lost(c, r, &mine, &theirs);
  }
  return dc__break(c, DC_E_PEER, "group %s: %s", c->label, why);
}

/* Who works in others' buffers shows that first, and then looks whether the group is sound (coll_direct.c). Here it is
 * the other way round, all sequentially consistent: so either we see that it works, or it sees that the group is
 * broken and leaves our buffers alone. Polls: the peers are at most one piece of work away from their next look. */
int dc__await_calm(dc_comm *c) {
  const int64_t deadline = dc__now_ns() + c->timeout_ns;
  atomic_load_explicit(&c->h->broken, memory_order_seq_cst);
  for (int r = 0; r < c->size; r++) {
    if (r == c->rank) continue;
    while (!dc__is_dead(c, r) && atomic_load_explicit(&c->h->seat[r].working, memory_order_seq_cst)) {
      if (dc__now_ns() >= deadline) return r;
      fault_nap(100000);
      dc__look_at_peers(c);
    }
  }
  return -1;
}

/* ---- the public side --------------------------------------------------------------------------------------------- */
int dc_comm_abort(dc_comm *c, const char *reason) {
  if (!c) return DC_FAIL(DC_E_INVALID, "the communicator is NULL");
  if (c->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process", c->label);
  dc__text t = {.n = 0};
  text_add(&t, "group %s: ", c->label);
  text_add_pid(&t, c, c->rank);
  text_add(&t, " aborted: %s", reason && reason[0] ? reason : "no reason given");
  dc__break(c, DC_E_ABORTED, "%s", t.s); /* its status is for the waits; the abort itself succeeded */
  return DC_OK;
}

int dc_comm_fail(dc_comm *c, int status, const char *text) {
  if (!c || !text) return DC_FAIL(DC_E_INVALID, "the communicator or the text is NULL");
  if (status == DC_OK || strcmp(dc_status_name(status), "E_UNKNOWN") == 0)
    return DC_FAIL(DC_E_INVALID, "status %d: no error has it", status);
  if (c->fork_mark != dc__fork_mark())
    return DC_FAIL(DC_E_STATE, "group %s was opened by the parent of this forked process", c->label);
  dc__break(c, status, "%s", text); /* its status is for the waits; telling them succeeded */
  return DC_OK;
}

const char *dc_comm_error(const dc_comm *c) {
  if (!c || c->fork_mark != dc__fork_mark()) return "";
  if (atomic_load_explicit(&c->h->broken, memory_order_acquire) != DC__BROKEN) return "";
  return c->h->text;
}
