/* rendezvous.c: how the ranks of a communicator find each other: sockets, hellos, descriptors.
 *
 * Rank 0 listens on an abstract Unix socket while ranks join. Each rank sends a hello with a pidfd of itself; rank 0
 * checks uid and hello, makes the arena, and sends every rank all pidfds and the memfd. Every rank maps it, faults it
 * in and acknowledges; rank 0 then tells all to go, or what went wrong. The sockets stay open to pass the memfds of
 * later segments. Nothing has a name that outlives the joining.
 *
 * Assumes Linux >= 5.3 (pidfd_open). */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "comm_impl.h"
#include "open.h"
#include "p2p.h"

/* ---- messages ---------------------------------------------------------------------------------------------------- */
void dc__fds_close(dc__fds *f) {
  for (int i = 0; i < f->n; i++) close(f->fd[i]);
  f->n = 0;
}

dc__msg dc__msg_of(int kind) { return (dc__msg){.magic = DC__COMM_MAGIC, .version = DC__COMM_VERSION, .kind = kind}; }

static int rdv_ms_left(int64_t deadline_ns) {
  int64_t ms = (deadline_ns - dc__now_ns() + 999999) / 1000000;
  return ms < 0 ? 0 : ms > 1000000 ? 1000000 : (int)ms;
}

static void rdv_nap(void) {
  struct timespec ms = {0, 1000000};
  nanosleep(&ms, NULL);
}

int dc__msg_send(int sock, const dc__msg *m, const int *fd, int nfd, int64_t deadline_ns) {
  struct iovec iov = {(void *)m, sizeof *m};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int) * DC__FDS_PER_MSG)];
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
    rdv_nap();
  }
}

enum { RECV_OK, RECV_AGAIN, RECV_CLOSED, RECV_BAD, RECV_NO_FDS };
/* One message, without blocking. Descriptors are owned by the caller. */
static int rdv_recv(int sock, dc__msg *m, dc__fds *f) {
  struct iovec iov = {m, sizeof *m};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int) * DC__FDS_PER_MSG)];
  } ctl;
  struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &ctl, .msg_controllen = sizeof ctl};
  f->n = 0;
  ssize_t n = recvmsg(sock, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) return errno == EAGAIN || errno == EINTR ? RECV_AGAIN : RECV_CLOSED;
  for (struct cmsghdr *cm = CMSG_FIRSTHDR(&h); cm; cm = CMSG_NXTHDR(&h, cm)) {
    if (cm->cmsg_level != SOL_SOCKET || cm->cmsg_type != SCM_RIGHTS) continue;
    int k = (int)((cm->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (int i = 0; i < k && f->n < DC__FDS_PER_MSG; i++)
      memcpy(&f->fd[f->n++], CMSG_DATA(cm) + sizeof(int) * (size_t)i, sizeof(int));
  }
  if (n == 0) return RECV_CLOSED;
  if (h.msg_flags & MSG_CTRUNC) return RECV_NO_FDS;
  if (n != (ssize_t)sizeof *m || (h.msg_flags & MSG_TRUNC) || m->magic != DC__COMM_MAGIC) return RECV_BAD;
  m->text[sizeof m->text - 1] = 0;
  return RECV_OK;
}

static int rdv_no_fds(void) {
  return DC_FAIL(DC_E_SYSTEM, "descriptors did not arrive: too many are open (raise ulimit -n)");
}

/* Waits for one message from `sock`; `who` names the sender. A message with an error becomes this rank's error. */
int dc__msg_await(int sock, const char *label, const char *who, dc__msg *m, dc__fds *f, int64_t deadline_ns) {
  for (;;) {
    struct pollfd p = {.fd = sock, .events = POLLIN};
    int left = rdv_ms_left(deadline_ns);
    if (left == 0) return DC_FAIL(DC_E_TIMEOUT, "group %s: no answer from %s while rdv_joining", label, who);
    if (poll(&p, 1, left) <= 0) continue;
    int got = rdv_recv(sock, m, f);
    if (got == RECV_AGAIN) continue;
    if (got == RECV_OK && m->version == DC__COMM_VERSION) {
      if (m->status == DC_OK) return DC_OK;
      dc__fds_close(f);
      return DC_FAIL(m->status, "%s", m->text);
    }
    dc__fds_close(f);
    if (got == RECV_CLOSED)
      return DC_FAIL(DC_E_PEER_DIED, "group %s: %s closed the connection while rdv_joining (did it die?)", label, who);
    if (got == RECV_NO_FDS) return rdv_no_fds();
    return DC_FAIL(DC_E_PEER, "group %s: %s is not a deepc rank of this version", label, who);
  }
}

/* ---- joining ----------------------------------------------------------------------------------------------------- */
static int rdv_address(const dc_comm_config *k, struct sockaddr_un *a, socklen_t *len) {
  size_t n = strlen(k->address);
  *a = (struct sockaddr_un){.sun_family = AF_UNIX};
  memcpy(a->sun_path + 1, k->address, n); /* a leading zero byte: abstract */
  *len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
  return DC_OK;
}

static int rdv_socket(int *out) {
  int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (s < 0) return DC_FAIL(DC_E_SYSTEM, "socket: %s", strerror(errno));
  *out = s;
  return DC_OK;
}

static bool rdv_same_user(int sock) {
  struct ucred u;
  socklen_t n = sizeof u;
  return getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &u, &n) == 0 && u.uid == geteuid();
}

