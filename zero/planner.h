/* planner.h: what a training step costs on a cluster, and the layout that costs least: how many ranks for data (dp),
 * tensor (tp), pipeline (pp), sequence (sp) and expert (ep) parallelism, the ZeRO stage, what is offloaded, the
 * micro-batch, the pipeline's schedule, and whether blocks are computed again. Arithmetic alone: no devices, no
 * processes. Every formula stands in docs/planner.md with its source. Seconds, bytes, FLOP/s, bytes/s. */
#ifndef DEEPC_PLANNER_H
#define DEEPC_PLANNER_H

#include "schedule.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DC_PLANNER_KINDS 8             /* kinds of nodes in a cluster */
#define DC_PLANNER_MAX_RANKS (1 << 17) /* ranks of a cluster */

/* Nodes of one kind. Rates are what is reached with all ranks of the node at work, not what is printed on the box. */
typedef struct dc_planner_nodes {
  int64_t nodes, ranks; /* ranks: on each node */
  double flops;         /* of a rank in matrix products */
  double start;         /* seconds an operation takes beside its work */
  double memory_rate;   /* of a rank's device memory */
  double
      device_bytes; /* of a rank's device; 0: ranks of CPUs, which share the node's memory and stage 3's parameters */
  double host_bytes; /* of the node */
  double host_rate; /* between a device and the host, each way, of a rank */
  double host_update; /* elements that the host's optimizer updates in a second, of the node */
  double disk_bytes, disk_rate; /* of the node */
  double link_rate, link_latency; /* between ranks of a node, each way, of a rank */
  double net_rate, net_latency; /* between nodes, each way, of a node */
  double reserve; /* bytes that a rank holds before it trains */
} dc_planner_nodes;

/* One layer, forward, for one sample (a sequence). Products and elements that tensor parallelism does not cut are
 * `whole`. Backward computes twice the products (of inputs and of weights). */
typedef struct dc_planner_layer {
  double params, expert_params; /* expert_params: of all experts */
  double flops;
  double traffic, traffic_whole; /* elements that operations beside products read and write, forward and backward */
  double saved, saved_whole; /* elements that are kept for backward */
  double output; /* elements handed on: what a hop carries, and what is kept of a block that is computed again */
  double tp_elems, tp_calls; /* all-reduced over tensor-parallel ranks, forward; the same again backward */
  double sp_elems; /* exchanged all-to-all over sequence-parallel ranks, forward; the same again backward */
  double ep_elems; /* the same over expert-parallel ranks */
  double calls; /* operations started, forward; twice as many backward */
  double block; /* 1: may be computed again in backward */
} dc_planner_layer;

typedef struct dc_planner_model {
  int64_t nlayers, heads, kv_heads, seq, experts, batch; /* batch: samples of a step, over all ranks */
  const dc_planner_layer *layers;
  int32_t item; /* bytes of a parameter and of an activation */
  int32_t grad, wire, master, state_size, nstates; /* as in dc_zero_bytes_in: grad is acc_size, wire grad_wire_size */
  double overlap; /* part of the computation beside which gradients and gathered parameters travel */
  double update_traffic; /* bytes of memory traffic for each parameter that is updated */
  double batch_traffic; /* bytes of memory traffic for each parameter's gradient, for each micro-batch */
} dc_planner_model;

enum dc_planner_offload { DC_OFFLOAD_NONE = 0, DC_OFFLOAD_HOST = 1, DC_OFFLOAD_DISK = 2, DC_OFFLOAD_PARAMS = 3 };
/* One way to train. dp * tp * pp * sp ranks in the order pp, dp, sp, tp (tp fastest), on the nodes in their order. */
typedef struct dc_planner_layout {
  int64_t dp, tp, pp, sp, ep, stage, offload, recompute, schedule, chunks, micro, accumulation;
} dc_planner_layout;

/* Of a step. Parts are those of the stage that is slowest; step is their sum. */
typedef struct dc_planner_cost {
  double step;
  double compute, recompute, tensor, sequence, expert, gather, bubble, data, update, offload;
  double device_bytes, host_bytes, disk_bytes; /* of the fullest rank; of the fullest node */
  double device_room, host_room, disk_room; /* what there is */
  double overflow; /* the largest of bytes / room, or 0 where nothing is asked; <= 1: it fits */
} dc_planner_cost;

/* Of one stage (of pp * chunks): its layers, times of a micro-batch, and its hop to the next. */
typedef struct dc_planner_stage {
  int64_t begin, end, rank; /* layers; the rank of the pipeline that holds it */
  double forward, backward, hop, params;
  double states_bytes, activation_bytes; /* of a rank's memory: of all its stages */
} dc_planner_stage;

/* What the search may choose. Sizes: 0 for any, else that one. masks: bit i allows value i. */
typedef struct dc_planner_space {
  int64_t dp, tp, pp, sp, ep, micro;
  int64_t stages, offloads, recomputes, schedules; /* masks */
  int64_t uneven; /* 1: replicas on unequal nodes may take different numbers of micro-batches */
  int64_t exhaustive; /* 1: nothing is left out; for tests */
} dc_planner_space;

typedef struct dc_planner_found {
  dc_planner_layout layout;
  dc_planner_cost cost;
} dc_planner_found;
typedef struct dc_planner_told {
  int64_t found, visited, fitting;
  dc_planner_found fastest; /* whatever it needs: if it does not fit, memory is what limits */
  dc_planner_found closest; /* the one that needs least beyond what there is, where none fits */
} dc_planner_told;

/* The cost of one layout. stages: [pp * chunks], may be NULL. micro_of: [dp], micro-batches of each replica, may be
 * NULL. DC_E_INVALID for sizes that are none, or that the model or the cluster can't have, with the reason. */
DC_API int dc_planner_cost_of(const dc_planner_nodes *nodes, int64_t kinds, const dc_planner_model *model,
                              const dc_planner_layout *layout, int64_t uneven, dc_planner_cost *cost,
                              dc_planner_stage *stages, int64_t *micro_of);
/* The `capacity` fastest layouts that fit, fastest first, no two with equal sizes. Branch and bound: a part of the
 * space is left out only if a lower bound of its time is above the slowest that is kept, or if each of its layouts
 * costs more than one with the same sizes that fits. told->found: how many. DC_E_INVALID, DC_E_NOMEM. */
DC_API int dc_planner_search(const dc_planner_nodes *nodes, int64_t kinds, const dc_planner_model *model,
                             const dc_planner_space *space, dc_planner_found *found, int64_t capacity,
                             dc_planner_told *told);

/* Seconds of collectives between n ranks of which `near` are on each node, where a node's net is shared by `together`
 * such groups; bytes: of the whole tensor (Thakur, Rabenseifner, Gropp, 2005). */
enum dc_planner_collective { DC_ALL_REDUCE = 0, DC_ALL_GATHER = 1, DC_ALL_TO_ALL = 2 };
DC_API double dc_planner_collective_s(int what, const dc_planner_nodes *node, double n, double near, double together,
                                      double bytes);
/* Seconds of a pipeline of p ranks: forward and backward of each rank's layers, hop[s] from rank s to s + 1. */
DC_API double dc_planner_pipeline_s(int schedule, int64_t chunks, int64_t p, double micro_batches,
                                    const double *forward, const double *backward, const double *hop);

#ifdef __cplusplus
}
#endif
#endif
