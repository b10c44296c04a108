/* attention.c: the public wrappers of dc_attention and its gradient: checks, then a head of k and v at a time over
 * dc_parallel_for. */
#include "ref/attention.h"
#include "call.h"

_Static_assert((int)TILE_DIM == (int)DC__ATTENTION_DIM, "the bodies keep a row of TILE_DIM numbers on the stack");

typedef struct att_job {
  const dc__ops *ops;
  const dc_attention_args *args;
  const dc_attention_grad_args *grad; /* NULL: forward */
  int64_t batch, kv_heads, words;
  int one_batch, one_head; /* a unit has all entries of the batch, or all heads: they share elements of dbias */
  int no_memory; /* accessed atomically */
} att_job;

static void att_unit(const att_job *j, int64_t unit, float *scratch) {
  const int64_t across = j->one_head ? 1 : j->kv_heads, b = unit / across, h = unit % across;
  const int64_t to_b = j->one_batch ? j->batch : b + 1, to_h = j->one_head ? j->kv_heads : h + 1;
  for (int64_t x = b; x < to_b; x++)
    for (int64_t y = h; y < to_h; y++) {
      if (j->grad) j->ops->attention_grad(j->grad, x, y, scratch);
      else j->ops->attention(j->args, x, y, scratch);
    }
}

/* Ranges are of heads of k and v, batch by batch; where they share elements of dbias, of what shares them. */
static void att_range(int64_t begin, int64_t end, void *ctx) {
  att_job *j = ctx;
  float *scratch = call_scratch_take(j->words * (int64_t)sizeof(float));
  if (!scratch) {
    __atomic_store_n(&j->no_memory, 1, __ATOMIC_RELAXED);
    return;
  }
  const unsigned fp = fp_enter();
  for (int64_t k = begin; k < end; k++) att_unit(j, k, scratch);
  fp_leave(fp);
  call_scratch_give(scratch);
}

static int att_run(att_job *j, int64_t batch, int64_t kv_heads) {
  DC_TRY(dc__ops_table(&j->ops));
  dc__count(DC_COUNTER_attention_calls, 1);
  j->batch = batch, j->kv_heads = kv_heads;
  dc_parallel_for((j->one_batch ? 1 : batch) * (j->one_head ? 1 : kv_heads), 1, att_range, j);
  if (__atomic_load_n(&j->no_memory, __ATOMIC_RELAXED))
    return DC_FAIL(DC_E_NOMEM, "no %lld bytes for the blocks of a head; take shorter sequences or fewer threads",
                   (long long)(j->words * (int64_t)sizeof(float)));
  return DC_OK;
}

int dc_attention(const dc_attention_args *args) {
  dc_attention_args a;
  att_job j = {.args = &a};
  DC_TRY(check_attention(args, &a));
  if (a.batch == 0 || a.heads == 0 || a.rows == 0) return DC_OK;
  j.words = dc__attention_words(a.rows, a.keys, a.dim, a.heads / a.kv_heads, 0);
  return att_run(&j, a.batch, a.kv_heads);
}

int dc_attention_grad(const dc_attention_grad_args *args) {
  dc_attention_grad_args a;
  att_job j = {.grad = &a};
  DC_TRY(check_attention_grad(args, &a));
  if (a.batch == 0 || a.heads == 0 || (a.rows == 0 && a.keys == 0)) return DC_OK;
  j.words = dc__attention_words(a.rows, a.keys, a.dim, a.heads / a.kv_heads, 1);
  j.one_batch = a.dbias && a.dbias_stride[0] == 0, j.one_head = a.dbias && a.dbias_stride[1] == 0;
  return att_run(&j, a.batch, a.kv_heads);
}
