/* zero.h: ZeRO's arithmetic (Rajbhandari et al., arXiv:1910.02054): who owns which element, in which bucket,
 * gathered when, and how many bytes lie where. Pure functions of sizes: no memory of tensors, no processes, no
 * devices. Everything here is exact integer arithmetic with overflow checks (DC_E_OVERFLOW) and can be tested
 * exhaustively. */
#ifndef DEEPC_ZERO_H
#define DEEPC_ZERO_H

#include "../ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Alignment of a parameter's start in the flat space, in elements (a cache line of the smallest element and
 * GEMM-friendly). */
#define DC_ZERO_ALIGN 64

/* The flat space: parameters one after the other in the given order, each start a multiple of DC_ZERO_ALIGN; the
 * total padded to a multiple of world * DC_BLOCK. Buckets cut it into ranges of bucket_elems (the last one shorter,
 * still a multiple of world * DC_BLOCK); slice r of a bucket is its r-th of `world` equal parts. A rank's shard is
 * the concatenation of its slices in bucket order. So every bucket's reduction is balanced over the ranks, slices
 * are multiples of DC_BLOCK, and offsets in the flat space do not depend on the world. */
typedef struct dc_zero_layout {
  int64_t nparams, world, total, bucket_elems, nbuckets, shard_elems;
  const int64_t *offset; /* [nparams] start of each parameter in the flat space; owned by the layout */
  const int64_t *numel;  /* [nparams] */
} dc_zero_layout;

/* numel[i] >= 0. world >= 1. bucket_elems >= 1 is a wish: rounded up to a multiple of world * DC_BLOCK, and not
 * beyond total (one unit of that if total is 0; then nbuckets is 0). *out is owned: dc_zero_layout_free. */
DC_API int dc_zero_layout_make(const int64_t *numel, int64_t nparams, int64_t world, int64_t bucket_elems,
                               dc_zero_layout **out);
DC_API void dc_zero_layout_free(dc_zero_layout *layout);

/* Bucket b: [*begin, *end) of the flat space. */
DC_API int dc_zero_bucket(const dc_zero_layout *l, int64_t b, int64_t *begin, int64_t *end);
/* Slice of rank r in bucket b: [*begin, *end) of the flat space, and where it starts in r's shard. */
DC_API int dc_zero_slice(const dc_zero_layout *l, int64_t b, int64_t r, int64_t *begin, int64_t *end,
                         int64_t *shard_begin);
/* Where flat element `flat` lives: its rank and index in that rank's shard. */
DC_API int dc_zero_locate(const dc_zero_layout *l, int64_t flat, int64_t *rank, int64_t *shard_index);

/* One run of consecutive elements of one parameter inside one rank's shard. */
typedef struct dc_zero_segment {
  int64_t param, param_begin, flat_begin, shard_begin, len;
} dc_zero_segment;
/* All segments of rank r, in shard order (which is also flat order). With segments == NULL only *count; a capacity
 * below it is DC_E_INVALID. Adjacent slices of one parameter are not merged across buckets unless they are
 * contiguous in both spaces. */
DC_API int dc_zero_segments(const dc_zero_layout *l, int64_t r, dc_zero_segment *segments, int64_t capacity,
                            int64_t *count);

/* Which ranges of bucket b belong to which parameter: pieces in flat order (padding in none). */
typedef struct dc_zero_piece {
  int64_t param, param_begin, flat_begin, len;
} dc_zero_piece;
DC_API int dc_zero_pieces(const dc_zero_layout *l, int64_t b, dc_zero_piece *pieces, int64_t capacity, int64_t *count);

/* Prefetch order (streamed mode): `use` is the recorded sequence of units (a unit may occur more than once); unit u
 * has elems[u]. While unit use[i] computes, later units may be in flight as long as the elements in flight stay <=
 * prefetch_elems, and gathered elements stay <= max_live_elems (a unit that is needed now is always gathered; kept
 * units make room for it, the one whose next use is farthest first). A unit is kept after its use if its next use is
 * within max_reuse_elems elements of other units (counted per use), else released; a unit above max_live_elems is
 * never kept. GATHER begins a gather, USE waits for it and computes: GATHERs of later units stand right before the
 * USE that hides them. Writes the action list (3 * nuse actions at most; with actions == NULL only *count); all
 * units are released at its end. */
enum dc_zero_action_kind { DC_ZERO_GATHER = 1, DC_ZERO_USE = 2, DC_ZERO_RELEASE = 3 };
typedef struct dc_zero_action {
  int32_t kind;
  int32_t reserved;
  int64_t unit;
} dc_zero_action;
DC_API int dc_zero_prefetch(const int64_t *use, int64_t nuse, const int64_t *elems, int64_t nunits,
                            int64_t prefetch_elems, int64_t max_live_elems, int64_t max_reuse_elems,
                            dc_zero_action *actions, int64_t capacity, int64_t *count);

/* Copies `bytes` bytes of gathered parameters and counts them (counter gather_bytes). Like dc_copy: any alignment, no
 * overlap. */
DC_API int dc_zero_gather(void *dst, const void *src, int64_t bytes);

/* Bytes of model states. Private is per rank, shared is once per node. Staging: slots of all ranks (shared).
 *   n = stage 0 ? total : shard
 *   params: stage 0-2 private (total + frozen) * param_size; stage 3 resident: the same, shared; stage 3 streamed:
 *           private (shard + ceil(frozen / world)) * param_size (what is gathered for a moment is not a state)
 *   grads:  n * acc_size (the accumulator; 0: fp32), times grad_buffers if > 1 (the tree of micro-batches);
 *   master: n * 4 if set;
 * states: n * nstates * state_size, or ceil(n / 256) * state_block; staging: ranks_per_node * slots * bucket_elems *
 * grad_wire_size, none with world 1 exchange: as given, private: what a rank keeps for gradients on their way between
 * nodes rank_total: what is private; node_total: ranks_per_node * rank_total + what is shared */
typedef struct dc_zero_bytes_in {
  int64_t total, shard, frozen; /* elements: flat space, one shard, parameters without gradient (padded) */
  int64_t world, ranks_per_node, slots, bucket_elems;
  /* sizes in bytes; master: 1 if separate fp32 masters exist */
  int32_t stage, param_size, grad_wire_size, master, state_size, nstates, resident;
  int16_t grad_buffers, acc_size; /* acc_size: bytes of an accumulated gradient; 0: 4 */
  int64_t exchange; /* bytes */
  int64_t state_block; /* bytes of 256 elements of all states, where they are no whole bytes each; 0: as above */
} dc_zero_bytes_in;
typedef struct dc_zero_bytes {
  int64_t params_private, params_shared, grads_private, master_private, states_private, staging_shared;
  int64_t rank_total, node_total, exchange_private;
} dc_zero_bytes;
DC_API int dc_zero_estimate(const dc_zero_bytes_in *in, dc_zero_bytes *out);

#ifdef __cplusplus
}
#endif
#endif
