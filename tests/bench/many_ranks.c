/* many_ranks.c: one group of many processes: how long it takes to open, what a call takes, and what a rank holds. Run
 * by many_ranks.py, which compiles it against the headers and the library of each contender.
 *
 *     many_ranks RANKS SLOTS SLOT_BYTES SECONDS      one JSON object on one line
 *
 * SECONDS: how long each kind of call is repeated. The time of a call is the time of all of them over their number,
 * on rank 0 (all ranks are within one call of each other). */
#define _GNU_SOURCE
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"

enum { MOST = DC_COMM_MAX_RANKS, KINDS = 4 };
static const char *const kind_name[KINDS] = {"barrier", "all_reduce 8 B", "all_reduce 16 KiB", "all_reduce 1 MiB"};
static const int64_t kind_bytes[KINDS] = {0, 8, 16 << 10, 1 << 20};

typedef struct shared {
  _Atomic int here;
  _Atomic int64_t loops; /* of the kind in turn, as rank 0 found */
  double open_ms[MOST], call_us[KINDS];
  int64_t fds[MOST], opened_pss[MOST], pss[MOST]; /* KiB of the arena, its share of this rank */
} shared;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(int rc, const char *what) {
  if (rc == DC_OK) return;
  fprintf(stderr, "many_ranks: %s: %s\n", what, dc_last_error());
  _exit(1);
}

static int64_t count_fds(void) {
  int64_t n = -1; /* of the directory itself */
  DIR *d = opendir("/proc/self/fd");
  for (struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
  if (d) closedir(d);
  return n;
}

/* KiB of the mappings of "deepc" memfds, shared pages counted in parts. */
static int64_t arena_pss(void) {
  FILE *f = fopen("/proc/self/smaps", "re");
  char line[512];
  int64_t sum = 0, kib;
  for (int in = 0; f && fgets(line, sizeof line, f);) {
    if (strchr(line, '-') && strchr(line, ':') && !strstr(line, "kB")) in = strstr(line, "memfd:deepc") != NULL;
    else if (in && sscanf(line, "Pss: %ld kB", &kib) == 1) sum += kib;
  }
  if (f) fclose(f);
  return sum;
}

/* Without the library: ranks that only wait here use no core. */
static void meet(shared *s, int size, int round) {
  const struct timespec ms = {0, 200000};
  s->here++;
  while (s->here < size * round) nanosleep(&ms, NULL);
}

static void call(dc_comm *c, int kind, float *in, float *out) {
  check(kind == 0 ? dc_barrier(c, 0) : dc_all_reduce(c, in, out, kind_bytes[kind] / 4, DC_F32, DC_RED_SUM, 0),
        kind_name[kind]);
}

/* Ranks agree on the number of calls by rank 0's clock. */
static double time_kind(shared *s, dc_comm *c, int kind, double seconds, float *in, float *out) {
  int64_t loops = 4;
  for (double took = 0;;) {
    check(dc_barrier(c, 0), "barrier");
    const double began = now();
    for (int64_t i = 0; i < loops; i++) call(c, kind, in, out);
    took = now() - began;
    if (dc_comm_rank(c) == 0) s->loops = took >= seconds / 2 ? 0 : (int64_t)((double)loops * 0.8 * seconds / took) + 1;
    check(dc_barrier(c, 0), "barrier");
    if (s->loops == 0) return 1e6 * took / (double)loops;
    loops = s->loops;
    check(dc_barrier(c, 0), "barrier"); /* all have read it */
  }
}

static int rank_main(shared *s, const char *address, int rank, int size, int slots, int64_t slot_bytes,
                     double seconds) {
  dc_comm_config k = {.rank = rank,
                      .size = size,
                      .address = address,
                      .label = "many",
                      .timeout_ms = 120000,
                      .slot_bytes = slot_bytes,
                      .slots = slots};
#ifdef DC_COMM_SECRET
  k.struct_size = sizeof k;
#endif
  dc_comm *c;
  float *in = malloc((size_t)kind_bytes[KINDS - 1]), *out = malloc((size_t)kind_bytes[KINDS - 1]);
  for (int64_t i = 0; i < kind_bytes[KINDS - 1] / 4; i++) in[i] = out[i] = (float)(i % 7 + rank);
  dc_set_num_threads(1);
  const int64_t held = count_fds();
  meet(s, size, 1);
  const double began = now();
  check(dc_comm_open(&k, &c), "open");
  s->open_ms[rank] = 1e3 * (now() - began);
  s->fds[rank] = count_fds() - held;
  meet(s, size, 2);
  s->opened_pss[rank] = arena_pss();
  meet(s, size, 3);
  for (int kind = 0; kind < KINDS; kind++) {
    const double us = time_kind(s, c, kind, seconds, in, out);
    if (rank == 0) s->call_us[kind] = us;
  }
  meet(s, size, 4);
  s->pss[rank] = arena_pss();
  meet(s, size, 5);
  return dc_comm_close(c);
}

static int64_t total(const int64_t *of, int n) {
  int64_t sum = 0;
  for (int i = 0; i < n; i++) sum += of[i];
  return sum;
}

static int64_t largest(const int64_t *of, int n) {
  int64_t most = of[0];
  for (int i = 1; i < n; i++) most = of[i] > most ? of[i] : most;
  return most;
}

int main(int argc, char **argv) {
  const int size = argc > 1 ? atoi(argv[1]) : 0, slots = argc > 2 ? atoi(argv[2]) : 0;
  const int64_t slot_bytes = argc > 3 ? atoll(argv[3]) : 0;
  const double seconds = argc > 4 ? atof(argv[4]) : 0;
  if (size < 2 || size > MOST || slots < 2 || slot_bytes < 4096 || seconds <= 0) {
    fprintf(stderr, "usage: many_ranks RANKS SLOTS SLOT_BYTES SECONDS\n");
    return 2;
  }
  shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (s == MAP_FAILED) return 1;
  char address[64];
  snprintf(address, sizeof address, "deepc-many-%d", getpid());
  for (int r = 0; r < size; r++) {
    if (fork()) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(rank_main(s, address, r, size, slots, slot_bytes, seconds) ? 1 : 0);
  }
  int failed = 0;
  for (int status; wait(&status) > 0;) failed += status != 0;
  if (failed) return 1;
  double slowest = 0;
  for (int r = 0; r < size; r++) slowest = s->open_ms[r] > slowest ? s->open_ms[r] : slowest;
  printf("{\"open\": %.3f, \"descriptors of a rank\": %ld, \"arena resident after open\": %.1f, \"arena resident after "
         "calls\": %.1f",
         slowest, (long)largest(s->fds, size), (double)total(s->opened_pss, size) / 1024,
         (double)total(s->pss, size) / 1024);
  for (int k = 0; k < KINDS; k++) printf(", \"%s\": %.2f", kind_name[k], s->call_us[k]);
  printf("}\n");
  return 0;
}
