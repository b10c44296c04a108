/* comm.h: collectives between the ranks of one node, on shared memory.
 *
 * A dc_comm is a group of processes of one node that agreed on `address`. Its shared segment (anonymous memfd of fixed,
 * sealed size, handed out by group rank 0 over an abstract Unix socket with SCM_RIGHTS to peers of its own uid that
 * know the group's secret) holds one header and, per rank, `slots` staging slots of `slot_bytes`. Nothing has a name in
 * the file system; all of it goes with the last process.
 *
 * One protocol carries everything, the exchange: every call is a sequence of steps; step k of a rank lives in its slot
 * k % slots. A rank fills its slot, posts step k, waits until all posted step k, reads the peers' slots, marks step k
 * done. A slot is filled again for step k + slots only after every rank marked step k done. Each post carries a
 * fingerprint of the call (op, dtype, count, root, reduce op, tag); peers compare before they read a byte.
 *
 * Waits spin for a while (DEEPC_SPIN_US), then sleep on a futex, and look after the peers (pidfd) at least every 20 ms:
 * a dead rank gives DC_E_PEER_DIED naming rank, pid and call; the time-out gives DC_E_TIMEOUT and tells where every
 * rank is. After any error but DC_E_INVALID/DTYPE/SHAPE of the local arguments the communicator is broken: the error is
 * shown to all ranks, and every further call returns it at once.
 *
 * Threads: one call at a time per dc_comm (a second thread gets DC_E_STATE); different dc_comms are independent. Fork:
 * a child must not use the parent's dc_comm (DC_E_STATE); staging is not inherited (MADV_DONTFORK). */
#ifndef DEEPC_COMM_H
#define DEEPC_COMM_H

#include "../ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DC_COMM_MAX_RANKS 256
#define DC_COMM_SECRET 16 /* bytes */

typedef struct dc_comm dc_comm;
typedef struct dc_segment dc_segment;

typedef struct dc_comm_config {
  size_t struct_size;         /* sizeof(dc_comm_config): see base.h */
  int32_t rank, size;         /* in the group; 1 <= size <= DC_COMM_MAX_RANKS */
  const char *address; /* the group's unique abstract socket name, the same on all ranks, <= 90 bytes. Any process
                          of the machine can read it in /proc/net/unix while ranks join: see secret */
  const char *label; /* for messages: "default_pg", "dp"; copied */
  const int32_t *global_rank; /* [size] names of the ranks in messages; NULL: 0..size-1 */
  int64_t timeout_ms; /* of open and of every wait; > 0 */
  int64_t slot_bytes; /* multiple of 4096; > 0 */
  int32_t slots; /* >= 2 */
  int32_t flags; /* 0 */
  const uint8_t *secret; /* [DC_COMM_SECRET] random bytes that only the group's ranks know, the same on all: who
                            does not know them is not let in. Borrowed for the call. NULL: zeros */
  const int32_t *pid; /* [size] the ranks' processes as this one numbers them, 0: not known. One that ends before it
                         has joined is DC_E_PEER_DIED for all. Borrowed for the call. NULL: none is known */
} dc_comm_config;

/* Joins the group. Collective. *out is owned: dc_comm_close. */
DC_API int dc_comm_open(const dc_comm_config *config, dc_comm **out);
/* *bytes: the shared memory of a communicator of `size` ranks with so many slots, once per group, however many ranks
 * map it. Opens nothing. DC_E_INVALID for what dc_comm_open refuses. */
DC_API int dc_comm_bytes(int32_t size, int32_t slots, int64_t slot_bytes, int64_t *bytes);
/* Leaves. Not collective; after a normal close peers that still wait see DC_E_PEER_DIED with "left the group". NULL is
 * fine. */
DC_API int dc_comm_close(dc_comm *c);
/* Marks the communicator broken on every rank, from any thread: all waits return DC_E_ABORTED naming this rank and
 * `reason`. The caller keeps others from closing `c` meanwhile: a wait may return before this does. */
DC_API int dc_comm_abort(dc_comm *c, const char *reason);
/* Says that c and `to`, of the same ranks in the same order, are called by one thread at a time and in one order on all
 * ranks, together with all that either was related to before: then ranks which wait for each other in different ones of
 * them get DC_E_MISMATCH, with who waits where, instead of waiting for ever (comm/deadlock.c). Local: every rank calls
 * it, while no other thread is in one of them. Ends when c or `to` is closed. DC_E_INVALID if their ranks differ. */