static int rdv_pidfd_self(int *out) {
  int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
  if (fd < 0)
    return DC_FAIL(DC_E_UNSUPPORTED, "pidfd_open: %s; deepc's collectives need Linux 5.3 or later", strerror(errno));
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  *out = fd;
  return DC_OK;
}

typedef struct rdv_joining {
  dc_comm *c;
  const dc_comm_config *k;
  int64_t deadline_ns;
  int listener;
  int memfd;
  int32_t pid[DC_COMM_MAX_RANKS];
  int pending[DC_COMM_MAX_RANKS + 64], npending; /* connections that have not said hello */
} rdv_joining;

static void rdv_add_missing(const rdv_joining *j, char *s, size_t room) {
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

static int rdv_hello_check(rdv_joining *j, const dc__msg *m, int nfd) {
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

/* Reads one pending connection. A stranger is dropped without a word; a rank with other settings ends the rdv_joining
 * for all. */
static int rdv_hear(rdv_joining *j, int i) {
  int sock = j->pending[i];
  dc__msg m;
  dc__fds f;
  int got = rdv_recv(sock, &m, &f);
  if (got == RECV_AGAIN) return DC_OK;
  j->pending[i] = j->pending[--j->npending];
  if (got != RECV_OK || m.kind != DC__MSG_HELLO) {
    dc__fds_close(&f);
    close(sock);
    return got == RECV_NO_FDS ? rdv_no_fds() : DC_OK;
  }
  int rc = rdv_hello_check(j, &m, f.n);
  if (rc) {
    dc__msg no = dc__msg_of(DC__MSG_GO);
    no.status = rc;
    snprintf(no.text, sizeof no.text, "%s", dc_last_error());
    dc__msg_send(sock, &no, NULL, 0, j->deadline_ns);
    dc__fds_close(&f);
    close(sock);
    return DC_FAIL(rc, "%s", no.text); /* restored: sending may have failed */
  }
  j->c->sock[m.rank] = sock;
  j->c->pidfd[m.rank] = f.fd[0];
  j->pid[m.rank] = m.pid;
  return DC_OK;
}

static void rdv_greet(rdv_joining *j) {
  int s;
  while ((s = accept4(j->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
    if (!rdv_same_user(s) || j->npending == (int)(sizeof j->pending / sizeof *j->pending)) close(s);
    else j->pending[j->npending++] = s;
  }
}

static int rdv_lost(rdv_joining *j, int rank) {
  return DC_FAIL(DC_E_PEER_DIED, "group %s: rank %d (pid %d) died while the group was rdv_joining", j->c->label,
                 j->c->global_rank[rank], j->pid[rank]);
}

static int rdv_gather(rdv_joining *j) {
  dc_comm *c = j->c;
  for (int joined = 1;;) {
    joined = 1;
    for (int r = 1; r < c->size; r++) joined += c->sock[r] >= 0;
    if (joined == c->size) return DC_OK;
    int left = rdv_ms_left(j->deadline_ns);
    if (left == 0) {
      char who[256] = "";
      rdv_add_missing(j, who, sizeof who);
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
      if (p[i].revents) return rdv_lost(j, who[i]);
    for (int i = n - 1; i >= first_pending; i--) /* backwards: rdv_hear() fills the gap with the last one */
      if (p[i].revents) DC_TRY(rdv_hear(j, i - first_pending));
    if (p[0].revents) rdv_greet(j);
  }
}

static int rdv_make_stage(rdv_joining *j) {
  dc_comm *c = j->c;
  int64_t bytes = dc__stage_bytes(c);
  DC_TRY(dc__arena_fits(bytes));
  DC_TRY(dc__arena_memfd(bytes, &j->memfd));
  DC_TRY(dc__stage_map(c, j->memfd, bytes, true));
  c->h->magic = DC__COMM_MAGIC;
  c->h->version = DC__COMM_VERSION;
  c->h->size = c->size;
  c->h->slots = c->slots;
  c->h->slot_bytes = c->slot_bytes;
  c->h->total_bytes = bytes;
  for (int r = 0; r < c->size; r++) c->h->seat[r].pid = j->pid[r];
  return DC_OK;
}

static int rdv_send_stage(rdv_joining *j, int rank) {
  dc_comm *c = j->c;
  dc__msg m = dc__msg_of(DC__MSG_PIDFDS);
  for (m.first = 0; m.first < c->size; m.first += DC__FDS_PER_MSG) {
    int n = c->size - m.first < DC__FDS_PER_MSG ? c->size - m.first : DC__FDS_PER_MSG;
    DC_TRY(dc__msg_send(c->sock[rank], &m, &c->pidfd[m.first], n, j->deadline_ns));
  }
  m = dc__msg_of(DC__MSG_SEGMENT);
  m.bytes = c->map.bytes;
  return dc__msg_send(c->sock[rank], &m, &j->memfd, 1, j->deadline_ns);
}

static int rdv_await_ready(rdv_joining *j) {
  for (int r = 1; r < j->c->size; r++) {
    char who[64];
    dc__msg m;
    dc__fds f;
    snprintf(who, sizeof who, "rank %d (pid %d)", j->c->global_rank[r], j->pid[r]);
    DC_TRY(dc__msg_await(j->c->sock[r], j->c->label, who, &m, &f, j->deadline_ns));
    dc__fds_close(&f);
  }
  return DC_OK;
}

/* Listens and leads. Whatever goes wrong is told to those that have joined. */
static int rdv_lead(rdv_joining *j) {
  dc_comm *c = j->c;
  struct sockaddr_un a;
  socklen_t len;
  rdv_address(j->k, &a, &len);
  j->pid[0] = getpid();
  DC_TRY(rdv_socket(&j->listener));
  if (bind(j->listener, (struct sockaddr *)&a, len) || listen(j->listener, 512))
    return DC_FAIL(DC_E_PEER, "group %s: can't listen on its address: %s; addresses must be unique", c->label,
                   strerror(errno));
  int rc = rdv_gather(j);
  if (!rc) rc = rdv_make_stage(j);
  for (int r = 1; r < c->size && !rc; r++) rc = rdv_send_stage(j, r);
  if (!rc) rc = rdv_await_ready(j);
  dc__msg m = dc__msg_of(DC__MSG_GO);
  m.status = rc;
  if (rc) snprintf(m.text, sizeof m.text, "%s", dc_last_error());
  for (int r = 1; r < c->size; r++) {
    if (c->sock[r] < 0) continue;
    int sent = dc__msg_send(c->sock[r], &m, NULL, 0, j->deadline_ns + 1000000000);
    if (sent && !rc) return rdv_lost(j, r);
  }
  return rc ? DC_FAIL(rc, "%s", m.text) : DC_OK;
}

static int rdv_connect(rdv_joining *j) {
  dc_comm *c = j->c;
  struct sockaddr_un a;
  socklen_t len;
  rdv_address(j->k, &a, &len);
  for (;;) {
    int s = -1;
    DC_TRY(rdv_socket(&s));
    if (connect(s, (struct sockaddr *)&a, len) == 0) {
      c->sock[0] = s;
      return rdv_same_user(s)
                 ? DC_OK
                 : DC_FAIL(DC_E_PEER, "group %s: who listens on its address belongs to another user", c->label);
    }
    int e = errno;
    close(s);
    /* rank 0 is not there yet, or its queue is full */
    if (e != ECONNREFUSED && e != EAGAIN && e != EINTR)
      return DC_FAIL(DC_E_SYSTEM, "group %s: connecting to rank 0: %s", c->label, strerror(e));
    if (rdv_ms_left(j->deadline_ns) == 0)
      return DC_FAIL(DC_E_TIMEOUT,
                     "group %s: rank %d did not listen within %lld ms (same node? same network namespace?)", c->label,
                     c->global_rank[0], (long long)j->k->timeout_ms);
    rdv_nap();
  }
}

static int rdv_take_pidfds(rdv_joining *j, const char *leader) {
  dc_comm *c = j->c;
  for (int have = 0; have < c->size;) {
    dc__msg m;
    dc__fds f;
    DC_TRY(dc__msg_await(c->sock[0], c->label, leader, &m, &f, j->deadline_ns));
    if (m.kind != DC__MSG_PIDFDS || m.first != have || have + f.n > c->size || f.n == 0) {
      dc__fds_close(&f);
      return DC_FAIL(DC_E_PEER, "group %s: %s sent something unexpected while rdv_joining", c->label, leader);
    }
    for (int i = 0; i < f.n; i++) {
      if (have == c->rank) close(f.fd[i]); /* we have our own */
      else c->pidfd[have] = f.fd[i];
      have++;
    }
  }
  return DC_OK;
}

static int rdv_take_stage(rdv_joining *j, const char *leader) {
  dc_comm *c = j->c;
  dc__msg m;
  dc__fds f;
  DC_TRY(rdv_take_pidfds(j, leader));
  DC_TRY(dc__msg_await(c->sock[0], c->label, leader, &m, &f, j->deadline_ns));
  if (m.kind != DC__MSG_SEGMENT || f.n != 1) {
    dc__fds_close(&f);
    return DC_FAIL(DC_E_PEER, "group %s: %s sent something unexpected while rdv_joining", c->label, leader);
  }
  j->memfd = f.fd[0];
  if (m.bytes < dc__stage_end(c) + dc__p2p_bytes(c->size))
    return DC_FAIL(DC_E_PEER, "group %s: %s sent a segment that is too small", c->label, leader);
  DC_TRY(dc__arena_memfd_check(j->memfd, m.bytes));
  return dc__stage_map(c, j->memfd, m.bytes, false);
}

static int rdv_follow(rdv_joining *j) {
  dc_comm *c = j->c;
  char leader[64];
  snprintf(leader, sizeof leader, "rank %d", c->global_rank[0]);
  DC_TRY(rdv_connect(j));
  dc__msg m = dc__msg_of(DC__MSG_HELLO);
  m.rank = c->rank;
  m.size = c->size;
  m.slots = c->slots;
  m.slot_bytes = c->slot_bytes;
  m.pid = getpid();
  DC_TRY(dc__msg_send(c->sock[0], &m, &c->pidfd[c->rank], 1, j->deadline_ns));
  j->deadline_ns +=
      1000000000; /* rank 0 may wait until its own deadline: leave time for its verdict, which says more than ours */
  int rc = rdv_take_stage(j, leader);
  m = dc__msg_of(DC__MSG_READY);
  m.status = rc;
  if (rc) snprintf(m.text, sizeof m.text, "%s", dc_last_error());
  int sent = dc__msg_send(c->sock[0], &m, NULL, 0, j->deadline_ns);
  if (rc) return DC_FAIL(rc, "%s", m.text);
  DC_TRY(sent);
  dc__fds f;
  DC_TRY(dc__msg_await(c->sock[0], c->label, leader, &m, &f, j->deadline_ns));
  dc__fds_close(&f);
  return DC_OK;
}

int dc__join(dc_comm *c, const dc_comm_config *k) {
  rdv_joining j = {.c = c, .k = k, .listener = -1, .memfd = -1, .deadline_ns = dc__now_ns() + c->timeout_ns};
  int rc = rdv_pidfd_self(&c->pidfd[c->rank]);
  if (!rc) rc = c->rank == 0 ? rdv_lead(&j) : rdv_follow(&j);
  for (int i = 0; i < j.npending; i++) close(j.pending[i]);
  if (j.listener >= 0) close(j.listener);
  if (j.memfd >= 0) close(j.memfd); /* the mapping keeps it */
  return rc;
}
