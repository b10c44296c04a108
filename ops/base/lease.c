/* lease.c: memory that one phase of a step needs, out of what the tensors of the other phases have left.
 *
 * The gradients' accumulators are written during backward and dead after the optimizer's step; the largest activations
 * are dead before the first gradient is there. Both would be resident all the time, since the heap keeps its pages.
 * Here the accumulators are a range of addresses only: when a bucket is about to be written, huge pages that are free
 * in the heap are moved to its place (mremap: page tables change, no byte is copied, no page is faulted), and after the
 * step they move back. A rank's peak falls from activations + accumulators to the larger of what is live before and
 * within backward.
 *
 * Owns the range and the list of what was moved. Assumes that one thread at a time calls it, that nobody reads the
 * range where it has no memory for other values than zeros, and that the heap's blocks hold nothing that must stay
 * where it is by its physical page (pinned memory, registered buffers).
 *
 * A huge page is moved in 2 to 3 us, either way, and stays huge. Mappings: one more per piece that is away and one per
 * border of pieces, so a piece is larger than a huge page in ranges of many (MOST_PIECES; the kernel's limit is
 * 65,530). docs/lab/heap.md has the measurements and the ways not taken. With gradient accumulation the pieces lie
 * among the next forward's activations: 8 % more memory than accumulators of their own, so there they are (zero/state's
 * leases_gradients). */
#include "base.h"

#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { MOST_PIECES = 8192 };

struct dc_lease {
  char *base; /* on a huge page */
  size_t begin, bytes; /* the user's part of it */
  size_t piece;  /* bytes that come and go together */
  int64_t pieces;
  char **from; /* [pieces] where in the heap a piece came from; NULL: has no memory; OWN, KEPT: the range's own, needed
                  in this phase or since an earlier one */
  bool moves; /* the kernel can, or has not been asked since this phase began */
};

static char lease_marks[2];
#define OWN (&lease_marks[0])
#define KEPT (&lease_marks[1])

static size_t lease_length(const dc_lease *l) { return (size_t)l->pieces * l->piece; }

static size_t lease_pages(size_t begin, size_t bytes) {
  size_t pages = (begin + bytes + DC_HUGE_PAGE - 1) / DC_HUGE_PAGE;
  return pages ? pages : 1;
}

int dc_lease_layout(size_t bytes, int color, size_t *begin, size_t *piece) {
  if (!begin || !piece) return DC_FAIL(DC_E_INVALID, "the lease's begin or piece is NULL; pass their addresses");
  if (color < 0 || color >= DC__COLORS)
    return DC_FAIL(DC_E_INVALID, "dc_lease_open: color is %d; expected 0 to %d", color, DC__COLORS - 1);
  if (bytes > SIZE_MAX / 4)
    return DC_FAIL(DC_E_NOMEM, "dc_lease_open: %zu bytes are more than there are addresses", bytes);
  *begin = (size_t)color * DC__COLOR_STEP;
  *piece = (lease_pages(*begin, bytes) + MOST_PIECES - 1) / MOST_PIECES * DC_HUGE_PAGE;
  return DC_OK;
}

int dc_lease_open(size_t bytes, int color, dc_lease **out, void **at) {
  bool huge = true;
  size_t begin, piece;
  if (!out || !at) return DC_FAIL(DC_E_INVALID, "dc_lease_open: out or at is NULL; pass their addresses");
  DC_TRY(dc_lease_layout(bytes, color, &begin, &piece));
  DC_TRY(dc__hugepages(&huge));
  size_t pages = lease_pages(begin, bytes);
  dc_lease *l = calloc(1, sizeof *l);
  if (!l) return DC_FAIL(DC_E_NOMEM, "dc_lease_open: no memory for the lease itself");
  l->begin = begin, l->bytes = bytes, l->moves = true;
  l->piece = piece;
  l->pieces = (int64_t)((pages * DC_HUGE_PAGE + l->piece - 1) / l->piece);
  l->from = calloc((size_t)l->pieces, sizeof *l->from);
  l->base = l->from ? dc__map_aligned(lease_length(l), MAP_NORESERVE, -1) : NULL;
  if (!l->base) {
    free(l->from);
    free(l);
    return DC_FAIL(DC_E_NOMEM,
                   "dc_lease_open: no addresses for %zu bytes (is there a limit on address space, ulimit -v?)", bytes);
  }
  dc__map_advise(l->base, lease_length(l));
  *at = l->base + begin;
  *out = l;
  return DC_OK;
}

/* Memory for piece k: the heap's if it has some that can be moved, else the kernel gives it when it is written. */
static void lease_fill(dc_lease *l, int64_t k) {
  char *from = l->moves ? dc_heap_take_high(l->piece) : NULL;
  if (from && !dc__map_move(from, l->base + (size_t)k * l->piece, l->piece)) {
    dc_heap_give(from);
    from = NULL, l->moves = false;
  }
  l->from[k] = from ? from : OWN;
  if (from) dc__count(DC_COUNTER_lease_bytes, (int64_t)l->piece);
}

int dc_lease_need(dc_lease *l, size_t offset, size_t bytes) {
  if (!l) return DC_FAIL(DC_E_INVALID, "dc_lease_need: the lease is NULL");
  if (offset > l->bytes || bytes > l->bytes - offset)
    return DC_FAIL(DC_E_INVALID, "dc_lease_need: bytes [%zu, %zu + %zu) are outside of the range's %zu", offset, offset,
                   bytes, l->bytes);
  if (!bytes) return DC_OK;
  int64_t last = (int64_t)((l->begin + offset + bytes - 1) / l->piece);
  for (int64_t k = (int64_t)((l->begin + offset) / l->piece); k <= last; k++)
    if (!l->from[k] || l->from[k] == KEPT) lease_fill(l, k);
  return DC_OK;
}

int dc_lease_end(dc_lease *l) {
  if (!l) return DC_FAIL(DC_E_INVALID, "dc_lease_end: the lease is NULL");
  for (int64_t k = 0; k < l->pieces; k++) {
    char *from = l->from[k];
    if (!from || from == KEPT) continue;
    if (from == OWN) {
      l->from[k] = KEPT;
      continue;
    }
    /* where too many mappings keep a piece from moving, the heap's place for it gets new pages when it is used */
    l->from[k] = dc__map_move(l->base + (size_t)k * l->piece, from, l->piece) ? NULL : KEPT;
    dc_heap_give(from);
  }
  l->moves = true; /* what was in the way may be gone: one call in the next phase finds out */
  return DC_OK;
}

int dc_lease_bytes(const dc_lease *l, int64_t *borrowed, int64_t *own) {
  if (!l || !borrowed || !own) return DC_FAIL(DC_E_INVALID, "dc_lease_bytes: the lease, borrowed or own is NULL");
  *borrowed = *own = 0;
  for (int64_t k = 0; k < l->pieces; k++)
    if (l->from[k]) *(l->from[k] == OWN || l->from[k] == KEPT ? own : borrowed) += (int64_t)l->piece;
  return DC_OK;
}

int dc_lease_close(dc_lease *l) {
  if (!l) return DC_OK;
  int rc = dc_lease_end(l);
  munmap(l->base, lease_length(l));
  free(l->from);
  free(l);
  return rc;
}
