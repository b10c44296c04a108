/* p2p.h: messages between two ranks of a dc_comm (send, receive, and their non-blocking forms).
 *
 * Messages from one rank to another with the same tag arrive in the order in which they were sent; a receive matches
 * the oldest message of its source and tag (MPI's rule). Small messages are eager: the send is complete when its data
 * lies in the pair's ring. Larger ones are a rendezvous: the receiver copies straight from the sender's memory where
 * the kernel allows that (process_vm_readv), needing nothing of the sender meanwhile; else through the ring, chunk by
 * chunk, while both sides wait or test. The kind of a message follows from its size alone.
 *
 * A receive must have the sender's dtype and count: otherwise both sides get DC_E_MISMATCH naming both calls, and the
 * communicator is broken. Waits look after the peers as collectives do (comm.h): DC_E_PEER_DIED, DC_E_TIMEOUT,
 * DC_E_ABORTED.
 *
 * Threads: these functions may run beside a collective of the same dc_comm in another thread, and in several threads.
 * They never enter dc__enter()'s lock; they have their own. A buffer belongs to the request until the request is
 * complete. */
#ifndef DEEPC_P2P_H
#define DEEPC_P2P_H

#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DC_ANY_SOURCE (-1)

typedef struct dc_request dc_request;

/* Starts a send of buf[count] to group rank dst (not oneself). *out is owned: dc_request_free. */
DC_API int dc_isend(dc_comm *c, const void *buf, int64_t count, int dtype, int dst, int64_t tag, const char *where,
                    dc_request **out);
/* Starts a receive into buf[count] from group rank src or DC_ANY_SOURCE. `where` (of both): the caller's line for
 * messages, or NULL; copied. */
DC_API int dc_irecv(dc_comm *c, void *buf, int64_t count, int dtype, int src, int64_t tag, const char *where,
                    dc_request **out);
/* 1 in *done when complete (progresses all requests of the communicator). */
DC_API int dc_request_test(dc_request *r, int *done);
/* Blocks until complete; timeout_ms <= 0: the communicator's. A request's error is returned by every later call on it.
 */
DC_API int dc_request_wait(dc_request *r, int64_t timeout_ms);
/* Group rank that a completed receive came from. */
DC_API int dc_request_source(const dc_request *r);
/* Frees; an incomplete receive is withdrawn, an incomplete send is waited for with the communicator's time-out. NULL is
 * fine. */
DC_API int dc_request_free(dc_request *r);
/* Blocking forms. */
DC_API int dc_send(dc_comm *c, const void *buf, int64_t count, int dtype, int dst, int64_t tag);
DC_API int dc_recv(dc_comm *c, void *buf, int64_t count, int dtype, int src, int64_t tag, int *source);

/* ---- for arena.c and open.c: the pairs' rings lie in the communicator's arena --------------------------------------
 */
/* Bytes of the area for `size` ranks (a multiple of 4096; the area is zeroed and 64-byte aligned). */
int64_t dc__p2p_bytes(int size);
/* Called by dc_comm_open when all ranks have mapped the area, and before it is unmapped (also in a forked child).
 * c->p2p is p2p.c's own. */
int dc__p2p_open(dc_comm *c, void *area);
void dc__p2p_close(dc_comm *c);

#ifdef __cplusplus
}
#endif
#endif
