/* offload.h: files that hold tensors: read and written past the page cache, many blocks at a time, whole or not at all.
 *
 * Two layers, each usable alone:
 *  - dc_file: bytes at offsets, in one call or in the background (dc_io), from and to vectors of pieces.
 *  - dc_extents: a file of numbered extents with generations and checksums. What is written counts from
 *    dc_extents_commit on, all of it or none; a process that is killed at any moment leaves the generation before or
 *    the one after.
 *  - dc_stream: arrays that lie in a scratch file and are worked on cell by cell, disk and arithmetic at the same time.
 *
 * Beneath both is a ring (ring.h): io_uring, or threads with pread and pwrite.
 *
 * Conventions: base.h's. Sizes and offsets are bytes. Memory is the caller's and must stay, unchanged (writes) or
 * untouched (reads), until its request is complete. All functions may be called from any thread, but a dc_io from one
 * at a time. A call that fails leaves the handle usable. Failures of the disk are
 *   DC_E_IO       a read, write or sync failed, or a file ended early
 *   DC_E_NOSPC    the file system, a quota or a limit on the size of files has no room
 *   DC_E_CORRUPT  what a file holds is torn, stale or damaged
 * and their text names the file, the offset or extent, and errno.
 *
 * After fork() the child can't use what the parent opened (DC_E_STATE says so): it may close it, which waits for
 * nothing and leaves the parent's requests alone, and open the file again. */
#ifndef DEEPC_OFFLOAD_H
#define DEEPC_OFFLOAD_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of offsets, sizes and memory that go past the page cache and are not copied. */
#define DC_DISK_ALIGN 4096

typedef struct dc_file dc_file;
typedef struct dc_io dc_io;
typedef struct dc_extents dc_extents;

/* ---- files ------------------------------------------------------------------------------------------------------- */
enum dc_ring_kind {
  DC_RING_AUTO = 0, /* DEEPC_RING if set; else io_uring where the kernel allows it, else threads */
  DC_RING_URING = 1, /* DC_E_UNSUPPORTED where there is none */
  DC_RING_THREADS = 2, /* pread and pwrite in threads of the file's own */
};
enum dc_file_flag {
  DC_FILE_WRITE = 1, /* else for reading only */
  DC_FILE_CREATE = 2, /* where there is no such file, make it (mode 0600) */
  DC_FILE_TRUNCATE = 4, /* what it held goes; a block device keeps it */
  DC_FILE_BUFFERED = 8, /* through the page cache, without O_DIRECT */
  DC_FILE_NAMELESS = 16, /* path is a folder: a new file there without a name, which goes with the process however it
                            ends; with DC_FILE_WRITE */
};
typedef struct dc_file_config {
  size_t struct_size; /* set by the caller: sizeof(struct dc_file_config), see base.h */
  const char *path; /* copied */
  int32_t flags; /* of dc_file_flag */
  int32_t ring; /* of dc_ring_kind */
  int32_t depth; /* blocks on their way at a time, 1 .. 4096; 0: 64 */
  int32_t threads; /* of DC_RING_THREADS, 1 .. 256; 0: 8 */
  int64_t block_bytes; /* a request is cut into blocks of so many bytes, a multiple of DC_DISK_ALIGN up to 1 GiB; 0: 1
                          MiB */
  int64_t reserve_bytes; /* the file gets at least this size, and room for it on the disk, at once; 0: it grows. A
                            block device has its size: DC_E_NOSPC beyond it */
} dc_file_config;
/* *out is owned: dc_file_close. DC_E_INVALID: a value out of range. DC_E_IO: the file can't be opened. DC_E_NOSPC: no
 * room for reserve_bytes. DC_E_UNSUPPORTED: DC_RING_URING where there is none. */
DC_API int dc_file_open(const dc_file_config *config, dc_file **out);
/* Waits for what is on its way. NULL is allowed. DC_E_STATE, and nothing is closed, while there is a dc_io of the file
 * that was not freed. */
DC_API int dc_file_close(dc_file *file);

typedef struct dc_file_info {
  size_t struct_size; /* set by the caller */
  int64_t size_bytes; /* of the file, now */
  int64_t block_bytes;
  int64_t registered_bytes; /* of memory that is registered with the ring (dc_file_register) */
  int32_t depth;
  int32_t direct; /* 1: past the page cache */
  const char *ring; /* "io_uring" or "threads"; static storage */
  const char *why; /* why not io_uring, why not O_DIRECT, why memory is not registered; "" if all is as wished. Lives as
                      long as the file; its text may change with later calls. */
} dc_file_info;
DC_API int dc_file_get_info(dc_file *file, dc_file_info *info);

