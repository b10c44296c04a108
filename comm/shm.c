/* shm.c: how ranks find each other and come to share memory: the handshake, memfd segments, huge pages, leaving.
 *
 * Rank 0 listens on an abstract Unix socket while ranks join. Each rank sends a hello with a pidfd of itself; rank 0
 * checks uid and hello, makes the segment, and sends every rank all pidfds and the memfd. Every rank maps it, faults it
 * in and acknowledges; rank 0 then tells all to go, or what went wrong. The sockets stay open to pass the memfds of
 * later segments. Nothing has a name that outlives the joining.
 *
 * Assumes Linux >= 5.3 (pidfd_open); uses MADV_POPULATE_WRITE (5.14) and MADV_COLLAPSE (6.1) where they exist. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "comm_impl.h"
#include "flight.h"
#include "p2p.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

#define SLOT_COLOR                                                                                   \
  4352 /* slots start at different offsets modulo 4 KiB and 2 MiB: congruent arrays evict each other \
        */
#define FDS_PER_MSG 64
#define ADDRESS_MAX 90

/* ---- forks ------------------------------------------------------------------------------------------------------- */
/* One page that the kernel zeroes in a forked child. It holds a number that no ancestor used, set at the first open of
 * a process. */
static pthread_mutex_t fork_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t *fork_page;
static uint64_t fork_last;

uint64_t dc__fork_mark(void) { return fork_page ? *fork_page : 0; }

static int fork_mark_set(void) {
  int rc = DC_OK;
  pthread_mutex_lock(&fork_lock);
  if (!fork_page) {
    void *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      rc = DC_FAIL(DC_E_NOMEM, "mmap of one page: %s", strerror(errno));
    } else if (madvise(p, 4096, MADV_WIPEONFORK)) {
      rc = DC_FAIL(DC_E_UNSUPPORTED, "madvise(MADV_WIPEONFORK): %s; deepc's collectives need Linux 5.3 or later",
                   strerror(errno));
      munmap(p, 4096);
    } else {
      fork_page = p;
    }
  }
  if (!rc && *fork_page == 0) *fork_page = ++fork_last;
  pthread_mutex_unlock(&fork_lock);
  return rc;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */
static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static bool want_huge(int64_t bytes) {
  const char *e = getenv("DEEPC_HUGEPAGES");
  return bytes >= (int64_t)DC_HUGE_PAGE && !(e && strcmp(e, "0") == 0);
}

/* Refuses before the kernel would kill: beyond a memory cgroup's limit, faulting in is a SIGKILL and not an ENOMEM. */
static int preflight(int64_t bytes) {
  int64_t free_bytes;
  DC_TRY(dc_mem_available(&free_bytes));
  if (bytes + bytes / 64 > free_bytes)
    return DC_FAIL(
        DC_E_NOMEM,
        "a shared segment of %lld MiB does not fit: %lld MiB are available here (memory cgroup and MemAvailable)",
        (long long)(bytes >> 20), (long long)(free_bytes >> 20));
  struct rlimit lim;
  if (getrlimit(RLIMIT_FSIZE, &lim) == 0 && lim.rlim_cur != RLIM_INFINITY && (uint64_t)bytes > lim.rlim_cur)
    return DC_FAIL(DC_E_NOMEM, "a shared segment of %lld bytes exceeds the file size limit (ulimit -f) of %llu bytes",
                   (long long)bytes, (unsigned long long)lim.rlim_cur);
  return DC_OK;
}

