/* wait.c: see wait.h. Owns how a rank sleeps.
 *
 * Spinning for c->spin_ns is as long as a peer takes that is about to arrive; then the core is offered to others for
 * c->yield_ns, because with more ranks than cores the peer that is waited for may need this one, and a core that sleeps
 * takes tens of microseconds to wake. tests/model/sleep.pml checks that no wake-up is lost. */
#include "wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "depend.h"

void (*_Atomic dc__serve)(void);
_Atomic int dc__unfinished;

enum { MB_GLOBAL_EXPEDITED = 2, MB_REGISTER_GLOBAL = 4 };

static bool wait_membarrier(int cmd) { return syscall(SYS_membarrier, cmd, 0, 0) == 0; }

bool dc__membarrier_register(void) { return wait_membarrier(MB_REGISTER_GLOBAL); }

static void wait_futex(_Atomic uint32_t *word, uint32_t seen, int64_t ns) {
  struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
  dc__count(DC_COUNTER_futex_waits, 1);
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0); /* every outcome is handled by looking again */
}

/* Peers may need an answer to their messages before they come to what we wait for. */
static bool wait_serves(const dc__waiting *w) {
  return w->serves && atomic_load_explicit(&dc__unfinished, memory_order_relaxed) > 0;
}

/* Sleeps until the word changes, somebody wakes us, or it is time to look after the peers. */
static int wait_sleep(dc__waiting *w, int64_t ns, bool *there) {
  atomic_fetch_add_explicit(w->sleepers, 1, memory_order_seq_cst);
  if (!w->c->fences) wait_membarrier(MB_GLOBAL_EXPEDITED);
  const uint32_t seen = atomic_load_explicit(w->word, memory_order_seq_cst);
  w->will_sleep = true;
  const int rc = w->poll(w, there);
  w->will_sleep = false;
  if (!rc && !*there) wait_futex(w->word, seen, ns);
  /* relaxed: only a hint whether a wake is needed; a stale count costs one syscall */
  atomic_fetch_sub_explicit(w->sleepers, 1, memory_order_relaxed);
  return rc;
}

bool dc__look_due(const dc__waiting *w) { return dc__now_ns() - *w->look_ns >= DC__LOOK_NS; }

int dc__look(dc__waiting *w) {
  *w->look_ns = dc__now_ns();
  dc__look_at_peers(w->c);
  DC_TRY(dc__depend_look(w->c));
  w->late = *w->look_ns - w->start_ns >= w->timeout_ns;
  return w->look(w);
}

/* How long a sleep may be. */
static int64_t wait_nap(const dc__waiting *w, int64_t now) {
  const int64_t left = w->start_ns + w->timeout_ns - now, most = wait_serves(w) ? DC__LOOK_NS / 20 : DC__LOOK_NS;
  return left > 0 && left < most ? left : most;
}

int dc__await(dc__waiting *w) {
  const int64_t begin = dc__now_ns(), spin_end = begin + w->c->spin_ns, awake_end = spin_end + w->c->yield_ns;
  bool there = false;
  if (!*w->look_ns) *w->look_ns = begin;
  for (;;) {
    const int64_t now = dc__now_ns();
    if (!w->start_ns) w->start_ns = now;
    for (int i = 0; i < (now < spin_end ? 64 : 1); i++) {
      const int rc = w->poll(w, &there);
      if (rc || there) return rc;
      dc__cpu_relax();
    }
    DC_TRY(dc__broken(w->c));
    /* looking costs a system call: not each time, and not for what comes at once */
    const int64_t looked = now < awake_end && *w->look_ns < begin ? begin : *w->look_ns;
    if (now - looked >= DC__LOOK_NS || now - w->start_ns >= w->timeout_ns) DC_TRY(dc__look(w));
    void (*serve)(void) = wait_serves(w) ? atomic_load_explicit(&dc__serve, memory_order_acquire) : NULL;
    if (serve) serve();
    if (now < spin_end) continue;
    if (now < awake_end) {
      sched_yield();
      continue;
    }
    DC_TRY(wait_sleep(w, wait_nap(w, now), &there));
    if (there) return DC_OK;
  }
}
