/* comm_impl.h: what all files of comm/ share: the layout of the arena, and a rank's own state. What a file offers the
 * others stands in a header of its own; comm/CMakeLists.txt lists the files in the order in which they may call each
 * other.
 *
 * The arena is one memfd that every rank has mapped:
 *
 *   dc__header                  the error that all share (broken, status, text) | which way rank 0 found faster
 *   dc__seat  [size]            of a rank: done | sleepers, working | left, pid, waits .. (one cache line each)
 *   dc__cell  [size][cells]     of a step: posted, fingerprint, hash of all calls, <= 16 bytes of data  (one line)
 *   dc__where [size][cells]     of a step: the caller's text                                            (one line)
 *   teams                       of a step and team: what its leader says, see team.h                    (one line)
 *   slots     [size][slots]     of a step: slot_bytes of data, slot_stride apart
 *   small     [size][SMALLS]    the same for <= 16 KiB; data[0] of the cell says which one
 *   p2p_seat  [size], p2p_pair [size][size]                                     messages, see message.h
 *
 * Step k of a rank uses its cell k % cells and, if its data does not fit there, a small slot or slot k % slots. A rank
 * runs through begin, fill, post, wait, read, done; posted and done are what the others wait for:
 *
 *   done <= arrived <= posted <= begun <= done + slots         (of one rank, in steps)
 *
 * Everything another process may write while we read it is an atomic; plain fields of the header are written by group
 * rank 0 before the arena is handed out and never again (the error text is published by a release of `broken`). */
#ifndef DEEPC_COMM_IMPL_H
#define DEEPC_COMM_IMPL_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include "comm.h"

#define DC__COMM_MAGIC 0x31304d4f43434544ull /* "DECCOM01" */
#define DC__COMM_VERSION 9
#define DC__ALGO \
  256 /* in a fingerprint, op = dc_call_op + DC__ALGO * number of the forced row of the algorithm table */
#define DC__CALL_OPS 24 /* above every dc_call_op */
#define DC__TEXT 2048 /* bytes of the shared error text */
#define DC__WHERE 64  /* bytes of a caller text */
#define DC__LABEL 64
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
  _Atomic uint32_t waits; /* for whom this rank has been waiting for long, see deadlock.c; 0: for nobody */
  _Atomic uint32_t looks; /* how often it has found, in such waits, that it still waits; modulo 2^32 */
  int32_t team, node; /* which team it is in; its node of memory, or -1 */
} dc__seat;

/* A posted step, in one cache line: the word that peers wait for, what they compare, how far its owner is, and the data
 * of a tiny call. A rank has a ring of cells, more than it has slots, so that a rank which waits for nobody (the root
 * of a broadcast) can run ahead of the others with small calls.
 *
 * `hash` is over all calls of this rank so far: comparing it finds a difference also in calls that did not wait for
 * each other. Atomic words, because a diagnosis may read them while their owner writes the next ones. `filling` tells
 * it: it is stored before them and `posted` after them, so words that were read between an equal `posted` and an equal
 * `filling` are of that step. `data` is read only between wait and done. */
enum { DC__CALL_WORDS = 3, DC__WHERE_WORDS = 8, DC__CELLS = 64, DC__SMALLS = 16, DC__SMALLS_ROUND = 3 };
#define DC__INLINE ((int64_t)16)     /* bytes of a call's data that fit into its cell */
#define DC__SMALL ((int64_t)16384)   /* and into a small slot */
#define DC__SMALL_STRIDE (DC__SMALL + 3 * DC__LINE) /* not congruent, see DC__SLOT_COLOR */
typedef struct dc__cell {
  _Alignas(DC__LINE) _Atomic uint32_t posted; /* number of the step + 1, modulo 2^32 */
  _Atomic uint32_t filling; /* what `posted` will be once the words below are those of the step */
  _Atomic uint64_t call[DC__CALL_WORDS]; /* the fingerprint: a dc_call, packed */
  _Atomic uint64_t hash;
  _Atomic uint32_t seq, done; /* calls so far; steps that the owner had done when it posted; modulo 2^32 */
  uint32_t data[DC__INLINE / 4]; /* the data, or in data[0] the number of the small slot */
} dc__cell;
typedef struct dc__where {
  _Alignas(DC__LINE) _Atomic uint64_t
      w[DC__WHERE_WORDS]; /* caller of the step; written when it differs from what is there */
} dc__where;
_Static_assert(sizeof(dc__cell) == DC__LINE, "one line to wait for");
_Static_assert(sizeof(dc__where) == DC__LINE && DC__WHERE_WORDS * 8 == DC__WHERE, "and one for the text");