DC_API int dc_comm_relate(dc_comm *c, dc_comm *to);
/* Says that the calling thread, which is the one that trains, calls both c (with what is related to it) and `to`, of
 * the same ranks in the same order, as other threads may too: then ranks whose training threads wait for each other,
 * one in c's and one in `to`'s, get DC_E_MISMATCH as well. One thread a process: the one that called this last. Local.
 * Ends when c or `to` is closed. DC_E_INVALID if their ranks differ. */
DC_API int dc_comm_meet(dc_comm *c, dc_comm *to);
/* Says that c and `on` are groups of one model, of any ranks: from now on a wait in c ends also when `on` is broken,
 * with its error, or 2 s after a rank of `on` has ended without leaving it (DC_E_PEER_DIED). Local and one way. Ends
 * when c or `on` is closed. */
DC_API int dc_comm_depend(dc_comm *c, dc_comm *on);
/* As dc_comm_abort with an error that another group has ended with: all waits return `status` with this text, as it is.
 * DC_E_INVALID if status is none of an error. */
DC_API int dc_comm_fail(dc_comm *c, int status, const char *text);
/* For who waits for `rank` of c elsewhere (until it has opened another group), to be called again and again meanwhile:
 * DC_E_PEER_DIED when its process has ended, with `what` ("to open group dp"); DC_E_MISMATCH when it waits for this
 * rank in c or what c is related to. The first leaves c sound. Between two of these calls the caller tests whether what
 * it waits for is there. rank -1: the wait is over; also while a call of another thread is in progress in c. */
DC_API int dc_comm_waits(dc_comm *c, int rank, const char *what);
/* This thread makes calls for another one, which goes on with something else: while *joined is 0 (no thread waits for
 * what is made here) its waits are none of a deadlock, since what they wait for may come from that other thread. joined
 * is borrowed until the thread ends; NULL: for itself again. */
DC_API void dc_comm_thread_serves(const int32_t *joined);
DC_API int dc_comm_rank(const dc_comm *c);
DC_API int dc_comm_size(const dc_comm *c);
/* The time-out of the calls that follow (milliseconds > 0); until then that of the configuration. */
DC_API int dc_comm_set_timeout(dc_comm *c, int64_t timeout_ms);
/* Sets the text that names the caller in messages (e.g. "train.py:31"), until it is set again. Copied, cut at 63 bytes.
 */
DC_API int dc_comm_set_caller(dc_comm *c, const char *where);
/* "" or the text of the error that broke the communicator. */
DC_API const char *dc_comm_error(const dc_comm *c);

/* A shared segment of `bytes` (rounded up to 2 MiB) mapped by every rank of c: zeroed, faulted in, on huge pages where
 * possible (touch one byte per 2 MiB, then MADV_COLLAPSE in rank 0, then MADV_POPULATE_WRITE in all). Collective; all
 * ranks pass the same size (else DC_E_MISMATCH). Before allocating, what is available is checked (DC_E_NOMEM on all
 * ranks). A communicator has 64 places, which are free again when all ranks have freed their segment; without one all
 * ranks get DC_E_STATE. c stays usable after both. The segment outlives c. *base is this rank's address. A forked child
 * inherits the mapping of a segment (unlike staging). */
DC_API int dc_segment_create(dc_comm *c, int64_t bytes, dc_segment **out, void **base);
/* Gives the segment up, in any thread, also while a collective of its communicator runs: a call in progress keeps the
 * mapping until it ends. The caller does not use the memory any more; it goes when the last rank has given it up. */
DC_API int dc_segment_free(dc_segment *s);
/* What huge pages were got, of how many bytes. */
DC_API int dc_segment_info(const dc_segment *s, int64_t *bytes, int64_t *huge_bytes);

/* ---- collectives (blocking). Shapes and dtypes agree on all ranks, or all ranks get DC_E_MISMATCH; who reads nothing
 * of his peers (the root of a small broadcast or scatter, the other ranks of a small reduce or gather) does not wait
 * and gets it from the next call that does. Floating sums are done in fp32 (fp64 for DC_F64) in rank order with one
 * rounding at the end, so results have equal bits on every rank and in every run, whatever the chunking. `in` may equal
 * `out` where their sizes agree. `tag` is part of the fingerprint (0 if none). ------------------------------- */
