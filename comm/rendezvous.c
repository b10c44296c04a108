/* rendezvous.c: how the ranks of a communicator find each other: sockets, hellos, descriptors.
 *
 * Rank 0 listens on an abstract Unix socket while ranks join. Each rank sends a hello with the group's secret and a
 * pidfd of itself; rank 0 checks user, secret and hello, makes the arena, and sends every rank all pidfds and the
 * memfd. Every rank maps it and acknowledges; rank 0 then tells all to go, or what went wrong. Who does not know the
 * secret (any process of the machine can read the address in /proc/net/unix while ranks join) is dropped without a
 * word.
 *
 * All sockets are closed when everybody is in. The memfd of a later segment comes as a datagram to a mailbox that its
 * receiver opens for it; where that is, and the secret of it, stands in the receiver's slot of the arena. So nothing
 * has a name that outlives what it is for, and a communicator keeps no descriptor but its peers' pidfds (peers.c).
 *
 * Assumes Linux >= 5.3 (pidfd_open). */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "comm_impl.h"
#include "open.h"
#include "p2p.h"
#include "team.h"

/* ---- messages ---------------------------------------------------------------------------------------------------- */
enum { FDS_PER_MSG = 64 };
enum { MSG_HELLO = 1, MSG_PIDFDS, MSG_SEGMENT, MSG_READY, MSG_GO };
/* A hello's secret is the group's, that of a segment's message the mailbox's. */
typedef struct rdv_msg {
  uint64_t magic;
  int32_t version, kind;
  uint8_t secret[DC_COMM_SECRET]; /* up to here equal in all versions from 6 on */
  int32_t status;
  int32_t rank, size, slots, pid, first; /* hello; first: number of the first pidfd of a MSG_PIDFDS */
  int64_t slot_bytes, bytes;
  uint64_t process; /* hello: dc__process_number() */
  dc__spot spot;    /* hello */
  union {
    char text[1024];                /* why, if status != DC_OK */
    uint64_t processes[FDS_PER_MSG]; /* MSG_PIDFDS */
  };
} rdv_msg;
enum { RDV_PREFIX = offsetof(rdv_msg, status) };

typedef struct rdv_fds {
  int n, fd[FDS_PER_MSG];
} rdv_fds;

static void rdv_fds_close(rdv_fds *f) {
  for (int i = 0; i < f->n; i++) close(f->fd[i]);
  f->n = 0;
}

static rdv_msg rdv_msg_of(int kind) {
  return (rdv_msg){.magic = DC__COMM_MAGIC, .version = DC__COMM_VERSION, .kind = kind};
}

/* In a time that does not tell how many bytes are right. */
static bool rdv_same_secret(const uint8_t *a, const uint8_t *b) {
  volatile uint8_t differs = 0;
  for (int i = 0; i < DC_COMM_SECRET; i++) differs |= a[i] ^ b[i];
  return differs == 0;
}

static int rdv_ms_left(int64_t deadline_ns) {
  int64_t ms = (deadline_ns - dc__now_ns() + 999999) / 1000000;
  return ms < 0 ? 0 : ms > 1000000 ? 1000000 : (int)ms;
}

static void rdv_nap(void) {
  struct timespec ms = {0, 1000000};
  nanosleep(&ms, NULL);
}

/* `to`: of a datagram; NULL: who is connected. */
static int rdv_send(int sock, const struct sockaddr_un *to, socklen_t to_len, const rdv_msg *m, const int *fd, int nfd,
                    int64_t deadline_ns) {
  struct iovec iov = {(void *)m, sizeof *m};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int) * FDS_PER_MSG)];
  } ctl;
  struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1, .msg_name = (void *)to, .msg_namelen = to_len};
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
      return DC_FAIL(e == EPIPE || e == ECONNRESET || e == ECONNREFUSED ? DC_E_PEER_DIED : DC_E_SYSTEM,
                     "sending to a rank: %s", strerror(e));
    rdv_nap();
  }
}