static int memfd_make(int64_t bytes, int *out) {
  int fd = (int)syscall(SYS_memfd_create, "deepc", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return DC_FAIL(DC_E_SYSTEM, "memfd_create: %s", strerror(errno));
  /* sealed in both directions: no rank can make another one's access fault, and nobody can undo that */
  if (ftruncate(fd, bytes) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
    int e = errno;
    close(fd);
    return DC_FAIL(DC_E_SYSTEM, "a shared segment of %lld bytes: %s", (long long)bytes, strerror(e));
  }
  *out = fd;
  return DC_OK;
}

/* What a peer sent must be of the agreed size and must not be able to shrink under us. */
static int memfd_check(int fd, int64_t bytes) {
  int seals = fcntl(fd, F_GET_SEALS);
  /* not fstat: as a symbol of its own it is younger than the glibc that the wheel is for */
  if (lseek(fd, 0, SEEK_END) != (off_t)bytes || seals < 0 || !(seals & F_SEAL_SHRINK))
    return DC_FAIL(DC_E_PEER, "rank 0 sent a segment of the wrong size or without seals");
  return DC_OK;
}

/* Maps at a 2 MiB boundary, so that huge pages of the file can be mapped whole. */
static int map_aligned(int fd, int64_t bytes, void **base) {
  int64_t span = bytes + (int64_t)DC_HUGE_PAGE;
  char *p = mmap(NULL, (size_t)span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return DC_FAIL(DC_E_NOMEM, "%lld bytes of address space: %s", (long long)span, strerror(errno));
  char *at = (char *)(((uintptr_t)p + DC_HUGE_PAGE - 1) & ~(uintptr_t)(DC_HUGE_PAGE - 1));
  if (mmap(at, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    int e = errno;
    munmap(p, (size_t)span);
    return DC_FAIL(DC_E_NOMEM, "mmap of a shared segment of %lld bytes: %s", (long long)bytes, strerror(e));
  }
  if (at > p) munmap(p, (size_t)(at - p));
  if (at + bytes < p + span) munmap(at + bytes, (size_t)(p + span - (at + bytes)));
  *base = at;
  return DC_OK;
}

/* Kernels before 5.14: reserve all of it (an error, not a SIGBUS), then touch. Peers use the memory only after the
 * handshake, so that adding 0 races with nobody. */
static int populate_by_hand(int fd, char *base, int64_t bytes) {
  int e = posix_fallocate(fd, 0, bytes);
  if (e) return e;
  for (int64_t i = 0; i < bytes; i += 4096)
    atomic_fetch_add_explicit((_Atomic uint8_t *)(base + i), 0, memory_order_relaxed);
  return 0;
}

/* Faults everything in. The first rank touches one byte per 2 MiB and collapses, which gives huge pages to all who map
 * the file, whatever shmem_enabled says; failing that, small pages do, and dc_segment_info tells. */
static int fault_in(int fd, char *base, int64_t bytes, bool first) {
  if (want_huge(bytes)) {
    madvise(base, (size_t)bytes, MADV_HUGEPAGE);
    if (first) {
      int64_t whole = bytes / (int64_t)DC_HUGE_PAGE * (int64_t)DC_HUGE_PAGE;
      for (int64_t i = 0; i < whole; i += (int64_t)DC_HUGE_PAGE) *(volatile char *)(base + i) = 0;
      madvise(base, (size_t)whole, MADV_COLLAPSE);
    }
  }
  int e = 0;
  while (madvise(base, (size_t)bytes, MADV_POPULATE_WRITE)) {
    e = errno;
    if (e == EINTR || e == EAGAIN) continue;
    if (e == EINVAL) e = populate_by_hand(fd, base, bytes);
    break;
  }
  if (e && e != EINTR && e != EAGAIN)
    return DC_FAIL(DC_E_NOMEM, "faulting in a shared segment of %lld bytes: %s", (long long)bytes, strerror(e));
  return DC_OK;
}

static int map_make(int fd, int64_t bytes, bool first, dc__map *out) {
  void *base = NULL;
  DC_TRY(map_aligned(fd, bytes, &base));
  int rc = fault_in(fd, base, bytes, first);
  if (rc) {
    munmap(base, (size_t)bytes);
    return rc;
  }
  *out = (dc__map){base, bytes};
  return DC_OK;
}

static void map_drop(dc__map *m) {
  if (m->base) munmap(m->base, (size_t)m->bytes);
  *m = (dc__map){NULL, 0};
}

/* ---- messages ---------------------------------------------------------------------------------------------------- */
enum { MSG_HELLO = 1, MSG_PIDFDS, MSG_SEGMENT, MSG_READY, MSG_GO };
typedef struct msg {
  uint64_t magic;
  int32_t version, kind, status;
  int32_t rank, size, slots, pid, first; /* hello; first: number of the first pidfd of a MSG_PIDFDS */
  int64_t slot_bytes, bytes;
  char text[1024]; /* why, if status != DC_OK */
} msg;

typedef struct fds {
  int n, fd[FDS_PER_MSG];
} fds;

static void fds_close(fds *f) {
  for (int i = 0; i < f->n; i++) close(f->fd[i]);
  f->n = 0;
}

static msg msg_of(int kind) { return (msg){.magic = DC__COMM_MAGIC, .version = DC__COMM_VERSION, .kind = kind}; }

static int ms_left(int64_t deadline_ns) {
  int64_t ms = (deadline_ns - dc__now_ns() + 999999) / 1000000;
  return ms < 0 ? 0 : ms > 1000000 ? 1000000 : (int)ms;
}

static void nap(void) {
  struct timespec ms = {0, 1000000};
  nanosleep(&ms, NULL);
}

static int msg_send(int sock, const msg *m, const int *fd, int nfd, int64_t deadline_ns) {
  struct iovec iov = {(void *)m, sizeof *m};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int) * FDS_PER_MSG)];
  } ctl;
  struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1};
  if (nfd) {
    memset(&ctl, 0, sizeof ctl);
    h.msg_control = &ctl;
    h.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nfd);
    struct cmsghdr *cm = CMSG_FIRSTHDR(&h);
    cm->cmsg_level = SOL_SOCKET;
    cm->cmsg_type = SCM_RIGHTS;
    cm->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nfd);
    memcpy(CMSG_DATA(cm), fd, sizeof(int) * (size_t)nfd);
  }
  for (;;) {
    if (sendmsg(sock, &h, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof *m) return DC_OK;
    int e = errno;
    /* ETOOMANYREFS: too many descriptors in flight; they are taken off as peers receive */
    if ((e != EAGAIN && e != EINTR && e != ETOOMANYREFS) || dc__now_ns() >= deadline_ns)
      return DC_FAIL(e == EPIPE || e == ECONNRESET ? DC_E_PEER_DIED : DC_E_SYSTEM, "sending to a rank: %s",
                     strerror(e));
    nap();
  }
}

