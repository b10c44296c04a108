/* comm_impl.h: what the files of comm/ share. Owns the layout of the shared header.
 *
 * Everything another process may write while we read it is an atomic; plain fields of the header are written by group
 * rank 0 before the segment is handed out and never again (the error text is published by a release of `broken`). */
#ifndef DEEPC_COMM_IMPL_H
#define DEEPC_COMM_IMPL_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "comm.h"

#define DC__COMM_MAGIC 0x31304d4f43434544ull /* "DECCOM01" */
#define DC__COMM_VERSION 5
#define DC__ALGO \
  256 /* in a fingerprint, op = dc_call_op + DC__ALGO * number of the forced row of the algorithm table */
#define DC__CALL_OPS 24 /* above every dc_call_op */
#define DC__TEXT 2048 /* bytes of the shared error text */
#define DC__WHERE 64  /* bytes of a caller text */
#define DC__LABEL 64
#define DC__LOOK_NS (20 * 1000 * 1000ll) /* look after the peers at least this often while waiting */
#define DC__LINE 64

/* What one rank shows to the others. Peers wait on `done` and on the cells' `posted`. The numbers of those who sleep
 * there have a line of their own, which all caches can keep: the owner reads it behind every store of such a word, and
 * beside the word it would wait each time until the store has the line back from the peers (60 ns a call). */
enum { DC__POSTED, DC__DONE };
typedef struct dc__seat {
  _Alignas(DC__LINE) _Atomic uint32_t done;        /* steps marked done, modulo 2^32 */
  _Alignas(DC__LINE) _Atomic uint32_t sleepers[2]; /* for some posted, for done */
  _Atomic uint32_t working; /* 1 while this rank may read and write other ranks' buffers, see dc__await_calm() */
  _Alignas(DC__LINE) _Atomic uint32_t left;        /* 1 after a normal close */
  int32_t pid;
} dc__seat;

/* A posted step, in one cache line: the word that peers wait for, what they compare, how far its owner is, and the data
 * of a tiny call. A rank has a ring of cells, more than it has slots, so that a rank which waits for nobody (the root
 * of a broadcast) can run ahead of the others with small calls.
 *
 * `hash` is over all calls of this rank so far: comparing it finds a difference also in calls that did not wait for
 * each other. Atomic words, because a diagnosis may read them while their owner writes the next ones: then the text may
 * be mixed, but nothing is undefined. `data` is read only between wait and done. */
enum { DC__CALL_WORDS = 3, DC__WHERE_WORDS = 8, DC__CELLS = 64, DC__SMALLS = 16, DC__SMALLS_ROUND = 3 };
#define DC__INLINE ((int64_t)16)     /* bytes of a call's data that fit into its cell */
#define DC__SMALL ((int64_t)16384)   /* and into a small slot */
#define DC__SMALL_STRIDE (DC__SMALL + 3 * DC__LINE) /* not congruent, see DC__SLOT_COLOR */
typedef struct dc__cell {
  _Alignas(DC__LINE) _Atomic uint32_t posted; /* number of the step + 1, modulo 2^32 */
  uint32_t reserved;
  _Atomic uint64_t call[DC__CALL_WORDS]; /* the fingerprint: a dc_call, packed */
  _Atomic uint64_t hash;
  _Atomic uint32_t seq, done; /* calls so far; steps that the owner had done when it posted; modulo 2^32 */
  uint32_t data[DC__INLINE / 4]; /* the data, or in data[0] the number of the small slot */
} dc__cell;
typedef struct dc__where {
  _Alignas(DC__LINE) _Atomic uint64_t
      w[DC__WHERE_WORDS]; /* caller of the step; written when it differs from what is there */
} dc__where;

enum { DC__SEGMENTS = 64 }; /* registered per communicator */
enum { DC__BIASES = 16 };   /* times that the fast way into a communicator may change its thread */
enum { DC__CLASSES = 6 }; /* of sizes, in which single copy and staging are timed */
typedef struct dc__trial {
  int64_t calls;
  int64_t best_ns[2]; /* staged, direct */
  bool direct;        /* the choice before the last window */
} dc__trial;

enum { DC__CHOICES = 8 };
typedef struct dc__choice { /* of one op: its rows by size, and from where on ranks meet to use buffers where they lie
                             */
  int rows;
  int64_t meet[2]; /* of ordinary memory, and where buffers may be registered */
  struct {
    int64_t bytes;
    const struct dc__algo *algo;
  } row[DC__CHOICES];
} dc__choice;

