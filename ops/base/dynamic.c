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
#include "commit.h"
#include "dynamic_sizes.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t dynamic_ask = (size_t)16 << 20; /* is committed between two looks at what the machine has left */

struct dc_dynamic {
  char *base;
  size_t page;      /* the kernel's */
  size_t length;    /* of the mapping: whole huge pages */
  dc__dynamic_sizes sizes;
  size_t zero_from; /* [zero_from, committed) holds zeros */
  double slack;     /* what may be committed without being used, of what is used */
  size_t huge_end;  /* only below may the kernel use huge pages */
  size_t unasked;   /* bytes committed since the last look */
  bool huge;
};

static size_t dynamic_min(size_t a, size_t b) { return a < b ? a : b; }
static size_t dynamic_max(size_t a, size_t b) { return a > b ? a : b; }

/* `bytes` and what may be committed beside them, of which there is at most `slack` of it, or less than a page. */
static size_t dynamic_target(const dc_dynamic *d, size_t bytes, double slack) {
  double spare = (double)bytes * slack;
  size_t room = d->length - bytes, extra = spare < (double)room ? (size_t)spare : room;
  size_t page = d->huge && extra >= DC_HUGE_PAGE ? DC_HUGE_PAGE : d->page;
  return dynamic_min(dynamic_max(dc__dynamic_up(bytes, page), (bytes + extra) / page * page), d->length);
}

int dc__dynamic_check_open(const char *who, size_t bytes, double slack, const void *out, const void *at) {
  if (!out || !at) return DC_FAIL(DC_E_INVALID, "%s: out or at is NULL; pass their addresses", who);
  if (!bytes) return DC_FAIL(DC_E_INVALID, "%s: bytes is 0; reserve what could ever be used", who);
  if (!(slack >= 0)) return DC_FAIL(DC_E_INVALID, "%s: slack is %g; it must be 0 or more", who, slack);
  if (bytes > SIZE_MAX / 4) return DC_FAIL(DC_E_NOMEM, "%s: %zu bytes are more than there are addresses", who, bytes);
  return DC_OK;
}

int dc__dynamic_tell(const char *who, const dc__dynamic_sizes *sizes, struct dc_dynamic_stats *out) {
  if (!sizes || !out || out->struct_size != sizeof *out)
    return DC_FAIL(DC_E_INVALID, "%s: the range or out is NULL, or struct_size is not %zu", who, sizeof *out);
  *out = (struct dc_dynamic_stats){.struct_size = sizeof *out,
                                   .reserved = (int64_t)sizes->reserved,
                                   .used = (int64_t)sizes->used,
                                   .committed = (int64_t)sizes->committed,
                                   .most_committed = (int64_t)sizes->most_committed,
                                   .granted = sizes->granted,
                                   .released = sizes->released,
                                   .grows = sizes->grows,
                                   .shrinks = sizes->shrinks,
                                   .commits = sizes->commits,
                                   .releases = sizes->releases};
  return DC_OK;
}

int dc_dynamic_open(size_t bytes, double slack, dc_dynamic **out, void **at) {
  bool huge = true;
  DC_TRY(dc__dynamic_check_open("dc_dynamic_open", bytes, slack, out, at));
  DC_TRY(dc__hugepages(&huge));
  dc_dynamic *d = calloc(1, sizeof *d);
  if (!d) return DC_FAIL(DC_E_NOMEM, "dc_dynamic_open: no memory to note a range of %zu bytes", bytes);
  d->page = (size_t)sysconf(_SC_PAGESIZE);
  d->length = dc__dynamic_up(bytes, DC_HUGE_PAGE);
  d->sizes.reserved = bytes;
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
  size_t from = dc__dynamic_up(d->sizes.committed, DC_HUGE_PAGE), to = target / DC_HUGE_PAGE * DC_HUGE_PAGE;
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
  size_t more = target - d->sizes.committed;
  if (d->unasked + more > dynamic_ask) {
    DC_TRY(dc__mem_check_available(bytes, more));
    d->unasked = 0;
  }
  dynamic_mark(d, target);
  int rc = dc__mem_fault_in(d->base + d->sizes.committed, more);
  if (rc != DC_OK) {
    (void)madvise(d->base + d->sizes.committed, more, MADV_DONTNEED); /* what was given of it */
    dynamic_unmark(d, d->sizes.committed);
    return rc;
  }
  d->unasked += more, d->sizes.granted += (int64_t)more, d->sizes.commits++;
  d->sizes.committed = target, d->sizes.most_committed = dynamic_max(d->sizes.most_committed, target);
  return DC_OK;
}

static int dynamic_release(dc_dynamic *d, size_t target) {
  DC_TRY(dynamic_drop(d, target, d->sizes.committed));
  d->sizes.released += (int64_t)(d->sizes.committed - target), d->sizes.releases++;
  dynamic_unmark(d, target);
  d->sizes.committed = target, d->zero_from = dynamic_min(d->zero_from, target);
  return DC_OK;
}

int dc_dynamic_resize(dc_dynamic *d, size_t bytes) {
  if (!d) return DC_FAIL(DC_E_INVALID, "dc_dynamic_resize: the range is NULL");
  if (bytes > d->sizes.reserved)
    return DC_FAIL(DC_E_INVALID, "dc_dynamic_resize: %zu bytes are more than the %zu that were reserved; reserve more",
                   bytes, d->sizes.reserved);
  /* Growing leaves some to grow into without a call, so that appending row by row asks the kernel a number of times
   * that is logarithmic in the size. Of a large slack it takes that much only: the rest is for what was committed
   * before. */
  size_t grown = dynamic_target(d, bytes, d->slack < DC__DYNAMIC_AHEAD ? d->slack : DC__DYNAMIC_AHEAD);
  size_t kept = dynamic_target(d, bytes, d->slack);
  if (bytes > d->sizes.committed) DC_TRY(dynamic_commit(d, bytes, grown));
  else if (kept < d->sizes.committed) DC_TRY(dynamic_release(d, kept));
  if (bytes > d->sizes.used &&
      d->zero_from > d->sizes.used) /* kept although not used: what was there is not to be seen */
    memset(d->base + d->sizes.used, 0, dynamic_min(bytes, d->zero_from) - d->sizes.used);
  d->zero_from = dynamic_max(d->zero_from, bytes);
  dc__dynamic_use(&d->sizes, bytes);
  return DC_OK;
}

int dc_dynamic_read(const dc_dynamic *d, struct dc_dynamic_stats *out) {
  return dc__dynamic_tell("dc_dynamic_read", d ? &d->sizes : NULL, out);
}

int dc_dynamic_close(dc_dynamic *d) {
  if (!d) return DC_OK;
  int rc = munmap(d->base, d->length);
  if (rc) return DC_FAIL(DC_E_SYSTEM, "dc_dynamic_close: munmap of %zu bytes: %s", d->length, strerror(errno));
  free(d);
  return DC_OK;
}