enum { RECV_OK, RECV_AGAIN, RECV_CLOSED, RECV_BAD, RECV_NO_FDS };
/* One message, without blocking. Descriptors are owned by the caller. */
static int msg_recv(int sock, msg *m, fds *f) {
  struct iovec iov = {m, sizeof *m};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int) * FDS_PER_MSG)];
  } ctl;
  struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &ctl, .msg_controllen = sizeof ctl};
  f->n = 0;
  ssize_t n = recvmsg(sock, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) return errno == EAGAIN || errno == EINTR ? RECV_AGAIN : RECV_CLOSED;
  for (struct cmsghdr *cm = CMSG_FIRSTHDR(&h); cm; cm = CMSG_NXTHDR(&h, cm)) {
    if (cm->cmsg_level != SOL_SOCKET || cm->cmsg_type != SCM_RIGHTS) continue;
    int k = (int)((cm->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (int i = 0; i < k && f->n < FDS_PER_MSG; i++)
      memcpy(&f->fd[f->n++], CMSG_DATA(cm) + sizeof(int) * (size_t)i, sizeof(int));
  }
  if (n == 0) return RECV_CLOSED;
  if (h.msg_flags & MSG_CTRUNC) return RECV_NO_FDS;
  if (n != (ssize_t)sizeof *m || (h.msg_flags & MSG_TRUNC) || m->magic != DC__COMM_MAGIC) return RECV_BAD;
  m->text[sizeof m->text - 1] = 0;
  return RECV_OK;
}

static int no_fds(void) {
  return DC_FAIL(DC_E_SYSTEM, "descriptors did not arrive: too many are open (raise ulimit -n)");
}

/* Waits for one message from `sock`; `who` names the sender. A message with an error becomes this rank's error. */
static int msg_await(int sock, const char *label, const char *who, msg *m, fds *f, int64_t deadline_ns) {
  for (;;) {
    struct pollfd p = {.fd = sock, .events = POLLIN};
    int left = ms_left(deadline_ns);
    if (left == 0) return DC_FAIL(DC_E_TIMEOUT, "group %s: no answer from %s while joining", label, who);
    if (poll(&p, 1, left) <= 0) continue;
    int got = msg_recv(sock, m, f);
    if (got == RECV_AGAIN) continue;
    if (got == RECV_OK && m->version == DC__COMM_VERSION) {
      if (m->status == DC_OK) return DC_OK;
      fds_close(f);
      return DC_FAIL(m->status, "%s", m->text);
    }
    fds_close(f);
    if (got == RECV_CLOSED)
      return DC_FAIL(DC_E_PEER_DIED, "group %s: %s closed the connection while joining (did it die?)", label, who);
    if (got == RECV_NO_FDS) return no_fds();
    return DC_FAIL(DC_E_PEER, "group %s: %s is not a deepc rank of this version", label, who);
  }
}

/* ---- joining ----------------------------------------------------------------------------------------------------- */
static int address_of(const dc_comm_config *k, struct sockaddr_un *a, socklen_t *len) {
  size_t n = strlen(k->address);
  *a = (struct sockaddr_un){.sun_family = AF_UNIX};
  memcpy(a->sun_path + 1, k->address, n); /* a leading zero byte: abstract */
  *len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
  return DC_OK;
}

static int unix_socket(int *out) {
  int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (s < 0) return DC_FAIL(DC_E_SYSTEM, "socket: %s", strerror(errno));
  *out = s;
  return DC_OK;
}

static bool same_user(int sock) {
  struct ucred u;
  socklen_t n = sizeof u;
  return getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &u, &n) == 0 && u.uid == geteuid();
}

static int pidfd_self(int *out) {
  int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
  if (fd < 0)
    return DC_FAIL(DC_E_UNSUPPORTED, "pidfd_open: %s; deepc's collectives need Linux 5.3 or later", strerror(errno));
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  *out = fd;
  return DC_OK;
}

typedef struct joining {
  dc_comm *c;
  const dc_comm_config *k;
  int64_t deadline_ns;
  int listener;
  int memfd;
  int32_t pid[DC_COMM_MAX_RANKS];
  int pending[DC_COMM_MAX_RANKS + 64], npending; /* connections that have not said hello */
} joining;

static void add_missing(const joining *j, char *s, size_t room) {
  size_t n = 0;
  for (int r = 1, shown = 0; r < j->c->size && n < room; r++) {
    if (j->c->sock[r] >= 0) continue;
    if (shown++ == 16) {
      snprintf(s + n, room - n, ", ...");
      return;
    }
    int w = snprintf(s + n, room - n, "%s%d", shown > 1 ? ", " : "", j->c->global_rank[r]);
    n += w > 0 ? (size_t)w : 0;
  }
}

