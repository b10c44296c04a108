/* flight.h: the flight record: the last DC_FLIGHT_CALLS calls of this process over all its communicators, and which groups it has.
 *
 * The record lies in an anonymous memfd named "deepc-flight" that stays open (close-on-exec, MADV_DONTFORK), so that another process of the
 * same user can read that of a hung one through /proc/PID/fd (`deepc doctor PID`), and nothing is left when the process ends. After an error that breaks a communicator it is also
 * written to $DEEPC_FLIGHT_DIR/deepc-flight-<rank>-<pid>.bin if that variable names a folder. Rows are written by the thread
 * that calls and read without locks: a row whose `number` changed while it was read is dropped by the reader. */
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
  int64_t count, tag, seq;     /* seq: number of the call in its group */
  int32_t group;               /* index into groups */
  int32_t op, dtype, red_op, root, status; /* dc_call_op; status: DC_OK or the error */
  char where[64];              /* the caller's line */
} dc_flight_row;

/* Copies the newest rows of this process, oldest first, at most `capacity`; *count of them. */
DC_API int dc_flight_read(dc_flight_row *rows, int64_t capacity, int64_t *count);
/* The record of another process's memfd or of a dump file, given as an open descriptor (borrowed): the same; and the text of the header as JSON
 * (pid, rank, world, groups with label, rank, size, members) into text[room]. DC_E_INVALID naming what is wrong with the file. */
DC_API int dc_flight_parse(int fd, dc_flight_row *rows, int64_t capacity, int64_t *count, char *text, int64_t room);
/* Name of a dc_call_op ("all_reduce"), "?" if there is none. */
DC_API const char *dc_call_name(int op);

/* ---- for shm.c, coll.c, p2p.c: called with c entered; cheap (two clock reads, one row) ------------------------------- */
int dc__flight_group_open(const dc_comm *c);                 /* at dc_comm_open; the returned index goes to c->flight_group */
void dc__flight_group_close(int group);
uint64_t dc__flight_begin(const dc_comm *c, const dc_call *call, const char *where); /* returns the row's number */
void dc__flight_end(uint64_t number, int status);            /* non-zero status that broke c also dumps to $DEEPC_FLIGHT_DIR */

#ifdef __cplusplus
}
#endif
#endif