enum { DC__SOUND = 0, DC__BREAKING = 1, DC__BROKEN = 2 };
typedef struct dc__header {
  uint64_t magic;
  int32_t version, size, slots, reserved;
  int64_t slot_bytes, total_bytes;
  _Alignas(DC__LINE) _Atomic uint32_t broken; /* SOUND -> BREAKING (one winner) -> BROKEN */
  int32_t status;
  char text[DC__TEXT];
  /* written by rank 0, see coll.c; relaxed: ordered by the exchange */
  _Alignas(DC__LINE) _Atomic uint32_t prefer_direct[DC__CALL_OPS][DC__CLASSES];
  _Alignas(DC__LINE) dc__seat seat[]; /* [size], then dc__cell [size][cells], dc__where [size][cells] */
} dc__header;

typedef struct dc__map {
  void *base;
  int64_t bytes;
} dc__map;

struct dc_comm {
  int32_t rank, size, slots;
  int64_t slot_bytes, slot_stride, timeout_ns, spin_ns, yield_ns;
  int32_t global_rank[DC_COMM_MAX_RANKS];
  char label[DC__LABEL];
  char where[DC__WHERE]; /* caller text of the current call */
  uint32_t where_number; /* of the text; 0: none was set */
  uint32_t *shown;       /* [cells] number of the text that each of our cells holds */
  uint64_t hash;         /* of all calls posted */
  uint64_t fork_mark;    /* dc__fork_mark() of the process that opened */
  /* who is inside, see dc__go_in() */
  _Atomic uint32_t bias, taking;
  _Atomic uintptr_t holder[DC__BIASES];
  _Atomic uint32_t inside[DC__BIASES + 1];
  uint32_t entered; /* the bias by which the thread inside came in */
  bool fences;       /* without membarrier(2): every post and done is a full fence, every entry an exchange */
  dc__counts counts; /* of the thread inside */
  dc__map map;
  dc__header *h; /* start of map */
  dc__cell *cell;   /* [size][cells] in map */
  dc__where *wheres; /* [size][cells] in map */
  int32_t cells;    /* DC__CELLS, or slots if that is more */
  char *stage;   /* [size][slots] slots, slot_stride apart */
  char *small;   /* [size][DC__SMALLS] small slots, DC__SMALL_STRIDE apart */
  int64_t *slot_used;             /* [slots] the last step + 1 that used each of our slots */
  int64_t small_used[DC__SMALLS];
  uint32_t small_last; /* the one that was begun last */
  int pidfd[DC_COMM_MAX_RANKS];
  int sock[DC_COMM_MAX_RANKS]; /* rank 0: to every rank; others: sock[0] */
  uint8_t dead[DC_COMM_MAX_RANKS];
  /* steps of this rank: done <= arrived <= posted <= begun <= done + slots */
  int64_t begun, posted, arrived, done;
  int64_t base;     /* steps that opening took: callers of the exchange count from there */
  int64_t all_done; /* steps that every rank is known to have done */
  int64_t seq;      /* calls, for messages */
  int64_t look_ns;  /* when we last looked after the peers */
  void *p2p;        /* p2p.c's own */
  int flight_group; /* flight.c's index of this group */
  bool unshown;     /* the call in progress is not in the flight record yet */
  uint64_t flight;  /* its row */
  uint64_t id;      /* of the group, the same on all its ranks and no other group's (dc__flight_id of the address) */
  dc_call call;     /* the call in progress, for messages */
  dc_segment *segment[DC__SEGMENTS]; /* segment.c's own */
  dc_segment *pinned[DC__SEGMENTS];  /* what the call in progress uses of them */
  uint64_t pins;                     /* which those are */
  int segments;                      /* made so far: the same on all ranks */
  bool single_copy;                  /* all ranks may read and write each other's memory through the kernel */
  uint8_t forced[DC__CALL_OPS];      /* row + 1 of the algorithm table that DEEPC_ALGO forces */
  dc__choice choice[DC__CALL_OPS];
  dc__trial trial[DC__CALL_OPS][DC__CLASSES];
};

/* Asks for the line at p to be written here. (GCC's builtin for that reads without -mprfchw.) */
static inline void dc__prefetch_write(const void *p) {
#if defined(__x86_64__)
  __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)p));
#else
  __builtin_prefetch(p, 1);
#endif
}

/* ---- open.c ------------------------------------------------------------------------------------------------------ */
/* A number that differs between a process and its forked children. */
uint64_t dc__fork_mark(void);

