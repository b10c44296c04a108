/* ring.c: which ring. */
#include "ring.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const dc__disk_ring_body *_Atomic ring_forced;

void dc__disk_ring_use(const dc__disk_ring_body *body) { atomic_store(&ring_forced, body); }

const char *dc__disk_ring_no_uring(int error) {
  switch (error) {
  case 0: return NULL;
  case ENOSYS: return "no io_uring: the kernel lacks it or the container's seccomp profile hides it (ENOSYS)";
  case EPERM: return "no io_uring: forbidden by kernel.io_uring_disabled or the container's seccomp profile (EPERM)";
  case ENOMEM: return "no io_uring: not enough memory or RLIMIT_MEMLOCK (ENOMEM)";
  case EOPNOTSUPP: return "no io_uring: it needs Linux 5.11 or later";
  case EMFILE:
  case ENFILE: return "no io_uring: too many open files; raise ulimit -n";
  default: return "no io_uring: io_uring_setup failed";
  }
}

/* DEEPC_RING, where the caller left the choice. */
static int ring_choose(int *kind) {
  const char *text = getenv("DEEPC_RING");
  if (*kind != DC_RING_AUTO || !text || !*text || !strcmp(text, "auto")) return DC_OK;
  if (!strcmp(text, "uring")) *kind = DC_RING_URING;
  else if (!strcmp(text, "threads")) *kind = DC_RING_THREADS;
  else
    return DC_FAIL(DC_E_ENV, "DEEPC_RING='%s' is not understood; set it to auto, uring or threads, or unset it", text);
  return DC_OK;
}

int dc__disk_ring_open(int kind, int depth, int threads, dc__disk_ring **out, const char **why) {
  const dc__disk_ring_body *forced = atomic_load(&ring_forced);
  int error = 0;
  *why = "";
  DC_TRY(ring_choose(&kind));
  if (forced) {
    error = -forced->open(forced, depth, threads, out);
  } else {
    if (kind != DC_RING_THREADS) {
      error = -dc__disk_ring_uring.open(&dc__disk_ring_uring, depth, threads, out);
      if (!error) return DC_OK;
      if (kind == DC_RING_URING)
        return DC_FAIL(DC_E_UNSUPPORTED, "%s; leave the choice to deepc (DEEPC_RING=auto) or ask for threads",
                       dc__disk_ring_no_uring(error));
      *why = dc__disk_ring_no_uring(error);
    }
    error = -dc__disk_ring_threads.open(&dc__disk_ring_threads, depth, threads, out);
  }
  return error ? DC_FAIL(error == ENOMEM ? DC_E_NOMEM : DC_E_SYSTEM, "a ring of %d blocks: %s (errno %d)", depth,
                         strerror(error), error)
               : DC_OK;
}