static int hello_check(joining *j, const msg *m, int nfd) {
  const dc_comm *c = j->c;
  if (m->version != DC__COMM_VERSION)
    return DC_FAIL(
        DC_E_PEER,
        "group %s: pid %d speaks version %d of the protocol, rank 0 speaks %d: two builds of deepc are mixed", c->label,
        m->pid, m->version, DC__COMM_VERSION);
  if (m->size != c->size || m->slots != c->slots || m->slot_bytes != c->slot_bytes)
    return DC_FAIL(
        DC_E_SHAPE,
        "group %s: rank 0 has %d ranks and %d slots of %lld bytes, pid %d has %d ranks and %d slots of %lld bytes",
        c->label, c->size, c->slots, (long long)c->slot_bytes, m->pid, m->size, m->slots, (long long)m->slot_bytes);
  if (m->rank < 1 || m->rank >= c->size)
    return DC_FAIL(DC_E_SHAPE, "group %s: pid %d says it is rank %d of %d", c->label, m->pid, m->rank, c->size);
  if (c->sock[m->rank] >= 0)
    return DC_FAIL(DC_E_SHAPE, "group %s: rank %d joined twice (pids %d and %d)", c->label, m->rank, j->pid[m->rank],
                   m->pid);
  if (nfd != 1) return DC_FAIL(DC_E_PEER, "group %s: the hello of rank %d lacks its pidfd", c->label, m->rank);
  return DC_OK;
}

/* Reads one pending connection. A stranger is dropped without a word; a rank with other settings ends the joining for
 * all. */
static int hear(joining *j, int i) {
  int sock = j->pending[i];
  msg m;
  fds f;
  int got = msg_recv(sock, &m, &f);
  if (got == RECV_AGAIN) return DC_OK;
  j->pending[i] = j->pending[--j->npending];
  if (got != RECV_OK || m.kind != MSG_HELLO) {
    fds_close(&f);
    close(sock);
    return got == RECV_NO_FDS ? no_fds() : DC_OK;
  }
  int rc = hello_check(j, &m, f.n);
  if (rc) {
    msg no = msg_of(MSG_GO);
    no.status = rc;
    snprintf(no.text, sizeof no.text, "%s", dc_last_error());
    msg_send(sock, &no, NULL, 0, j->deadline_ns);
    fds_close(&f);
    close(sock);
    return DC_FAIL(rc, "%s", no.text); /* restored: sending may have failed */
  }
  j->c->sock[m.rank] = sock;
  j->c->pidfd[m.rank] = f.fd[0];
  j->pid[m.rank] = m.pid;
  return DC_OK;
}

