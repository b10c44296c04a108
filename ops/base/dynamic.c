/* dynamic.c: memory that grows and shrinks in place.
 *
 * Addresses cost nothing, so as many are reserved as could ever be wanted, and pages are given and taken at the end of
 * what is used: nothing moves when it grows, and nothing stays behind when it shrinks. That is how stacks and arenas of
 * databases grow, and what CUDA has as virtual memory management (cuMemAddressReserve, cuMemMap).
 *
 * Owns the mapping and the sizes. Assumes one caller at a time per range, and that nobody writes above `used`: it would
 * be given pages that nobody counts.
 *
 * Pages: a kernel that may use huge ones gives a whole one for its first byte, so only what is committed as whole ones
 * is marked for them, and the end of what is used has small ones, unless the slack has room for a huge one. What was
 * small stays small. A huge page of which a shrinking leaves the first part is the system's again when that goes too,
 * or when memory gets short: by then it is the kernel's to split (at most one per range). */
#include "dynamic.h"
#include "commit.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t dynamic_ask = (size_t)16 << 20; /* is committed between two looks at what the machine has left */

static const double dynamic_ahead = 1.0 / 32;

struct dc_dynamic {
  char *base;
  size_t page;      /* the kernel's */
  size_t length;    /* of the mapping: whole huge pages */
  size_t reserved, used, committed, most_committed;
  size_t zero_from; /* [zero_from, committed) holds zeros */
  double slack;     /* what may be committed without being used, of what is used */
  size_t huge_end;  /* only below may the kernel use huge pages */
  size_t unasked;   /* bytes committed since the last look */
  bool huge;
  int64_t granted, released, grows, shrinks, commits, releases;
};

static size_t dynamic_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static size_t dynamic_min(size_t a, size_t b) { return a < b ? a : b; }
static size_t dynamic_max(size_t a, size_t b) { return a > b ? a : b; }

/* `bytes` and what may be committed beside them, of which there is at most `slack` of it, or less than a page. */
static size_t dynamic_target(const dc_dynamic *d, size_t bytes, double slack) {
  double spare = (double)bytes * slack;
  size_t room = d->length - bytes, extra = spare < (double)room ? (size_t)spare : room;
  size_t page = d->huge && extra >= DC_HUGE_PAGE ? DC_HUGE_PAGE : d->page;
  return dynamic_min(dynamic_max(dynamic_up(bytes, page), (bytes + extra) / page * page), d->length);
}

int dc_dynamic_open(size_t bytes, double slack, dc_dynamic **out, void **at) {
  bool huge = true;
  if (!out || !at) return DC_FAIL(DC_E_INVALID, "dc_dynamic_open: out or at is NULL; pass their addresses");
  if (!bytes) return DC_FAIL(DC_E_INVALID, "dc_dynamic_open: bytes is 0; reserve what could ever be used");
  if (!(slack >= 0)) return DC_FAIL(DC_E_INVALID, "dc_dynamic_open: slack is %g; it must be 0 or more", slack);
  if (bytes > SIZE_MAX / 4)
    return DC_FAIL(DC_E_NOMEM, "dc_dynamic_open: %zu bytes are more than there are addresses", bytes);
  DC_TRY(dc__hugepages(&huge));
  dc_dynamic *d = calloc(1, sizeof *d);
  if (!d) return DC_FAIL(DC_E_NOMEM, "dc_dynamic_open: no memory to note a range of %zu bytes", bytes);
  d->page = (size_t)sysconf(_SC_PAGESIZE);
  d->length = dynamic_up(bytes, DC_HUGE_PAGE);
  d->reserved = bytes;
  d->huge = huge;
  d->slack = slack;
  d->base = dc__map_aligned(d->length, MAP_NORESERVE, -1);
  if (!d->base) {
    int e = errno;
    free(d);
    return DC_FAIL(DC_E_NOMEM,
                   "dc_dynamic_open: no addresses for %zu bytes: %s; reserve less, or look at ulimit -v and "
                   "vm.overcommit_memory (2 counts what is only reserved)",
                   bytes, strerror(e));
  }
  (void)madvise(d->base, d->length, MADV_NOHUGEPAGE);
  *at = d->base;
  *out = d;
  return DC_OK;
}

/* Takes the memory of [from, to) away; it reads as zeros. */
static int dynamic_drop(dc_dynamic *d, size_t from, size_t to) {
  if (to > from && madvise(d->base + from, to - from, MADV_DONTNEED))
    return DC_FAIL(DC_E_SYSTEM, "dc_dynamic_resize: the kernel did not take %zu bytes back: %s (is the memory locked?)",
                   to - from, strerror(errno));
  return DC_OK;
}