enum { DC__SEGMENTS = 64 }; /* registered per communicator */
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
  int32_t version, size, slots, teams; /* teams: 1: none */
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
  int64_t slot_bytes, slot_stride, spin_ns, yield_ns;
  _Atomic int64_t timeout_ns;
  int32_t global_rank[DC_COMM_MAX_RANKS];
  char label[DC__LABEL];
  _Atomic uint64_t where[DC__WHERE_WORDS]; /* caller text of the current call, padded with zeros */
  _Atomic uint32_t where_number;           /* of the text; 0: none was set */
  uint32_t *shown;       /* [cells] number of the text that each of our cells holds */
  uint64_t hash;         /* of all calls posted */
  uint64_t fork_mark;    /* dc__fork_mark() of the process that opened */
  _Atomic uint32_t inside; /* 1 while a thread is in a call */
  bool fences;             /* without membarrier(2): every post and done is a full fence */
  bool crowded;            /* the group has more ranks than this machine has cores */
  dc__counts counts; /* of the thread inside */
  dc__map map;
  dc__header *h; /* start of map */
  dc__cell *cell;   /* [size][cells] in map */
  dc__where *wheres; /* [size][cells] in map */
  struct dc__team *team; /* NULL: the group has none */
  char *teams;           /* their area in map */
  int32_t cells;    /* DC__CELLS, or slots if that is more */
  char *stage;   /* [size][slots] slots, slot_stride apart */
  char *small;   /* [size][DC__SMALLS] small slots, DC__SMALL_STRIDE apart */
  int64_t *slot_used;             /* [slots] the last step + 1 that used each of our slots */
  int64_t small_used[DC__SMALLS];
  uint32_t small_last; /* the one that was begun last */
  int pidfd[DC_COMM_MAX_RANKS]; /* of dc__peer_take */
  bool may_copy, may_membarrier; /* DEEPC_CMA and DEEPC_MEMBARRIER of this rank */
  int team_wanted;               /* DEEPC_TEAM of this rank */
  uint64_t nodes;                /* bit i: ranks run on node i of memory; 0: that is not known of all */
  int64_t tracer;                /* a process that this rank comes from, and maybe all do; 0: unknown */
  _Atomic uint8_t dead[DC_COMM_MAX_RANKS];
  /* steps of this rank: done <= arrived <= posted <= begun <= done + slots */
  int64_t begun, posted, arrived, done;
  int64_t base;     /* steps that opening took: callers of the exchange count from there */
  int64_t all_done; /* steps that every rank is known to have done */
  int64_t seq;      /* calls, for messages */
  int64_t look_ns;  /* when we last looked after the peers */
  /* deadlock.c's own, up to alive_ns */
  struct dc_comm *family; /* the next of a ring of those that were joined; itself if there is none */
  uint64_t kin;           /* the same number for those of dc_comm_relate */
  uint32_t waits;         /* the number of the wait that our seat showed last */
  bool waits_shown;
  uint64_t circle;        /* of waits that the last look saw, since when it stands, and the looks of its ranks then */
  int64_t circle_ns;
  uint32_t circle_looks[DC_COMM_MAX_RANKS];
  _Atomic int64_t alive_ns; /* when all that dc__is_dead() does not tell were last seen alive, for coll_direct.c */
  struct p2p *p2p;  /* of the messages, with where their seats lie */
  struct p2p_seat *messages;
  int flight_group; /* flight.c's index of this group */
  bool unshown;     /* the call in progress is not in the flight record yet */
  uint64_t flight;  /* its row */
  uint64_t id;      /* of the group, the same on all its ranks and no other group's (dc__flight_id of the address) */
  dc_call call;     /* the call in progress, for messages */
  dc_segment *segment[DC__SEGMENTS]; /* segment.c's own */
  dc_segment *pinned[DC__SEGMENTS];  /* what the call in progress uses of them */
  uint64_t pins;                     /* which those are */
  int segments;                      /* made so far: the same on all ranks */
  char *scratch;                     /* of direct calls, see coll_direct.c; NULL before the first */
  _Atomic uint64_t scratch_taken;    /* bit i: a thread uses part i */
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

/* A number that differs between a process and its forked children. */
uint64_t dc__fork_mark(void);
/* Gives this process its number; once per process, before any communicator. */
int dc__fork_mark_set(void);

static inline int64_t dc__now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void dc__cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

/* A caller's text. Acquire, for those that are written again: see dc__tell_where(). */
static inline void dc__where_text(const _Atomic uint64_t w[DC__WHERE_WORDS], char text[DC__WHERE]) {
  for (int i = 0; i < DC__WHERE_WORDS; i++) {
    const uint64_t v = atomic_load_explicit(&w[i], memory_order_acquire);
    memcpy(text + 8 * i, &v, sizeof v);
  }
  text[DC__WHERE - 1] = 0;
}

/* ---- steps, as everybody sees them ------------------------------------------------------------------------------- */
/* True if counter `value` is at or past `target`; both are modulo 2^32 and less than 2^31 apart. */
static inline bool dc__at_least(uint32_t value, uint32_t target) { return (int32_t)(value - target) >= 0; }

static inline dc__cell *dc__cell_of(const dc_comm *c, int rank, int64_t step) {
  return &c->cell[(int64_t)rank * c->cells + step % c->cells];
}

/* The cell of `rank` still holds (or already holds) just this step. */
static inline bool dc__holds(const dc_comm *c, int rank, int64_t step) {
  return atomic_load_explicit(&dc__cell_of(c, rank, step)->posted, memory_order_acquire) == (uint32_t)(step + 1);
}

/* The same call, and the same calls before it. */
static inline bool dc__same_hash(const dc__cell *a, const dc__cell *b) {
  return atomic_load_explicit(&a->hash, memory_order_relaxed) == atomic_load_explicit(&b->hash, memory_order_relaxed);
}

static inline char *dc__slot(const dc_comm *c, int rank, int64_t step) {
  return c->stage + ((int64_t)rank * c->slots + step % c->slots) * c->slot_stride;
}
static inline char *dc__small(const dc_comm *c, int rank, uint32_t i) {
  return c->small + ((int64_t)rank * DC__SMALLS + i % DC__SMALLS) * DC__SMALL_STRIDE;
}
static inline const char *dc__place(const dc_comm *c, int rank, int64_t step, int64_t bytes) {
  const dc__cell *cell = dc__cell_of(c, rank, step);
  if (bytes <= DC__INLINE) return (const char *)cell->data;
  return bytes <= DC__SMALL ? dc__small(c, rank, cell->data[0]) : dc__slot(c, rank, step);
}

#endif
