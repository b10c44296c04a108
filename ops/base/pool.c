/* pool.c: dc_parallel_for over our own threads or a framework's.
 *
 * Owns the worker threads. They start at the first call that needs them, sleep on a condition variable between calls,
 * and are gone after dc_set_num_threads (then started again) and when the library is unloaded. A job is cut into a few
 * more pieces than there are threads, so that a thread that was descheduled does not hold up the rest; pieces are
 * claimed from an atomic counter. One job runs at a time: a call from inside a job, or while another thread's job runs,
 * runs inline, which can't deadlock. After fork() the child has no workers and starts its own when it needs them. */
#include "base.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_THREADS = 1024, PIECES_PER_THREAD = 4 };

struct job {
  dc_range_fn fn;
  void *ctx;
  int64_t n, grain, blocks, pieces;
  _Atomic int64_t next;
  int slots; /* workers that may still join; under pool.lock */
};

static struct pool {
  pthread_mutex_t owner; /* held by the thread whose job runs, and while threads start or stop */
  pthread_mutex_t lock;  /* guards all that follows */
  pthread_cond_t work, idle;
  struct job *job;
  uint64_t generation; /* of job: a worker joins each job once */
  int active;          /* workers inside job */
  int stop;
  int nworkers; /* guarded by owner */
  pthread_t worker[MAX_THREADS];
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .idle = PTHREAD_COND_INITIALIZER};

static _Thread_local int pool_inside_job;
static _Atomic(dc_parallel_hook) pool_hook;
static _Atomic(int (*)(void)) pool_hook_threads;
static atomic_int pool_wanted_threads; /* 0: not decided yet */

/* ---- how many threads -------------------------------------------------------------------------------------------- */
static int pool_online_cpus(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
  long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? (int)(n < MAX_THREADS ? n : MAX_THREADS) : 1;
}

/* A value that is not understood leaves the default in force and its text in dc_last_error(): this function can't fail,
 * and `deepc doctor` checks the variable. */
static int pool_default_threads(void) {
  const char *text = getenv("DEEPC_NUM_THREADS");
  if (text && *text) {
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    if (!errno && !*end && n >= 1 && n <= MAX_THREADS) return (int)n;
    (void)DC_FAIL(DC_E_ENV, "DEEPC_NUM_THREADS='%s' is not a number from 1 to %d; using %d, this process's processors",
                  text, MAX_THREADS, pool_online_cpus());
  }
  int n = pool_online_cpus();
  return n < MAX_THREADS ? n : MAX_THREADS;
}

static int pool_own_threads(void) {
  int n = atomic_load_explicit(&pool_wanted_threads, memory_order_relaxed);
  if (n) return n;
  int expected = 0;
  n = pool_default_threads();
  return atomic_compare_exchange_strong(&pool_wanted_threads, &expected, n) ? n : expected;
}

int dc_num_threads(void) {
  int (*count)(void) = atomic_load(&pool_hook_threads);
  int n = atomic_load(&pool_hook) && count ? count() : pool_own_threads();
  return n > 0 ? n : 1;
}

void dc_set_parallel_hook(dc_parallel_hook new_hook, int (*num_threads)(void)) {
  atomic_store(&pool_hook_threads, new_hook ? num_threads : NULL);
  atomic_store(&pool_hook, new_hook);
}

/* ---- workers ----------------------------------------------------------------------------------------------------- */
static void pool_run_pieces(struct job *job) {
  int64_t piece;
  pool_inside_job = 1;
  while ((piece = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->pieces) {
    /* blocks / pieces each, the first blocks % pieces get one more: no product that could overflow */
    int64_t each = job->blocks / job->pieces, extra = job->blocks % job->pieces;
    int64_t first = piece * each + (piece < extra ? piece : extra);
    int64_t last = first + each + (piece < extra);
    job->fn(first * job->grain, last == job->blocks ? job->n : last * job->grain, job->ctx);
  }
  pool_inside_job = 0;
}

static void *pool_worker_main(void *unused) {
  uint64_t seen = 0;
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    while (!pool.stop && !(pool.job && pool.generation != seen && pool.job->slots > 0))
      pthread_cond_wait(&pool.work, &pool.lock);
    if (pool.stop) break;
    struct job *job = pool.job;
    seen = pool.generation;
    job->slots--;
    pool.active++;
    pthread_mutex_unlock(&pool.lock);
    pool_run_pieces(job);
    pthread_mutex_lock(&pool.lock);
    if (--pool.active == 0) pthread_cond_signal(&pool.idle);
  }
  pthread_mutex_unlock(&pool.lock);
  return NULL;
}

