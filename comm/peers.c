/* peers.c: this process' pidfds: one per process that it shares a communicator with, however many communicators.
 *
 * Owns the table of them and the number by which processes know each other. A pidfd is readable once its process is
 * dead, which is what waits look at. The table stays in a forked child (the descriptors do as well), where closing an
 * inherited communicator gives back the child's own references. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "comm_impl.h"
#include "open.h"

typedef struct peer {
  struct peer *next;
  uint64_t process;
  int fd, refs;
} peer;

static pthread_mutex_t peers_lock = PTHREAD_MUTEX_INITIALIZER;
static peer *peers;
static uint64_t peers_self, peers_mark; /* our number, and the process that it is of */
DC__AT_FORK(peers_at_fork, DC__FORK_PEERS, &peers_lock, NULL)

uint64_t dc__process_number(void) {
  pthread_mutex_lock(&peers_lock);
  if (!peers_self || peers_mark != dc__fork_mark()) {
    if (getrandom(&peers_self, sizeof peers_self, GRND_NONBLOCK) != sizeof peers_self) /* early in boot: no pool yet */
      peers_self = (uint64_t)dc__now_ns() * 0x9e3779b97f4a7c15u ^ (uint64_t)getpid() << 32;
    peers_self |= 1; /* never 0 */
    peers_mark = dc__fork_mark();
  }
  const uint64_t self = peers_self;
  pthread_mutex_unlock(&peers_lock);
  return self;
}

int dc__peer_take(uint64_t process, int fd, int *pidfd) {
  int rc = DC_OK;
  pthread_mutex_lock(&peers_lock);
  peer *p = peers;
  while (p && p->process != process) p = p->next;
  if (p) {
    if (fd != p->fd) close(fd);
    p->refs++;
    *pidfd = p->fd;
  } else if ((p = malloc(sizeof *p))) {
    *p = (peer){.next = peers, .process = process, .fd = fd, .refs = 1};
    peers = p;
    *pidfd = fd;
  } else {
    close(fd);
    rc = DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *p);
  }
  pthread_mutex_unlock(&peers_lock);
  return rc;
}

void dc__peer_drop(int pidfd) {
  pthread_mutex_lock(&peers_lock);
  for (peer **at = &peers; *at; at = &(*at)->next) {
    peer *p = *at;
    if (p->fd != pidfd) continue;
    if (--p->refs == 0) {
      *at = p->next;
      close(p->fd);
      free(p);
    }
    break;
  }
  pthread_mutex_unlock(&peers_lock);
}
