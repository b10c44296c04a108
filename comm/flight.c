/* flight.c: the flight record (flight.h). Owns the layout of the memfd and of the dump files, which is the same.
 *
 *   header (one page) | DC_FLIGHT_CALLS rows of two cache lines | DC_FLIGHT_GROUPS groups, of which a dump has only the
 * used ones
 *
 * Every word that changes is an atomic: another thread, or another process, reads while we write. A writer claims a row
 * by setting its number to CLAIMED, fills it, and writes the number last (release); a reader copies everything, then
 * reads the numbers again, and keeps the rows whose number is the same. Rows of calls that are not finished are never
 * taken over: the one call that hangs is what the record is for, while other groups may make thousands.
 *
 * A group's thread claims rows in batches, and times are ticks of the TSC where it is invariant: with a claim and a
 * clock_gettime a call, a barrier took 90 ns more (docs/lab/collectives.md). The header holds one moment in ticks and
 * on the clock, and whoever reads takes the second one (a dump holds it too). */
#include "flight.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

#include "comm_impl.h"

#define FLIGHT_MAGIC 0x3130544847494c46ull /* "FLIGHT01" */
#define FLIGHT_VERSION 2
#define PAGE 4096
#define CLAIMED UINT64_MAX
#define CLAIM_TRIES 64
#define BATCH 8           /* rows that a group claims at a time */
#define BATCH_GROUPS 32   /* groups that may: a quarter of the rows at most is set aside */

typedef _Atomic uint64_t word;
enum { ROW_NUMBER, ROW_BEGIN, ROW_END, ROW_COUNT, ROW_TAG, ROW_SEQ, ROW_WHAT, ROW_STATUS, ROW_WHERE, ROW_WORDS = 16 };
enum {
  GROUP_GENERATION,
  GROUP_ID,
  GROUP_RANK,
  GROUP_OPENED,
  GROUP_CLOSED,
  GROUP_FIRST,
  GROUP_LABEL = 8,
  GROUP_MEMBERS = 16,
  GROUP_WORDS = GROUP_MEMBERS + DC_COMM_MAX_RANKS
};
_Static_assert(ROW_WORDS * sizeof(word) == 2 * DC__LINE && (ROW_WORDS - ROW_WHERE) * sizeof(word) == DC__WHERE,
               "a row is two cache lines, the second holds the caller's line");
_Static_assert((GROUP_MEMBERS - GROUP_LABEL) * sizeof(word) == DC__LABEL, "a label fits");

typedef struct header {
  uint64_t magic;
  uint32_t version, header_bytes, row_bytes, rows, group_bytes, tsc; /* tsc: ticks are not nanoseconds */
  int64_t start_ns,
      start_real_ns; /* one moment on CLOCK_MONOTONIC and CLOCK_REALTIME: clocks of several hosts are compared by it */
  int64_t dump_ns; /* CLOCK_MONOTONIC; 0 in the memfd */
  uint64_t start_ticks, dump_ticks; /* at start_ns and dump_ns, in the unit of a row's begin and end */
  int32_t pid, dump_status;
  char host[64];
  char reason[DC__TEXT]; /* of a dump: the error */
  _Alignas(DC__LINE) word last; /* number of the newest row */
  word dropped; /* calls that found no row: all were of unfinished calls */
  word groups; /* used entries */
  word rank, world; /* of this process in its largest group */
} header;
_Static_assert(sizeof(header) <= PAGE, "the header is one page");
#define ROWS_AT ((int64_t)PAGE)
#define ROWS_BYTES ((int64_t)DC_FLIGHT_CALLS * ROW_WORDS * 8)
#define GROUPS_AT (ROWS_AT + ROWS_BYTES)
#define GROUP_BYTES ((int64_t)GROUP_WORDS * 8)
#define FILE_BYTES (GROUPS_AT + DC_FLIGHT_GROUPS * GROUP_BYTES)

/* A copy of a record in plain memory. What was being written while it was copied has number or generation 0. */
typedef struct copy {
  header h;
  int64_t now_ns; /* a second moment, for flight_ns_of() */
  uint64_t now_ticks;
  uint64_t row[DC_FLIGHT_CALLS][ROW_WORDS];
  uint64_t group[DC_FLIGHT_GROUPS][GROUP_WORDS];
} copy;

/* The log: finished rows once more, in a larger private ring, for dc_flight_log. */
typedef struct log_ring {
  int64_t capacity, bytes;
  word last;
  word row[][ROW_WORDS];
} log_ring;

static pthread_mutex_t flight_lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below but rows */
static header *_Atomic flight_record; /* NULL: none (yet) */
static log_ring *_Atomic flight_log_rows; /* NULL: not wanted */
static log_ring *flight_log_kept; /* stays mapped when the log is off, as a thread may still be writing into it */
static uint64_t flight_log_taken;
static int flight_record_fd = -1;
static uint64_t *flight_step_row[DC_FLIGHT_GROUPS]; /* per open group: numbers of the rows of its open steps */
static struct batch { /* per open group: rows it has claimed, used from the end */
  int have;
  uint64_t number[BATCH];
} flight_batches[BATCH_GROUPS];

