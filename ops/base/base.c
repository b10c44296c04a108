/* base.c: statuses, the last error of a thread, data types, counters, environment rows.
 *
 * Owns the thread-local error text and the process-wide counters. Assumes nothing; everything else in the core may call
 * it. */
#include "base.h"
#include "take.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *dc_version(void) { return DC_VERSION_STRING; }

/* ---- statuses ---------------------------------------------------------------------------------------------------- */
static const struct {
  const char *name;
  int value;
  const char *text;
} base_statuses[] = {
#define DC_STATUS(name, value, text) {#name, value, text},
#include "status.def"
#undef DC_STATUS
};
enum { STATUS_COUNT = sizeof base_statuses / sizeof base_statuses[0] };

static int base_status_row(int status) {
  for (int i = 0; i < STATUS_COUNT; i++)
    if (base_statuses[i].value == status) return i;
  return -1;
}

const char *dc_status_name(int status) {
  int i = base_status_row(status);
  return i < 0 ? "E_UNKNOWN" : base_statuses[i].name;
}

const char *dc_status_text(int status) {
  int i = base_status_row(status);
  return i < 0 ? "not a status of libdeepc" : base_statuses[i].text;
}

int dc_status_at(int i, const char **name, int *value) {
  if (!name || !value) return DC_FAIL(DC_E_INVALID, "dc_status_at needs both outputs; got a NULL pointer");
  if (i < 0 || i >= STATUS_COUNT) return DC_FAIL(DC_E_INVALID, "status row %d is not in [0, %d)", i, (int)STATUS_COUNT);
  *name = base_statuses[i].name;
  *value = base_statuses[i].value;
  return DC_OK;
}

/* ---- the last error ---------------------------------------------------------------------------------------------- */
static _Thread_local char base_last_error[4096]; /* a time-out tells where every rank is */

const char *dc_last_error(void) { return base_last_error; }

static const char *base_file_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

int dc_fail(int status, const char *file, int line, const char *func, const char *fmt, ...) {
  int saved_errno = errno;
  /* Not straight into base_last_error: an argument may be the previous dc_last_error(). The place must survive a long
   * text, so the text is what gets cut. */
  char what[sizeof base_last_error], place[192];
  va_list args;
  va_start(args, fmt);
  if (vsnprintf(what, sizeof what, fmt, args) < 0) snprintf(what, sizeof what, "%s", dc_status_text(status));
  va_end(args);
  int place_len = snprintf(place, sizeof place, " (%s:%d, %s)", base_file_name(file), line, func);
  if (place_len >= (int)sizeof place) place_len = (int)sizeof place - 1;
  if (place_len < 0) place_len = 0, place[0] = 0;
  int room = (int)sizeof base_last_error - 1 - place_len;
  snprintf(base_last_error, sizeof base_last_error, "%.*s%s", room, what, place);
  errno = saved_errno;
  return status;
}

/* ---- structs that may grow --------------------------------------------------------------------------------------- */
int dc__take_struct(void *taken, size_t known, size_t least, const void *given, const char *name) {
  char why[TAKE_WHY];
  const int rc = take_struct(taken, known, least, given, name, why);
  return rc ? DC_FAIL(rc, "%s", why) : DC_OK;
}

/* ---- data types -------------------------------------------------------------------------------------------------- */
static const struct {
  size_t size;
  const char *name;
} base_dtypes[DC_DTYPE_COUNT] = {
#define DC_DTYPE(name, bytes, text) [DC_##name] = {bytes, text},
#include "dtypes.def"
#undef DC_DTYPE
};

size_t dc_dtype_size(int dtype) { return dtype < 0 || dtype >= DC_DTYPE_COUNT ? 0 : base_dtypes[dtype].size; }
const char *dc_dtype_name(int dtype) { return dtype < 0 || dtype >= DC_DTYPE_COUNT ? "?" : base_dtypes[dtype].name; }

