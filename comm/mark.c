/* mark.c: tells a process from its forked children. */
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#include "comm_impl.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

/* One page that the kernel zeroes in a forked child. It holds a number that no ancestor used, set at the first open of
 * a process. */
static pthread_mutex_t mark_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t *mark_page;
static uint64_t mark_last;
DC__AT_FORK(mark_at_fork, DC__FORK_MARK, &mark_lock, NULL)

uint64_t dc__fork_mark(void) { return mark_page ? *mark_page : 0; }

int dc__fork_mark_set(void) {
  int rc = DC_OK;
  pthread_mutex_lock(&mark_lock);
  if (!mark_page) {
    void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      rc = DC_FAIL(DC_E_NOMEM, "mmap of one page: %s", strerror(errno));
    } else if (madvise(p, 4096, MADV_WIPEONFORK)) {
      rc = DC_FAIL(DC_E_UNSUPPORTED, "madvise(MADV_WIPEONFORK): %s; deepc's collectives need Linux 5.3 or later",
                   strerror(errno));
      munmap(p, 4096);
    } else {
      mark_page = p;
    }
  }
  if (!rc && *mark_page == 0) *mark_page = ++mark_last;
  pthread_mutex_unlock(&mark_lock);
  return rc;
}
