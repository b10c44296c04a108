/* open.h: what the files that open a communicator share: arena.c (memory), rendezvous.c (sockets), segment.c
 * (segments), open.c (which wires them). */
#ifndef DEEPC_COMM_OPEN_H
#define DEEPC_COMM_OPEN_H

#include "comm_impl.h"

enum { DC__ADDRESS = 90 }; /* bytes of a group's address at most */
/* Slots start at different offsets modulo 4 KiB and 2 MiB: congruent arrays evict each other. */
enum { DC__SLOT_COLOR = 4352 };

static inline int64_t dc__round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* ---- arena.c ----------------------------------------------------------------------------------------------------- */
/* Whether so many bytes are to lie on huge pages. */
bool dc__arena_huge(int64_t bytes);
/* DC_E_NOMEM if so many bytes do not fit here now. */
int dc__arena_fits(int64_t bytes);
/* A sealed memfd; owned by the caller. */
int dc__arena_memfd(int64_t bytes, int *fd);
/* What a peer sent must be of the agreed size and must not be able to shrink under us. */
int dc__arena_memfd_check(int fd, int64_t bytes);
/* Maps it and faults it in; `first`: before any peer. */
int dc__arena_map(int fd, int64_t bytes, bool first, dc__map *map);
void dc__arena_unmap(dc__map *map);
/* Where the messages' area begins, and the whole arena. */
int64_t dc__stage_end(const dc_comm *c);
int64_t dc__stage_bytes(const dc_comm *c);
/* Maps the arena and points c's fields into it. */
int dc__stage_map(dc_comm *c, int fd, int64_t bytes, bool first);

/* ---- rendezvous.c ------------------------------------------------------------------------------------------------ */
enum { DC__FDS_PER_MSG = 64 };
enum { DC__MSG_HELLO = 1, DC__MSG_PIDFDS, DC__MSG_SEGMENT, DC__MSG_READY, DC__MSG_GO };
typedef struct dc__msg {
  uint64_t magic;
  int32_t version, kind, status;
  int32_t rank, size, slots, pid, first; /* hello; first: number of the first pidfd of a DC__MSG_PIDFDS */
  int64_t slot_bytes, bytes;
  char text[1024]; /* why, if status != DC_OK */
} dc__msg;

typedef struct dc__fds {
  int n, fd[DC__FDS_PER_MSG];
} dc__fds;

void dc__fds_close(dc__fds *f);
dc__msg dc__msg_of(int kind);
int dc__msg_send(int sock, const dc__msg *m, const int *fd, int nfd, int64_t deadline_ns);
/* Waits for one message from `sock`; `who` names the sender. A message with an error becomes this rank's error. The
 * descriptors are owned by the caller. */
int dc__msg_await(int sock, const char *label, const char *who, dc__msg *m, dc__fds *f, int64_t deadline_ns);
/* Joins the group: afterwards c has its arena mapped, and every rank's pidfd. */
int dc__join(dc_comm *c, const dc_comm_config *config);

#endif
