/* probe.c: what the kernel lets the ranks of a communicator do with each other: read and write each other's memory
 * (single copies), and membarrier(2). All ranks agree on both.
 *
 * Containers may forbid process_vm_readv or process_vm_writev, and another pid namespace makes pids mean something
 * else: so each rank reads a random word out of every peer's private memory, writes it back beside it, and all must
 * succeed.
 *
 * Under Yama's ptrace_scope 1 (Ubuntu's default) a process may reach into its descendants only. Each rank then names a
 * process that they all come from as its tracer (PR_SET_PTRACER), which lets that one and its descendants, the other
 * ranks among them, and nobody else; and takes that back where it did not help. */
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "comm_impl.h"
#include "open.h"
#include "sync.h"
#include "team.h"
#include "wait.h"

#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif

typedef struct probe_shown {
  uint64_t word_at, landing_at; /* addresses in the owner's process */
  uint64_t word;                /* what it reads at the one, and peers write to the other */
  int64_t tracer;
} probe_shown;

enum { PROBE_COPIES = 1, PROBE_MEMBARRIER = 2, PROBE_WANTED = 4, PROBE_NOT_DENIED = 8 };

/* Never writes to a process that it did not recognize by what it read. */
static bool probe_peer(const dc_comm *c, int r, const probe_shown *s) {
  uint64_t got = 0, word = s->word;
  const pid_t pid = c->h->seat[r].pid;
  const struct iovec to = {&got, sizeof got}, at = {(void *)(uintptr_t)s->word_at, sizeof got};
  const struct iovec from = {&word, sizeof word}, landing = {(void *)(uintptr_t)s->landing_at, sizeof word};
  errno = 0;
  return process_vm_readv(pid, &to, 1, &at, 1, 0) == (ssize_t)sizeof got && got == word &&
         process_vm_writev(pid, &from, 1, &landing, 1, 0) == (ssize_t)sizeof word;
}

static uint64_t probe_peers(const dc_comm *c, const probe_shown *all) {
  for (int r = 0; r < c->size; r++)
    if (r != c->rank && !probe_peer(c, r, &all[r])) return errno == EPERM ? 0 : PROBE_NOT_DENIED;
  return PROBE_COPIES | PROBE_NOT_DENIED;
}

/* *all: what all ranks can. */
static int probe_agree(dc_comm *c, const dc_call *call, uint64_t mine, uint64_t *all) {
  uint64_t bits[DC_COMM_MAX_RANKS];
  DC_TRY(dc__share(c, call, &mine, sizeof mine, bits));
  for (int r = 0; r < c->size; r++) mine &= bits[r];
  *all = mine;
  return DC_OK;
}

static bool probe_same_tracer(const dc_comm *c, const probe_shown *all) {
  for (int r = 1; r < c->size; r++)
    if (all[r].tracer != all[0].tracer) return false;
  return all[0].tracer > 0;
}

/* Fails without Yama, which is as good. */
static void probe_admit(int64_t tracer) { prctl(PR_SET_PTRACER, (unsigned long)tracer, 0, 0, 0); }

/* Once more, with the common ancestor as everyone's tracer. */
static int probe_under_tracer(dc_comm *c, const dc_call *call, const probe_shown *shown, uint64_t *all) {
  uint64_t again;
  probe_admit(shown[0].tracer);
  DC_TRY(dc__share(c, call, NULL, 0, NULL)); /* all have admitted it */
  DC_TRY(probe_agree(c, call, probe_peers(c, shown), &again));
  *all |= again & PROBE_COPIES;
  if (!(again & PROBE_COPIES)) probe_admit(0);
  return DC_OK;
}

/* What peers write when they try it: of the process, since one that is stopped meanwhile may do so long after our
 * opening has failed. Any number of communicators share it: nobody reads it. */
static volatile uint64_t probe_landing;

int dc__probe(dc_comm *c) {
  const dc_call call = {.op = DC_CALL_BARRIER, .tag = -1};
  probe_shown shown[DC_COMM_MAX_RANKS];
  uint64_t word = (uint64_t)dc__now_ns() * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid(), all = 0;
  const probe_shown own = {(uint64_t)(uintptr_t)&word, (uint64_t)(uintptr_t)&probe_landing, word, c->tracer};
  c->call = call;
  DC_TRY(dc__share(c, &call, &own, sizeof own, shown));
  uint64_t mine = c->may_copy ? probe_peers(c, shown) | PROBE_WANTED : PROBE_NOT_DENIED;
  if (c->may_membarrier && dc__membarrier_register()) mine |= PROBE_MEMBARRIER;
  DC_TRY(probe_agree(c, &call, mine, &all)); /* `word` lives until all are through */
  if ((all & PROBE_WANTED) && !(all & PROBE_NOT_DENIED) && probe_same_tracer(c, shown))
    DC_TRY(probe_under_tracer(c, &call, shown, &all));
  c->single_copy = all & PROBE_COPIES;
  c->fences = !(all & PROBE_MEMBARRIER);
  return DC_OK;
}