/* The child of a fork has none of our threads. The owner of a job is not waited for before a fork: the job may be long,
 * and it may be its own thread that forks. */
static void pool_in_child(void) {
  pool.owner = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
  pool.work = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  pool.idle = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
  pool.job = NULL;
  pool.active = pool.stop = pool.nworkers = 0;
}

DC__AT_FORK(pool_at_fork, DC__FORK_POOL, &pool.lock, pool_in_child)

/* Under pool.owner. Fewer threads than asked for is not an error: the caller does what the missing ones would have
 * done. */
static void pool_start_workers(int n) {
  while (pool.nworkers < n) {
    if (pthread_create(&pool.worker[pool.nworkers], NULL, pool_worker_main, NULL)) return;
    pool.nworkers++;
  }
}

/* Under pool.owner, so no job runs. */
static void pool_stop_workers(void) {
  pthread_mutex_lock(&pool.lock);
  pool.stop = 1;
  pthread_cond_broadcast(&pool.work);
  pthread_mutex_unlock(&pool.lock);
  while (pool.nworkers > 0) pthread_join(pool.worker[--pool.nworkers], NULL);
  pool.stop = 0;
}

/* Workers must not outlive the code they run (dlclose). At exit a job of another thread may still run: then leave it
 * be. */
__attribute__((destructor)) static void pool_unload(void) {
  if (pthread_mutex_trylock(&pool.owner)) return;
  pool_stop_workers();
  pthread_mutex_unlock(&pool.owner);
}

int dc_set_num_threads(int n) {
  if (n < 1 || n > MAX_THREADS)
    return DC_FAIL(DC_E_INVALID, "number of threads is %d; it must be from 1 to %d", n, MAX_THREADS);
  if (pool_inside_job)
    return DC_FAIL(DC_E_STATE, "the number of threads can't change inside dc_parallel_for; set it before");
  pthread_mutex_lock(&pool.owner);
  pool_stop_workers();
  atomic_store(&pool_wanted_threads, n);
  pthread_mutex_unlock(&pool.owner);
  return DC_OK;
}

/* ---- parallel_for ------------------------------------------------------------------------------------------------ */
/* A framework may cut anywhere, so it is given blocks of `grain` elements to cut between. */
static void pool_run_blocks(int64_t begin, int64_t end, void *ctx) {
  const struct job *job = ctx;
  if (begin < end) job->fn(begin * job->grain, end == job->blocks ? job->n : end * job->grain, job->ctx);
}

static void pool_run_on_pool(struct job *job, int threads) {
  int workers = (int)(job->pieces < threads ? job->pieces : threads) - 1;
  pool_start_workers(workers);
  if (workers > pool.nworkers) workers = pool.nworkers;
  pthread_mutex_lock(&pool.lock);
  pool.job = job;
  pool.generation++;
  job->slots = workers;
  for (int i = 0; i < workers; i++) pthread_cond_signal(&pool.work);
  pthread_mutex_unlock(&pool.lock);
  pool_run_pieces(job);
  /* Every piece is claimed now; those claimed by workers are done when none is active. */
  pthread_mutex_lock(&pool.lock);
  pool.job = NULL;
  while (pool.active) pthread_cond_wait(&pool.idle, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
}

void dc_parallel_for(int64_t n, int64_t grain, dc_range_fn fn, void *ctx) {
  if (n <= 0) return;
  if (grain < 1) grain = 1;
  if (n <= grain || pool_inside_job) {
    fn(0, n, ctx);
    return;
  }
  struct job job = {.fn = fn, .ctx = ctx, .n = n, .grain = grain, .blocks = n / grain + (n % grain != 0)};
  dc_parallel_hook framework = atomic_load(&pool_hook);
  if (framework) {
    framework(0, job.blocks, 1, pool_run_blocks, &job);
    return;
  }
  int threads = pool_own_threads();
  if (threads == 1 || pthread_mutex_trylock(&pool.owner)) {
    fn(0, n, ctx);
    return;
  }
  job.pieces = job.blocks < (int64_t)threads * PIECES_PER_THREAD ? job.blocks : (int64_t)threads * PIECES_PER_THREAD;
  pool_run_on_pool(&job, threads);
  pthread_mutex_unlock(&pool.owner);
}
