/* bucket.h: gradients reduced where they lie.
 *
 * Autograd hands over one parameter's gradient at a time, in an order that may differ between ranks. The reducer
 * writes each into this rank's slots of a dc_comm (one exchange step per bucket, buckets strictly in index order on
 * every rank) and reduces, in place, this rank's slice of every bucket that all ranks have filled, into its
 * accumulator (fp32, or 16 bits where memory counts more). Nothing is copied but the gradient into its slot; the
 * reduce reads all ranks' slots and writes only its own slice.
 *
 * A bucket is a range [b*B, (b+1)*B) of the flat space of a dc_zero_layout (zero.h); a parameter may span several.
 * Windows: the buckets that have a begun exchange step, at most `slots` of them. A gradient beyond the window stays
 * with its owner (pending) until the window reaches it; when pending bytes exceed `pending_limit_bytes`, add()
 * blocks and helps. So memory is bounded and the order of hooks does not matter; ranks may disagree on which
 * parameters are used: finish() puts zeros for the missing.
 *
 * Every bucket goes through an explicit state machine: IDLE -> OPEN (being filled) -> POSTED -> REDUCED -> IDLE. One
 * pass = begin ... finish. */
#ifndef DEEPC_BUCKET_H
#define DEEPC_BUCKET_H

#include "../zero/zero.h"
#include "comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dc_reducer dc_reducer;

typedef struct dc_reducer_config {
  size_t struct_size; /* sizeof(dc_reducer_config): see base.h */
  dc_comm *comm; /* borrowed; slot_bytes >= bucket_elems * dtype size. NULL only with layout->world 1 */
  const dc_zero_layout *layout; /* borrowed */
  int32_t dtype; /* of the gradients on the wire: fp32, bf16, fp16 */
  int32_t own_all; /* 1: this rank's slice is the whole bucket (stage 0); 0: slice `rank` (stages 1-3) */
  int32_t rank;
  int32_t ring; /* 0: acc is whole. k > 0: acc holds k buckets' slices, see dc_reducer_give_back */
  float pre_scale; /* factor on each gradient as it is written to its slot (1: none; prescale_gradients) */
  int32_t tree; /* 0: see dc_reducer_begin. k > 0: gradients are added along the tree of micro-batches,
                 * with k buffers: acc and the k - 1 in tree_acc */
  int64_t pending_limit_bytes;
  void *acc; /* borrowed, of acc_dtype: [shard elements] (own_all: [total elements]); ring: [ring * slice] */
  double *partial; /* borrowed: squared-norm partials of acc, one per DC_BLOCK elements of acc; not with a
                    * ring */
  float *tree_acc; /* borrowed: [tree - 1][elements of acc]; NULL with tree 0 and 1 */
  int32_t acc_dtype; /* fp32; or bf16, fp16 (neither with a tree nor a ring): every pass adds in fp32 and rounds once */
} dc_reducer_config;

DC_API int dc_reducer_create(const dc_reducer_config *config, dc_reducer **out);
DC_API int dc_reducer_free(dc_reducer *r);
/* acc starts where this lease does (ops/base/base.h) and gets its memory, bucket by bucket, when a bucket is written;
 * NULL: acc has memory. Borrowed. The caller ends the lease when nobody needs the sums any more, and then assigns.
 * DC_E_STATE within a pass. */
DC_API int dc_reducer_lease(dc_reducer *r, dc_lease *lease);

/* Starts a pass (one micro-batch's backward). assign: 1 overwrites acc (first micro-batch), 0 adds. norm: 1 fills
 * `partial`. A pass may be begun implicitly by the first add; that one assigns, and fills `partial` if there is one.
 * DC_E_STATE if one is open. The communicator is not touched before the first add. */
DC_API int dc_reducer_begin(dc_reducer *r, int assign, int norm);
/* The tree: one order of additions for every layout. Pass j of a step (the one that assigns is 0) holds micro-batches
 * j * world + rank, and the sum over all micro-batches of the step depends on nothing but their indices and number
 * (comm/bucket_tree.h): any world, any number of passes and both values of own_all give equal bits. Gradients are
 * rounded to the wire dtype also without peers, and added in fp32. With a tree
 *   - norm = 1 says that the pass is the last of its step: acc then holds the whole sum and `partial`, if there is one,
 *     its norm, and the next pass assigns (else DC_E_STATE). Until then acc and tree_acc hold one node for every bit
 *     that is set in the number of micro-batches so far, in falling order;
 *   - so many nodes must fit after every pass but the last (1 buffer with one pass, about log2(passes) with more);
 *     DC_E_STATE at begin otherwise;
 *   - a pass that is begun implicitly is a whole step; with a ring every pass is (tree 1). */
/* Hands over the gradient of parameter `param` (index in the layout): contiguous, layout numel, `dtype` fp32, bf16
 * or fp16 (cast to the wire dtype if it differs). Borrowed until it is listed as released. Adds for one parameter
 * twice in a pass: DC_E_STATE naming it. Wrong arguments (DC_E_INVALID, DC_E_DTYPE, that DC_E_STATE) leave the pass
 * as it was; after any other error the reducer and its communicator are broken: every call returns that error (peers
 * get it too), and the gradients count as released. Without peers a gradient goes to acc unrounded, whatever the
 * wire dtype. */
DC_API int dc_reducer_add(dc_reducer *r, int64_t param, const void *grad, int dtype);
/* Parameters whose gradient is no longer needed since the last call of this function (also the one just added,
 * usually): writes up to `capacity` indices, *count of them; call until 0. Owners drop their gradients then. What a
 * pass released can be asked for until the next one begins. */
DC_API int dc_reducer_released(dc_reducer *r, int64_t *params, int64_t capacity, int64_t *count);
/* Ends the pass: zeros for parameters without gradient (with assign; nothing to add otherwise), waits for all ranks,
 * reduces the rest. Collective. All gradients are released after it. DC_E_STATE if no pass is open (a rank without
 * any gradient begins its pass explicitly). */
DC_API int dc_reducer_finish(dc_reducer *r);
/* 1 while a pass is open. */
DC_API int dc_reducer_in_pass(const dc_reducer *r);

/* A ring: the reduced slices are on their way to somewhere else (other nodes), and acc is only where they wait. Bucket
 * b's slice lies at acc + (b % ring) * (bucket_elems / world) (own_all: b % ring * bucket_elems); it is assigned, never
 * added to, and bucket b is not reduced before bucket b - ring is given back. With a ring
 *   - dc_reducer_begin takes assign = 1 and norm = 0 only, and a pass is never begun implicitly;
 *   - finish returns as soon as it has reduced one more bucket; give back what was taken and call it until
 *     dc_reducer_in_pass is 0. With a full ring and nothing given back: DC_E_STATE;
 *   - the communicator may be of one rank. */
/* *count: buckets [0, *count) of the open pass, or of the last one, are reduced. Does what it can without waiting. */
DC_API int dc_reducer_reduced(dc_reducer *r, int64_t *count);
/* Buckets [0, count) of the open pass were taken: their places may be written again. count never falls. */
DC_API int dc_reducer_give_back(dc_reducer *r, int64_t count);

/* The reverse way, for stages 1 and 2: every rank holds a whole replica of `elem_size`-byte elements at `flat`
 * (layout->total elements; any dtype) whose own slices are new; on return all slices are. Moves each slice once
 * through the slots. Collective; not inside a pass. */
DC_API int dc_reducer_gather(dc_reducer *r, void *flat, int dtype);

#ifdef __cplusplus
}
#endif
#endif