/* ---- coll.c, coll_direct.c --------------------------------------------------------------------------------------- */
void dc__choices_make(dc_comm *c);
int dc__force_algos(dc_comm *c);
/* Asks every peer's memory for a word that it shows; all ranks agree on the answer. Called once by dc_comm_open. */
int dc__probe_single_copy(dc_comm *c);

/* ---- sync.c ------------------------------------------------------------------------------------------------------ */
int64_t dc__now_ns(void);
/* Enters a call: DC_E_INVALID for NULL, DC_E_STATE after a fork or when another thread is inside, or the error that
 * broke c. */
int dc__enter(dc_comm *c);
void dc__leave(dc_comm *c);
/* dc__enter's lock alone: false if a thread is inside. */
bool dc__go_in(dc_comm *c);
/* Registers this process for membarrier(2); false where there is none. */
bool dc__membarrier_register(void);
/* What all ranks have agreed on: membarrier for the rare side, or fences for all. Before that: dc__use_membarrier(c,
 * false). */
void dc__use_membarrier(dc_comm *c, bool yes);
/* The error that broke c (as this thread's failure), or DC_OK. */
int dc__broken(dc_comm *c);
/* Breaks c on all ranks with this error; the first one wins. Returns the status of the winner. */
int dc__break(dc_comm *c, int status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void dc__wake_all(dc_comm *c);
/* c is broken and this rank's call is about to fail: waits until no living peer reads or writes the buffers of ranks
 * any more, at most for the time-out. Returns the rank that was still at it then, or -1. */
int dc__await_calm(dc_comm *c);
/* A peer's memory could not be reached: breaks c, with the peer's death as soon as that shows, else with `why`. */
int dc__unreachable(dc_comm *c, const char *why);
/* " died: ..." and "is in all_reduce(...) ...": how a rank ended, and what it did last in collectives. */
void dc__tell_death(const dc_comm *c, int rank, char *s, size_t room);
void dc__tell_position(const dc_comm *c, int rank, char *s, size_t room);
/* "rank 1 called all_reduce(...)": what it posted as `step`, while no rank can be DC__CELLS steps further. */
void dc__tell_call(const dc_comm *c, int rank, int64_t step, char *s, size_t room);
/* Puts the call in progress into the flight record. Done behind its first post, where there is time while the post
 * travels, and before any longer wait. */
void dc__show(dc_comm *c);
/* The exchange, inside a call. A step has a slot (dc__begin) or room for `bytes` <= slot_bytes, where little has a
 * cheaper place (dc__begin_for; peers read it at dc__place with the same number of bytes). */
int dc__begin(dc_comm *c, int64_t *step, void **slot);
int dc__begin_for(dc_comm *c, int64_t bytes, int64_t *step, void **place);
int dc__can_begin(dc_comm *c, int *ready);
int dc__post(dc_comm *c, const dc_call *call);
/* Between post and wait of `step`, whose place took `bytes`: while peers have not posted it, asks for the lines of our
 * next place, which are in the caches of those who read it. */
void dc__warm(dc_comm *c, int64_t step, int64_t bytes);
int dc__wait(dc_comm *c, int64_t step);
/* Waits for `rank` only, and compares with it. */
int dc__wait_rank(dc_comm *c, int64_t step, int rank);
/* Instead of wait, by a rank that reads nothing of the posted step: it may be done before the others post. */
int dc__skip(dc_comm *c, int64_t step);
int dc__done(dc_comm *c, int64_t step);
/* One whole step: every rank shows `bytes` <= slot_bytes of `mine`; all[size * bytes] is everyone's, in rank order.
 * With 0 bytes a meeting; the pointers may be NULL then. */
int dc__share(dc_comm *c, const dc_call *call, const void *mine, int64_t bytes, void *all);
static inline char *dc__slot(const dc_comm *c, int rank, int64_t step) {
  return c->stage + ((int64_t)rank * c->slots + step % c->slots) * c->slot_stride;
}
static inline char *dc__small(const dc_comm *c, int rank, uint32_t i) {
  return c->small + ((int64_t)rank * DC__SMALLS + i % DC__SMALLS) * DC__SMALL_STRIDE;
}
static inline const char *dc__place(const dc_comm *c, int rank, int64_t step, int64_t bytes) {
  const dc__cell *cell = &c->cell[(int64_t)rank * c->cells + step % c->cells];
  if (bytes <= DC__INLINE) return (const char *)cell->data;
  return bytes <= DC__SMALL ? dc__small(c, rank, cell->data[0]) : dc__slot(c, rank, step);
}

#endif