/* A run of bytes in memory and where in the file it lies. */
typedef struct dc_piece {
  void *data; /* may be NULL if bytes is 0 */
  int64_t bytes;
  int64_t offset;
} dc_piece;
/* Read or write all pieces, of any number, size and alignment, and wait. Pieces of one call that overlap in the file
 * are written in no particular order. What is aligned to DC_DISK_ALIGN in memory and file is not copied; other memory
 * is, and the parts of blocks at the edges of a piece go through the page cache. The first failure is returned; which
 * of the bytes were moved before it is unknown. DC_E_IO where a read goes past the end of the file. */
DC_API int dc_file_read(dc_file *file, const dc_piece *pieces, int64_t n);
DC_API int dc_file_write(dc_file *file, const dc_piece *pieces, int64_t n);
/* The same in the background; `pieces` itself is copied. Up to `depth` blocks start at once, later ones as dc_io_test
 * or dc_io_wait of any request of the file make room. *out is owned: dc_io_free. */
DC_API int dc_file_read_start(dc_file *file, const dc_piece *pieces, int64_t n, dc_io **out);
DC_API int dc_file_write_start(dc_file *file, const dc_piece *pieces, int64_t n, dc_io **out);
/* Waits for all requests that were started before, then makes what they wrote durable (fdatasync). Failures of those
 * requests are theirs to tell. */
DC_API int dc_file_sync(dc_file *file);
/* Registers [data, data + bytes), aligned to DC_DISK_ALIGN, with the ring, which spares io_uring looking its pages up
 * for every block; the memory must stay until dc_file_close. *registered: 0 where that can't be (threads;
 * RLIMIT_MEMLOCK; 16 ranges are the most), which dc_file_info.why explains and costs nothing but that. DC_E_STATE while
 * requests are on their way. */
DC_API int dc_file_register(dc_file *file, void *data, int64_t bytes, int *registered);

/* ---- requests ---------------------------------------------------------------------------------------------------- */
/* *done: 1 when it is complete, well or not. Never blocks. */
DC_API int dc_io_test(dc_io *io, int *done);
/* Blocks until it is complete and returns what became of it; again at every later call. timeout_ms > 0: DC_E_TIMEOUT
 * after so long; the request goes on. */
DC_API int dc_io_wait(dc_io *io, int64_t timeout_ms);
/* Waits until it is complete, however long, and frees. NULL is allowed. */
DC_API int dc_io_free(dc_io *io);

/* ---- extents ----------------------------------------------------------------------------------------------------- */
/* Opens a file of extents, or makes it. capacity[count]: bytes that extent i may hold; NULL and 0 take what the file
 * says. copies: 2, or 1 to take half the space, where a process that is killed while it writes an extent leaves it torn
 * (DC_E_CORRUPT when it is read); 0: 2, or what the file says. A file that is empty or new is laid out, with all its
 * space reserved; one that has other capacities or copies than asked for is DC_E_SHAPE; one that is not of extents, or
 * damaged, DC_E_CORRUPT. What was written after the last commit is undone. DC_E_STATE: another process has it open for
 * writing; then DC_FILE_TRUNCATE has emptied nothing. */
DC_API int dc_extents_open(const dc_file_config *config, const int64_t *capacity, int64_t count, int copies,
                           dc_extents **out);
/* Does not commit. As dc_file_close. */
DC_API int dc_extents_close(dc_extents *x);
/* The file beneath, for dc_file_get_info and dc_file_register; not owned. NULL for NULL. */
DC_API dc_file *dc_extents_file(dc_extents *x);
typedef struct dc_extents_info {
  size_t struct_size; /* set by the caller */
  int64_t count, generation; /* generation: the last that was committed; 0: none was */
  int32_t copies, reserved;
} dc_extents_info;
DC_API int dc_extents_get_info(dc_extents *x, dc_extents_info *info);
typedef struct dc_extent_info {
  size_t struct_size; /* set by the caller */
  int64_t capacity, bytes, generation; /* of what a read gives now; generation 0: it was never written */
} dc_extent_info;
DC_API int dc_extent_get_info(dc_extents *x, int64_t extent, dc_extent_info *info);
/* Bytes on the disk that a file of these extents takes. DC_E_OVERFLOW, DC_E_INVALID. */
DC_API int dc_extents_bytes(const int64_t *capacity, int64_t count, int copies, int64_t *bytes);
/* Writes data[bytes] as the extent's value of the generation in the making; readers of this handle see it at once.
 * DC_E_SHAPE: more than its capacity. DC_E_STATE: a request on the extent is on its way. After a failed write the
 * extent must be written again, or all be rolled back, before dc_extents_commit. */