DC_API int dc_barrier(dc_comm *c, int64_t tag);
/* out[count] = reduction over ranks of in[count]. */
DC_API int dc_all_reduce(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int64_t tag);
/* out[count] = slice `rank` of the reduction of in[size * count]. */
DC_API int dc_reduce_scatter(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int64_t tag);
/* out[size * count] = in[count] of every rank in rank order. `in` may be out + rank * count (in place: that part is not
 * copied). */
DC_API int dc_all_gather(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int64_t tag);
/* buf[count] of root to all. */
DC_API int dc_broadcast(dc_comm *c, void *buf, int64_t count, int dtype, int root, int64_t tag);
/* out block j = block `rank` of rank j's in; blocks of `count`. in != out. */
DC_API int dc_all_to_all(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int64_t tag);
/* Blocks of any sizes (MPI_Alltoallv): in_counts[size] elements for each rank lie behind each other in `in`,
 * out_counts[size] from each rank behind each other in `out`. Counts are borrowed for the call. Ranks exchange their
 * counts first: where out_counts[j] of rank i differs from in_counts[i] of rank j all ranks get DC_E_MISMATCH naming
 * both; so does a rank that is alone, and nothing is written. in != out. */
DC_API int dc_all_to_allv(dc_comm *c, const void *in, const int64_t *in_counts, void *out, const int64_t *out_counts,
                          int dtype, int64_t tag);
/* On `root`: out[count] = reduction over ranks of in[count]; elsewhere `out` is not touched and may be NULL. */
DC_API int dc_reduce_to(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int op, int root, int64_t tag);
/* On `root`: out[size * count] = in[count] of every rank in rank order; elsewhere `out` is not touched and may be NULL.
 */
DC_API int dc_gather(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int root, int64_t tag);
/* out[count] = block `rank` of root's in[size * count]; elsewhere `in` is not read and may be NULL. */
DC_API int dc_scatter(dc_comm *c, const void *in, void *out, int64_t count, int dtype, int root, int64_t tag);

/* Buffers that lie in a dc_segment made by this dc_comm (on every rank; in and out may be of different segments) are
 * registered: large calls read and write them where they lie. Others are staged, or read straight from the peer's
 * memory where the kernel allows that (process_vm_readv). Which it is never changes a bit of the result. Who passes a
 * peer a registered buffer lets it write that buffer's output range during the call, and nothing else, nor after: a
 * call that fails returns when no living peer works in its buffers any more. Only a peer that stays stopped within the
 * call for longer than the time-out can't be waited for; the error then names it. */

/* ---- the exchange itself, for callers that fill and read slots in place ------------------------------------------ */
enum dc_call_op {
  DC_CALL_BARRIER = 1,
  DC_CALL_ALL_REDUCE,
  DC_CALL_REDUCE_SCATTER,
  DC_CALL_ALL_GATHER,
  DC_CALL_BROADCAST,
  DC_CALL_ALL_TO_ALL,
  DC_CALL_SEGMENT,
  DC_CALL_BUCKET,
  DC_CALL_USER,
  DC_CALL_ALL_TO_ALLV,
  DC_CALL_REDUCE,
  DC_CALL_GATHER,
  DC_CALL_SCATTER,
  DC_CALL_SEND,
  DC_CALL_RECV
};
typedef struct dc_call {
  int32_t op, dtype, red_op, root;
  int64_t count, tag;
} dc_call;
/* Step numbers start at 0 and rise by one per begin. *slot is this rank's staging for *step, writable until post.
 * Blocks until every rank marked step - slots done. At most `slots` steps may be open (begun, not done). */
DC_API int dc_exchange_begin(dc_comm *c, int64_t *step, void **slot);
/* 1 in *ready if begin would not block. */
DC_API int dc_exchange_can_begin(dc_comm *c, int *ready);
/* Publishes the oldest begun and unposted step with its fingerprint. */
DC_API int dc_exchange_post(dc_comm *c, const dc_call *call);
/* Waits until all ranks posted `step`, then compares fingerprints. */
DC_API int dc_exchange_wait(dc_comm *c, int64_t step);
/* 1 in *ready if wait would not block (errors, a dead peer or a mismatch included: they are returned). */
DC_API int dc_exchange_test(dc_comm *c, int64_t step, int *ready);
/* The slot of `rank` for `step`; valid between wait and done. */
DC_API const void *dc_exchange_peer(const dc_comm *c, int rank, int64_t step);
/* This rank has read all it needs of `step`. Steps are marked in order. */
DC_API int dc_exchange_done(dc_comm *c, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
