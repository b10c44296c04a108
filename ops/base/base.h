/* base.h: status, errors, data types, memory, threads, counters. The bottom layer of libdeepc.so: includes nothing of
 * ours.
 *
 * Conventions of the whole C core:
 *  - A function that can fail returns int: DC_OK (0) or a negative DC_E_* value (status.def). Outputs are written only
 * on DC_OK. The text of the last failure of this thread, with its place, is dc_last_error().
 *  - Sizes are int64_t counts of elements unless the name says _bytes. Pointers are borrowed unless "owned" is said.
 *  - No function calls abort, exit or assert on input or I/O.
 *  - dc_ is public, dc__ is shared between files of the core only. */
#ifndef DEEPC_BASE_H
#define DEEPC_BASE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DC_API __attribute__((visibility("default")))
#define DC_VERSION_MAJOR 0
#define DC_VERSION_MINOR 1
#define DC_VERSION_PATCH 0
#define DC_VERSION_STRING "0.1.0"

enum dc_status {
#define DC_STATUS(name, value, text) DC_##name = value,
#include "status.def"
#undef DC_STATUS
};

/* "0.1.0"; static storage. */
DC_API const char *dc_version(void);
/* "E_NOMEM" for DC_E_NOMEM; "E_UNKNOWN" for a value that is not a status. Static storage. */
DC_API const char *dc_status_name(int status);
DC_API const char *dc_status_text(int status);
/* Row i of status.def, for bindings: returns 0 and fills name/value, or DC_E_INVALID past the end. */
DC_API int dc_status_at(int i, const char **name, int *value);

/* Text of this thread's last failure: "what (file.c:123, dc_function)". Never NULL; valid until the thread's next
 * failure. */
