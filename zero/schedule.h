/* schedule.h: pipeline schedules as data: which rank computes what in which order, for one training step of m
 * micro-batches through a chain of stages. Made, written as text, checked and simulated here, without processes or
 * tensors; executed elsewhere.
 *
 * p ranks hold v chunks of the model each, so there are p * v stages, numbered along the chain. A schedule says only
 * what is computed. What travels follows from it: forward of stage s needs the activations that the rank of stage s - 1
 * made of the same micro-batch, backward of stage s (B or I) the gradients from the rank of stage s + 1. */
#ifndef DEEPC_SCHEDULE_H
#define DEEPC_SCHEDULE_H

#include "../ops/base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

enum dc_schedule_kind {
  /* All forwards, then all backwards (Huang et al., arXiv:1811.06965). v = 1. */
  DC_SCHEDULE_GPIPE = 0,
  /* One forward, one backward, flushed (Narayanan et al., arXiv:2006.09503; arXiv:2104.04473, 2.2.1). v = 1. */
  DC_SCHEDULE_1F1B = 1,
  /* The same over v >= 2 chunks: stage s is on rank s mod p (arXiv:2104.04473, 2.2.2). */
  DC_SCHEDULE_INTERLEAVED = 2,
  /* 1F1B with backward split into I and W, and W put off to fill the bubble (Qi et al., arXiv:2401.10241, 2.3). v = 1.
   */
  DC_SCHEDULE_ZB_H1 = 3,
  /* v = 2 chunks that go down the ranks and up again, so that rank 0 has the first and the last stage (Qi et al.,
   * arXiv:2401.10241, 6). */
  DC_SCHEDULE_ZB_V = 4,
  DC_SCHEDULE_COUNT = 5
};
/* "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"; NULL for another value. */
DC_API const char *dc_schedule_name(int kind);

/* What is computed with one micro-batch in one stage: its letter in the text form. */
enum dc_schedule_work {
  DC_SCHEDULE_F = 0, /* forward */
  DC_SCHEDULE_B = 1, /* backward: gradients of the inputs and of the weights */
  DC_SCHEDULE_I = 2, /* gradients of the inputs alone, for the stage before */
  DC_SCHEDULE_W = 3, /* gradients of the weights alone, after I */
  DC_SCHEDULE_WORKS = 4
};
typedef struct dc_schedule_action {
  int32_t work, stage, micro;
} dc_schedule_action;

#define DC_SCHEDULE_MAX_STAGES (1 << 20) /* p * v */

/* The actions of one rank, in order. With actions == NULL only *count; a capacity below it is DC_E_INVALID. Also
 * DC_E_INVALID: a kind that is none, chunks that the kind does not have, ranks, micro_batches or chunks below 1, a rank
 * that is none, too many stages; DC_E_OVERFLOW: more actions than 32 bits count. Any number of micro-batches is legal;
 * the interleaved schedule has its published bubble for multiples of `ranks`. */
DC_API int dc_schedule_actions(int kind, int64_t ranks, int64_t chunks, int64_t micro_batches, int64_t rank,
                               dc_schedule_action *actions, int64_t capacity, int64_t *count);
/* The rank that holds a stage, in schedules of this kind. Errors as above. */
DC_API int dc_schedule_stage_rank(int kind, int64_t ranks, int64_t chunks, int64_t stage, int64_t *rank);

/* Text: "0F0 0F1 0B0", stage, letter and micro-batch of each action, as in a cell of torch.distributed.pipelining's
 * files. *length is without the final NUL; with text == NULL only *length, else capacity_bytes must be above it. */
DC_API int dc_schedule_print(const dc_schedule_action *actions, int64_t count, char *text, int64_t capacity_bytes,
                             int64_t *length);
/* One rank's actions, one line; blanks and commas separate, and may repeat. DC_E_INVALID names the column (from 1) and
 * what stands there. With actions == NULL only *count. */
DC_API int dc_schedule_parse(const char *text, dc_schedule_action *actions, int64_t capacity, int64_t *count);

/* The actions of all ranks, whoever made them. Borrowed. */
typedef struct dc_schedule {
  const dc_schedule_action *actions; /* rank 0's, then rank 1's, ... */
  const int64_t *begin; /* [ranks + 1] rank r has [begin[r], begin[r + 1]) of them */
  int64_t ranks, stages, micro_batches;
} dc_schedule;

/* Whether it can be executed with sends that do not block and receives that do: every micro-batch goes once forward
 * and once backward (B, or I and then W) through each stage, each stage is on one rank, and no rank waits for ever.
 * DC_E_INVALID names rank, action (counted from 0 within the rank) and micro-batch. peak, if not NULL: [ranks] the most
 * activations (of one micro-batch in one stage: from its F until its B or W) that are there at a time. */
DC_API int dc_schedule_check(const dc_schedule *schedule, int64_t *peak);

/* In any unit of time, counted from the start of the step. */
typedef struct dc_schedule_span {
  double start, end;
} dc_schedule_span;
typedef struct dc_schedule_load {
  double busy, first, last; /* in actions; when the first begins and the last ends (0 and 0 without actions) */
  int64_t peak;             /* as dc_schedule_check says */
} dc_schedule_load;
/* Executes it in time, each action as early as its rank and what it needs allow. cost: [stages][DC_SCHEDULE_WORKS].
 * hop: [stages - 1] time from stage s to stage s + 1 and back, where they are on different ranks; NULL: none. spans:
 * [actions], loads: [ranks], either may be NULL. *makespan: when all is done, so a rank's bubble is *makespan - busy.
 * Errors: those of dc_schedule_check; DC_E_INVALID for a time that is negative or not finite. */
DC_API int dc_schedule_simulate(const dc_schedule *schedule, const double *cost, const double *hop,
                                dc_schedule_span *spans, dc_schedule_load *loads, double *makespan);

/* What dc_schedule_simulate says of the schedule that dc_schedule_actions makes, for a search among many. loads:
 * [ranks], may be NULL. Errors: those of both; DC_E_NOMEM. */
DC_API int dc_schedule_predict(int kind, int64_t ranks, int64_t chunks, int64_t micro_batches, const double *cost,
                               const double *hop, dc_schedule_load *loads, double *makespan);

#ifdef __cplusplus
}
#endif
#endif