DC_API int dc_extent_write(dc_extents *x, int64_t extent, const void *data, int64_t bytes);
DC_API int dc_extent_write_start(dc_extents *x, int64_t extent, const void *data, int64_t bytes, dc_io **out);
/* Reads the whole value; bytes must be its size (DC_E_SHAPE). DC_E_CORRUPT names extent, generation and what is wrong:
 * a checksum that differs (torn, damaged), or another generation than was written last (stale). DC_E_STATE: it was
 * never written, or a write is on its way. */
DC_API int dc_extent_read(dc_extents *x, int64_t extent, void *data, int64_t bytes);
/* The checksum is looked at in dc_io_wait. */
DC_API int dc_extent_read_start(dc_extents *x, int64_t extent, void *data, int64_t bytes, dc_io **out);
/* Waits for all writes and makes the generation in the making the file's. durable: also against a loss of power
 * (fdatasync, twice); 0: against the end of the process. DC_E_STATE, and nothing is changed, if a write failed and was
 * not repeated, or if an fdatasync has failed that was to bring an extent to disk, and it was not written since: what
 * the next fdatasync says of it is not true. If the commit itself fails the generation stays in the making and may be
 * committed again; where it may have arrived all the same, extents can't be written before that, or before a rollback
 * (DC_E_STATE). */
DC_API int dc_extents_commit(dc_extents *x, int durable);
/* Back to the last commit that did not fail: what was written since is gone. Writes to the file if a commit failed. */
DC_API int dc_extents_rollback(dc_extents *x);

/* ---- streams ----------------------------------------------------------------------------------------------------- */
/* Arrays of equally many elements on disk, for work that goes through all of them in order: reads run ahead of it and
 * writes behind. A cell is the same stretch of elements of every array; its data come together, in memory of the
 * stream's, are changed there, and go back. The file is scratch: checksums and generations are kept in memory, and what
 * is read must be what was written last, else DC_E_CORRUPT names array, elements and generation. Arrays begin as zeros,
 * which cost no transfer.
 *
 * Nothing is lost by a failed transfer: a cell that could not be written stays in memory, is what later calls see, and
 * is written again by dc_stream_begin and dc_stream_flush. One thread at a time. */
typedef struct dc_stream dc_stream;
enum { DC_STREAM_ARRAYS = 16 }; /* the most of one stream */
typedef struct dc_stream_array {
  const char *name; /* for texts of failures; copied */
  int64_t elem_bytes; /* of an element, from 1 on */
} dc_stream_array;
typedef struct dc_stream_config {
  size_t struct_size; /* set by the caller */
  const dc_stream_array *arrays;
  int64_t narrays; /* 1 .. DC_STREAM_ARRAYS */
  int64_t elems; /* of each array, from 1 on */
  int64_t cell_elems; /* of a cell, from 1 on; the last cell may have less */
  int32_t slots; /* cells in memory at a time, from 2 on; 4 let reads, arithmetic and writes overlap */
  int32_t reserved; /* 0 */
  /* [narrays], or NULL: how many elements of each array share one item of elem_bytes, as those of a code's byte or of a
   * block's scale; 1 elsewhere. Cells, if there are several, are of multiples of it. Windows count an array's items. */
  const int64_t *per;
} dc_stream_config;
/* What a stream takes: *disk and *memory bytes. Opens nothing. Errors as dc_stream_open. */
DC_API int dc_stream_bytes(const dc_stream_config *config, int64_t *disk, int64_t *memory);
/* file: with DC_FILE_WRITE, most often DC_FILE_NAMELESS; reserve_bytes is the stream's matter. All space on disk and
 * all memory is taken here. *out is owned: dc_stream_close. DC_E_INVALID, DC_E_OVERFLOW, DC_E_NOMEM; as dc_file_open.
 */
DC_API int dc_stream_open(const dc_file_config *file, const dc_stream_config *config, dc_stream **out);
/* Waits for what is on its way; what was not written is lost with the stream. NULL is allowed. */
DC_API int dc_stream_close(dc_stream *s);
/* The file beneath, for dc_file_get_info; not owned. NULL for NULL. */
DC_API dc_file *dc_stream_file(dc_stream *s);
typedef struct dc_stream_info {
  size_t struct_size; /* set by the caller */
  int64_t cells, cell_elems, disk_bytes, memory_bytes;
  int64_t unsaved; /* cells with values that are not on disk (yet) and live in memory alone */
  int64_t wait_ns; /* that calls of this stream waited for the disk so far */
} dc_stream_info;
DC_API int dc_stream_get_info(dc_stream *s, dc_stream_info *info);

