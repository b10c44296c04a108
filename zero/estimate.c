/* estimate.c: bytes of model states per rank and per node (the table of the ZeRO paper, with shared parameters and the
 * exchange's staging added). What is private is counted per rank; what is shared is counted once per node. */
#include "zero.h"

/* A sum of products that remembers whether it overflowed, so that the formulas read as formulas. */
typedef struct sum {
  int64_t value;
  int overflow;
} sum;

static void estimate_add_product(sum *s, int64_t a, int64_t b) {
  int64_t product;
  s->overflow |= __builtin_mul_overflow(a, b, &product) || __builtin_add_overflow(s->value, product, &s->value);
}

static int estimate_check_counts(const dc_zero_bytes_in *in) {
  const struct {
    const char *name;
    int64_t value, least;
  } rows[] = {
      {"total", in->total, 0},
      {"shard", in->shard, 0},
      {"frozen", in->frozen, 0},
      {"world", in->world, 1},
      {"ranks_per_node", in->ranks_per_node, 1},
      {"slots", in->slots, 0},
      {"bucket_elems", in->bucket_elems, 0},
      {"param_size", in->param_size, 1},
      {"grad_wire_size", in->grad_wire_size, 1},
      {"state_size", in->state_size, 0},
      {"nstates", in->nstates, 0},
      {"master", in->master, 0},
      {"resident", in->resident, 0},
      {"exchange", in->exchange, 0},
      {"grad_buffers", in->grad_buffers, 0},
      {"acc_size", in->acc_size, 0},
      {"state_block", in->state_block, 0},
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    if (rows[i].value < rows[i].least)
      return DC_FAIL(DC_E_INVALID, "%s is %lld; it must be >= %lld", rows[i].name, (long long)rows[i].value,
                     (long long)rows[i].least);
  if (in->stage < 0 || in->stage > 3) return DC_FAIL(DC_E_INVALID, "stage is %d; it must be 0 to 3", in->stage);
  if (in->shard > in->total)
    return DC_FAIL(DC_E_INVALID, "a shard of %lld elements is larger than the total of %lld", (long long)in->shard,
                   (long long)in->total);
  if (in->ranks_per_node > in->world)
    return DC_FAIL(DC_E_INVALID, "ranks_per_node %lld is larger than world %lld", (long long)in->ranks_per_node,
                   (long long)in->world);
  return DC_OK;
}

int dc_zero_estimate(const dc_zero_bytes_in *in, dc_zero_bytes *out) {
  if (!in || !out) return DC_FAIL(DC_E_INVALID, "in or out is NULL");
  DC_TRY(estimate_check_counts(in));
  const int64_t fp32 = 4;
  int64_t optimized = in->stage == 0 ? in->total : in->shard;
  int64_t frozen_shard = in->frozen / in->world + (in->frozen % in->world != 0);
  sum params = {0}, shared = {0}, grads = {0}, master = {0}, states = {0}, staging = {0}, rank = {0}, node = {0};

  if (in->stage < 3) {
    estimate_add_product(&params, in->total, in->param_size);
    estimate_add_product(&params, in->frozen, in->param_size);
  } else if (in->resident) {
    estimate_add_product(&shared, in->total, in->param_size);
    estimate_add_product(&shared, in->frozen, in->param_size);
  } else {
    estimate_add_product(&params, in->shard, in->param_size);
    estimate_add_product(&params, frozen_shard, in->param_size);
  }
  sum buffers = {0};
  estimate_add_product(&buffers, in->acc_size ? in->acc_size : fp32, in->grad_buffers > 1 ? in->grad_buffers : 1);
  estimate_add_product(&grads, optimized, buffers.value);
  if (in->master) estimate_add_product(&master, optimized, fp32);
  sum per_element = {0};
  estimate_add_product(&per_element, in->nstates, in->state_size);
  if (in->state_block) estimate_add_product(&states, optimized / 256 + (optimized % 256 != 0), in->state_block);
  else estimate_add_product(&states, optimized, per_element.value);
  if (in->world > 1) {
    sum slots = {0}, slot = {0};
    estimate_add_product(&slots, in->ranks_per_node, in->slots);
    estimate_add_product(&slot, in->bucket_elems, in->grad_wire_size);
    estimate_add_product(&staging, slots.value, slot.value);
    staging.overflow |= slots.overflow | slot.overflow;
  }
  estimate_add_product(&rank, params.value, 1);
  estimate_add_product(&rank, grads.value, 1);
  estimate_add_product(&rank, master.value, 1);
  estimate_add_product(&rank, states.value, 1);
  estimate_add_product(&rank, in->exchange, 1);
  estimate_add_product(&node, rank.value, in->ranks_per_node);
  estimate_add_product(&node, shared.value, 1);
  estimate_add_product(&node, staging.value, 1);
  if (params.overflow | shared.overflow | grads.overflow | master.overflow | states.overflow | staging.overflow |
      rank.overflow | node.overflow)
    return DC_FAIL(DC_E_OVERFLOW, "the bytes of %lld elements on %lld ranks don't fit in 64 bits", (long long)in->total,
                   (long long)in->world);
  *out = (dc_zero_bytes){.params_private = params.value,
                         .params_shared = shared.value,
                         .grads_private = grads.value,
                         .master_private = master.value,
                         .states_private = states.value,
                         .staging_shared = staging.value,
                         .rank_total = rank.value,
                         .node_total = node.value,
                         .exchange_private = in->exchange};
  return DC_OK;
}