static int rdv_tell(int sock, const rdv_msg *m, const int *fd, int nfd, int64_t deadline_ns) {
  return rdv_send(sock, NULL, 0, m, fd, nfd, deadline_ns);
}

enum { RECV_OK, RECV_AGAIN, RECV_CLOSED, RECV_BAD, RECV_NO_FDS };
/* One message, without blocking. Descriptors are owned by the caller. */
static int rdv_recv(int sock, rdv_msg *m, rdv_fds *f) {
  struct iovec iov = {m, sizeof *m};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int) * FDS_PER_MSG)];
  } ctl;
  struct msghdr h = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &ctl, .msg_controllen = sizeof ctl};
  f->n = 0;
  memset(m, 0, sizeof *m);
  ssize_t n = recvmsg(sock, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  /* told once, where the other end closed with something of ours unread: what it had sent is there */
  if (n < 0 && errno == ECONNRESET) n = recvmsg(sock, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) return errno == EAGAIN || errno == EINTR ? RECV_AGAIN : RECV_CLOSED;
  for (struct cmsghdr *cm = CMSG_FIRSTHDR(&h); cm; cm = CMSG_NXTHDR(&h, cm)) {
    if (cm->cmsg_level != SOL_SOCKET || cm->cmsg_type != SCM_RIGHTS) continue;
    int k = (int)((cm->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (int i = 0; i < k && f->n < FDS_PER_MSG; i++)
      memcpy(&f->fd[f->n++], CMSG_DATA(cm) + sizeof(int) * (size_t)i, sizeof(int));
  }
  if (n == 0) return RECV_CLOSED;
  if (n < (ssize_t)RDV_PREFIX || m->magic != DC__COMM_MAGIC) return RECV_BAD;
  /* another version's messages may have another size */
  if (m->version == DC__COMM_VERSION && (n != (ssize_t)sizeof *m || (h.msg_flags & MSG_TRUNC))) return RECV_BAD;
  if (m->version == DC__COMM_VERSION && m->kind != MSG_PIDFDS) m->text[sizeof m->text - 1] = 0;
  return h.msg_flags & MSG_CTRUNC ? RECV_NO_FDS : RECV_OK;
}

static int rdv_no_fds(void) {
  return DC_FAIL(DC_E_SYSTEM, "descriptors did not arrive: too many are open (raise ulimit -n)");
}

/* Waits for one message from `sock`; `who` names the sender. A message with an error becomes this rank's error. */
static int rdv_await(int sock, const char *label, const char *who, rdv_msg *m, rdv_fds *f, int64_t deadline_ns) {
  for (;;) {
    struct pollfd p = {.fd = sock, .events = POLLIN};
    int left = rdv_ms_left(deadline_ns);
    if (left == 0) return DC_FAIL(DC_E_TIMEOUT, "group %s: no answer from %s while joining", label, who);
    if (poll(&p, 1, left) <= 0) continue;
    int got = rdv_recv(sock, m, f);
    if (got == RECV_AGAIN) continue;
    if (got == RECV_OK && m->version == DC__COMM_VERSION) {
      if (m->status == DC_OK) return DC_OK;
      rdv_fds_close(f);
      return DC_FAIL(m->status, "%s", m->text);
    }
    rdv_fds_close(f);
    if (got == RECV_CLOSED)
      return DC_FAIL(DC_E_PEER_DIED, "group %s: %s closed the connection while joining (did it die?)", label, who);
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
    return DC_FAIL(errno == EMFILE || errno == ENFILE ? DC_E_SYSTEM : DC_E_UNSUPPORTED,
                   "pidfd_open: %s; deepc's collectives need Linux 5.3 or later", strerror(errno));
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return dc__peer_take(dc__process_number(), fd, out);
}

typedef struct rdv_joining {
  dc_comm *c;
  const dc_comm_config *k;
  const uint8_t *secret;
  int64_t deadline_ns;
  int listener;
  int memfd;
  int sock[DC_COMM_MAX_RANKS]; /* rank 0: to every rank; others: sock[0] */
  int32_t pid[DC_COMM_MAX_RANKS];
  uint64_t process[DC_COMM_MAX_RANKS];
  dc__spot spot[DC_COMM_MAX_RANKS];
  int pending[DC_COMM_MAX_RANKS + 64], npending; /* connections that have not said hello */
  int absent[DC_COMM_MAX_RANKS]; /* pidfds of ranks that are waited for, once they are looked at */
  int64_t look_ns; /* from when on: sooner costs descriptors that nobody needs */
  /* the first rank that could not open, and why: all are told when all are there */
  int status;
  char why[1024];
} rdv_joining;

static void rdv_add_missing(const rdv_joining *j, char *s, size_t room) {
  size_t n = 0;
  for (int r = 1, shown = 0; r < j->c->size && n < room; r++) {
    if (j->sock[r] >= 0) continue;
    if (shown++ == 16) {
      snprintf(s + n, room - n, ", ...");
      return;
    }
    int w = snprintf(s + n, room - n, "%s%d", shown > 1 ? ", " : "", j->c->global_rank[r]);
    n += w > 0 ? (size_t)w : 0;
  }
}

static int rdv_hello_check(rdv_joining *j, const rdv_msg *m, int nfd) {
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
  if (j->sock[m->rank] >= 0)
    return DC_FAIL(DC_E_SHAPE, "group %s: rank %d joined twice (pids %d and %d)", c->label, m->rank, j->pid[m->rank],
                   m->pid);
  if (nfd != 1) return DC_FAIL(DC_E_PEER, "group %s: the hello of rank %d lacks its pidfd", c->label, m->rank);
  return DC_OK;
}

static void rdv_refuse(const rdv_joining *j, int sock, int status) {
  rdv_msg no = rdv_msg_of(MSG_GO);
  no.status = status;
  snprintf(no.text, sizeof no.text, "%s", dc_last_error());
  rdv_tell(sock, &no, NULL, 0, j->deadline_ns);
  DC_FAIL(status, "%s", no.text); /* restored: sending may have failed */
}

static void rdv_look_away(rdv_joining *j, int rank) {
  if (j->absent[rank] >= 0) close(j->absent[rank]);
  j->absent[rank] = -1;
}

static int rdv_welcome(rdv_joining *j, int sock, const rdv_msg *m, int pidfd) {
  rdv_look_away(j, m->rank);
  j->sock[m->rank] = sock;
  j->pid[m->rank] = m->pid;
  j->process[m->rank] = m->process;
  j->spot[m->rank] = m->spot;
  if (m->status && !j->status) {
    j->status = m->status;
    snprintf(j->why, sizeof j->why, "%s", m->text);
  }
  return dc__peer_take(m->process, pidfd, &j->c->pidfd[m->rank]);
}

/* Whether what was received is a rank's hello, with or without its descriptors. */
static bool rdv_is_hello(const rdv_joining *j, int got, const rdv_msg *m) {
  return (got == RECV_OK || got == RECV_NO_FDS) && m->kind == MSG_HELLO && rdv_same_secret(m->secret, j->secret);
}

/* Reads one pending connection. A stranger is dropped without a word; a rank with other settings ends the joining for
 * all. */
static int rdv_hear(rdv_joining *j, int i) {
  int sock = j->pending[i];
  rdv_msg m;
  rdv_fds f;
  int got = rdv_recv(sock, &m, &f);
  if (got == RECV_AGAIN) return DC_OK;
  j->pending[i] = j->pending[--j->npending];
  const bool ours = rdv_is_hello(j, got, &m);
  if (!ours || got == RECV_NO_FDS) {
    rdv_fds_close(&f);
    close(sock);
    return ours ? rdv_no_fds() : DC_OK;
  }
  int rc = rdv_hello_check(j, &m, f.n);
  if (!rc) return rdv_welcome(j, sock, &m, f.fd[0]);
  rdv_refuse(j, sock, rc);
  rdv_fds_close(&f);
  close(sock);
  return rc;
}

/* Without a descriptor to accept with, waiting would only be spinning: the connection stays in the queue. */
static int rdv_greet(rdv_joining *j) {
  int s;
  while ((s = accept4(j->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
    if (!rdv_same_user(s) || j->npending == (int)(sizeof j->pending / sizeof *j->pending)) close(s);
    else j->pending[j->npending++] = s;
  }
  if (errno == EMFILE || errno == ENFILE)
    return DC_FAIL(DC_E_SYSTEM,
                   "group %s: accepting a rank: %s; rank 0 needs two descriptors for each of %d ranks while they join "
                   "(raise ulimit -n)",
                   j->c->label, strerror(errno), j->c->size);
  return DC_OK;
}

static int rdv_lost(const rdv_joining *j, int rank) {
  const bool came = j->sock[rank] >= 0;
  return DC_FAIL(DC_E_PEER_DIED, "group %s: rank %d (pid %d) died %s", j->c->label, j->c->global_rank[rank],
                 came ? j->pid[rank] : j->k->pid[rank],
                 came ? "while the group was joining" : "before it joined the group");
}

/* Looks at a rank that has not come, if the configuration tells its process. A number may be another process' by now:
 * then we wait as for one that is not known. */
static int rdv_look(rdv_joining *j, int rank) {
  const int pid = j->k->pid ? j->k->pid[rank] : 0;
  if (pid <= 0 || j->absent[rank] >= 0) return DC_OK;
  j->absent[rank] = (int)syscall(SYS_pidfd_open, pid, 0);
  return j->absent[rank] < 0 && errno == ESRCH ? rdv_lost(j, rank) : DC_OK;
}

/* Whether a rank has ended that is neither here nor with rank 0, as far as the configuration tells processes: without
 * it there will be no group. */
static int rdv_look_at(rdv_joining *j, int rank) {
  if (rank == j->c->rank) return DC_OK;
  DC_TRY(rdv_look(j, rank));
  struct pollfd p = {.fd = j->absent[rank], .events = POLLIN};
  const bool gone = poll(&p, 1, 0) > 0;
  rdv_look_away(j, rank); /* a descriptor for each rank is what rank 0 needs, not everyone */
  return gone ? rdv_lost(j, rank) : DC_OK;
}

static int rdv_gather(rdv_joining *j) {
  dc_comm *c = j->c;
  for (int joined = 1;;) {
    joined = 1;
    for (int r = 1; r < c->size; r++) joined += j->sock[r] >= 0;
    if (joined == c->size) return DC_OK;
    int left = rdv_ms_left(j->deadline_ns);
    if (left == 0) {
      char who[256] = "";
      rdv_add_missing(j, who, sizeof who);
      return DC_FAIL(DC_E_TIMEOUT, "group %s: %d of %d ranks joined in %lld ms; missing: rank %s", c->label, joined,
                     c->size, (long long)j->k->timeout_ms, who);
    }
    const int until_look = rdv_ms_left(j->look_ns);
    struct pollfd p[2 * DC_COMM_MAX_RANKS + 65];
    int who[2 * DC_COMM_MAX_RANKS + 65], n = 0;
    p[n] = (struct pollfd){.fd = j->listener, .events = POLLIN};
    who[n++] = 0;
    for (int r = 1; r < c->size; r++) {
      if (j->sock[r] < 0 && until_look == 0) DC_TRY(rdv_look(j, r));
      /* either has nothing to say now: readable means gone; poll() passes over one below 0 */
      p[n] = (struct pollfd){.fd = j->sock[r] >= 0 ? j->sock[r] : j->absent[r], .events = POLLIN};
      who[n++] = r;
    }
    int first_pending = n;
    for (int i = 0; i < j->npending; i++) p[n++] = (struct pollfd){.fd = j->pending[i], .events = POLLIN};
    if (poll(p, (nfds_t)n, until_look && until_look < left ? until_look : left) <= 0) continue;
    for (int i = 1; i < first_pending; i++)
      if (p[i].revents) return rdv_lost(j, who[i]);
    for (int i = n - 1; i >= first_pending; i--) /* backwards: rdv_hear() fills the gap with the last one */
      if (p[i].revents) DC_TRY(rdv_hear(j, i - first_pending));
    if (p[0].revents) DC_TRY(rdv_greet(j));
  }
}

static int rdv_make_stage(rdv_joining *j) {
  dc_comm *c = j->c;
  int64_t bytes = dc__stage_bytes(c);
  DC_TRY(dc__arena_fits(bytes));
  DC_TRY(dc__arena_memfd(bytes, &j->memfd));
  DC_TRY(dc__stage_map(c, j->memfd, bytes));
  dc__stage_place(c, j->spot);
  DC_TRY(dc__stage_bring(c, j->memfd));
  c->h->magic = DC__COMM_MAGIC;
  c->h->version = DC__COMM_VERSION;
  c->h->size = c->size;
  c->h->slots = c->slots;
  c->h->slot_bytes = c->slot_bytes;
  c->h->total_bytes = bytes;
  int32_t team[DC_COMM_MAX_RANKS];
  c->h->teams = dc__team_plan(c->size, j->spot, c->team_wanted, team);
  for (int r = 0; r < c->size; r++) {
    c->h->seat[r].pid = j->pid[r];
    c->h->seat[r].team = team[r];
    c->h->seat[r].node = j->spot[r].node;
  }
  return DC_OK;
}

static int rdv_send_stage(rdv_joining *j, int rank) {
  dc_comm *c = j->c;
  rdv_msg m = rdv_msg_of(MSG_PIDFDS);
  for (m.first = 0; m.first < c->size; m.first += FDS_PER_MSG) {
    int n = c->size - m.first < FDS_PER_MSG ? c->size - m.first : FDS_PER_MSG;
    memcpy(m.processes, &j->process[m.first], sizeof *m.processes * (size_t)n);
    DC_TRY(rdv_tell(j->sock[rank], &m, &c->pidfd[m.first], n, j->deadline_ns));
  }
  m = rdv_msg_of(MSG_SEGMENT);
  m.bytes = c->map.bytes;
  return rdv_tell(j->sock[rank], &m, &j->memfd, 1, j->deadline_ns);
}

static int rdv_await_ready(rdv_joining *j) {
  for (int r = 1; r < j->c->size; r++) {
    char who[64];
    rdv_msg m;
    rdv_fds f;
    snprintf(who, sizeof who, "rank %d (pid %d)", j->c->global_rank[r], j->pid[r]);
    DC_TRY(rdv_await(j->sock[r], j->c->label, who, &m, &f, j->deadline_ns));
    rdv_fds_close(&f);
  }
  return DC_OK;
}

static int rdv_listen(rdv_joining *j) {
  struct sockaddr_un a;
  socklen_t len;
  rdv_address(j->k, &a, &len);
  DC_TRY(rdv_socket(&j->listener));
  if (bind(j->listener, (struct sockaddr *)&a, len) || listen(j->listener, 512))
    return DC_FAIL(DC_E_PEER, "group %s: can't listen on its address: %s; addresses must be unique", j->c->label,
                   strerror(errno));
  return DC_OK;
}

/* Ranks that have connected, and were not heard or not even accepted: they would see no more than a closed connection.
 * What they sent is read first: closing with it unread would take the answer with it. */
static void rdv_tell_unheard(rdv_joining *j, const rdv_msg *no) {
  (void)rdv_greet(j); /* as many as there are descriptors for */
  for (int i = 0; i < j->npending; i++) {
    rdv_msg m;
    rdv_fds f;
    int got = rdv_recv(j->pending[i], &m, &f);
    rdv_fds_close(&f);
    if (got == RECV_AGAIN || rdv_is_hello(j, got, &m)) rdv_tell(j->pending[i], no, NULL, 0, j->deadline_ns);
  }
}

/* Listens and leads. Whatever goes wrong is told to those that have come. */
static int rdv_lead(rdv_joining *j) {
  dc_comm *c = j->c;
  j->pid[0] = getpid();
  j->process[0] = dc__process_number();
  j->spot[0] = dc__numa_here();
  DC_TRY(rdv_listen(j));
  int rc = rdv_gather(j);
  if (!rc && j->status) rc = DC_FAIL(j->status, "%s", j->why);
  if (!rc) rc = rdv_make_stage(j);
  for (int r = 1; r < c->size && !rc; r++) rc = rdv_send_stage(j, r);
  if (!rc) rc = rdv_await_ready(j);
  rdv_msg m = rdv_msg_of(MSG_GO);
  m.status = rc;
  if (rc) snprintf(m.text, sizeof m.text, "%s", dc_last_error());
  for (int r = 1; r < c->size; r++) {
    if (j->sock[r] < 0) continue;
    int sent = rdv_tell(j->sock[r], &m, NULL, 0, j->deadline_ns + 1000000000);
    if (sent && !rc) return rdv_lost(j, r);
  }
  if (rc) rdv_tell_unheard(j, &m);
  return rc ? DC_FAIL(rc, "%s", m.text) : DC_OK;
}

static int rdv_connect(rdv_joining *j) {
  dc_comm *c = j->c;
  struct sockaddr_un a;
  socklen_t len;
  rdv_address(j->k, &a, &len);
  for (int turn = 0;; turn++) {
    int s = -1;
    DC_TRY(rdv_socket(&s));
    if (connect(s, (struct sockaddr *)&a, len) == 0) {
      j->sock[0] = s;
      j->pid[0] = j->k->pid ? j->k->pid[0] : 0;
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
    if (rdv_ms_left(j->look_ns) == 0) DC_TRY(rdv_look(j, 0));
    struct pollfd leader = {.fd = j->absent[0], .events = POLLIN};
    if (poll(&leader, 1, 1) > 0) return rdv_lost(j, 0);
    /* it may have given up because of one of the others, and closed its address */
    if (rdv_ms_left(j->look_ns) == 0) DC_TRY(rdv_look_at(j, 1 + turn % (c->size - 1)));
  }
}

/* Waits for a message of rank 0. Where it has left without one, a rank that is gone is the reason: rank 0 itself last.
 */
static int rdv_await_leader(rdv_joining *j, const char *leader, rdv_msg *m, rdv_fds *f) {
  int rc = rdv_await(j->sock[0], j->c->label, leader, m, f, j->deadline_ns);
  if (rc != DC_E_PEER_DIED || m->status) return rc;
  for (int i = 1; i <= j->c->size; i++) DC_TRY(rdv_look_at(j, i % j->c->size));
  return rc;
}

static int rdv_take_pidfds(rdv_joining *j, const char *leader) {
  dc_comm *c = j->c;
  for (int have = 0; have < c->size;) {
    rdv_msg m;
    rdv_fds f;
    DC_TRY(rdv_await_leader(j, leader, &m, &f));
    if (m.kind != MSG_PIDFDS || m.first != have || have + f.n > c->size || f.n == 0) {
      rdv_fds_close(&f);
      return DC_FAIL(DC_E_PEER, "group %s: %s sent something unexpected while joining", c->label, leader);
    }
    int rc = DC_OK;
    for (int i = 0; i < f.n; i++, have++) {
      if (have == c->rank || rc) close(f.fd[i]); /* we have our own */
      else rc = dc__peer_take(m.processes[i], f.fd[i], &c->pidfd[have]);
    }
    DC_TRY(rc);
  }
  return DC_OK;
}

static int rdv_take_stage(rdv_joining *j, const char *leader) {
  dc_comm *c = j->c;
  rdv_msg m;
  rdv_fds f;
  DC_TRY(rdv_take_pidfds(j, leader));
  DC_TRY(rdv_await_leader(j, leader, &m, &f));
  if (m.kind != MSG_SEGMENT || f.n != 1) {
    rdv_fds_close(&f);
    return DC_FAIL(DC_E_PEER, "group %s: %s sent something unexpected while joining", c->label, leader);
  }
  j->memfd = f.fd[0];
  if (m.bytes < dc__stage_end(c) + dc__p2p_bytes(c->size))
    return DC_FAIL(DC_E_PEER, "group %s: %s sent a segment that is too small", c->label, leader);
  DC_TRY(dc__arena_memfd_check(j->memfd, m.bytes));
  DC_TRY(dc__stage_map(c, j->memfd, m.bytes));
  return dc__stage_bring(c, j->memfd);
}

/* Up to rank 0's verdict: a socket that is closed with messages unread would take our own last one with it. */
static void rdv_await_verdict(rdv_joining *j, const char *leader) {
  rdv_msg m = {.kind = 0};
  rdv_fds f = {.n = 0};
  while (m.kind != MSG_GO && rdv_await(j->sock[0], j->c->label, leader, &m, &f, j->deadline_ns) == DC_OK)
    rdv_fds_close(&f);
}

static int rdv_hello(rdv_joining *j) {
  dc_comm *c = j->c;
  rdv_msg m = rdv_msg_of(MSG_HELLO);
  memcpy(m.secret, j->secret, sizeof m.secret);
  m.rank = c->rank;
  m.size = c->size;
  m.slots = c->slots;
  m.slot_bytes = c->slot_bytes;
  m.pid = getpid();
  m.process = dc__process_number();
  m.spot = dc__numa_here();
  m.status = j->status;
  snprintf(m.text, sizeof m.text, "%s", j->why);
  return rdv_tell(j->sock[0], &m, &c->pidfd[c->rank], 1, j->deadline_ns);
}

static int rdv_follow(rdv_joining *j) {
  dc_comm *c = j->c;
  char leader[64];
  snprintf(leader, sizeof leader, "rank %d", c->global_rank[0]);
  DC_TRY(rdv_connect(j));
  int rc = rdv_hello(j);
  if (rc && rc != DC_E_PEER_DIED) return rc; /* that: rank 0 has given up, and what it said of it can be read below */
  j->deadline_ns +=
      1000000000; /* rank 0 may wait until its own deadline: leave time for its verdict, which says more than ours */
  if (j->status) {
    rdv_await_verdict(j, leader);
    return DC_FAIL(j->status, "%s", j->why);
  }
  rc = rdv_take_stage(j, leader);
  rdv_msg m = rdv_msg_of(MSG_READY);
  m.status = rc;
  if (rc) snprintf(m.text, sizeof m.text, "%s", dc_last_error());
  int sent = rdv_tell(j->sock[0], &m, NULL, 0, j->deadline_ns);
  if (rc) {
    char why[sizeof m.text];
    memcpy(why, m.text, sizeof why);
    rdv_await_verdict(j, leader);
    return DC_FAIL(rc, "%s", why);
  }
  DC_TRY(sent);
  rdv_fds f;
  DC_TRY(rdv_await_leader(j, leader, &m, &f));
  rdv_fds_close(&f);
  return DC_OK;
}

int dc__join(dc_comm *c, const dc_comm_config *k, int status) {
  static const uint8_t none[DC_COMM_SECRET];
  if (status && c->size == 1) return status;
  rdv_joining j = {.c = c, .k = k, .secret = k->secret ? k->secret : none, .listener = -1, .memfd = -1};
  j.look_ns = dc__now_ns() + 100000000; /* 100 ms */
  j.deadline_ns = dc__now_ns() + c->timeout_ns;
  j.status = status;
  if (status)
    snprintf(j.why, sizeof j.why, "group %s: rank %d could not open it: %s", c->label, c->global_rank[c->rank],
             dc_last_error());
  for (int r = 0; r < DC_COMM_MAX_RANKS; r++) j.sock[r] = j.absent[r] = -1;
  int rc = rdv_pidfd_self(&c->pidfd[c->rank]);
  if (!rc) rc = c->rank == 0 ? rdv_lead(&j) : rdv_follow(&j);
  for (int r = 0; r < c->size; r++) {
    rdv_look_away(&j, r);
    if (j.sock[r] >= 0) close(j.sock[r]);
  }
  for (int i = 0; i < j.npending; i++) close(j.pending[i]);
  if (j.listener >= 0) close(j.listener);
  if (j.memfd >= 0) close(j.memfd); /* the mapping keeps it */
  return rc;
}

/* ---- mailboxes --------------------------------------------------------------------------------------------------- */
int dc__mailbox_open(int *sock, dc__mailbox *shown) {
  struct sockaddr_un a = {.sun_family = AF_UNIX};
  socklen_t len = sizeof a;
  int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (s < 0) return DC_FAIL(DC_E_SYSTEM, "socket: %s", strerror(errno));
  /* no name given: the kernel makes one (unix(7), autobind) */
  if (bind(s, (struct sockaddr *)&a, sizeof(sa_family_t)) || getsockname(s, (struct sockaddr *)&a, &len) ||
      len > sizeof shown->name || getrandom(shown->secret, sizeof shown->secret, 0) != sizeof shown->secret) {
    int e = errno;
    close(s);
    return DC_FAIL(DC_E_SYSTEM, "a socket for a segment's descriptor: %s", strerror(e));
  }
  memcpy(shown->name, &a, len);
  shown->length = len;
  *sock = s;
  return DC_OK;
}

int dc__mail(const dc__mailbox *to, int n, int fd, int64_t bytes, int64_t deadline_ns) {
  int s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), rc = DC_OK;
  if (s < 0) return DC_FAIL(DC_E_SYSTEM, "socket: %s", strerror(errno));
  rdv_msg m = rdv_msg_of(MSG_SEGMENT);
  m.bytes = bytes;
  for (int i = 0; i < n && !rc; i++) {
    struct sockaddr_un a;
    if (to[i].length == 0 || to[i].length > sizeof to[i].name) continue;
    memcpy(&a, to[i].name, to[i].length);
    memcpy(m.secret, to[i].secret, sizeof m.secret);
    rc = rdv_send(s, &a, to[i].length, &m, &fd, 1, deadline_ns);
  }
  close(s);
  return rc;
}

int dc__mail_take(int sock, const dc__mailbox *shown, int64_t bytes, int *fd) {
  for (;;) {
    rdv_msg m;
    rdv_fds f;
    int got = rdv_recv(sock, &m, &f);
    if (got == RECV_AGAIN) return DC_FAIL(DC_E_PEER, "rank 0 sent no segment");
    const bool ours = (got == RECV_OK || got == RECV_NO_FDS) && rdv_same_secret(m.secret, shown->secret);
    if (got == RECV_OK && ours && m.kind == MSG_SEGMENT && m.bytes == bytes && f.n == 1) {
      *fd = f.fd[0];
      return DC_OK;
    }
    rdv_fds_close(&f); /* anybody of this machine may send us anything */
    if (ours) return got == RECV_NO_FDS ? rdv_no_fds() : DC_FAIL(DC_E_PEER, "rank 0 sent something unexpected");
  }
}