static word *flight_rows_of(header *h) { return (word *)(void *)((char *)h + ROWS_AT); }
static word *flight_group_of(header *h, int g) { return (word *)(void *)((char *)h + GROUPS_AT + g * GROUP_BYTES); }
/* Acquire and release on every word, which costs nothing on x86: so a row's words stay between the claim and the
 * number, and a reader's second look at the number stays behind the words, without fences (ThreadSanitizer knows none).
 */
static uint64_t flight_get(const word *w) { return atomic_load_explicit(w, memory_order_acquire); }
static void flight_set(word *w, uint64_t v) { atomic_store_explicit(w, v, memory_order_release); }

/* ---- time -------------------------------------------------------------------------------------------------------- */
static int flight_invariant_tsc(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid(0x80000007u, &a, &b, &c, &d) && (d >> 8 & 1);
#else
  return 0;
#endif
}

static uint64_t flight_ticks(const header *h) {
#if defined(__x86_64__)
  if (h->tsc) return __rdtsc();
#endif
  (void)h;
  return (uint64_t)dc__now_ns();
}

/* The same moment on both clocks. A thread may be put aside between two readings, for milliseconds on a busy machine,
 * and all times of a record would be off by that: of a few tries the one in which the readings are closest counts. */
static void flight_now_both(const header *h, int64_t *ns, uint64_t *t) {
  uint64_t least = UINT64_MAX;
  for (int k = 0; k < 5; k++) {
    const uint64_t before = flight_ticks(h);
    const int64_t now = dc__now_ns();
    const uint64_t between = flight_ticks(h) - before;
    if (between >= least) continue;
    least = between;
    *ns = now, *t = before + between / 2;
  }
}

static int64_t flight_ns_of(const copy *k, uint64_t t) {
  if (!t || !k->h.tsc) return (int64_t)t;
  const double whole = (double)(int64_t)(k->now_ticks - k->h.start_ticks), ns = (double)(k->now_ns - k->h.start_ns);
  if (!(whole > 0) || !(ns > 0)) return k->h.start_ns;
  const double at = (double)(int64_t)(t - k->h.start_ticks) * (ns / whole);
  return at > -9e18 && at < 9e18 ? (int64_t)((uint64_t)k->h.start_ns + (uint64_t)(int64_t)at) : k->h.start_ns;
}

/* ---- the record of this process ---------------------------------------------------------------------------------- */
/* The parent's record is not mapped in a forked child, and its descriptor there would only pass it off as the child's.
 */
static void flight_in_child(void) {
  atomic_store(&flight_record, NULL);
  atomic_store(&flight_log_rows, NULL);
  if (flight_record_fd >= 0) close(flight_record_fd);
  flight_record_fd = -1;
  for (int g = 0; g < DC_FLIGHT_GROUPS; g++) { /* the parent's groups can't be used here */
    free(flight_step_row[g]);
    flight_step_row[g] = NULL;
  }
  memset(flight_batches, 0, sizeof flight_batches);
}

DC__AT_FORK(flight_at_fork, DC__FORK_FLIGHT, &flight_lock, flight_in_child)