DC_API const char *dc_last_error(void);
/* Records the failure and returns `status`, so that `return DC_FAIL(DC_E_SHAPE, "...", ...)` reads as one thing. */
DC_API int dc_fail(int status, const char *file, int line, const char *func, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
#define DC_FAIL(status, ...) dc_fail((status), __FILE__, __LINE__, __func__, __VA_ARGS__)
#define DC_TRY(expr)                            \
  do {                                          \
    int dc_try_rc_ = (expr);                    \
    if (dc_try_rc_ != DC_OK) return dc_try_rc_; \
  } while (0)

/* ---- structs that may grow --------------------------------------------------------------------------------------- */
/* Configurations and arguments that a public function takes in a struct begin with `size_t struct_size`, which the
 * caller sets to sizeof of the struct as it was compiled there. New fields are added at the end, and mean what was
 * before when they are zero. So a smaller struct (an older caller) is taken with zeros for what it lacks, and a larger
 * one (a caller newer than the library) is refused, since what it asks for might be left undone.
 *
 * DC__SIZED copies `given` to *taken by these rules; `last`: the last field of the struct's first version, which no
 * caller may lack. DC_E_INVALID (NULL, too small, too large) names the struct. */
#define DC__SIZED(type, last, given, taken) \
  dc__take_struct((taken), sizeof(type), offsetof(type, last) + sizeof(((type *)0)->last), (given), #type)
int dc__take_struct(void *taken, size_t known, size_t least, const void *given, const char *name);

/* ---- data types -------------------------------------------------------------------------------------------------- */
enum dc_dtype {
  DC_F32 = 0, /* IEEE 754 binary32 */
  DC_BF16 = 1, /* bfloat16: the upper half of a binary32, round to nearest even */
  DC_F16 = 2, /* IEEE 754 binary16 */
  DC_F64 = 3,
  DC_I8 = 4,
  DC_U8 = 5, /* also bool */
  DC_I16 = 6,
  DC_I32 = 7,
  DC_I64 = 8,
  DC_DTYPE_COUNT = 9
};
/* Bytes of one element, or 0 for a value that is not a dtype. */
DC_API size_t dc_dtype_size(int dtype);
/* "fp32", "bf16", ...; "?" for a value that is not a dtype. */
DC_API const char *dc_dtype_name(int dtype);

/* ---- instruction sets -------------------------------------------------------------------------------------------- */
enum dc_isa {
  DC_ISA_BEST = -1, /* of dc_isa_force */
  DC_ISA_SCALAR = 0,
  DC_ISA_AVX2 = 1,
  DC_ISA_AVX512 = 2,
  DC_ISA_AVX512_BF16 = 3,
  DC_ISA_AMX_BF16 = 4, /* and AVX512_BF16; the kernel must have given the process the tiles' state (arch_prctl(2)) */
  DC_ISA_COUNT = 5
};
/* "scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16". */
DC_API const char *dc_isa_name(int isa);
/* 1 if this processor and this binary can run `isa`. */
DC_API int dc_isa_available(int isa);
/* The best set that this processor can run and this binary has no bodies for (a build with DEEPC_NATIVE on another
 * machine); -1 if the best is available. */
DC_API int dc_isa_left_out(void);
/* The instruction set in use: DEEPC_ISA if set, else the best available. *isa is written on DC_OK. DC_E_ENV if
 * DEEPC_ISA is not a name or names a set that this processor lacks. */
DC_API int dc_isa_current(int *isa);
/* Forces one set for the whole process (tests); DC_ISA_BEST: DEEPC_ISA or the best again. Where nobody names a set, an
 * Intel processor with AVX512-BF16 and without AMX multiplies bf16 matrices as AVX-512 does: that is twice as fast.
 * DC_E_UNSUPPORTED if the processor lacks it. Not thread safe. */
DC_API int dc_isa_force(int isa);

/* ---- threads ----------------------------------------------------------------------------------------------------- */
typedef void (*dc_range_fn)(int64_t begin, int64_t end, void *ctx);
typedef void (*dc_parallel_hook)(int64_t begin, int64_t end, int64_t grain, dc_range_fn fn, void *ctx);
/* Calls fn on disjoint sub-ranges of [0, n) that cover it, on up to dc_num_threads() threads (the caller is one of
 * them); cut points are multiples of `grain`. Returns when all are done. Runs inline when n <= grain or one thread is
 * set. Which thread runs what never changes a result: callers write results by index. */
DC_API void dc_parallel_for(int64_t n, int64_t grain, dc_range_fn fn, void *ctx);
/* Hands parallel_for to a framework's pool, so that a process has one pool, not two. NULL restores our own (pthreads).
 */
DC_API void dc_set_parallel_hook(dc_parallel_hook hook, int (*num_threads)(void));
/* n >= 1. Affects our own pool only. */
DC_API int dc_set_num_threads(int n);
DC_API int dc_num_threads(void);

/* ---- memory ------------------------------------------------------------------------------------------------------ */
#define DC_HUGE_PAGE ((size_t)2 << 20)
/* Private anonymous memory, zeroed, faulted in, on huge pages where the kernel gives them. Rounded up to 2 MiB above 1
 * MiB. `color` (0..15) staggers the start address within a huge page: arrays that are walked together get different
 * colors, because arrays congruent modulo 2 MiB evict each other (3x slower, measured). *ptr is 64-byte aligned. Owned
 * by the caller: dc_mem_free(ptr). DC_E_NOMEM names the size and what is available; the limit of the cgroup path and
 * MemAvailable are read first, because the kernel kills instead of failing. bytes == 0 gives a valid pointer. */
DC_API int dc_mem_alloc(size_t bytes, int color, void **ptr);
/* *taken: what dc_mem_alloc(bytes, color) takes of the machine's memory. Allocates nothing. DC_E_INVALID: color, taken.
 */
DC_API int dc_mem_alloc_bytes(size_t bytes, int color, size_t *taken);
/* NULL is allowed. DC_E_INVALID for a pointer that is not from dc_mem_alloc, and for a second free. */
DC_API int dc_mem_free(void *ptr);
/* Bytes that can still be allocated: min over cgroup (v1 and v2, whole path) of limit - usage, and MemAvailable. */
DC_API int dc_mem_available(int64_t *bytes);
/* The same, read from another mount of procfs than /proc (a test's, a host's seen from a container). */
DC_API int dc_mem_available_in(const char *proc, int64_t *bytes);
/* The heap for large blocks that come and go every step (heap.c). `bytes` of memory, at a multiple of 16 KiB, not
 * zeroed; its pages stay resident when it is given back, for the next block, wherever that lies. NULL if the range of
 * addresses is full or could not be reserved: take the memory elsewhere. Any thread. */
DC_API void *dc_heap_take(size_t bytes);
/* The same in whole huge pages, as high in the heap as its free blocks allow: for what must not cut the place of large
 * blocks into pieces. */
DC_API void *dc_heap_take_high(size_t bytes);
/* Gives a block back. 1: done. 0: not from this heap (NULL too). -1: inside the heap but no block starts there, or it
 * was given back before. */
DC_API int dc_heap_give(void *p);
/* Of the heap now. Bytes but where it says otherwise. */
struct dc_heap_stats {
  size_t struct_size; /* set by the caller: sizeof(struct dc_heap_stats), see above */
  void *base;
  int64_t limit, extent; /* of [base, base + limit); extent: up to where blocks ever lay */
  int64_t in_use, peak;  /* in blocks that live: now, and at most so far */
  int64_t free, free_blocks, largest_free; /* in how many holes (a count) */
  int64_t free_resident; /* of `free`, what has not been given back to the system: at most so much of it is resident */
  int64_t decayed; /* given back, in all, because no step had used it for a while (dc_heap_step) */
  int64_t refusals, foreign_frees, steps; /* counts: requests that found no room, dc_heap_give's -1, dc_heap_step */
  int64_t covered; /* in huge pages that blocks lie on: with their memory the heap is as large as the most of this */
  int64_t moved; /* in all: of free huge pages, that went under blocks which had none */
};
/* DC_E_INVALID: out is NULL, or its struct_size is no size that this struct had. */
DC_API int dc_heap_stats(struct dc_heap_stats *out);
/* The end of a training step, called between steps: what has been in no block for 32 steps goes back to the system,
 * huge page by huge page; after 2 steps where the memory that is available (dc_mem_available, looked at once a second)
 * is less than a quarter of the heap's memory. Any thread; about 0.2 us, at every eighth step a look at the free
 * blocks. */
DC_API int dc_heap_step(void);
/* 1 if the range of addresses could be reserved. */
DC_API int dc_heap_usable(void);
/* From how many bytes on torch's CPU tensors are to lie here, decided once: 128 KiB, which is where glibc gives blocks
 * mappings of their own if nobody tells it otherwise; 1 MiB where the user has chosen malloc's thresholds by hand. */
DC_API size_t dc_heap_smallest(void);
/* Gives what this heap and malloc hold free back to the system, once. */
DC_API int dc_heap_trim(void);
/* keep != 0: malloc keeps what is freed, up to blocks of 32 MiB, instead of giving it back to the system; 0: it gives
 * back again what is free at its top beyond 64 MiB. The thresholds stay where glibc's own would come to rest after a
 * block of 32 MiB was freed: glibc can't be told to adapt them again. *kept: 1 if malloc keeps, 0 if not: another
 * malloc than glibc's (jemalloc, tcmalloc, a sanitizer's), or thresholds that the user set (MALLOC_*_, GLIBC_TUNABLES),
 * which stay. Process-wide. DC_E_INVALID: kept is NULL. */
DC_API int dc_heap_keep_small(int keep, int *kept);
/* A range of addresses that has memory only while it is used, and then the heap's (lease.c): what a phase of a step
 * needs and the other phases' tensors can have. One user at a time per lease. */
typedef struct dc_lease dc_lease;
/* *at: the start of `bytes` that read as zeros, on cache lines, with a color as in dc_mem_alloc. *out is owned by the
 * caller: dc_lease_close. DC_E_NOMEM: no addresses are left. */
DC_API int dc_lease_open(size_t bytes, int color, dc_lease **out, void **at);
/* How dc_lease_open(bytes, color) would lay its range out: the user's bytes begin at *begin, and memory comes and goes
 * in pieces of *piece bytes, from 0 on. DC_E_INVALID: color, begin or piece; DC_E_NOMEM as there. */
DC_API int dc_lease_layout(size_t bytes, int color, size_t *begin, size_t *piece);
/* [offset, offset + bytes) has memory until dc_lease_end. What it holds where it had none is anything: write it before
 * it is read. Where the kernel can't move pages (before Linux 5.7) or the heap is not there, the range gets memory of
 * its own and keeps it until a dc_lease_need after the next dc_lease_end finds that it can borrow. DC_E_INVALID outside
 * of the range. */
DC_API int dc_lease_need(dc_lease *lease, size_t offset, size_t bytes);
/* What is the heap's goes back to it and reads as zeros; the contents are lost. */
DC_API int dc_lease_end(dc_lease *lease);
/* *borrowed: bytes that are the heap's now; *own: bytes of memory of its own. */
DC_API int dc_lease_bytes(const dc_lease *lease, int64_t *borrowed, int64_t *own);
/* NULL is allowed. */
DC_API int dc_lease_close(dc_lease *lease);
/* How many of [ptr, ptr + bytes) lie on huge pages now (from /proc/self/smaps). */
DC_API int dc_mem_huge_bytes(const void *ptr, size_t bytes, int64_t *huge);

/* ---- forks (fork.c) ---------------------------------------------------------------------------------------------- */
/* The core's process-wide locks, outermost first: a thread that holds one may take only those below it. Each has one
 * row in the registry. */
enum dc__fork_order {
  DC__FORK_REGISTRY, /* comm/p2p_match.c: open endpoints */
  DC__FORK_SEGMENTS, /* comm/segment.c: segments of communicators */
  DC__FORK_FAMILIES, /* comm/deadlock.c: communicators that belong together */
  DC__FORK_DEPENDS, /* comm/depend.c: communicators that end with others */
  DC__FORK_MARK, /* comm/mark.c: the number of this process */
  DC__FORK_PEERS, /* comm/peers.c: pidfds of other processes */
  DC__FORK_FLIGHT, /* comm/flight.c: the record */
  DC__FORK_FILES, /* offload/file.c: nothing but that it knows of forks */
  DC__FORK_POOL, /* ops/base/pool.c: threads and their job */
  DC__FORK_BLOCKS, /* ops/base/mem.c: blocks of dc_mem_alloc */
  DC__FORK_HEAP, /* ops/base/heap.c: the heap */
  DC__FORK_COUNTS, /* ops/base/base.c: blocks of counters */
  DC__FORK_COUNT
};
/* lock is taken before a fork and given back on both sides. child, if not NULL, is called in the child while all locks
 * are still held; the only thread there is its caller. */
typedef struct dc__fork_entry {
  int order;
  pthread_mutex_t *lock;
  void (*child)(void);
} dc__fork_entry;
/* Any thread, once per row, before the lock is first taken: from a constructor. The entry lives for ever. */
void dc__at_fork(const dc__fork_entry *entry);
/* The row of one of enum dc__fork_order; NULL where none is registered. */
const dc__fork_entry *dc__fork_row(int order);
/* Registers a lock of this file when the library is loaded. */
#define DC__AT_FORK(name, order_, lock_, child_)               \
  __attribute__((constructor)) static void name(void) {        \
    static const dc__fork_entry row = {order_, lock_, child_}; \
    dc__at_fork(&row);                                         \
  }

/* ---- checksums --------------------------------------------------------------------------------------------------- */
/* CRC-32C (Castagnoli, RFC 3720), continued from `crc` (0 to begin). */
DC_API uint32_t dc_crc32c(uint32_t crc, const void *data, size_t bytes);

/* ---- counters and variables -------------------------------------------------------------------------------------- */
enum dc_counter {
#define DC_COUNTER(name, help) DC_COUNTER_##name,
#include "counters.def"
#undef DC_COUNTER
  DC_COUNTER_COUNT
};
DC_API int64_t dc_counter_get(int counter);
DC_API void dc_counter_reset(void);
DC_API const char *dc_counter_name(int counter); /* NULL past the end */
void dc__count(int counter, int64_t n);
/* A block of counters that one thread at a time adds to without locked instructions (dc__count_in): a communicator's.
 * Its numbers are part of dc_counter_get while it is attached, and stay in it after detach. A block lies still while
 * attached. */
typedef struct dc__counts {
  struct dc__counts *next, *prev;
  int64_t v[DC_COUNTER_COUNT]; /* accessed atomically */
} dc__counts;
void dc__counts_attach(dc__counts *b);
void dc__counts_detach(dc__counts *b);
static inline void dc__count_in(dc__counts *b, int counter, int64_t n) {
  __atomic_store_n(&b->v[counter], __atomic_load_n(&b->v[counter], __ATOMIC_RELAXED) + n, __ATOMIC_RELAXED);
}
/* *on: whether the variable `name` is 1, or unset (then `fallback`). DC_E_ENV if it is neither 0 nor 1. */
int dc__env_switch(const char *name, bool fallback, bool *on);
enum { DC__COLORS = 16, DC__COLOR_STEP = 4096 + 256 }; /* of dc_mem_alloc, see mem.c */
/* ---- mappings (map.c) -------------------------------------------------------------------------------------------- */
/* The least multiple of `to` that is not below n. n >= 0, to > 0. */
static inline int64_t dc__round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
/* *on: DEEPC_HUGEPAGES, by the rule of dc__env_switch. */
int dc__hugepages(bool *on);
/* A mapping of `length` bytes on a huge page's boundary: private (fd -1; length: a multiple of DC_HUGE_PAGE), or of the
 * file's first bytes, shared. flags: further ones of mmap. NULL with errno on failure. */
void *dc__map_aligned(size_t length, int flags, int fd);
/* What private memory of the core is to the kernel: on huge pages (DEEPC_HUGEPAGES), in no core dump. */
void dc__map_advise(void *at, size_t bytes);
/* The memory of whole pages [from, from + bytes) of one private mapping to [to, to + bytes), whose own is dropped; what
 * is read at `from` then is zeros. Page tables change, no byte is copied: 2 to 3 us a huge page. false: nothing moved
 * (the kernel can't, before Linux 5.7, or has no room for a mapping more), and `to` holds what it held or is empty. */
bool dc__map_move(void *from, void *to, size_t bytes);
/* Gives every page of [base, base + length) memory, without changing what it holds; peers may write there meanwhile.
 * fd: of the file whose byte `at` is mapped at base, or -1. 0, or the errno of what there was no memory for. */
int dc__fault_in(void *base, size_t length, int fd, int64_t at);
/* *available: dc_mem_available, after the heap and malloc gave back what they hold free if it was less than `bytes`:
 * who needs more than this is to be refused. proc: "/proc", or a test's. */
int dc__mem_room(const char *proc, int64_t bytes, int64_t *available);
/* Row i of env.def, which says what *values means; *value_or_default is the environment's where it is set and not
 * empty. All static or the environment's own. DC_E_INVALID past the end. */
DC_API int dc_env_at(int i, const char **name, const char **values, const char **value_or_default, const char **help);

#ifdef __cplusplus
}
#endif
#endif