/* A walk over cells [first, last) in their order:
 *
 *   dc_stream_begin; for each cell { dc_stream_next; work on cell.data; dc_stream_done } dc_stream_end
 *
 * reads: bit k: the values of array k are wanted; data of others hold anything and must be written whole if at all.
 * After a failure the walk is over: dc_stream_end. Cells that were done are done, whatever became of their writes; the
 * one that dc_stream_next failed to give, and those after it, are untouched, and a walk from there on may be begun. */
typedef struct dc_stream_cell {
  size_t struct_size; /* set by the caller */
  int64_t cell, begin, elems; /* its number; its first element; how many it has */
  void *data[DC_STREAM_ARRAYS]; /* of each array, aligned to DC_DISK_ALIGN; the caller's until dc_stream_done */
} dc_stream_cell;
/* Writes what could not be written before; if that fails again no walk is begun. DC_E_STATE inside of a walk. */
DC_API int dc_stream_begin(dc_stream *s, int64_t first, int64_t last, uint32_t reads);
/* The next cell, when its data are there and are what was written. One cell at a time: DC_E_STATE before the last one
 * is done, and behind the end. */
DC_API int dc_stream_next(dc_stream *s, dc_stream_cell *cell);
/* The caller is done with the cell; bit k of `writes`: array k was changed and goes to disk. */
DC_API int dc_stream_done(dc_stream *s, uint32_t writes);
/* Waits for all writes; their first failure. A cell that was not done keeps the value it had. Not in a walk: DC_OK. */
DC_API int dc_stream_end(dc_stream *s);

/* Windows: elements [begin, begin + elems) of one array, anywhere, to and from the caller's memory of any alignment.
 * What was written reaches the disk when its slot is needed or with dc_stream_flush; neighbouring windows share their
 * cell's transfers. DC_E_STATE inside of a walk. After a failed read what `data` holds is unknown, after a failed write
 * which of its elements were taken. */
DC_API int dc_stream_read(dc_stream *s, int array, int64_t begin, int64_t elems, void *data);
DC_API int dc_stream_write(dc_stream *s, int array, int64_t begin, int64_t elems, const void *data);
/* Everything is on disk. */
DC_API int dc_stream_flush(dc_stream *s);
/* The cell's part of `array` is zeros from now on, whatever the disk holds: for one that is damaged and is to be
 * written anew, in windows that do not cover it at once. DC_E_STATE inside of a walk. */
DC_API int dc_stream_drop(dc_stream *s, int array, int64_t cell);

/* ---- checksums of blocks ------------------------------------------------------------------------------------------
 */
/* sums[k]: CRC-32C of block k of data[bytes]; the last block may be short. On the calling thread. */
DC_API int dc_blocks_sum(const void *data, int64_t bytes, int64_t block_bytes, uint32_t *sums);
/* *bad: the first block whose sum is another one, or -1. */
DC_API int dc_blocks_check(const void *data, int64_t bytes, int64_t block_bytes, const uint32_t *sums, int64_t *bad);

/* ---- before a run ------------------------------------------------------------------------------------------------ */
typedef struct dc_disk_info {
  size_t struct_size; /* set by the caller */
  int64_t free_bytes; /* that this user may still write there */
  int64_t lock_bytes; /* RLIMIT_MEMLOCK; INT64_MAX: no limit */
  int32_t direct; /* 1: O_DIRECT works there */
  int32_t uring; /* 1: io_uring may be used */
  char file_system[16]; /* "ext4", "xfs", ..., or its number in hexadecimal */
  char why_not_direct[96], why_not_uring[160]; /* "" or the reason */
} dc_disk_info;
/* What the folder gives. Makes a file without a name there and removes it. DC_E_IO: no such folder, or no permission;
 * DC_E_NOSPC: less than need_bytes are free, or a file may not be so large; the text has both numbers and what to do.
 * lock_bytes > 0: DC_E_NOMEM if RLIMIT_MEMLOCK is below. */
DC_API int dc_disk_check(const char *folder, int64_t need_bytes, int64_t lock_bytes, dc_disk_info *info);

#ifdef __cplusplus
}
#endif
#endif