static int64_t flight_real_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Without a record calls go on: no memory for it is no reason to fail a group. `deepc doctor` then finds none. */
static header *flight_record_make(void) {
  int fd = (int)syscall(SYS_memfd_create, "deepc-flight", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return NULL;
  if (ftruncate(fd, FILE_BYTES) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) goto fail;
  header *h = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (h == MAP_FAILED) goto fail;
  if (madvise(h, FILE_BYTES, MADV_DONTFORK)) {
    munmap(h, FILE_BYTES);
    goto fail;
  }
  /* the pages of header and rows, now: a fault in a call costs more than the call */
  for (int64_t at = 0; at < GROUPS_AT; at += PAGE) flight_set((word *)(void *)((char *)h + at), 0);
  h->version = FLIGHT_VERSION;
  h->header_bytes = PAGE;
  h->row_bytes = ROW_WORDS * 8;
  h->rows = DC_FLIGHT_CALLS;
  h->group_bytes = (uint32_t)GROUP_BYTES;
  h->tsc = (uint32_t)flight_invariant_tsc();
  flight_now_both(h, &h->start_ns, &h->start_ticks);
  h->start_real_ns = flight_real_ns();
  h->pid = getpid();
  gethostname(h->host, sizeof h->host - 1);
  h->magic = FLIGHT_MAGIC;
  flight_record_fd = fd;
  return h;
fail:
  close(fd);
  return NULL;
}

/* A free entry, else that of the group that closed first; -1 if all are open. */
static int flight_group_find(header *h) {
  int used = (int)flight_get(&h->groups), found = -1;
  if (used < DC_FLIGHT_GROUPS) return used;
  for (int g = 0; g < DC_FLIGHT_GROUPS; g++) {
    uint64_t closed = flight_get(&flight_group_of(h, g)[GROUP_CLOSED]);
    if (closed && (found < 0 || closed < flight_get(&flight_group_of(h, found)[GROUP_CLOSED]))) found = g;
  }
  return found;
}

static uint64_t flight_pair(int32_t low, int32_t high) { return (uint32_t)low | (uint64_t)(uint32_t)high << 32; }
static int32_t flight_low_of(uint64_t w) { return (int32_t)(uint32_t)w; }
static int32_t flight_high_of(uint64_t w) { return (int32_t)(uint32_t)(w >> 32); }

/* An odd generation: the entry is being written. */
static void flight_generation_next(word *g) { flight_set(&g[GROUP_GENERATION], flight_get(&g[GROUP_GENERATION]) + 1); }

static void flight_group_write(header *h, int index, const dc_comm *c) {
  word *g = flight_group_of(h, index);
  uint64_t label[GROUP_MEMBERS - GROUP_LABEL];
  memcpy(label, c->label, sizeof label);
  flight_generation_next(g);
  flight_set(&g[GROUP_ID], c->id);
  flight_set(&g[GROUP_RANK], flight_pair(c->rank, c->size));
  flight_set(&g[GROUP_OPENED], (uint64_t)dc__now_ns());
  flight_set(&g[GROUP_CLOSED], 0);
  flight_set(&g[GROUP_FIRST], flight_get(&h->last)); /* rows up to here are of an earlier group at this index */
  for (int i = 0; i < GROUP_MEMBERS - GROUP_LABEL; i++) flight_set(&g[GROUP_LABEL + i], label[i]);
  if (index < BATCH_GROUPS) flight_batches[index].have = 0;
  for (int r = 0; r < c->size; r++)
    flight_set(&g[GROUP_MEMBERS + r], flight_pair(c->h->seat[r].pid, c->global_rank[r]));
  flight_generation_next(g);
}

uint64_t dc__flight_id(const char *address) { /* FNV-1a */
  uint64_t h = 0xcbf29ce484222325ull;
  for (; *address; address++) h = (h ^ (unsigned char)*address) * 0x100000001b3ull;
  return h;
}

int dc__flight_group_open(const dc_comm *c) {
  pthread_mutex_lock(&flight_lock);
  header *h = atomic_load(&flight_record);
  if (!h) atomic_store(&flight_record, h = flight_record_make());
  int index = h ? flight_group_find(h) : -1;
  if (index >= 0) {
    flight_group_write(h, index, c);
    if (index == (int)flight_get(&h->groups)) flight_set(&h->groups, (uint64_t)index + 1);
    if ((uint64_t)c->size > flight_get(&h->world)) {
      flight_set(&h->rank, (uint64_t)c->global_rank[c->rank]);
      flight_set(&h->world, (uint64_t)c->size);
    }
    flight_step_row[index] = calloc((size_t)c->slots,
                                    sizeof *flight_step_row[index]); /* without it steps are not recorded */
  }
  pthread_mutex_unlock(&flight_lock);
  return index;
}

/* Rows that were claimed and not used become empty. */
static void flight_give_back(header *h, struct batch *b) {
  for (; b->have; b->have--)
    flight_set(&flight_rows_of(h)[(b->number[b->have - 1] - 1) % DC_FLIGHT_CALLS * ROW_WORDS + ROW_NUMBER], 0);
}

void dc__flight_group_close(int group) {
  pthread_mutex_lock(&flight_lock);
  header *h = atomic_load(&flight_record);
  if (h && group >= 0 && group < DC_FLIGHT_GROUPS) {
    word *g = flight_group_of(h, group);
    flight_generation_next(g);
    flight_set(&g[GROUP_CLOSED], (uint64_t)dc__now_ns());
    flight_generation_next(g);
    free(flight_step_row[group]);
    flight_step_row[group] = NULL;
    if (group < BATCH_GROUPS) flight_give_back(h, &flight_batches[group]);
  }
  pthread_mutex_unlock(&flight_lock);
}

/* ---- a call ------------------------------------------------------------------------------------------------------ */
/* Row of call n, if it is empty or finished, claimed. */
static word *flight_claim_row(header *h, uint64_t n) {
  word *row = flight_rows_of(h) + (n - 1) % DC_FLIGHT_CALLS * ROW_WORDS;
  uint64_t old = flight_get(&row[ROW_NUMBER]);
  if (old == CLAIMED || (old && !flight_get(&row[ROW_END]))) return NULL;
  return atomic_compare_exchange_strong_explicit(&row[ROW_NUMBER], &old, CLAIMED, memory_order_acq_rel,
                                                 memory_order_relaxed)
             ? row
             : NULL;
}

/* A claimed row; *number is the new call's. NULL if there is none nearby. */
static word *flight_claim(header *h, uint64_t *number) {
  for (int i = 0; i < CLAIM_TRIES; i++) {
    const uint64_t n = atomic_fetch_add_explicit(&h->last, 1, memory_order_relaxed) + 1;
    word *row = flight_claim_row(h, n);
    if (!row) continue;
    *number = n;
    return row;
  }
  atomic_fetch_add_explicit(&h->dropped, 1, memory_order_relaxed);
  return NULL;
}

static uint64_t flight_what_of(const dc_comm *c, const dc_call *k) {
  return (uint64_t)(uint8_t)k->op | (uint64_t)(uint8_t)k->dtype << 8 | (uint64_t)(uint8_t)k->red_op << 16 |
         (uint64_t)(uint8_t)(c->size - 1) << 24 | (uint64_t)(uint16_t)k->root << 32 |
         (uint64_t)(uint16_t)c->flight_group << 48;
}

static uint64_t flight_row_fill(header *h, word *row, uint64_t n, const dc_comm *c, const dc_call *call,
                                const uint64_t where[DC__WHERE_WORDS], int64_t seq) {
  flight_set(&row[ROW_BEGIN], flight_ticks(h));
  flight_set(&row[ROW_END], 0);
  flight_set(&row[ROW_COUNT], (uint64_t)call->count);
  flight_set(&row[ROW_TAG], (uint64_t)call->tag);
  flight_set(&row[ROW_SEQ], (uint64_t)seq);
  flight_set(&row[ROW_WHAT], flight_what_of(c, call));
  flight_set(&row[ROW_STATUS], 0);
  for (int i = 0; i < DC__WHERE_WORDS; i++) flight_set(&row[ROW_WHERE + i], where[i]);
  flight_set(&row[ROW_NUMBER], n);
  return n;
}

uint64_t dc__flight_begin_as(const dc_comm *c, const dc_call *call, const char *where, int64_t seq) {
  header *h = atomic_load_explicit(&flight_record, memory_order_acquire);
  uint64_t n, w[DC__WHERE_WORDS];
  word *row = h ? flight_claim(h, &n) : NULL;
  memcpy(w, where, sizeof w);
  return row ? flight_row_fill(h, row, n, c, call, w, seq) : 0;
}

/* A claimed row of the group's batch; claims new ones when it is used up, or so old that newer rows have gone round. */
static word *flight_batch_next(header *h, struct batch *b, uint64_t *number) {
  if (b->have && flight_get(&h->last) - b->number[b->have - 1] > DC_FLIGHT_CALLS / 2) flight_give_back(h, b);
  if (!b->have) { /* used from the end: the oldest number there */
    const uint64_t last = atomic_fetch_add_explicit(&h->last, BATCH, memory_order_relaxed) + BATCH;
    for (uint64_t n = last; n > last - BATCH; n--)
      if (flight_claim_row(h, n)) b->number[b->have++] = n;
    if (!b->have && flight_claim(h, &b->number[0])) b->have = 1;
    if (!b->have) return NULL;
  }
  *number = b->number[--b->have];
  return flight_rows_of(h) + (*number - 1) % DC_FLIGHT_CALLS * ROW_WORDS;
}

uint64_t dc__flight_begin(const dc_comm *c, const dc_call *call) {
  header *h = atomic_load_explicit(&flight_record, memory_order_acquire);
  if (!h) return 0;
  const bool batched = c->flight_group >= 0 && c->flight_group < BATCH_GROUPS;
  uint64_t n, w[DC__WHERE_WORDS];
  word *row = batched ? flight_batch_next(h, &flight_batches[c->flight_group], &n) : flight_claim(h, &n);
  for (int i = 0; i < DC__WHERE_WORDS; i++) w[i] = atomic_load_explicit(&c->where[i], memory_order_relaxed);
  return row ? flight_row_fill(h, row, n, c, call, w, c->seq) : 0;
}

static void flight_log_append(log_ring *l, const word *row, uint64_t end, int status) {
  uint64_t n = atomic_fetch_add_explicit(&l->last, 1, memory_order_relaxed) + 1;
  word *to = l->row[(n - 1) % (uint64_t)l->capacity];
  flight_set(&to[ROW_NUMBER],
             CLAIMED); /* a writer that is a whole ring behind may mix its row with ours: then one row is wrong */
  for (int i = ROW_COUNT; i < ROW_WORDS; i++) flight_set(&to[i], flight_get(&row[i]));
  flight_set(&to[ROW_BEGIN], flight_get(&row[ROW_BEGIN]));
  flight_set(&to[ROW_END], end);
  flight_set(&to[ROW_STATUS], (uint64_t)(uint32_t)status);
  flight_set(&to[ROW_NUMBER], n);
}

static void flight_dump(header *h, int status);

/* True for errors after which the group is broken: then the record goes to a file. */
static bool flight_breaking(int status) {
  return status != DC_OK && status != DC_E_INVALID && status != DC_E_DTYPE && status != DC_E_SHAPE &&
         status != DC_E_STATE && status != DC_E_NOMEM;
}

void dc__flight_end(uint64_t number, int status) {
  header *h = atomic_load_explicit(&flight_record, memory_order_acquire);
  if (!number || !h) return;
  word *row = flight_rows_of(h) + (number - 1) % DC_FLIGHT_CALLS * ROW_WORDS;
  if (flight_get(&row[ROW_NUMBER]) != number) return; /* of a process that forked meanwhile */
  flight_set(&row[ROW_STATUS], (uint64_t)(uint32_t)status);
  log_ring *l = atomic_load_explicit(&flight_log_rows, memory_order_acquire);
  uint64_t end = flight_ticks(h);
  if (l) flight_log_append(l, row, end, status);
  flight_set(&row[ROW_END], end); /* last: it gives the row away */
  for (int i = 0; i < ROW_WORDS; i += ROW_WHERE) /* most likely the next one, which is in the second-level cache */
    __builtin_prefetch((const void *)(flight_rows_of(h) + number % DC_FLIGHT_CALLS * ROW_WORDS + i), 1);
  if (flight_breaking(status)) flight_dump(h, status);
}

/* Steps of the exchange stay open between calls of it: the numbers of their rows are kept here. */
void dc__flight_step_begin(const dc_comm *c, const dc_call *call, int64_t step) {
  if (c->flight_group < 0 || !flight_step_row[c->flight_group]) return;
  flight_step_row[c->flight_group][step % c->slots] = dc__flight_begin(c, call);
}

void dc__flight_step_end(const dc_comm *c, int64_t step, int status) {
  if (c->flight_group < 0 || !flight_step_row[c->flight_group]) return;
  if (status == DC_E_STATE) return; /* a wrong call, perhaps of a step that does not exist: nothing ended */
  dc__flight_end(flight_step_row[c->flight_group][step % c->slots], status);
  flight_step_row[c->flight_group][step % c->slots] = 0;
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */
static void flight_row_copy(uint64_t *to, const word *row) {
  uint64_t n = flight_get(&row[ROW_NUMBER]);
  for (int i = 1; i < ROW_WORDS; i++) to[i] = flight_get(&row[i]);
  to[ROW_NUMBER] = n != CLAIMED && flight_get(&row[ROW_NUMBER]) == n ? n : 0;
}

static void flight_group_copy(uint64_t *to, const word *g) {
  uint64_t n = flight_get(&g[GROUP_GENERATION]);
  for (int i = 1; i < GROUP_WORDS; i++) to[i] = flight_get(&g[i]);
  to[GROUP_GENERATION] = n % 2 == 0 && flight_get(&g[GROUP_GENERATION]) == n ? n : 0;
}

static void flight_copy_own(header *h, copy *k) {
  memcpy(&k->h, h, offsetof(header, last)); /* written before the record was shown, and never again */
  for (int i = 0; i < DC_FLIGHT_CALLS; i++) flight_row_copy(k->row[i], flight_rows_of(h) + i * ROW_WORDS);
  flight_now_both(h, &k->now_ns, &k->now_ticks);
  flight_set(&k->h.last, flight_get(&h->last));
  flight_set(&k->h.dropped, flight_get(&h->dropped));
  flight_set(&k->h.groups, flight_get(&h->groups));
  flight_set(&k->h.rank, flight_get(&h->rank));
  flight_set(&k->h.world, flight_get(&h->world));
  for (int g = 0; g < (int)flight_get(&k->h.groups); g++) flight_group_copy(k->group[g], flight_group_of(h, g));
}

/* Reads exactly that range; a short file is an error. */
static int flight_read_at(int fd, void *to, int64_t bytes, int64_t at) {
  for (int64_t done = 0; done < bytes;) {
    ssize_t n = pread(fd, (char *)to + done, (size_t)(bytes - done), (off_t)(at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return DC_FAIL(DC_E_SYSTEM, "reading a flight record: %s", strerror(errno));
    if (n == 0)
      return DC_FAIL(DC_E_INVALID, "this flight record is cut: it has %lld bytes, and at least %lld are needed",
                     (long long)(at + done), (long long)(at + bytes));
    done += n;
  }
  return DC_OK;
}

static int flight_header_check(const header *h) {
  if (h->magic != FLIGHT_MAGIC)
    return DC_FAIL(DC_E_INVALID, "this is no flight record of deepc: it begins with %016llx, expected %016llx",
                   (unsigned long long)h->magic, (unsigned long long)FLIGHT_MAGIC);
  if (h->version != FLIGHT_VERSION)
    return DC_FAIL(DC_E_INVALID, "this flight record has version %u; this deepc reads version %d", h->version,
                   FLIGHT_VERSION);
  if (h->header_bytes != PAGE || h->row_bytes != ROW_WORDS * 8 || h->rows != DC_FLIGHT_CALLS ||
      h->group_bytes != GROUP_BYTES)
    return DC_FAIL(
        DC_E_INVALID,
        "this flight record has a header of %u bytes, %u rows of %u and groups of %u; expected %d, %d, %d and "
        "%lld",
        h->header_bytes, h->rows, h->row_bytes, h->group_bytes, PAGE, DC_FLIGHT_CALLS, ROW_WORDS * 8,
        (long long)GROUP_BYTES);
  if (flight_get(&h->groups) > DC_FLIGHT_GROUPS)
    return DC_FAIL(DC_E_INVALID, "this flight record has %llu groups; expected at most %d",
                   (unsigned long long)flight_get(&h->groups), DC_FLIGHT_GROUPS);
  return DC_OK;
}

static int flight_group_check(const uint64_t *g, int index) {
  int rank = flight_low_of(g[GROUP_RANK]), size = flight_high_of(g[GROUP_RANK]);
  if (g[GROUP_GENERATION] && (size < 1 || size > DC_COMM_MAX_RANKS || rank < 0 || rank >= size))
    return DC_FAIL(DC_E_INVALID, "group %d of this flight record is of rank %d of %d; expected 0 <= rank < size <= %d",
                   index, rank, size, DC_COMM_MAX_RANKS);
  return DC_OK;
}

/* Twice: what has the same number in the second copy was not touched while the first one was made. */
static int flight_copy_file(int fd, copy *k, copy *again) {
  DC_TRY(flight_read_at(fd, &k->h, sizeof k->h, 0));
  DC_TRY(flight_header_check(&k->h));
  k->now_ns = k->h.dump_ns;
  k->now_ticks = k->h.dump_ticks;
  if (!k->h.dump_ns) flight_now_both(&k->h, &k->now_ns, &k->now_ticks); /* alive, on this machine */
  int groups = (int)flight_get(&k->h.groups);
  for (int i = 0; i < 2; i++) {
    copy *to = i ? again : k;
    DC_TRY(flight_read_at(fd, to->row, sizeof to->row, ROWS_AT));
    DC_TRY(flight_read_at(fd, to->group, groups * GROUP_BYTES, GROUPS_AT));
  }
  for (int i = 0; i < DC_FLIGHT_CALLS; i++)
    if (k->row[i][ROW_NUMBER] == CLAIMED || k->row[i][ROW_NUMBER] != again->row[i][ROW_NUMBER])
      k->row[i][ROW_NUMBER] = 0;
  for (int g = 0; g < groups; g++) {
    if (k->group[g][GROUP_GENERATION] % 2 || k->group[g][GROUP_GENERATION] != again->group[g][GROUP_GENERATION])
      k->group[g][GROUP_GENERATION] = 0;
    DC_TRY(flight_group_check(k->group[g], g));
  }
  return DC_OK;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */
static void flight_row_unpack(const copy *k, const uint64_t *w, dc_flight_row *r) {
  *r = (dc_flight_row){.number = w[ROW_NUMBER],
                       .begin_ns = flight_ns_of(k, w[ROW_BEGIN]),
                       .end_ns = flight_ns_of(k, w[ROW_END]),
                       .count = (int64_t)w[ROW_COUNT],
                       .tag = (int64_t)w[ROW_TAG],
                       .seq = (int64_t)w[ROW_SEQ],
                       .group = (int16_t)(w[ROW_WHAT] >> 48),
                       .op = (uint8_t)w[ROW_WHAT],
                       .dtype = (uint8_t)(w[ROW_WHAT] >> 8),
                       .red_op = (uint8_t)(w[ROW_WHAT] >> 16),
                       .root = (int16_t)(w[ROW_WHAT] >> 32),
                       .ranks = (uint8_t)(w[ROW_WHAT] >> 24) + 1,
                       .status = (int32_t)(uint32_t)w[ROW_STATUS]};
  memcpy(r->where, &w[ROW_WHERE], sizeof r->where);
  r->where[sizeof r->where - 1] = 0;
}

/* The index of a group that is in the record, and was when the row was written; else -1. */
static int32_t flight_group_known(const copy *k, const dc_flight_row *r) {
  if (r->group < 0 || r->group >= (int64_t)flight_get(&k->h.groups)) return -1;
  const uint64_t *g = k->group[r->group];
  return g[GROUP_GENERATION] && r->number > g[GROUP_FIRST] ? r->group : -1;
}

/* Numbers of one group rise with time; those of several are in the order in which they were claimed. */
static int flight_by_time(const void *a, const void *b) {
  const dc_flight_row *x = a, *y = b;
  if (x->begin_ns != y->begin_ns) return x->begin_ns < y->begin_ns ? -1 : 1;
  return x->number < y->number ? -1 : x->number > y->number;
}

/* The newest `capacity` rows, oldest first. */
static int flight_rows_give(const copy *k, dc_flight_row *rows, int64_t capacity, int64_t *count) {
  dc_flight_row *all = malloc(DC_FLIGHT_CALLS * sizeof *all);
  if (!all) return DC_FAIL(DC_E_NOMEM, "%zu bytes", DC_FLIGHT_CALLS * sizeof *all);
  int64_t n = 0;
  for (int i = 0; i < DC_FLIGHT_CALLS; i++) {
    if (!k->row[i][ROW_NUMBER]) continue;
    flight_row_unpack(k, k->row[i], &all[n]);
    all[n].group = flight_group_known(k, &all[n]);
    n++;
  }
  qsort(all, (size_t)n, sizeof *all, flight_by_time);
  int64_t give = n < capacity ? n : capacity;
  if (give) memcpy(rows, all + (n - give), (size_t)give * sizeof *all);
  *count = give;
  free(all);
  return DC_OK;
}

static int flight_rows_check(const dc_flight_row *rows, int64_t capacity, const int64_t *count) {
  if (!count || capacity < 0 || (capacity && !rows))
    return DC_FAIL(DC_E_INVALID, "rows or count is NULL, or capacity %lld is negative", (long long)capacity);
  return DC_OK;
}

int dc_flight_read(dc_flight_row *rows, int64_t capacity, int64_t *count) {
  DC_TRY(flight_rows_check(rows, capacity, count));
  header *h = atomic_load_explicit(&flight_record, memory_order_acquire);
  *count = 0;
  if (!h) return DC_OK;
  copy *k = calloc(1, sizeof *k);
  if (!k) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *k);
  flight_copy_own(h, k);
  int rc = flight_rows_give(k, rows, capacity, count);
  free(k);
  return rc;
}

int dc_flight_fd(void) {
  pthread_mutex_lock(&flight_lock);
  int fd = flight_record_fd;
  pthread_mutex_unlock(&flight_lock);
  return fd;
}

/* ---- the header as JSON ------------------------------------------------------------------------------------------ */
typedef struct out {
  char *s;
  int64_t room, n; /* n may pass room: then it is what would be needed */
} out;

__attribute__((format(printf, 2, 3))) static void flight_put(out *o, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  int64_t left = o->n < o->room ? o->room - o->n : 0;
  int n = vsnprintf(left ? o->s + o->n : NULL, (size_t)left, fmt, ap);
  va_end(ap);
  o->n += n;
}

/* A string of at most `max` bytes of the file. Bytes from 0x80 on pass: they are UTF-8, or the reader replaces them. */
static void flight_put_string(out *o, const char *s, size_t max) {
  flight_put(o, "\"");
  for (size_t i = 0; i < max && s[i]; i++) {
    unsigned char ch = (unsigned char)s[i];
    if (ch < 0x20 || ch == 0x7f) flight_put(o, "\\u%04x", ch);
    else if (ch == '"' || ch == '\\') flight_put(o, "\\%c", ch);
    else flight_put(o, "%c", ch);
  }
  flight_put(o, "\"");
}

static void flight_put_group(out *o, const uint64_t *g, int index) {
  int size = flight_high_of(g[GROUP_RANK]);
  flight_put(o, "{\"index\": %d, \"id\": \"%016llx\", \"label\": ", index, (unsigned long long)g[GROUP_ID]);
  flight_put_string(o, (const char *)&g[GROUP_LABEL], DC__LABEL);
  flight_put(o, ", \"rank\": %d, \"size\": %d, \"opened_ns\": %lld, \"closed_ns\": %lld, \"members\": [",
             flight_low_of(g[GROUP_RANK]), size, (long long)g[GROUP_OPENED], (long long)g[GROUP_CLOSED]);
  for (int r = 0; r < size; r++)
    flight_put(o, "%s{\"rank\": %d, \"pid\": %d}", r ? ", " : "", flight_high_of(g[GROUP_MEMBERS + r]),
               flight_low_of(g[GROUP_MEMBERS + r]));
  flight_put(o, "]}");
}

static int flight_describe(const copy *k, char *text, int64_t room) {
  const header *h = &k->h;
  out o = {.s = text, .room = room};
  flight_put(&o, "{\"pid\": %d, \"rank\": %d, \"world\": %d, \"host\": ", h->pid, (int)flight_get(&h->rank),
             (int)flight_get(&h->world));
  flight_put_string(&o, h->host, sizeof h->host);
  flight_put(&o, ", \"start_ns\": %lld, \"start_real_ns\": %lld, \"dump_ns\": %lld, \"status\": \"%s\", \"reason\": ",
             (long long)h->start_ns, (long long)h->start_real_ns, (long long)h->dump_ns,
             dc_status_name(h->dump_status));
  flight_put_string(&o, h->reason, sizeof h->reason);
  flight_put(&o, ", \"calls\": %llu, \"dropped\": %llu, \"groups\": [", (unsigned long long)flight_get(&h->last),
             (unsigned long long)flight_get(&h->dropped));
  const char *sep = "";
  for (int g = 0; g < (int)flight_get(&h->groups); g++) {
    if (!k->group[g][GROUP_GENERATION]) continue;
    flight_put(&o, "%s", sep);
    flight_put_group(&o, k->group[g], g);
    sep = ", ";
  }
  flight_put(&o, "]}");
  if (o.n >= room)
    return DC_FAIL(DC_E_SHAPE, "the text of this flight record's header needs %lld bytes, and %lld are there",
                   (long long)o.n + 1, (long long)room);
  return DC_OK;
}

int dc_flight_parse(int fd, dc_flight_row *rows, int64_t capacity, int64_t *count, char *text, int64_t room) {
  DC_TRY(flight_rows_check(rows, capacity, count));
  if (room < 0 || (room && !text)) return DC_FAIL(DC_E_INVALID, "text is NULL or room %lld negative", (long long)room);
  copy *k = calloc(2, sizeof *k);
  if (!k) return DC_FAIL(DC_E_NOMEM, "%zu bytes", 2 * sizeof *k);
  int rc = flight_copy_file(fd, &k[0], &k[1]);
  if (!rc && room) rc = flight_describe(k, text, room);
  if (!rc) rc = flight_rows_give(k, rows, capacity, count);
  free(k);
  return rc;
}

/* ---- dumps ------------------------------------------------------------------------------------------------------- */
static int flight_write_all(int fd, const void *from, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    ssize_t n = write(fd, (const char *)from + done, (size_t)(bytes - done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n ? errno : EIO;
    done += n;
  }
  return 0;
}

static int flight_copy_write(const copy *k, int fd) {
  char *page = calloc(1, PAGE);
  if (!page) return ENOMEM;
  memcpy(page, &k->h, sizeof k->h);
  int e = flight_write_all(fd, page, PAGE);
  free(page);
  if (!e) e = flight_write_all(fd, k->row, sizeof k->row);
  return e ? e : flight_write_all(fd, k->group, (int64_t)flight_get(&k->h.groups) * GROUP_BYTES);
}

/* An errno. The name appears when all is written. */
static int flight_dump_to(const copy *k, const char *dir) {
  char path[4096], part[4096];
  if (mkdir(dir, 0777) && errno != EEXIST) return errno;
  int n = snprintf(path, sizeof path, "%s/deepc-flight-%d-%d.bin", dir, (int)flight_get(&k->h.rank), k->h.pid);
  if (n < 0 || n + 8 > (int)sizeof path) return ENAMETOOLONG;
  snprintf(part, sizeof part, "%.4080s.part", path);
  int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return errno;
  int e = flight_copy_write(k, fd);
  if (close(fd) && !e) e = errno;
  if (!e && rename(part, path)) e = errno;
  if (e) unlink(part);
  return e;
}

/* Never changes this thread's last error: the caller is about to return it. */
static void flight_dump(header *h, int status) {
  const char *dir = getenv("DEEPC_FLIGHT_DIR");
  if (!dir || !*dir) return;
  pthread_mutex_lock(&flight_lock); /* one at a time: they write the same name */
  copy *k = calloc(1, sizeof *k);
  int e = ENOMEM;
  if (k) {
    flight_copy_own(h, k);
    k->h.dump_ns = k->now_ns;
    k->h.dump_ticks = k->now_ticks;
    k->h.dump_status = status;
    snprintf(k->h.reason, sizeof k->h.reason, "%s", dc_last_error());
    e = flight_dump_to(k, dir);
    free(k);
  }
  pthread_mutex_unlock(&flight_lock);
  if (e) fprintf(stderr, "deepc: can't write the flight record to DEEPC_FLIGHT_DIR=%s: %s\n", dir, strerror(e));
}

/* ---- the log ----------------------------------------------------------------------------------------------------- */
int dc_flight_log(int64_t capacity) {
  if (capacity < 0 || capacity > (int64_t)1 << 24)
    return DC_FAIL(DC_E_INVALID, "a log of %lld calls: expected 0 to %d", (long long)capacity, 1 << 24);
  int rc = DC_OK;
  pthread_mutex_lock(&flight_lock);
  if (capacity && !flight_log_kept) {
    int64_t bytes = (int64_t)sizeof(log_ring) + capacity * ROW_WORDS * 8;
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      rc = DC_FAIL(DC_E_NOMEM, "%lld bytes for a log of %lld calls", (long long)bytes, (long long)capacity);
    } else {
      flight_log_kept = p;
      flight_log_kept->capacity = capacity;
    }
  }
  if (!rc) {
    if (capacity && !atomic_load(&flight_log_rows)) flight_log_taken = flight_get(&flight_log_kept->last);
    atomic_store(&flight_log_rows, capacity ? flight_log_kept : NULL);
  }
  pthread_mutex_unlock(&flight_lock);
  return rc;
}

enum { LOG_TAKEN, LOG_LOST, LOG_NOT_YET };
/* One row of the log that has not been taken. Lost: its place is another call's; not yet: another thread is writing it
 * at this moment. */
static int flight_log_row(const copy *k, log_ring *l, uint64_t number, dc_flight_row *row) {
  uint64_t w[ROW_WORDS];
  flight_row_copy(w, l->row[(number - 1) % (uint64_t)l->capacity]);
  if (w[ROW_NUMBER] != number) return flight_get(&l->last) - number < (uint64_t)l->capacity ? LOG_NOT_YET : LOG_LOST;
  flight_row_unpack(k, w, row);
  return LOG_TAKEN;
}

int dc_flight_log_take(dc_flight_row *rows, int64_t capacity, int64_t *count, int64_t *lost) {
  DC_TRY(flight_rows_check(rows, capacity, count));
  if (!lost) return DC_FAIL(DC_E_INVALID, "lost is NULL");
  int64_t n = 0, gone = 0;
  copy *k = calloc(1, sizeof *k); /* for its clock only */
  if (!k) return DC_FAIL(DC_E_NOMEM, "%zu bytes", sizeof *k);
  pthread_mutex_lock(&flight_lock);
  header *h = atomic_load(&flight_record);
  if (h) {
    memcpy(&k->h, h, offsetof(header, last));
    flight_now_both(h, &k->now_ns, &k->now_ticks);
  }
  log_ring *l = atomic_load(&flight_log_rows);
  uint64_t last = l ? flight_get(&l->last) : 0;
  if (l && last - flight_log_taken > (uint64_t)l->capacity) {
    gone = (int64_t)(last - flight_log_taken) - l->capacity;
    flight_log_taken = last - (uint64_t)l->capacity;
  }
  for (; l && flight_log_taken < last && n < capacity; flight_log_taken++) {
    const int found = flight_log_row(k, l, flight_log_taken + 1, &rows[n]);
    if (found == LOG_NOT_YET) break; /* the next call takes it */
    n += found == LOG_TAKEN, gone += found == LOG_LOST;
  }
  pthread_mutex_unlock(&flight_lock);
  free(k);
  *count = n;
  *lost = gone;
  return DC_OK;
}

/* ---- names ------------------------------------------------------------------------------------------------------- */
const char *dc_call_name(int op) {
  static const char *const name[] = {"?",          "barrier",       "all_reduce",  "reduce_scatter",
                                     "all_gather", "broadcast",     "all_to_all",  "segment_create",
                                     "bucket",     "user_exchange", "all_to_allv", "reduce",
                                     "gather",     "scatter",       "send",        "recv"};
  return op >= 1 && op < (int)(sizeof name / sizeof *name) ? name[op] : "?";
}
