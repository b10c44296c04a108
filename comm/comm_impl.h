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
#define DC__COMM_VERSION 1
#define DC__TEXT 2048 /* bytes of the shared error text */
#define DC__WHERE 64  /* bytes of a caller text */
#define DC__LABEL 64
#define DC__LOOK_NS (20 * 1000 * 1000ll) /* look after the peers at least this often while waiting */
#define DC__LINE 64

/* A counter that peers wait on. Both fields lie in one cache line: who advances the value reads `sleepers` next. */
typedef struct dc__word {
  _Alignas(DC__LINE) _Atomic uint32_t value;
  _Atomic uint32_t sleepers;
} dc__word;

/* What one rank shows to the others. */
typedef struct dc__seat {
  dc__word posted;                          /* steps posted, modulo 2^32 */
  dc__word done;                            /* steps marked done, modulo 2^32 */
  _Alignas(DC__LINE) _Atomic uint32_t left; /* 1 after a normal close */
  int32_t pid;
} dc__seat;

/* The fingerprint of a posted step. Atomic words, because a diagnosis may read it while its owner writes the next one:
 * then the text may be mixed, but nothing is undefined. */
enum { DC__FP_CALL = 0, DC__FP_SEQ = 4, DC__FP_STEP = 5, DC__FP_WHERE = 8, DC__FP_WORDS = 16 };
typedef struct dc__fp {
  _Alignas(DC__LINE) _Atomic uint64_t w[DC__FP_WORDS];
} dc__fp;

enum { DC__SOUND = 0, DC__BREAKING = 1, DC__BROKEN = 2 };
typedef struct dc__header {
  uint64_t magic;
  int32_t version, size, slots, reserved;
  int64_t slot_bytes, total_bytes;
  _Alignas(DC__LINE) _Atomic uint32_t broken; /* SOUND -> BREAKING (one winner) -> BROKEN */
  int32_t status;
  char text[DC__TEXT];
  _Alignas(DC__LINE) dc__seat seat[]; /* [size], then dc__fp [size][slots] */
} dc__header;

typedef struct dc__map {
  void *base;
  int64_t bytes;
} dc__map;

struct dc_comm {
  int32_t rank, size, slots;
  int64_t slot_bytes, slot_stride, timeout_ns, spin_ns;
  int32_t global_rank[DC_COMM_MAX_RANKS];
  char label[DC__LABEL];
  char where[DC__WHERE]; /* caller text of the current call */
  uint64_t fork_mark;    /* dc__fork_mark() of the process that opened */
  _Atomic uint32_t busy; /* a thread is inside */
  dc__map map;
  dc__header *h; /* start of map */
  dc__fp *fp;    /* [size][slots] in map */
  char *stage;   /* [size][slots] slots, slot_stride apart */
  int pidfd[DC_COMM_MAX_RANKS];
  int sock[DC_COMM_MAX_RANKS]; /* rank 0: to every rank; others: sock[0] */
  uint8_t dead[DC_COMM_MAX_RANKS];
  /* steps of this rank: done <= arrived <= posted <= begun <= done + slots */
  int64_t begun, posted, arrived, done;
  int64_t all_done; /* steps that every rank is known to have done */
  int64_t seq;      /* calls, for messages */
  int64_t look_ns;  /* when we last looked after the peers */
  void *p2p;        /* p2p.c's own */
  int flight_group; /* flight.c's index of this group */
  dc_call call;     /* the call in progress, for messages */
};

struct dc_segment {
  dc__map map;
  uint64_t fork_mark;
};

/* ---- shm.c ---- */
/* A number that differs between a process and its forked children. */
uint64_t dc__fork_mark(void);

/* ---- sync.c ---- */
int64_t dc__now_ns(void);
/* Enters a call: DC_E_INVALID for NULL, DC_E_STATE after a fork or when another thread is inside, or the error that
 * broke c. */
int dc__enter(dc_comm *c);
void dc__leave(dc_comm *c);
/* The error that broke c (as this thread's failure), or DC_OK. */
int dc__broken(dc_comm *c);
/* Breaks c on all ranks with this error; the first one wins. Returns the status of the winner. */
int dc__break(dc_comm *c, int status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
void dc__wake_all(dc_comm *c);
/* The exchange, inside a call. */
int dc__begin(dc_comm *c, int64_t *step, void **slot);
int dc__can_begin(dc_comm *c, int *ready);
int dc__post(dc_comm *c, const dc_call *call);
int dc__wait(dc_comm *c, int64_t step);
int dc__done(dc_comm *c, int64_t step);
static inline char *dc__slot(const dc_comm *c, int rank, int64_t step) {
  return c->stage + ((int64_t)rank * c->slots + step % c->slots) * c->slot_stride;
}

#endif
