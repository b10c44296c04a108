/* open.h: what the files that open a communicator share: arena.c (memory), rendezvous.c (sockets), segment.c
 * (segments), open.c (which wires them). */
#ifndef DEEPC_COMM_OPEN_H
#define DEEPC_COMM_OPEN_H

#include "comm_impl.h"
#include "numa.h"

enum { DC__ADDRESS = 90 }; /* bytes of a group's address at most */
/* Slots start at different offsets modulo 4 KiB and 2 MiB: congruent arrays evict each other. */
enum { DC__SLOT_COLOR = 4352 };

/* ---- arena.c ----------------------------------------------------------------------------------------------------- */
/* Whether so many bytes are to lie on huge pages. */
bool dc__arena_huge(int64_t bytes);
/* DC_E_NOMEM if so many bytes do not fit here now. */
int dc__arena_fits(int64_t bytes);
/* A sealed memfd; owned by the caller. */
int dc__arena_memfd(int64_t bytes, int *fd);
/* What a peer sent must be of the agreed size and must not be able to shrink under us. */
int dc__arena_memfd_check(int fd, int64_t bytes);
/* Maps it and faults it in; `first`: before any peer, on these nodes in turns (bit i: node i). */
int dc__arena_map(int fd, int64_t bytes, uint64_t nodes, bool first, dc__map *map);
void dc__arena_unmap(dc__map *map);
/* What an arena's layout is made of: DC_E_INVALID if it can't be, and c's fields from it. */
int dc__slots_check(int32_t slots, int64_t slot_bytes);
void dc__slots_set(dc_comm *c, int32_t size, int32_t slots, int64_t slot_bytes);
/* Where the messages' area begins, and the whole arena. */
int64_t dc__stage_end(const dc_comm *c);
int64_t dc__stage_bytes(const dc_comm *c);
/* Maps the arena and points c's fields into it. */
int dc__stage_map(dc_comm *c, int fd, int64_t bytes);
/* By rank 0, before anything is touched: what rank r writes is to lie where r runs. */
void dc__stage_place(dc_comm *c, const dc__spot *spot);
/* Faults in what this rank is to bring; by rank 0 before any peer. */
int dc__stage_bring(dc_comm *c, int fd);

/* ---- peers.c ----------------------------------------------------------------------------------------------------- */
/* A random number that only this process has; a forked child has another. */
uint64_t dc__process_number(void);
/* *pidfd: the descriptor that this process uses for that process. `fd`, one more pidfd of it, is taken over: it is the
 * one from now on, or is closed. Given back with dc__peer_drop. */
int dc__peer_take(uint64_t process, int fd, int *pidfd);
void dc__peer_drop(int pidfd);

/* ---- rendezvous.c ------------------------------------------------------------------------------------------------ */
/* Joins the group: afterwards c has its arena mapped, and every rank's pidfd. status: of what this rank has done
 * before; where that is a failure (of dc_last_error()) it joins only to tell the others, and all fail. */
int dc__join(dc_comm *c, const dc_comm_config *config, int status);
/* Where a rank is sent the descriptor of one segment. It shows this in its slot. */
typedef struct dc__mailbox {
  uint32_t length; /* of name; 0: there is no mailbox */
  uint8_t secret[DC_COMM_SECRET];
  char name[32]; /* a socket's address */
} dc__mailbox;
/* *sock is owned. */
int dc__mailbox_open(int *sock, dc__mailbox *shown);
/* Sends fd to all n mailboxes. */
int dc__mail(const dc__mailbox *to, int n, int fd, int64_t bytes, int64_t deadline_ns);
/* What was sent to `sock` before; *fd is owned. What others than the group's ranks have sent is thrown away. */
int dc__mail_take(int sock, const dc__mailbox *shown, int64_t bytes, int *fd);

/* ---- probe.c ----------------------------------------------------------------------------------------------------- */
/* Finds out, together with all ranks, c->single_copy and whether membarrier(2) can be used. Called once, with the
 * exchange working. */
int dc__probe(dc_comm *c);

#endif