/* Lets what of [committed, target) is whole huge pages be huge. Advice: a kernel without them refuses it. */
static void dynamic_mark(dc_dynamic *d, size_t target) {
  size_t from = dynamic_up(d->committed, DC_HUGE_PAGE), to = target / DC_HUGE_PAGE * DC_HUGE_PAGE;
  if (to <= from || !d->huge) return;
  (void)madvise(d->base + from, to - from, MADV_HUGEPAGE);
  d->huge_end = to;
}

/* Above `from` the next pages may be the last of what is used: small ones. */
static void dynamic_unmark(dc_dynamic *d, size_t from) {
  from = from / DC_HUGE_PAGE * DC_HUGE_PAGE;
  if (d->huge_end <= from) return;
  (void)madvise(d->base + from, d->huge_end - from, MADV_NOHUGEPAGE);
  d->huge_end = from;
}

static int dynamic_commit(dc_dynamic *d, size_t bytes, size_t target) {
  size_t more = target - d->committed;
  if (d->unasked + more > dynamic_ask) {
    DC_TRY(dc__mem_check_available(bytes, more));
    d->unasked = 0;
  }
  dynamic_mark(d, target);
  int rc = dc__mem_fault_in(d->base + d->committed, more);
  if (rc != DC_OK) {
    (void)madvise(d->base + d->committed, more, MADV_DONTNEED); /* what was given of it */
    dynamic_unmark(d, d->committed);
    return rc;
  }
  d->unasked += more, d->granted += (int64_t)more, d->commits++;
  d->committed = target, d->most_committed = dynamic_max(d->most_committed, target);
  return DC_OK;
}

static int dynamic_release(dc_dynamic *d, size_t target) {
  DC_TRY(dynamic_drop(d, target, d->committed));
  d->released += (int64_t)(d->committed - target), d->releases++;
  dynamic_unmark(d, target);
  d->committed = target, d->zero_from = dynamic_min(d->zero_from, target);
  return DC_OK;
}

int dc_dynamic_resize(dc_dynamic *d, size_t bytes) {
  if (!d) return DC_FAIL(DC_E_INVALID, "dc_dynamic_resize: the range is NULL");
  if (bytes > d->reserved)
    return DC_FAIL(DC_E_INVALID, "dc_dynamic_resize: %zu bytes are more than the %zu that were reserved; reserve more",
                   bytes, d->reserved);
  /* Growing leaves some to grow into without a call, so that appending row by row asks the kernel a number of times
   * that is logarithmic in the size. Of a large slack it takes that much only: the rest is for what was committed
   * before. */
  size_t grown = dynamic_target(d, bytes, d->slack < dynamic_ahead ? d->slack : dynamic_ahead);
  size_t kept = dynamic_target(d, bytes, d->slack);
  if (bytes > d->committed) DC_TRY(dynamic_commit(d, bytes, grown));
  else if (kept < d->committed) DC_TRY(dynamic_release(d, kept));
  if (bytes > d->used && d->zero_from > d->used) /* kept although not used: what was there is not to be seen */
    memset(d->base + d->used, 0, dynamic_min(bytes, d->zero_from) - d->used);
  d->zero_from = dynamic_max(d->zero_from, bytes);
  d->grows += bytes > d->used, d->shrinks += bytes < d->used;
  d->used = bytes;
  return DC_OK;
}

int dc_dynamic_read(const dc_dynamic *d, struct dc_dynamic_stats *out) {
  if (!d || !out || out->struct_size != sizeof *out)
    return DC_FAIL(DC_E_INVALID, "dc_dynamic_read: the range or out is NULL, or struct_size is not %zu", sizeof *out);
  *out = (struct dc_dynamic_stats){.struct_size = sizeof *out,
                                   .reserved = (int64_t)d->reserved,
                                   .used = (int64_t)d->used,
                                   .committed = (int64_t)d->committed,
                                   .most_committed = (int64_t)d->most_committed,
                                   .granted = d->granted,
                                   .released = d->released,
                                   .grows = d->grows,
                                   .shrinks = d->shrinks,
                                   .commits = d->commits,
                                   .releases = d->releases};
  return DC_OK;
}

int dc_dynamic_close(dc_dynamic *d) {
  if (!d) return DC_OK;
  int rc = munmap(d->base, d->length);
  if (rc) return DC_FAIL(DC_E_SYSTEM, "dc_dynamic_close: munmap of %zu bytes: %s", d->length, strerror(errno));
  free(d);
  return DC_OK;
}
