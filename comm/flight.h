/* flight.h: the flight record: the last DC_FLIGHT_CALLS calls of this process over all its communicators, and which
 * groups it has.
 *
 * The record lies in an anonymous memfd named "deepc-flight" that stays open (close-on-exec, MADV_DONTFORK), so that
 * another process of the same user can read that of a hung one through /proc/PID/fd (`deepc doctor PID`), and nothing
 * is left when the process ends. After an error that breaks a communicator it is also written to
 * $DEEPC_FLIGHT_DIR/deepc-flight-<rank>-<pid>.bin if that variable names a folder. Rows are written by the thread that
 * calls and read without locks: a row whose `number` changed while it was read is dropped by the reader. */
#ifndef DEEPC_FLIGHT_H
#define DEEPC_FLIGHT_H

#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DC_FLIGHT_CALLS 1024
#define DC_FLIGHT_GROUPS 256

typedef struct dc_flight_row {
  uint64_t number;             /* of the call in this process, from 1; 0: empty. Written last */
  int64_t begin_ns, end_ns;    /* CLOCK_MONOTONIC; end_ns 0: not finished */
  int64_t count, tag, seq;     /* seq: number of the call in its group; of a message: of p2p.c's own */
  int32_t group;               /* index into groups; -1: not known any more */
  int32_t op, dtype, red_op, root, status; /* dc_call_op; status: DC_OK or the error */
  int32_t ranks;               /* size of the group */
  int32_t reserved;
  char where[64];              /* the caller's line */
} dc_flight_row;

/* Copies the newest rows of this process, oldest first, at most `capacity`; *count of them. */
DC_API int dc_flight_read(dc_flight_row *rows, int64_t capacity, int64_t *count);
/* The record of another process's memfd or of a dump file, given as an open descriptor (borrowed): the same; and the
 * text of the header as JSON (pid, rank, world, groups with label, rank, size, members) into text[room]. DC_E_INVALID
 * naming what is wrong with the file. */
DC_API int dc_flight_parse(int fd, dc_flight_row *rows, int64_t capacity, int64_t *count, char *text, int64_t room);
/* The descriptor of this process's record (borrowed), or -1 if there is none: no group was opened yet, or no memory was
 * left for it. */
DC_API int dc_flight_fd(void);
/* For who wants every call and not only the newest (the comms logger): from now on finished calls are also kept in a
 * private ring of `capacity` rows (the first caller's); 0 stops that. */
DC_API int dc_flight_log(int64_t capacity);
/* Takes from that ring what has not been taken, oldest first, at most `capacity` rows; `number` counts the ring's own
 * rows; group is an index at the time of the call. *lost: rows that were written over before they were taken. A row
 * that another thread is writing at this moment, and what is behind it, is left for the next call. */
DC_API int dc_flight_log_take(dc_flight_row *rows, int64_t capacity, int64_t *count, int64_t *lost);
/* Name of a dc_call_op ("all_reduce"), "?" if there is none. */
DC_API const char *dc_call_name(int op);

/* ---- for open.c, segment.c, coll.c, p2p.c: called with c entered; cheap (two clock reads, one row)
 * --------------------------- */
int dc__flight_group_open(const dc_comm *c); /* at dc_comm_open; the returned index goes to c->flight_group */
void dc__flight_group_close(int group);
/* After c->seq was counted up. Returns the row's number, 0 if the call is not recorded. */
uint64_t dc__flight_begin(const dc_comm *c, const dc_call *call);
/* The same without c entered, for messages: they have numbers of their own, and c->seq may be changing in another
 * thread. `where`: 64 bytes, padded with zeros. */
uint64_t dc__flight_begin_as(const dc_comm *c, const dc_call *call, const char *where, int64_t seq);
void dc__flight_end(uint64_t number, int status); /* a status that breaks a group also dumps to $DEEPC_FLIGHT_DIR */
/* The same for an exchange step, which is begun and ended by different calls: from its post to its done. */
void dc__flight_step_begin(const dc_comm *c, const dc_call *call, int64_t step);
void dc__flight_step_end(const dc_comm *c, int64_t step, int status);
/* Names a group across its ranks, for dc_comm.id. */
uint64_t dc__flight_id(const char *address);

#ifdef __cplusplus
}
#endif
#endif
