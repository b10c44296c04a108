/* step.c: dc_step: the public wrapper of every optimizer rule. It validates, counts, and splits all tensors over the
 * threads as one line of elements; Adam's rule runs dc_adamw's bodies, the others those of step. */
#include "adamw_coef.h"
#include "call.h"
#include "ref/packed.h"
#include "step_coef.h"

#include <stdlib.h>
#include <string.h>

/* Each tensor is padded to STEP_PAD, so that cut points (multiples of the grain) fall on whole cache lines of an
 * aligned tensor. */
enum { STEP_PAD = 64, STEP_GRAIN = 8 * DC_BLOCK };

typedef struct step_job {
  const dc__ops *ops;
  const dc_step_args *tensor;
  int64_t count;
} step_job;

static int64_t step_padded(int64_t n) { return (n + STEP_PAD - 1) / STEP_PAD * STEP_PAD; }

/* The tensors of one group share their scalars; two pow() per small tensor would be most of its time. */
static int step_same_scalars(const dc_step_args *a, const dc_step_args *b) {
  return a->rule == b->rule && a->step == b->step && a->lr == b->lr && a->beta1 == b->beta1 && a->beta2 == b->beta2 &&
         a->eps == b->eps && a->weight_decay == b->weight_decay && a->grad_scale == b->grad_scale &&
         a->flags == b->flags;
}

static dc_adamw_args step_as_adamw(const dc_step_args *t) {
  return (dc_adamw_args){.struct_size = sizeof(dc_adamw_args),
                         .param = t->param,
                         .grad = t->grad,
                         .exp_avg = t->state[0],
                         .exp_avg_sq = t->state[1],
                         .max_exp_avg_sq = t->state[2],
                         .lowp = t->lowp,
                         .n = t->n,
                         .step = t->step,
                         .lr = t->lr,
                         .beta1 = t->beta1,
                         .beta2 = t->beta2,
                         .eps = t->eps,
                         .weight_decay = t->weight_decay,
                         .grad_scale = t->grad_scale,
                         .param_dtype = t->param_dtype,
                         .grad_dtype = t->grad_dtype,
                         .state_dtype = t->state_dtype,
                         .lowp_dtype = t->lowp_dtype,
                         .flags = t->flags & DC_STEP_DECOUPLED ? DC_ADAMW_DECOUPLED : 0};
}

/* A cut at element x moves up to the next edge of a block, so that each block is one thread's. */
static int64_t step_cut(const dc_step_args *t, int64_t x) {
  const int64_t block = dc__state_block(t->format), edge = (t->first + x + block - 1) / block * block - t->first;
  return x == 0 || edge > t->n ? (x == 0 ? 0 : t->n) : edge;
}

static void step_piece(const dc__ops *ops, const dc_step_args *t, const dc__packed_coef *c, int64_t lo, int64_t hi) {
  if (t->format != DC_STATE_NEAREST) {
    lo = step_cut(t, lo), hi = step_cut(t, hi);
    if (lo < hi) ops->step_packed(t, c, lo, hi);
  } else if (t->rule == DC_RULE_ADAMW) {
    const dc_adamw_args a = step_as_adamw(t);
    ops->adamw(&a, &c->adamw, lo, hi);
  } else {
    ops->step(t, &c->other, lo, hi);
  }
}

static void step_scalars_of(const dc_step_args *t, dc__packed_coef *c) {
  if (t->rule == DC_RULE_ADAMW) {
    const dc_adamw_args a = step_as_adamw(t);
    c->adamw = dc__adamw_coef_of(&a);
  } else {
    c->other = dc__step_coef_of(t);
  }
}

static void step_range(int64_t begin, int64_t end, void *ctx) {
  const step_job *j = ctx;
  const dc_step_args *last = NULL;
  dc__packed_coef c;
  int64_t start = 0; /* of tensor t on the line */
  const unsigned fp = fp_enter();
  for (const dc_step_args *t = j->tensor; start < end && t < j->tensor + j->count; start += step_padded(t->n), t++) {
    const int64_t lo = begin > start ? begin - start : 0, hi = end - start < t->n ? end - start : t->n;
    if (lo >= hi) continue;
    if (!last || !step_same_scalars(last, t)) step_scalars_of(t, &c);
    last = t;
    step_piece(j->ops, t, &c, lo, hi);
  }
  fp_leave(fp);
}