static void greet(joining *j) {
  int s;
  while ((s = accept4(j->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
    if (!same_user(s) || j->npending == (int)(sizeof j->pending / sizeof *j->pending)) close(s);
    else j->pending[j->npending++] = s;
  }
}

static int lost_while_joining(joining *j, int rank) {
  return DC_FAIL(DC_E_PEER_DIED, "group %s: rank %d (pid %d) died while the group was joining", j->c->label,
                 j->c->global_rank[rank], j->pid[rank]);
}

static int gather_ranks(joining *j) {
  dc_comm *c = j->c;
  for (int joined = 1;;) {
    joined = 1;
    for (int r = 1; r < c->size; r++) joined += c->sock[r] >= 0;
    if (joined == c->size) return DC_OK;
    int left = ms_left(j->deadline_ns);
    if (left == 0) {
      char who[256] = "";
      add_missing(j, who, sizeof who);
      return DC_FAIL(DC_E_TIMEOUT, "group %s: %d of %d ranks joined in %lld ms; missing: rank %s", c->label, joined,
                     c->size, (long long)j->k->timeout_ms, who);
    }
    struct pollfd p[2 * DC_COMM_MAX_RANKS + 65];
    int who[2 * DC_COMM_MAX_RANKS + 65], n = 0;
    p[n] = (struct pollfd){.fd = j->listener, .events = POLLIN};
    who[n++] = 0;
    for (int r = 1; r < c->size; r++) {
      if (c->sock[r] < 0) continue;
      p[n] = (struct pollfd){.fd = c->sock[r], .events = POLLIN}; /* it has nothing to say now: readable means gone */
      who[n++] = r;
    }
    int first_pending = n;
    for (int i = 0; i < j->npending; i++) p[n++] = (struct pollfd){.fd = j->pending[i], .events = POLLIN};
    if (poll(p, (nfds_t)n, left) <= 0) continue;
    for (int i = 1; i < first_pending; i++)
      if (p[i].revents) return lost_while_joining(j, who[i]);
    for (int i = n - 1; i >= first_pending; i--) /* backwards: hear() fills the gap with the last one */
      if (p[i].revents) DC_TRY(hear(j, i - first_pending));
    if (p[0].revents) greet(j);
  }
}

static int64_t header_bytes(const dc_comm *c) {
  int64_t n = (int64_t)sizeof(dc__header) + (int64_t)sizeof(dc__seat) * c->size +
              (int64_t)(sizeof(dc__cell) + sizeof(dc__where)) * c->size * c->cells;
  return round_up(n, 4096);
}

static int64_t small_begin(const dc_comm *c) {
  return round_up(header_bytes(c) + c->slot_stride * c->slots * c->size, 4096);
}

/* Where the messages' area begins. */
static int64_t stage_end(const dc_comm *c) {
  return round_up(small_begin(c) + DC__SMALL_STRIDE * DC__SMALLS * c->size, 4096);
}

static int64_t total_bytes(const dc_comm *c) {
  int64_t n = stage_end(c) + dc__p2p_bytes(c->size);
  return round_up(n, want_huge(n) ? (int64_t)DC_HUGE_PAGE : 4096);
}

static int map_stage(dc_comm *c, int fd, int64_t bytes, bool first) {
  DC_TRY(map_make(fd, bytes, first, &c->map));
  /* a forked child (a data loader) keeps neither the memory alive nor can it write into it */
  if (madvise(c->map.base, (size_t)bytes, MADV_DONTFORK))
    return DC_FAIL(DC_E_SYSTEM, "madvise(MADV_DONTFORK): %s", strerror(errno));
  c->h = c->map.base;
  c->cell = (dc__cell *)((char *)c->map.base + (int64_t)sizeof(dc__header) + (int64_t)sizeof(dc__seat) * c->size);
  c->wheres = (dc__where *)(c->cell + (int64_t)c->size * c->cells);
  c->stage = (char *)c->map.base + header_bytes(c);
  c->small = (char *)c->map.base + small_begin(c);
  return DC_OK;
}

static int make_stage(joining *j) {
  dc_comm *c = j->c;
  int64_t bytes = total_bytes(c);
  DC_TRY(preflight(bytes));
  DC_TRY(memfd_make(bytes, &j->memfd));
  DC_TRY(map_stage(c, j->memfd, bytes, true));
  c->h->magic = DC__COMM_MAGIC;
  c->h->version = DC__COMM_VERSION;
  c->h->size = c->size;
  c->h->slots = c->slots;
  c->h->slot_bytes = c->slot_bytes;
  c->h->total_bytes = bytes;
  for (int r = 0; r < c->size; r++) c->h->seat[r].pid = j->pid[r];
  return DC_OK;
}

static int send_stage(joining *j, int rank) {
  dc_comm *c = j->c;
  msg m = msg_of(MSG_PIDFDS);
  for (m.first = 0; m.first < c->size; m.first += FDS_PER_MSG) {
    int n = c->size - m.first < FDS_PER_MSG ? c->size - m.first : FDS_PER_MSG;
    DC_TRY(msg_send(c->sock[rank], &m, &c->pidfd[m.first], n, j->deadline_ns));
  }
  m = msg_of(MSG_SEGMENT);
  m.bytes = c->map.bytes;
  return msg_send(c->sock[rank], &m, &j->memfd, 1, j->deadline_ns);
}

static int await_ready(joining *j) {
  for (int r = 1; r < j->c->size; r++) {
    char who[64];
    msg m;
    fds f;
    snprintf(who, sizeof who, "rank %d (pid %d)", j->c->global_rank[r], j->pid[r]);
    DC_TRY(msg_await(j->c->sock[r], j->c->label, who, &m, &f, j->deadline_ns));
    fds_close(&f);
  }
  return DC_OK;
}

/* Listens and leads. Whatever goes wrong is told to those that have joined. */
static int lead(joining *j) {
  dc_comm *c = j->c;
  struct sockaddr_un a;
  socklen_t len;
  address_of(j->k, &a, &len);
  j->pid[0] = getpid();
  DC_TRY(unix_socket(&j->listener));
  if (bind(j->listener, (struct sockaddr *)&a, len) || listen(j->listener, 512))
    return DC_FAIL(DC_E_PEER, "group %s: can't listen on its address: %s; addresses must be unique", c->label,
                   strerror(errno));
  int rc = gather_ranks(j);
  if (!rc) rc = make_stage(j);
  for (int r = 1; r < c->size && !rc; r++) rc = send_stage(j, r);
  if (!rc) rc = await_ready(j);
  msg m = msg_of(MSG_GO);
  m.status = rc;
  if (rc) snprintf(m.text, sizeof m.text, "%s", dc_last_error());
  for (int r = 1; r < c->size; r++) {
    if (c->sock[r] < 0) continue;
    int sent = msg_send(c->sock[r], &m, NULL, 0, j->deadline_ns + 1000000000);
    if (sent && !rc) return lost_while_joining(j, r);
  }
  return rc ? DC_FAIL(rc, "%s", m.text) : DC_OK;
}

static int connect_to_leader(joining *j) {
  dc_comm *c = j->c;
  struct sockaddr_un a;
  socklen_t len;
  address_of(j->k, &a, &len);
  for (;;) {
    int s = -1;
    DC_TRY(unix_socket(&s));
    if (connect(s, (struct sockaddr *)&a, len) == 0) {
      c->sock[0] = s;
      return same_user(s)
                 ? DC_OK
                 : DC_FAIL(DC_E_PEER, "group %s: who listens on its address belongs to another user", c->label);
    }
    int e = errno;
    close(s);
    /* rank 0 is not there yet, or its queue is full */
    if (e != ECONNREFUSED && e != EAGAIN && e != EINTR)
      return DC_FAIL(DC_E_SYSTEM, "group %s: connecting to rank 0: %s", c->label, strerror(e));
    if (ms_left(j->deadline_ns) == 0)
      return DC_FAIL(DC_E_TIMEOUT,
                     "group %s: rank %d did not listen within %lld ms (same node? same network namespace?)", c->label,
                     c->global_rank[0], (long long)j->k->timeout_ms);
    nap();
  }
}

static int take_pidfds(joining *j, const char *leader) {
  dc_comm *c = j->c;
  for (int have = 0; have < c->size;) {
    msg m;
    fds f;
    DC_TRY(msg_await(c->sock[0], c->label, leader, &m, &f, j->deadline_ns));
    if (m.kind != MSG_PIDFDS || m.first != have || have + f.n > c->size || f.n == 0) {
      fds_close(&f);
      return DC_FAIL(DC_E_PEER, "group %s: %s sent something unexpected while joining", c->label, leader);
    }
    for (int i = 0; i < f.n; i++) {
      if (have == c->rank) close(f.fd[i]); /* we have our own */
      else c->pidfd[have] = f.fd[i];
      have++;
    }
  }
  return DC_OK;
}

static int take_stage(joining *j, const char *leader) {
  dc_comm *c = j->c;
  msg m;
  fds f;
  DC_TRY(take_pidfds(j, leader));
  DC_TRY(msg_await(c->sock[0], c->label, leader, &m, &f, j->deadline_ns));
  if (m.kind != MSG_SEGMENT || f.n != 1) {
    fds_close(&f);
    return DC_FAIL(DC_E_PEER, "group %s: %s sent something unexpected while joining", c->label, leader);
  }
  j->memfd = f.fd[0];
  if (m.bytes < stage_end(c) + dc__p2p_bytes(c->size))
    return DC_FAIL(DC_E_PEER, "group %s: %s sent a segment that is too small", c->label, leader);
  DC_TRY(memfd_check(j->memfd, m.bytes));
  return map_stage(c, j->memfd, m.bytes, false);
}

static int follow(joining *j) {
  dc_comm *c = j->c;
  char leader[64];
  snprintf(leader, sizeof leader, "rank %d", c->global_rank[0]);
  DC_TRY(connect_to_leader(j));
  msg m = msg_of(MSG_HELLO);
  m.rank = c->rank;
  m.size = c->size;
  m.slots = c->slots;
  m.slot_bytes = c->slot_bytes;
  m.pid = getpid();
  DC_TRY(msg_send(c->sock[0], &m, &c->pidfd[c->rank], 1, j->deadline_ns));
  j->deadline_ns +=
      1000000000; /* rank 0 may wait until its own deadline: leave time for its verdict, which says more than ours */
  int rc = take_stage(j, leader);
  m = msg_of(MSG_READY);
  m.status = rc;
  if (rc) snprintf(m.text, sizeof m.text, "%s", dc_last_error());
  int sent = msg_send(c->sock[0], &m, NULL, 0, j->deadline_ns);
  if (rc) return DC_FAIL(rc, "%s", m.text);
  DC_TRY(sent);
  fds f;
  DC_TRY(msg_await(c->sock[0], c->label, leader, &m, &f, j->deadline_ns));
  fds_close(&f);
  return DC_OK;
}

/* ---- open, close ------------------------------------------------------------------------------------------------- */
static int env_us(const char *name, int64_t *ns) {
  const char *e = getenv(name);
  if (!e || !*e) return DC_OK;
  char *end;
  long us = strtol(e, &end, 10);
  if (*end || us < 0 || us > 10000000)
    return DC_FAIL(DC_E_ENV, "%s=%s: expected microseconds from 0 to 10000000", name, e);
  *ns = us * 1000;
  return DC_OK;
}

static int wait_defaults(dc_comm *c) {
  cpu_set_t set;
  int cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  /* ranks are often bound to cores of their own each: then the machine's count says whether they fit */
  if (cpus < (int)sysconf(_SC_NPROCESSORS_ONLN)) cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
  c->spin_ns = c->size <= cpus ? 20000 : 0; /* with fewer cores a spinning rank only keeps the others from arriving */
  c->yield_ns = 200000;
  DC_TRY(env_us("DEEPC_SPIN_US", &c->spin_ns));
  return env_us("DEEPC_YIELD_US", &c->yield_ns);
}

static int config_check(const dc_comm_config *k) {
  if (!k || !k->address || !k->label) return DC_FAIL(DC_E_INVALID, "config, address or label is NULL");
  if (k->size < 1 || k->size > DC_COMM_MAX_RANKS || k->rank < 0 || k->rank >= k->size)
    return DC_FAIL(DC_E_INVALID, "rank %d of %d: expected 0 <= rank < size <= %d", k->rank, k->size, DC_COMM_MAX_RANKS);
  size_t n = strlen(k->address);
  if (n < 1 || n > ADDRESS_MAX)
    return DC_FAIL(DC_E_INVALID, "the address has %zu bytes: expected 1 to %d", n, ADDRESS_MAX);
  if (k->timeout_ms <= 0 || k->timeout_ms > INT64_MAX / 2000000)
    return DC_FAIL(DC_E_INVALID, "timeout_ms %lld", (long long)k->timeout_ms);
  if (k->slot_bytes <= 0 || k->slot_bytes % 4096 || k->slot_bytes > ((int64_t)1 << 40))
    return DC_FAIL(DC_E_INVALID, "slot_bytes %lld: expected a positive multiple of 4096", (long long)k->slot_bytes);
  if (k->slots < 2 || k->slots > 1024) return DC_FAIL(DC_E_INVALID, "slots %d: expected 2 to 1024", k->slots);
  if (k->flags) return DC_FAIL(DC_E_INVALID, "flags %d: none is defined", k->flags);
  return DC_OK;
}

/* ---- segments of a communicator, for registered buffers ---------------------------------------------------------- */
/* One lock for all: segments are freed by whoever drops the last reference, in any thread, before or after their
 * communicator. */
static pthread_mutex_t segment_lock = PTHREAD_MUTEX_INITIALIZER;

void dc__segments_lock(void) { pthread_mutex_lock(&segment_lock); }
void dc__segments_unlock(void) { pthread_mutex_unlock(&segment_lock); }

static void segment_register(dc_comm *c, dc_segment *s) {
  dc__segments_lock();
  s->id = c->segments++;
  if (s->id < DC__SEGMENTS) {
    s->owner = c;
    c->segment[s->id] = s;
  }
  dc__segments_unlock();
}

static void segment_unregister(dc_segment *s) {
  dc__segments_lock();
  if (s->owner) s->owner->segment[s->id] = NULL;
  s->owner = NULL;
  dc__segments_unlock();
}

static void segments_orphan(dc_comm *c) {
  dc__segments_lock();
  for (int i = 0; i < DC__SEGMENTS; i++)
    if (c->segment[i]) c->segment[i]->owner = NULL;
  dc__segments_unlock();
}

static void release(dc_comm *c) {
  dc__p2p_close(c); /* before its area goes */
  segments_orphan(c);
  dc__counts_detach(&c->counts);
  bool ours = c->fork_mark == dc__fork_mark();
  if (ours) map_drop(&c->map); /* in a forked child nothing of it is mapped */
  for (int r = 0; r < DC_COMM_MAX_RANKS; r++) {
    if (c->sock[r] >= 0) close(c->sock[r]);
    if (c->pidfd[r] >= 0) close(c->pidfd[r]);
  }
  free(c->shown);
  free(c->slot_used);
  free(c);
}

int dc_comm_open(const dc_comm_config *k, dc_comm **out) {
  DC_TRY(config_check(k));
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  DC_TRY(fork_mark_set());
  dc_comm *c = calloc(1, sizeof *c);
  if (!c) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *c);
  c->rank = k->rank;
  c->size = k->size;
  c->slots = k->slots;
  c->slot_bytes = k->slot_bytes;
  c->slot_stride = k->slot_bytes + SLOT_COLOR;
  c->timeout_ns = k->timeout_ms * 1000000;
  c->look_ns = dc__now_ns();
  c->fork_mark = dc__fork_mark();
  snprintf(c->label, sizeof c->label, "%s", k->label);
  for (int r = 0; r < DC_COMM_MAX_RANKS; r++) {
    c->sock[r] = c->pidfd[r] = -1;
    c->global_rank[r] = k->global_rank && r < k->size ? k->global_rank[r] : r;
  }
  joining j = {.c = c, .k = k, .listener = -1, .memfd = -1, .deadline_ns = dc__now_ns() + c->timeout_ns};
  c->cells = k->slots > DC__CELLS ? k->slots : DC__CELLS;
  dc__counts_attach(&c->counts);
  dc__use_membarrier(c, false); /* until all ranks have agreed */
  c->shown = calloc((size_t)c->cells, sizeof *c->shown);
  c->slot_used = calloc((size_t)k->slots, sizeof *c->slot_used);
  int rc = c->shown && c->slot_used ? wait_defaults(c) : DC_FAIL(DC_E_NOMEM, "%d slots", k->slots);
  if (!rc) rc = dc__force_algos(c);
  if (!rc) dc__choices_make(c);
  if (!rc) rc = pidfd_self(&c->pidfd[c->rank]);
  if (!rc) rc = c->rank == 0 ? lead(&j) : follow(&j);
  for (int i = 0; i < j.npending; i++) close(j.pending[i]);
  if (j.listener >= 0) close(j.listener);
  if (j.memfd >= 0) close(j.memfd); /* the mapping keeps it */
  if (!rc) rc = dc__p2p_open(c, (char *)c->map.base + stage_end(c));
  if (!rc && c->size > 1) rc = dc__probe_single_copy(c);
  c->base = c->begun;
  if (rc) {
    release(c);
    return rc;
  }
  c->id = dc__flight_id(k->address);
  c->flight_group = dc__flight_group_open(c);
  *out = c;
  return DC_OK;
}

int dc_comm_close(dc_comm *c) {
  if (!c) return DC_OK;
  if (c->fork_mark == dc__fork_mark()) {
    if (!dc__go_in(c)) return DC_FAIL(DC_E_STATE, "group %s is in use by another thread and can't be closed", c->label);
    dc__p2p_close(c); /* first: its waits here end because of this call, not because a peer saw us leave */
    /* release: peers that see it also see the last steps that we posted */
    atomic_store_explicit(&c->h->seat[c->rank].left, 1, memory_order_release);
    dc__wake_all(c);
    dc__flight_group_close(c->flight_group);
  }
  release(c);
  return DC_OK;
}

int dc_comm_rank(const dc_comm *c) { return c ? c->rank : DC_FAIL(DC_E_INVALID, "the communicator is NULL"); }

int dc_comm_size(const dc_comm *c) { return c ? c->size : DC_FAIL(DC_E_INVALID, "the communicator is NULL"); }

/* ---- segments ---------------------------------------------------------------------------------------------------- */
/* What ranks tell each other in a slot about their part of a segment's creation. */
typedef struct verdict {
  int32_t status;
  char text[1020];
} verdict;

/* Every rank gives its status; the first that is not DC_OK becomes everyone's. */
static int agree(dc_comm *c, const dc_call *call, int status) {
  int64_t step;
  void *slot;
  DC_TRY(dc__begin(c, &step, &slot));
  verdict *v = slot;
  v->status = status;
  snprintf(v->text, sizeof v->text, "%s", status ? dc_last_error() : "");
  DC_TRY(dc__post(c, call));
  DC_TRY(dc__wait(c, step));
  int rc = DC_OK;
  for (int r = 0; r < c->size && !rc; r++) {
    const verdict *p = (const verdict *)dc__slot(c, r, step);
    if (p->status) rc = DC_FAIL(p->status, "group %s: on rank %d: %.1000s", c->label, c->global_rank[r], p->text);
  }
  DC_TRY(dc__done(c, step));
  return rc;
}

static int segment_make(dc_comm *c, int64_t bytes, int *fd, dc__map *map) {
  DC_TRY(preflight(bytes));
  DC_TRY(memfd_make(bytes, fd));
  DC_TRY(map_make(*fd, bytes, true, map));
  msg m = msg_of(MSG_SEGMENT);
  m.bytes = bytes;
  for (int r = 1; r < c->size; r++) DC_TRY(msg_send(c->sock[r], &m, fd, 1, dc__now_ns() + c->timeout_ns));
  return DC_OK;
}

/* Its message was sent before rank 0 posted, so it is there. */
static int segment_take(dc_comm *c, int64_t bytes, int *fd, dc__map *map) {
  msg m;
  fds f;
  DC_TRY(msg_await(c->sock[0], c->label, "rank 0", &m, &f, dc__now_ns() + c->timeout_ns));
  if (m.kind != MSG_SEGMENT || f.n != 1) {
    fds_close(&f);
    return DC_FAIL(DC_E_PEER, "group %s: rank 0 sent something unexpected", c->label);
  }
  *fd = f.fd[0];
  DC_TRY(memfd_check(*fd, bytes));
  return map_make(*fd, bytes, false, map);
}

/* Three agreements: all ask for the same; rank 0 has made it (a refusal leaves the group sound); all have mapped it. */
static int segment_build(dc_comm *c, int64_t bytes, dc__map *map) {
  const dc_call call = {.op = DC_CALL_SEGMENT, .count = bytes};
  int fd = -1;
  c->seq++;
  c->call = call;
  const uint64_t flight = dc__flight_begin(c, &call, c->where);
  int rc = agree(c, &call, DC_OK);
  if (!rc) {
    rc = agree(c, &call, c->rank == 0 ? segment_make(c, bytes, &fd, map) : DC_OK);
    if (!rc) rc = agree(c, &call, c->rank == 0 ? DC_OK : segment_take(c, bytes, &fd, map));
  }
  if (fd >= 0) close(fd);
  if (rc) map_drop(map);
  /* after a refusal for memory all messages have been read; after anything else they may not */
  if (rc && rc != DC_E_NOMEM) rc = dc__break(c, rc, "%s", dc_last_error());
  dc__flight_end(flight, rc);
  return rc;
}

int dc_segment_create(dc_comm *c, int64_t bytes, dc_segment **out, void **base) {
  if (!out || !base) return DC_FAIL(DC_E_INVALID, "out or base is NULL");
  if (bytes <= 0 || bytes > ((int64_t)1 << 50))
    return DC_FAIL(DC_E_INVALID, "a segment of %lld bytes", (long long)bytes);
  DC_TRY(dc__enter(c));
  int rc = DC_OK;
  dc_segment *s = NULL;
  if (c->begun != c->done) {
    rc = DC_FAIL(DC_E_STATE, "group %s: %lld exchange steps are open", c->label, (long long)(c->begun - c->done));
    goto out;
  }
  s = calloc(1, sizeof *s);
  if (!s) {
    rc = DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *s);
    goto out;
  }
  s->fork_mark = c->fork_mark;
  rc = segment_build(c, round_up(bytes, (int64_t)DC_HUGE_PAGE), &s->map);
  if (!rc) segment_register(c, s);
out:
  dc__leave(c);
  if (rc) {
    free(s);
    return rc;
  }
  *base = s->map.base;
  *out = s;
  return DC_OK;
}

int dc_segment_free(dc_segment *s) {
  if (!s) return DC_OK;
  segment_unregister(s);
  map_drop(&s->map); /* a forked child inherited the mapping and drops its own */
  free(s);
  return DC_OK;
}

int dc_segment_info(const dc_segment *s, int64_t *bytes, int64_t *huge_bytes) {
  if (!s || !bytes || !huge_bytes) return DC_FAIL(DC_E_INVALID, "segment, bytes or huge_bytes is NULL");
  int64_t huge;
  DC_TRY(dc_mem_huge_bytes(s->map.base, (size_t)s->map.bytes, &huge));
  *bytes = s->map.bytes;
  *huge_bytes = huge;
  return DC_OK;
}
