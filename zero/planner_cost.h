/* planner_cost.h: what the planner's search (planner.c) takes of its costs (planner_cost.c). */
#ifndef DEEPC_PLANNER_COST_H
#define DEEPC_PLANNER_COST_H

#include "planner.h"
#include "zero.h"

/* A cluster and a model, checked, with sums over layers. */
typedef struct dc__planner {
  const dc_planner_nodes *nodes;
  int64_t kinds, ranks;
  const dc_planner_model *model;
  int64_t first[DC_PLANNER_KINDS + 1]; /* kind k has the ranks from first[k] on */
  dc_planner_layer *sums;              /* [nlayers + 1] of the layers before */
  dc_planner_layer *block_sums;        /* [nlayers + 1] of those that may be computed again */
  int64_t blocks;
  /* Of the largest layer: parameters, elements saved, and those that tensor parallelism does not cut. */
  double largest, largest_saved, largest_whole;
} dc__planner;

/* The sizes of a layout and what follows from them alone: where the model is cut, how fast each stage is. */
typedef struct dc__shape {
  int64_t dp, tp, pp, sp, ep, schedule, chunks;
  int64_t pieces;    /* pp * chunks */
  int64_t *cut;      /* [pieces + 1] layers */
  int64_t *rank_of;  /* [pieces] */
  dc_planner_nodes *at; /* [pp] the slowest of a rank's stage in every respect */
  double *forward, *backward, *hop; /* [pp] of one micro-batch */
  double *slower; /* [pp][DC_PLANNER_KINDS] */
  /* Of replicas on unequal nodes: seconds of a micro-batch, and how many of them each takes if they are shared. */
  double *replica;   /* [dp] */
  int64_t *micro_of; /* [dp] */
  int64_t most;      /* micro-batches of the replica that has most */
  double busy, gather; /* where they are shared: seconds of the last replica; of gathering once for a micro-batch */
  int shared;        /* micro_of counts; else all take as many */
} dc__shape;

int dc__planner_open(dc__planner *p, const dc_planner_nodes *nodes, int64_t kinds, const dc_planner_model *model);
void dc__planner_close(dc__planner *p);
/* Memory for shapes of up to `pp` ranks and `pieces` pieces in a pipeline, and `dp` replicas. */
int dc__shape_open(dc__shape *x, int64_t pp, int64_t pieces, int64_t dp);
void dc__shape_close(dc__shape *x);
/* Whether the model and the cluster can have these sizes: DC_OK, or DC_E_INVALID with the reason. */
int dc__shape_check(const dc__planner *p, const dc_planner_layout *l);
/* Cuts the model. The layout's sizes, schedule and chunks count. */
int dc__shape_set(const dc__planner *p, dc__shape *x, const dc_planner_layout *l);
/* Seconds of a step of this shape below which no stage, offload or recomputation brings it. */
double dc__planner_least(const dc__planner *p, dc__shape *x, const dc_planner_layout *l, int uneven);
int dc__planner_cost(const dc__planner *p, dc__shape *x, const dc_planner_layout *l, int uneven, dc_planner_cost *out,
                     dc_planner_stage *stages, int64_t *micro_of);

#endif