static int step_run(const dc_step_args *tensors, int64_t count) {
  step_job j = {.tensor = tensors, .count = count};
  int64_t line = 0, elements = 0, adamw = 0; /* adamw: elements of Adam's rule, which count as such too */
  for (int64_t k = 0; k < count; k++) {
    DC_TRY(check_step(&tensors[k], k));
    if (__builtin_add_overflow(line, step_padded(tensors[k].n), &line))
      return DC_FAIL(DC_E_OVERFLOW, "the elements of %lld tensors overflow 64 bits", (long long)count);
    elements += tensors[k].n;
    if (tensors[k].rule == DC_RULE_ADAMW) adamw += tensors[k].n;
  }
  DC_TRY(dc__ops_table(&j.ops));
  dc__count(DC_COUNTER_step_calls, 1);
  dc__count(DC_COUNTER_step_elements, elements);
  if (count > 0 && tensors[0].rule == DC_RULE_ADAMW) dc__count(DC_COUNTER_adamw_calls, 1);
  dc__count(DC_COUNTER_adamw_elements, adamw);
  if (line > 0) dc_parallel_for(line, STEP_GRAIN, step_range, &j);
  return DC_OK;
}

int dc_step(const dc_step_args *tensors, int64_t count) {
  const void *list;
  void *owned;
  int rc = CHECK_LIST(dc_step_args, flags, tensors, count, &list, &owned);
  if (rc == DC_OK) rc = step_run(list, count);
  free(owned);
  return rc;
}

const char *dc_step_state_name(int rule, int index) {
  static const char *const names[DC_RULE_COUNT][3] = {
      [DC_RULE_ADAMW] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
      [DC_RULE_LION] = {"exp_avg"},
      [DC_RULE_ADAGRAD] = {"sum"},
      [DC_RULE_SGD] = {"momentum_buffer"},
  };
  return rule >= 0 && rule < DC_RULE_COUNT && index >= 0 && index < 3 ? names[rule][index] : NULL;
}

/* ---- states as codes --------------------------------------------------------------------------------------------- */
int dc_state_sizes(int format, int64_t first, int64_t n, int64_t *bytes, int64_t *scales) {
  if (!bytes || !scales) return DC_FAIL(DC_E_INVALID, "bytes or scales is NULL");
  DC_TRY(check_count(n));
  DC_TRY(check_format(format, first));
  if (format == DC_STATE_NEAREST) return DC_FAIL(DC_E_INVALID, "format 0 has the size of its dtype");
  *bytes = format == DC_STATE_STOCHASTIC ? 2 * n : format == DC_STATE_8BIT ? n : (n + 1) / 2;
  *scales = n == 0 || format == DC_STATE_STOCHASTIC ? 0 : dc__state_blocks(format, first, n);
  return DC_OK;
}

static int step_check_codes(const void *numbers, const void *codes, const float *scale, int format, int kind,
                            int64_t first, int64_t n) {
  DC_TRY(check_count(n));
  DC_TRY(check_format(format, first));
  if (format != DC_STATE_8BIT && format != DC_STATE_4BIT)
    return DC_FAIL(DC_E_INVALID, "format = %d has no codes; %d and %d have", format, DC_STATE_8BIT, DC_STATE_4BIT);
  if (kind < DC_STATE_SIGNED || kind > DC_STATE_LINEAR)
    return DC_FAIL(DC_E_INVALID, "kind = %d; there are 0 to %d", kind, DC_STATE_LINEAR);
  DC_TRY(check_array(numbers, sizeof(float), n, "the array of numbers"));
  DC_TRY(check_array(codes, 1, n, "codes"));
  return check_array(scale, sizeof *scale, n, "scale");
}

int dc_state_unpack(float *out, const void *codes, const float *scale, int format, int kind, int64_t first, int64_t n) {
  DC_TRY(step_check_codes(out, codes, scale, format, kind, first, n));
  const dc__code_map map = dc__code_map_of(format, kind);
  const unsigned fp = fp_enter();
  for (int64_t i = 0; i < n; i++)
    out[i] = dc__canonical_f32(dc__code_get(&map, codes, i) * scale[dc__state_block_at(format, first, i)]);
  fp_leave(fp);
  return DC_OK;
}

int dc_state_pack(void *codes, float *scale, const float *in, int format, int kind, int64_t first, int64_t n) {
  DC_TRY(step_check_codes(in, codes, scale, format, kind, first, n));
  const dc__code_map map = dc__code_map_of(format, kind);
  const unsigned fp = fp_enter();
  for (int64_t begin = 0, end; begin < n; begin = end) {
    end = dc__state_block_end(format, first, begin, n);
    dc__codes_put(&map, codes, &scale[dc__state_block_at(format, first, begin)], in + begin, begin, end, NULL);
  }
  fp_leave(fp);
  return DC_OK;
}