/* ---- counters ---------------------------------------------------------------------------------------------------- */
static _Atomic int64_t base_counters[DC_COUNTER_COUNT];
static const char *const base_counter_names[DC_COUNTER_COUNT] = {
#define DC_COUNTER(name, help) #name,
#include "counters.def"
#undef DC_COUNTER
};

static int base_is_counter(int counter) { return counter >= 0 && counter < DC_COUNTER_COUNT; }

static pthread_mutex_t base_counts_lock = PTHREAD_MUTEX_INITIALIZER;
static dc__counts *base_counts_head;
DC__AT_FORK(base_at_fork, DC__FORK_COUNTS, &base_counts_lock, NULL)

void dc__counts_attach(dc__counts *b) {
  pthread_mutex_lock(&base_counts_lock);
  *b = (dc__counts){.next = base_counts_head};
  if (b->next) b->next->prev = b;
  base_counts_head = b;
  pthread_mutex_unlock(&base_counts_lock);
}

void dc__counts_detach(dc__counts *b) {
  pthread_mutex_lock(&base_counts_lock);
  if (b->next) b->next->prev = b->prev;
  if (b->prev) b->prev->next = b->next;
  else base_counts_head = b->next;
  for (int i = 0; i < DC_COUNTER_COUNT; i++) dc__count(i, b->v[i]);
  pthread_mutex_unlock(&base_counts_lock);
}

int64_t dc_counter_get(int counter) {
  if (!base_is_counter(counter)) return 0;
  pthread_mutex_lock(&base_counts_lock);
  int64_t n = atomic_load_explicit(&base_counters[counter], memory_order_relaxed);
  for (dc__counts *b = base_counts_head; b; b = b->next) n += __atomic_load_n(&b->v[counter], __ATOMIC_RELAXED);
  pthread_mutex_unlock(&base_counts_lock);
  return n;
}

/* A block's owner may add at this moment: so its numbers are balanced, not written. */
void dc_counter_reset(void) {
  for (int i = 0; i < DC_COUNTER_COUNT; i++)
    atomic_fetch_sub_explicit(&base_counters[i], dc_counter_get(i), memory_order_relaxed);
}

const char *dc_counter_name(int counter) { return base_is_counter(counter) ? base_counter_names[counter] : NULL; }

void dc__count(int counter, int64_t n) {
  if (base_is_counter(counter)) atomic_fetch_add_explicit(&base_counters[counter], n, memory_order_relaxed);
}

int dc__env_switch(const char *name, bool fallback, bool *on) {
  const char *text = getenv(name);
  if (text && *text && strcmp(text, "0") && strcmp(text, "1"))
    return DC_FAIL(DC_E_ENV, "%s='%s' is not understood; set it to 0 or 1, or unset it", name, text);
  *on = text && *text ? *text == '1' : fallback;
  return DC_OK;
}

/* ---- environment rows -------------------------------------------------------------------------------------------- */
static const struct {
  const char *name, *values, *fallback, *help;
} base_env_rows[] = {
#define DC_ENV(name, values, fallback, help) {#name, values, fallback, help},
#include "env.def"
#undef DC_ENV
};
enum { ENV_COUNT = sizeof base_env_rows / sizeof base_env_rows[0] };

int dc_env_at(int i, const char **name, const char **values, const char **value_or_default, const char **help) {
  if (!name || !values || !value_or_default || !help)
    return DC_FAIL(DC_E_INVALID, "dc_env_at needs all four outputs; got a NULL pointer");
  if (i < 0 || i >= ENV_COUNT) return DC_FAIL(DC_E_INVALID, "environment row %d is not in [0, %d)", i, (int)ENV_COUNT);
  const char *value = getenv(base_env_rows[i].name);
  *name = base_env_rows[i].name;
  *values = base_env_rows[i].values;
  /* Set but empty means unset, as in most tools. */
  *value_or_default = value && *value ? value : base_env_rows[i].fallback;
  *help = base_env_rows[i].help;
  return DC_OK;
}
