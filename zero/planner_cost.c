/* planner_cost.c: what one layout costs. The formulas and their sources are those of docs/planner.md, section by
 * section in the same order: layers, collectives, pipeline, states, memory. */
#include "planner_cost.h"

#include <math.h>
#include <stdlib.h>

static double cost_at_most(double a, double b) { return a < b ? a : b; }
static double cost_at_least(double a, double b) { return a > b ? a : b; }
static double cost_above(double x) { return x > 0 ? x : 0; }

/* ---- the cluster and the model ----------------------------------------------------------------------------------- */
#define FIELDS (sizeof(dc_planner_layer) / sizeof(double))

static void cost_layer_add(dc_planner_layer *to, const dc_planner_layer *from, const dc_planner_layer *more) {
  const double *a = (const double *)from, *b = (const double *)more;
  for (size_t i = 0; i < FIELDS; i++) ((double *)to)[i] = a[i] + (b ? b[i] : 0);
}

static dc_planner_layer cost_layer_between(const dc_planner_layer *sums, int64_t begin, int64_t end) {
  dc_planner_layer out;
  const double *a = (const double *)&sums[begin], *b = (const double *)&sums[end];
  for (size_t i = 0; i < FIELDS; i++) ((double *)&out)[i] = b[i] - a[i];
  return out;
}

static int cost_nodes_check(const dc_planner_nodes *n, int64_t kind) {
  const struct {
    const char *name;
    double value;
    int least;
  } rows[] = {
      {"flops", n->flops, 1},
      {"memory_rate", n->memory_rate, 1},
      {"link_rate", n->link_rate, 1},
      {"net_rate", n->net_rate, 1},
      {"host_bytes", n->host_bytes, 1},
      {"host_rate", n->host_rate, 1},
      {"host_update", n->host_update, 1},
      {"start", n->start, 0},
      {"device_bytes", n->device_bytes, 0},
      {"disk_bytes", n->disk_bytes, 0},
      {"disk_rate", n->disk_rate, 0},
      {"link_latency", n->link_latency, 0},
      {"net_latency", n->net_latency, 0},
      {"reserve", n->reserve, 0},
  };
  if (n->nodes < 1 || n->ranks < 1)
    return DC_FAIL(DC_E_INVALID, "nodes of kind %lld: %lld of %lld ranks; both must be at least 1", (long long)kind,
                   (long long)n->nodes, (long long)n->ranks);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    if (!isfinite(rows[i].value) || rows[i].value < 0 || (rows[i].least && rows[i].value <= 0))
      return DC_FAIL(DC_E_INVALID, "nodes of kind %lld: %s is %g; it must be a number %s 0", (long long)kind,
                     rows[i].name, rows[i].value, rows[i].least ? "above" : "of at least");
  return DC_OK;
}

static int cost_model_check(const dc_planner_model *m) {
  if (!m || !m->layers) return DC_FAIL(DC_E_INVALID, "model or its layers are NULL");
  if (m->nlayers < 1 || m->nlayers > 1 << 20 || m->heads < 1 || m->kv_heads < 1 || m->seq < 1 || m->batch < 1 ||
      m->experts < 0)
    return DC_FAIL(DC_E_INVALID,
                   "a model of %lld layers, %lld heads (%lld of keys), sequences of %lld, %lld experts, %lld samples a "
                   "step: sizes must be at least 1 (experts: 0)",
                   (long long)m->nlayers, (long long)m->heads, (long long)m->kv_heads, (long long)m->seq,
                   (long long)m->experts, (long long)m->batch);
  if (m->item < 1 || m->wire < 1 || m->grad < 0 || m->master < 0 || m->state_size < 0 || m->nstates < 0 ||
      !(m->overlap >= 0 && m->overlap <= 1) || !(m->update_traffic >= 0) || !(m->batch_traffic >= 0))
    return DC_FAIL(DC_E_INVALID, "bytes of parameters, gradients and states must not be negative, overlap is 0 to 1");
  for (int64_t i = 0; i < m->nlayers; i++)
    for (size_t f = 0; f < FIELDS; f++) {
      const double value = ((const double *)&m->layers[i])[f];
      if (!(value >= 0) || !isfinite(value))
        return DC_FAIL(DC_E_INVALID, "layer %lld: field %zu is %g; it must be a number of at least 0", (long long)i, f,
                       value);
    }
  return DC_OK;
}

int dc__planner_open(dc__planner *p, const dc_planner_nodes *nodes, int64_t kinds, const dc_planner_model *model) {
  if (!nodes || kinds < 1 || kinds > DC_PLANNER_KINDS)
    return DC_FAIL(DC_E_INVALID, "%lld kinds of nodes; a cluster has 1 to %d", (long long)kinds, DC_PLANNER_KINDS);
  DC_TRY(cost_model_check(model));
  *p = (dc__planner){.nodes = nodes, .kinds = kinds, .model = model};
  for (int64_t k = 0; k < kinds; k++) {
    DC_TRY(cost_nodes_check(&nodes[k], k));
    if ((nodes[k].device_bytes > 0) != (nodes[0].device_bytes > 0))
      return DC_FAIL(DC_E_INVALID, "nodes with devices and nodes without in one cluster: plan for each by itself");
    if (nodes[k].nodes > DC_PLANNER_MAX_RANKS || nodes[k].ranks > DC_PLANNER_MAX_RANKS ||
        (p->ranks += nodes[k].nodes * nodes[k].ranks) > DC_PLANNER_MAX_RANKS)
      return DC_FAIL(DC_E_INVALID, "a cluster of more than %d ranks", DC_PLANNER_MAX_RANKS);
    p->first[k + 1] = p->ranks;
  }
  p->sums = calloc((size_t)model->nlayers + 1, sizeof *p->sums);
  p->block_sums = calloc((size_t)model->nlayers + 1, sizeof *p->block_sums);
  if (!p->sums || !p->block_sums) {
    dc__planner_close(p);
    return DC_FAIL(DC_E_NOMEM, "no memory for the sums of %lld layers", (long long)model->nlayers);
  }
  for (int64_t i = 0; i < model->nlayers; i++) {
    const dc_planner_layer *layer = &model->layers[i];
    cost_layer_add(&p->sums[i + 1], &p->sums[i], layer);
    cost_layer_add(&p->block_sums[i + 1], &p->block_sums[i], layer->block > 0 ? layer : NULL);
    p->blocks += layer->block > 0;
    p->largest = cost_at_least(p->largest, layer->params + layer->expert_params);
    if (layer->block > 0) {
      p->largest_saved = cost_at_least(p->largest_saved, layer->saved);
      p->largest_whole = cost_at_least(p->largest_whole, layer->saved_whole);
    }
  }
  return DC_OK;
}

void dc__planner_close(dc__planner *p) {
  free(p->sums);
  free(p->block_sums);
  p->sums = p->block_sums = NULL;
}

/* What ranks [begin, end) have at least, as one node: who waits for the slowest is as slow. */
static dc_planner_nodes cost_worst_of(const dc__planner *p, int64_t begin, int64_t end) {
  dc_planner_nodes out = {0};
  int some = 0;
  for (int64_t k = 0; k < p->kinds; k++) {
    if (p->first[k] >= end || p->first[k + 1] <= begin) continue;
    const dc_planner_nodes *n = &p->nodes[k];
    if (!some) {
      out = *n;
      some = 1;
      continue;
    }
    const double before = (double)out.ranks, here = (double)n->ranks;
    out.ranks = n->ranks < out.ranks ? n->ranks : out.ranks;
    out.flops = cost_at_most(out.flops, n->flops);
    out.start = cost_at_least(out.start, n->start);
    out.memory_rate = cost_at_most(out.memory_rate, n->memory_rate);
    out.device_bytes = cost_at_most(out.device_bytes, n->device_bytes);
    out.host_rate = cost_at_most(out.host_rate, n->host_rate);
    out.link_rate = cost_at_most(out.link_rate, n->link_rate);
    out.link_latency = cost_at_least(out.link_latency, n->link_latency);
    out.net_latency = cost_at_least(out.net_latency, n->net_latency);
    /* What the ranks of a node share: a rank's part counts, which is less where the node has more ranks. */
    const double ranks = (double)out.ranks;
    out.host_bytes = ranks * cost_at_most(out.host_bytes / before, n->host_bytes / here);
    out.host_update = ranks * cost_at_most(out.host_update / before, n->host_update / here);
    out.disk_bytes = ranks * cost_at_most(out.disk_bytes / before, n->disk_bytes / here);
    out.disk_rate = ranks * cost_at_most(out.disk_rate / before, n->disk_rate / here);
    out.net_rate = ranks * cost_at_most(out.net_rate / before, n->net_rate / here);
    out.reserve = cost_at_least(out.reserve, n->reserve);
  }
  return out;
}

/* ---- collectives ------------------------------------------------------------------------------------------------- */
double dc_planner_collective_s(int what, const dc_planner_nodes *node, double n, double near, double together,
                               double bytes) {
  if (n <= 1) return 0;
  near = cost_at_most(near, n);
  const double across = n / near;
  const double link = log2(near) * node->link_latency, net = across > 1 ? ceil(log2(across)) * node->net_latency : 0;
  if (what == DC_ALL_TO_ALL)
    return (near - 1) / n * bytes / node->link_rate + (n - near) / n * bytes * near * together / node->net_rate + link +
           net;
  const double once = (near - 1) / near * bytes / node->link_rate + link +
                      (across > 1 ? (across - 1) / across * bytes * together / node->net_rate + net : 0);
  return what == DC_ALL_REDUCE ? 2 * once : once;
}

typedef struct group {
  double n, near, together;
} group;

/* The groups of n ranks that are `stride` apart: how many of one share a node, and how many groups a node has. */
static group cost_group_of(const dc_planner_nodes *at, int64_t n, int64_t stride) {
  int64_t near = stride >= at->ranks ? 1 : at->ranks / stride;
  if (near > n) near = n;
  if (near < 1) near = 1;
  while (n % near) near--; /* ranks of a node that has room for part of a group more */
  return (group){(double)n, (double)near, cost_at_least(1, (double)(at->ranks / near))};
}

static double cost_collective(int what, const dc_planner_nodes *at, group g, double calls, double bytes) {
  return calls > 0 ? calls * dc_planner_collective_s(what, at, g.n, g.near, g.together, bytes / calls) : 0;
}

/* The ranks that share a model's experts: neighbours among those of the data and the sequence axis (plan/mesh.py). */
static group cost_sharers(const dc__shape *x, const dc_planner_nodes *at) { return cost_group_of(at, x->ep, x->tp); }

/* ---- layers ------------------------------------------------------------------------------------------------------ */
typedef struct times {
  double compute, tensor, sequence, expert;
} times;

static double cost_total(times t) { return t.compute + t.tensor + t.sequence + t.expert; }

/* Forward of these layers (sums) for one micro-batch; backward: that with products, traffic and calls twice. */
static times cost_layers_time(const dc__planner *p, const dc__shape *x, const dc_planner_nodes *at,
                              const dc_planner_layer *s, double micro, double twice) {
  const double item = p->model->item, cut = (double)(x->tp * x->sp), sp = (double)x->sp, tp = (double)x->tp;
  const double weights = s->params / tp + s->expert_params / (tp * (double)x->ep);
  times t;
  t.compute = twice * (s->flops * micro / cut / at->flops +
                       ((s->traffic / cut + s->traffic_whole / sp) * micro + weights) * item / at->memory_rate +
                       s->calls * at->start);
  t.tensor = x->tp > 1 ? cost_collective(DC_ALL_REDUCE, at, cost_group_of(at, x->tp, 1), s->tp_calls,
                                         s->tp_elems * micro / sp * item)
                       : 0;
  t.sequence = x->sp > 1 ? cost_collective(DC_ALL_TO_ALL, at, cost_group_of(at, x->sp, x->tp), 4 * s->block,
                                           s->sp_elems * micro / cut * item)
                         : 0;
  t.expert = x->ep > 1 ? cost_collective(DC_ALL_TO_ALL, at, cost_sharers(x, at),
                                         s->expert_params > 0 ? 2 * s->block : 0, s->ep_elems * micro / sp * item)
                       : 0;
  return t;
}

/* ---- shapes ------------------------------------------------------------------------------------------------------ */
int dc__shape_open(dc__shape *x, int64_t pp, int64_t pieces, int64_t dp) {
  *x = (dc__shape){0};
  x->cut = calloc((size_t)pieces + 1, sizeof *x->cut);
  x->rank_of = calloc((size_t)pieces, sizeof *x->rank_of);
  x->at = calloc((size_t)pp, sizeof *x->at);
  x->forward = calloc((size_t)pp * (3 + DC_PLANNER_KINDS), sizeof *x->forward);
  x->replica = calloc((size_t)dp, sizeof *x->replica);
  x->micro_of = calloc((size_t)dp, sizeof *x->micro_of);
  if (!x->cut || !x->rank_of || !x->at || !x->forward || !x->replica || !x->micro_of) {
    dc__shape_close(x);
    return DC_FAIL(DC_E_NOMEM, "no memory for a pipeline of %lld ranks and %lld replicas", (long long)pp,
                   (long long)dp);
  }
  return DC_OK;
}

void dc__shape_close(dc__shape *x) {
  free(x->cut);
  free(x->rank_of);
  free(x->at);
  free(x->forward);
  free(x->replica);
  free(x->micro_of);
  *x = (dc__shape){0};
}

int dc__shape_check(const dc__planner *p, const dc_planner_layout *l) {
  const dc_planner_model *m = p->model;
  const int64_t sizes[] = {l->dp, l->tp, l->pp, l->sp, l->ep, l->chunks, l->micro, l->accumulation};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
    if (sizes[i] < 1 || sizes[i] > DC_PLANNER_MAX_RANKS)
      return DC_FAIL(DC_E_INVALID,
                     "size %lld of the layout: dp, tp, pp, sp, ep, chunks, micro-batch and accumulation "
                     "must be 1 to %d",
                     (long long)sizes[i], DC_PLANNER_MAX_RANKS);
  if (l->tp * l->sp > p->ranks || l->dp * l->pp > p->ranks || l->dp * l->tp * l->pp * l->sp != p->ranks)
    return DC_FAIL(DC_E_INVALID, "dp %lld x tp %lld x pp %lld x sp %lld is not the %lld ranks of the cluster",
                   (long long)l->dp, (long long)l->tp, (long long)l->pp, (long long)l->sp, (long long)p->ranks);
  if (m->heads % (l->tp * l->sp) || m->kv_heads % l->tp)
    return DC_FAIL(DC_E_INVALID, "%lld heads (%lld of keys) can't be cut into tp %lld x sp %lld", (long long)m->heads,
                   (long long)m->kv_heads, (long long)l->tp, (long long)l->sp);
  if (m->seq % l->sp)
    return DC_FAIL(DC_E_INVALID, "sequences of %lld can't be cut into sp %lld", (long long)m->seq, (long long)l->sp);
  if (l->ep > 1 && (m->experts < 1 || m->experts % l->ep || l->dp * l->sp % l->ep))
    return DC_FAIL(DC_E_INVALID, "ep %lld must divide the %lld experts and dp %lld x sp %lld", (long long)l->ep,
                   (long long)m->experts, (long long)l->dp, (long long)l->sp);
  if (l->stage < 0 || l->stage > 3 || l->offload < 0 || l->offload > DC_OFFLOAD_PARAMS || l->recompute < 0 ||
      l->recompute > 1 || l->schedule < 0 || l->schedule >= DC_SCHEDULE_COUNT)
    return DC_FAIL(DC_E_INVALID, "stage %lld, offload %lld, recompute %lld or schedule %lld is none",
                   (long long)l->stage, (long long)l->offload, (long long)l->recompute, (long long)l->schedule);
  if (l->pp * l->chunks > cost_at_least(1, (double)p->blocks))
    return DC_FAIL(DC_E_INVALID, "%lld blocks can't be cut into %lld stages", (long long)p->blocks,
                   (long long)(l->pp * l->chunks));
  if (l->dp * l->micro * l->accumulation != m->batch)
    return DC_FAIL(DC_E_INVALID, "dp %lld x micro-batch %lld x accumulation %lld is not the %lld samples of a step",
                   (long long)l->dp, (long long)l->micro, (long long)l->accumulation, (long long)m->batch);
  const int chunked = l->schedule == DC_SCHEDULE_INTERLEAVED || l->schedule == DC_SCHEDULE_ZB_V;
  if (chunked ? l->chunks < 2 || l->pp < 2 : l->chunks != 1)
    return DC_FAIL(DC_E_INVALID, "schedule %s of %lld ranks has not %lld stages on each",
                   dc_schedule_name((int)l->schedule), (long long)l->pp, (long long)l->chunks);
  /* Their formulas hold from there on (docs/pipeline-schedules.md). */
  const int64_t least = l->schedule == DC_SCHEDULE_ZB_V ? 2 * l->pp : l->schedule == DC_SCHEDULE_ZB_H1 ? l->pp : 1;
  if (l->accumulation < least || (l->schedule == DC_SCHEDULE_INTERLEAVED && l->accumulation % l->pp))
    return DC_FAIL(DC_E_INVALID, "schedule %s of %lld ranks is not planned for %lld micro-batches",
                   dc_schedule_name((int)l->schedule), (long long)l->pp, (long long)l->accumulation);
  if (l->recompute && (l->schedule == DC_SCHEDULE_ZB_H1 || l->schedule == DC_SCHEDULE_ZB_V))
    return DC_FAIL(DC_E_INVALID, "gradients of weights of layers that are computed again do not wait: use 1f1b");
  if (l->offload && l->stage < (l->offload == DC_OFFLOAD_PARAMS ? 3 : 1))
    return DC_FAIL(DC_E_INVALID, "offload %lld needs a higher ZeRO stage than %lld", (long long)l->offload,
                   (long long)l->stage);
  if (l->offload == DC_OFFLOAD_HOST && p->nodes[0].device_bytes <= 0)
    return DC_FAIL(DC_E_INVALID, "ranks of CPUs have their states on the host anyway");
  for (int64_t k = 0; k < p->kinds; k++)
    if (l->offload >= DC_OFFLOAD_DISK && p->nodes[k].disk_rate <= 0)
      return DC_FAIL(DC_E_INVALID, "offload to disk: nodes of kind %lld have none", (long long)k);
  return DC_OK;
}

/* Seconds of work of a layer for one sample on a node, by which the model is cut. */
static double cost_weight_of(const dc__planner *p, const dc__shape *x, int64_t layer, const dc_planner_nodes *at) {
  const dc_planner_layer one = cost_layer_between(p->sums, layer, layer + 1);
  return cost_total(cost_layers_time(p, x, at, &one, 1, 3));
}

/* Whether `pieces` stages of at most `limit` seconds hold all layers; fills cut. Each has a block at least. */
static int cost_cut_within(const dc__planner *p, dc__shape *x, double limit) {
  int64_t layer = 0;
  const int64_t n = p->model->nlayers;
  for (int64_t s = 0; s < x->pieces; s++) {
    const dc_planner_nodes *at = &x->at[x->rank_of[s]];
    double sum = 0, blocks = 0;
    x->cut[s] = layer;
    while (layer < n) {
      const double w = cost_weight_of(p, x, layer, at);
      const double left = p->block_sums[n].block - p->block_sums[layer].block;
      const int is_block = p->model->layers[layer].block > 0;
      if (sum > 0 && sum + w > limit && blocks >= 1) break;
      if (is_block && blocks >= 1 && left <= (double)(x->pieces - 1 - s)) break; /* the rest need theirs */
      if (sum + w > limit) return 0;
      sum += w;
      blocks += is_block;
      layer++;
    }
    if (blocks < 1 && x->pieces > 1) return 0;
  }
  x->cut[x->pieces] = layer;
  return layer == n;
}

int dc__shape_set(const dc__planner *p, dc__shape *x, const dc_planner_layout *l) {
  x->dp = l->dp, x->tp = l->tp, x->pp = l->pp, x->sp = l->sp, x->ep = l->ep;
  x->schedule = l->schedule, x->chunks = l->chunks, x->pieces = l->pp * l->chunks;
  x->backward = x->forward + l->pp, x->hop = x->backward + l->pp, x->slower = x->hop + l->pp;
  const int64_t width = l->dp * l->sp * l->tp;
  for (int64_t s = 0; s < l->pp; s++) x->at[s] = cost_worst_of(p, s * width, (s + 1) * width);
  for (int64_t s = 0; s < x->pieces; s++)
    DC_TRY(dc_schedule_stage_rank((int)l->schedule, l->pp, l->chunks, s, &x->rank_of[s]));
  if (x->pieces == 1) {
    x->cut[0] = 0;
    x->cut[1] = p->model->nlayers;
    return DC_OK;
  }
  double high = 0, low = 0;
  const dc_planner_nodes slowest = cost_worst_of(p, 0, p->ranks);
  for (int64_t i = 0; i < p->model->nlayers; i++) high += cost_weight_of(p, x, i, &slowest);
  for (int step = 0; step < 24; step++) { /* to 1e-7 of all work */
    const double middle = (low + high) / 2;
    if (cost_cut_within(p, x, middle)) high = middle;
    else low = middle;
  }
  if (!cost_cut_within(p, x, high * (1 + 1e-9)))
    return DC_FAIL(DC_E_INVALID, "the layers can't be cut into %lld stages", (long long)x->pieces);
  return DC_OK;
}

/* ---- pipeline ---------------------------------------------------------------------------------------------------- */
double dc_planner_pipeline_s(int schedule, int64_t chunks, int64_t p, double m, const double *f, const double *b,
                             const double *hop) {
  double slowest = 0, ramp = 0, hops = 0;
  int64_t at = 0;
  for (int64_t s = 0; s < p; s++)
    if (f[s] + b[s] > slowest) slowest = f[s] + b[s], at = s;
  for (int64_t s = 0; s < p; s++) {
    if (s + 1 < p) hops += hop[s];
    if (s == at) continue;
    switch (schedule) {
    case DC_SCHEDULE_INTERLEAVED: ramp += (f[s] + b[s]) / (double)chunks; break;
    case DC_SCHEDULE_ZB_H1: ramp += f[s]; break; /* F + I - W, with I = W */
    case DC_SCHEDULE_ZB_V: ramp += f[s] / 2; break;
    default: ramp += f[s] + b[s];
    }
  }
  if (schedule == DC_SCHEDULE_1F1B || schedule == DC_SCHEDULE_ZB_H1) {
    /* At most p - s micro-batches are under way from rank s on: a round trip takes as long as they last. */
    double trip = 0;
    for (int64_t s = p - 1; s >= 0; s--) {
      trip += f[s] + b[s] + (s + 1 < p ? 2 * hop[s] : 0);
      if (m >= (double)(p - s)) slowest = cost_at_least(slowest, trip / (double)(p - s));
    }
  }
  return m * slowest + ramp + 2 * hops;
}

/* ---- states ------------------------------------------------------------------------------------------------------ */
typedef struct held {
  double dense, expert; /* parameters of a rank before ZeRO cuts them */
} held;

static held cost_held_by(const dc__planner *p, const dc__shape *x, int64_t rank) {
  held h = {0, 0};
  for (int64_t s = 0; s < x->pieces; s++)
    if (x->rank_of[s] == rank) {
      h.dense += (p->sums[x->cut[s + 1]].params - p->sums[x->cut[s]].params) / (double)x->tp;
      h.expert += (p->sums[x->cut[s + 1]].expert_params - p->sums[x->cut[s]].expert_params) / (double)(x->tp * x->ep);
    }
  return h;
}

/* The ranks that hold the same parameters, experts too: gradients are reduced and states cut over these. */
static group cost_holders(const dc__shape *x, const dc_planner_nodes *at) {
  return cost_group_of(at, x->dp * x->sp / x->ep, x->tp * x->ep);
}

static double cost_states_collective(int what, const dc__shape *x, const dc_planner_nodes *at, held h,
                                     double bytes_each) {
  const group g = cost_holders(x, at);
  return dc_planner_collective_s(what, at, g.n, g.near, g.together, (h.dense + h.expert) * bytes_each);
}

/* Gradients (a reduce-scatter takes as long as a gather): of what is no expert's those of the ranks that share experts
 * are summed first (docs/moe.md). */
static double cost_reduce_time(const dc__shape *x, const dc_planner_nodes *at, held h, int64_t stage,
                               double bytes_each) {
  const group e = cost_sharers(x, at);
  return cost_states_collective(stage ? DC_ALL_GATHER : DC_ALL_REDUCE, x, at, h, bytes_each) +
         (x->ep > 1 ? dc_planner_collective_s(DC_ALL_REDUCE, at, e.n, e.near, e.together, h.dense * bytes_each) : 0);
}

/* Gathering whole parameters from shards. A CPU node's ranks share them: only what other nodes own moves. */
static double cost_gather_time(const dc__planner *p, const dc__shape *x, const dc_planner_nodes *at, held h,
                               int shared) {
  if (!shared) return cost_states_collective(DC_ALL_GATHER, x, at, h, p->model->item);
  const group g = cost_holders(x, at);
  const double across = g.n / g.near;
  return across > 1 ? (across - 1) / across * (h.dense + h.expert) * p->model->item * g.together / at->net_rate +
                          ceil(log2(across)) * at->net_latency
                    : 0;
}

static double cost_owned_by(const dc__shape *x, const dc_planner_layout *l, held h) {
  return (h.dense + h.expert) / (l->stage == 0 ? 1 : (double)(x->dp * x->sp / x->ep));
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */
typedef struct room {
  double params, shared, grads, states, staging;
} room;

static int cost_states_room(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l,
                            const dc_planner_nodes *at, held h, room *out) {
  const int64_t over = x->dp * x->sp / x->ep, elems = (int64_t)ceil(h.dense + h.expert);
  const int cpu = at->device_bytes <= 0;
  const group g = cost_holders(x, at);
  const dc_zero_bytes_in in = {.total = elems,
                               .shard = l->stage == 0 ? elems : (elems + over - 1) / over,
                               .world = over,
                               .ranks_per_node = (int64_t)g.near,
                               .slots = 2,
                               .bucket_elems = elems < 1 << 20 ? elems : 1 << 20,
                               .stage = (int32_t)l->stage,
                               .param_size = p->model->item,
                               .grad_wire_size = p->model->wire,
                               .master = p->model->master,
                               .state_size = p->model->state_size,
                               .nstates = p->model->nstates,
                               .resident = cpu,
                               .acc_size = (int16_t)p->model->grad};
  dc_zero_bytes b;
  *out = (room){0};
  if (elems == 0) return DC_OK;
  DC_TRY(dc_zero_estimate(&in, &b));
  out->params = (double)b.params_private;
  out->shared = (double)b.params_shared * (double)at->ranks / g.near; /* so many groups have a copy on the node */
  out->grads = (double)b.grads_private;
  out->states = (double)(b.master_private + b.states_private);
  out->staging = (double)b.staging_shared * (cpu ? (double)at->ranks / g.near : 1 / g.near);
  return DC_OK;
}

/* Micro-batches whose activations a rank of the pipeline holds at most, of each of its stages. */
static double cost_in_flight(const dc__shape *x, const dc_planner_layout *l, int64_t rank) {
  const double p = (double)l->pp, m = (double)x->most, v = (double)l->chunks;
  if (l->pp == 1) return 1;
  switch (l->schedule) {
  case DC_SCHEDULE_GPIPE: return m;
  case DC_SCHEDULE_INTERLEAVED: return cost_at_most(m, ((v - 1) * p + 2 * (p - 1 - (double)rank) + 1) / v);
  case DC_SCHEDULE_1F1B: return cost_at_most(m, p - (double)rank);
  default: return cost_at_most(m, p);
  }
}

/* What memory holds for a byte of activations. On CPUs the holes between blocks count where forwards come between the
 * backwards of other stages, or between their halves: 0.1 to 0.6 of the activations were measured (docs/planner.md). */
static double cost_holes(const dc__planner *p, const dc_planner_layout *l) {
  const int in_turn = l->schedule == DC_SCHEDULE_GPIPE || l->schedule == DC_SCHEDULE_1F1B;
  return p->nodes[0].device_bytes > 0 || l->pp == 1 || in_turn ? 1 : 1.3;
}

static double cost_activations_room(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l,
                                    int64_t rank) {
  const double tp = (double)x->tp, sp = (double)x->sp, micro = (double)l->micro, item = p->model->item;
  double held_elems = 0, once = 0;
  for (int64_t s = 0; s < x->pieces; s++) {
    if (x->rank_of[s] != rank) continue;
    const dc_planner_layer all = cost_layer_between(p->sums, x->cut[s], x->cut[s + 1]);
    const dc_planner_layer blocks = cost_layer_between(p->block_sums, x->cut[s], x->cut[s + 1]);
    double elems = (all.saved - blocks.saved) / (tp * sp) + (all.saved_whole - blocks.saved_whole) / sp;
    if (l->recompute) {
      /* A block is computed again when backward is through with the head, and has freed what that held. */
      once = cost_at_least(once, p->largest_saved / (tp * sp) + p->largest_whole / sp - elems);
      elems += blocks.output / sp;
    } else elems += blocks.saved / (tp * sp) + blocks.saved_whole / sp;
    held_elems += elems;
  }
  return (held_elems * cost_in_flight(x, l, rank) * cost_holes(p, l) + once) * micro * item;
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */
typedef struct parts {
  times forward, backward;
  double again, gather; /* in forward and backward together */
} parts;

/* Times of a micro-batch in a pipeline rank's stages on `at`. gather: seconds in which stage 3 gathers its parameters,
 * once for forward and once for backward. */
static parts cost_rank_time(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l, int64_t rank,
                            const dc_planner_nodes *at, double gather, double *f, double *b) {
  parts out = {0};
  for (int64_t s = 0; s < x->pieces; s++) {
    if (x->rank_of[s] != rank) continue;
    const dc_planner_layer all = cost_layer_between(p->sums, x->cut[s], x->cut[s + 1]);
    const times one = cost_layers_time(p, x, at, &all, (double)l->micro, 1);
    const times two = cost_layers_time(p, x, at, &all, (double)l->micro, 2);
    out.forward.compute += one.compute, out.forward.tensor += one.tensor, out.forward.sequence += one.sequence;
    out.forward.expert += one.expert;
    out.backward.compute += two.compute, out.backward.tensor += two.tensor, out.backward.sequence += two.sequence;
    out.backward.expert += two.expert;
    if (l->recompute) {
      const dc_planner_layer blocks = cost_layer_between(p->block_sums, x->cut[s], x->cut[s + 1]);
      out.again += cost_total(cost_layers_time(p, x, at, &blocks, (double)l->micro, 1));
    }
  }
  const double hidden = p->model->overlap;
  *f = cost_total(out.forward), *b = cost_total(out.backward) + out.again;
  const double late = cost_above(gather - hidden * *f), late_back = cost_above(gather - hidden * *b);
  out.gather = late + late_back;
  *f += late;
  *b += late_back;
  return out;
}

static double cost_hop_time(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l, int64_t rank) {
  const int64_t width = x->dp * x->sp * x->tp;
  const dc_planner_nodes *at = &x->at[rank];
  /* Of the layers that end a stage of this rank: the largest. */
  double elems = 0;
  for (int64_t s = 0; s + 1 < x->pieces; s++)
    if (x->rank_of[s] == rank && x->rank_of[s + 1] != rank)
      elems = cost_at_least(elems, p->model->layers[x->cut[s + 1] - 1].output);
  const double bytes = elems * (double)l->micro / (double)x->sp * p->model->item;
  const int64_t node = at->ranks, begin = rank * width, end = begin + 2 * width;
  if (begin / node == (end - 1) / node) return bytes / at->link_rate + at->link_latency;
  const double senders = (double)(width < node ? width : node);
  return bytes * senders / at->net_rate + at->net_latency;
}

/* Seconds in which a rank of stage s gathers its parameters for a micro-batch, once for forward, once for backward. */
static double cost_gathers(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l, int64_t s) {
  const int moves = l->stage == 3 && x->dp * x->sp > 1 && p->nodes[0].device_bytes > 0;
  return moves ? cost_gather_time(p, x, &x->at[s], cost_held_by(p, x, s), 0) : 0;
}

/* Time of a micro-batch in a rank's stages on nodes of each kind, as a part of what it is on x->at, the slowest in
 * every respect. What is gathered takes all as long, and hides beside less where a node is fast. */
static void cost_slower_kinds(const dc__planner *p, dc__shape *x, const dc_planner_layout *l) {
  for (int64_t s = 0; s < x->pp; s++) {
    const double gather = cost_gathers(p, x, l, s);
    double f, b, kind_f, kind_b;
    (void)cost_rank_time(p, x, l, s, &x->at[s], gather, &f, &b);
    for (int64_t k = 0; k < p->kinds; k++) {
      dc_planner_nodes at = x->at[s]; /* links and collectives: with the others */
      at.flops = p->nodes[k].flops, at.memory_rate = p->nodes[k].memory_rate, at.start = p->nodes[k].start;
      (void)cost_rank_time(p, x, l, s, &at, gather, &kind_f, &kind_b);
      x->slower[s * DC_PLANNER_KINDS + k] = f + b > 0 ? (kind_f + kind_b) / (f + b) : 1;
    }
  }
}

/* Seconds of a micro-batch in the slowest stage of replica d. */
static double cost_replica_time(const dc__planner *p, const dc__shape *x, int64_t d) {
  const int64_t cell = x->sp * x->tp, width = x->dp * cell;
  double slowest = 0;
  for (int64_t s = 0; s < x->pp; s++) {
    const int64_t begin = s * width + d * cell;
    double slower = 0;
    for (int64_t k = 0; k < p->kinds; k++)
      if (p->first[k] < begin + cell && p->first[k + 1] > begin)
        slower = cost_at_least(slower, x->slower[s * DC_PLANNER_KINDS + k]);
    slowest = cost_at_least(slowest, (x->forward[s] + x->backward[s]) * slower);
  }
  return slowest;
}

/* Micro-batches that are through after `end` seconds. */
static double cost_done_by(const dc__shape *x, double end) {
  double done = 0;
  for (int64_t d = 0; d < x->dp; d++) done += floor(end / x->replica[d]);
  return done;
}

/* Seconds until all replicas have computed, if each takes as many micro-batches (x->micro_of) as let the last be done
 * soonest, in whatever order the replicas stand. *least: with parts of micro-batches, which no other allotment beats.
 */
static double cost_shares(const dc__planner *p, dc__shape *x, const dc_planner_layout *l, double *least) {
  const double all = (double)(l->dp * l->accumulation);
  double rate = 0, slowest = 0, end = 0;
  cost_slower_kinds(p, x, l);
  *least = 0;
  for (int64_t d = 0; d < l->dp; d++) {
    x->replica[d] = cost_replica_time(p, x, d);
    if (!(x->replica[d] > 0)) return INFINITY; /* a model without work has nothing to share out */
    rate += 1 / x->replica[d];
    slowest = cost_at_least(slowest, x->replica[d]);
  }
  *least = all / rate;
  /* By then each has as many as it has time for, less a part of one. */
  double low = *least * (1 - 1e-9), high = *least * (1 + 1e-9) + slowest;
  for (int step = 0; step < 40; step++) {
    const double middle = (low + high) / 2;
    if (cost_done_by(x, middle) >= all) high = middle;
    else low = middle;
  }
  int64_t over = (int64_t)(cost_done_by(x, high) - all);
  for (int64_t d = 0; d < l->dp; d++) {
    x->micro_of[d] = (int64_t)floor(high / x->replica[d]);
    if (over > 0 && (double)x->micro_of[d] * x->replica[d] > low) x->micro_of[d]--, over--; /* of those that end last */
    end = cost_at_least(end, (double)x->micro_of[d] * x->replica[d]);
  }
  return over == 0 ? end : INFINITY;
}

static int cost_is_uneven(const dc__planner *p, const dc__shape *x) {
  const int64_t cell = x->sp * x->tp, width = x->dp * cell;
  if (p->kinds == 1) return 0;
  for (int64_t s = 0; s < x->pp; s++)
    for (int64_t k = 1; k < p->kinds; k++)
      if (p->first[k] > s * width && p->first[k] < (s + 1) * width) return 1;
  return 0;
}

/* Seconds of all micro-batches, and of the slowest rank's alone (*busy). Sets x->shared, x->micro_of and x->most. */
static double cost_pipeline_time(const dc__planner *p, dc__shape *x, const dc_planner_layout *l, int uneven,
                                 double *busy, int64_t *slowest, double *least) {
  *slowest = 0;
  for (int64_t s = 0; s < x->pp; s++) {
    x->hop[s] = s + 1 < x->pp ? cost_hop_time(p, x, l, s) : 0;
    if (x->forward[s] + x->backward[s] > x->forward[*slowest] + x->backward[*slowest]) *slowest = s;
  }
  const double m = (double)l->accumulation, most = x->forward[*slowest] + x->backward[*slowest];
  const double even = dc_planner_pipeline_s((int)l->schedule, l->chunks, x->pp, m, x->forward, x->backward, x->hop);
  *busy = m * most;
  *least = even;
  x->shared = 0;
  x->most = l->accumulation;
  if (!uneven || !cost_is_uneven(p, x)) return even;
  const double end = cost_shares(p, x, l, least), ramp = even - *busy;
  *least += ramp;
  if (end >= *busy) return even;
  x->shared = 1;
  for (int64_t d = 0; d < l->dp; d++) x->most = x->micro_of[d] > x->most ? x->micro_of[d] : x->most;
  x->gather = 0;
  for (int64_t s = 0; s < x->pp; s++) x->gather = cost_at_least(x->gather, cost_gathers(p, x, l, s));
  /* Who has fewer takes part in what the others gather, with nothing beside it. */
  *busy = 0;
  for (int64_t d = 0; d < l->dp; d++)
    *busy = cost_at_least(*busy,
                          (double)x->micro_of[d] * x->replica[d] + 2 * x->gather * (double)(x->most - x->micro_of[d]));
  x->busy = *busy;
  return *busy + ramp;
}

double dc__planner_least(const dc__planner *p, dc__shape *x, const dc_planner_layout *l, int uneven) {
  dc_planner_layout bare = *l;
  bare.recompute = bare.stage = bare.offload = 0;
  double busy, least;
  int64_t slowest;
  for (int64_t s = 0; s < x->pp; s++)
    (void)cost_rank_time(p, x, &bare, s, &x->at[s], 0, &x->forward[s], &x->backward[s]);
  (void)cost_pipeline_time(p, x, &bare, uneven, &busy, &slowest, &least);
  return least;
}

/* What a rank of stage s does once a step besides micro-batches. */
typedef struct once {
  double data, update, offload;
} once;

/* Micro-batches that a rank of stage s adds the gradients of, each divided by the rate of its memory: of the rank for
 * which that takes longest. Not the slowest memory with the most micro-batches, which are of different nodes. */
static double cost_most_added(const dc__planner *p, const dc__shape *x, int64_t s) {
  if (!x->shared) return (double)x->most / x->at[s].memory_rate;
  const int64_t cell = x->sp * x->tp, width = x->dp * cell;
  double most = 0;
  for (int64_t d = 0; d < x->dp; d++) {
    const int64_t begin = s * width + d * cell;
    for (int64_t k = 0; k < p->kinds; k++)
      if (p->first[k] < begin + cell && p->first[k + 1] > begin)
        most = cost_at_least(most, (double)x->micro_of[d] / p->nodes[k].memory_rate);
  }
  return most;
}

/* Seconds of reductions, with each micro-batch, of `reduce` seconds each that replicas with unequal shares do not hide:
 * who has fewer takes part in the others' with nothing beside it. */
static double cost_reductions(const dc__planner *p, const dc__shape *x, double reduce) {
  const double hidden = p->model->overlap * x->backward[0] / (x->forward[0] + x->backward[0]);
  double end = 0;
  for (int64_t d = 0; d < x->dp; d++) {
    const double mine = (double)x->micro_of[d], others = (double)(x->most - x->micro_of[d]);
    end = cost_at_least(end, mine * (x->replica[d] + cost_above(reduce - hidden * x->replica[d])) +
                                 others * (2 * x->gather + reduce));
  }
  return end - x->busy;
}

static once cost_once_a_step(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l, int64_t s) {
  const dc_planner_model *m = p->model;
  const dc_planner_nodes *at = &x->at[s];
  const int cpu = at->device_bytes <= 0;
  const held h = cost_held_by(p, x, s);
  const double ranks = (double)at->ranks, owned = cost_owned_by(x, l, h), micro = (double)x->most;
  once t = {0, 0, 0};
  /* Gradients go with each micro-batch, in a pipeline once (docs/pipeline.md). */
  const double times_a_step = x->pp > 1 ? 1 : micro;
  if (x->dp * x->sp > 1) {
    const double reduce = cost_reduce_time(x, at, h, l->stage, m->wire);
    t.data = x->shared && x->pp == 1 ? cost_reductions(p, x, reduce)
                                     : times_a_step * cost_above(reduce - m->overlap * x->backward[s]);
    if (l->stage == 1 || l->stage == 2) t.data += cost_states_collective(DC_ALL_GATHER, x, at, h, m->item);
    if (l->stage == 3 && cpu) t.data += cost_gather_time(p, x, at, h, 1);
  }
  t.data += (h.dense + h.expert) * m->batch_traffic * cost_most_added(p, x, s);
  if (l->offload == DC_OFFLOAD_NONE || cpu) t.update = owned * m->update_traffic / at->memory_rate;
  else {
    const double travel = owned * (m->grad + m->item) / at->host_rate;
    t.offload = cost_at_least(travel + owned * ranks / at->host_update, owned * m->update_traffic / at->memory_rate);
  }
  if (l->offload >= DC_OFFLOAD_DISK) {
    const double bytes = 2.0 * owned * ((m->master ? 4 : 0) + m->nstates * m->state_size) * ranks;
    t.offload += cost_above(bytes / at->disk_rate - (t.update + t.offload)); /* cells stream beside the update */
  }
  if (l->offload == DC_OFFLOAD_PARAMS) {
    const double bytes = 2.0 * micro * owned * m->item * ranks;
    /* Beside what is computed and what is sent, but not beside more than there is time: a faster rank hides less. */
    const double beside = micro * (x->forward[s] + x->backward[s]) + t.data;
    t.offload += cost_above(bytes / at->disk_rate - m->overlap * beside);
  }
  return t;
}

static int cost_memory_of(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l, dc_planner_cost *out,
                          dc_planner_stage *stages) {
  double fullest[3] = {0, 0, 0};
  for (int64_t s = 0; s < x->pp; s++) {
    const dc_planner_nodes *at = &x->at[s];
    const int cpu = at->device_bytes <= 0;
    const double ranks = (double)at->ranks, act = cost_activations_room(p, x, l, s);
    const held h = cost_held_by(p, x, s);
    room r;
    DC_TRY(cost_states_room(p, x, l, at, h, &r));
    const double elsewhere = l->offload == DC_OFFLOAD_NONE ? 0 : r.states + (cpu ? 0 : r.grads);
    const double params_elsewhere = l->offload == DC_OFFLOAD_PARAMS ? r.params : 0;
    const double gathered = l->stage == 3 && (!cpu || l->offload == DC_OFFLOAD_PARAMS)
                                ? 2 * p->largest / (double)x->tp * p->model->item
                                : 0;
    /* Without accumulation a CPU's gradients borrow what activations have left (docs/memory-plan.md). */
    const double grads = l->offload != DC_OFFLOAD_NONE && !cpu ? 0 : r.grads;
    const int borrows = cpu && x->most == 1 && x->pp == 1;
    const double moving = borrows ? cost_at_least(grads, act) : grads + act;
    const double rank = at->reserve + r.params - params_elsewhere + (l->offload ? 0 : r.states) + moving + gathered;
    const double shared = l->offload == DC_OFFLOAD_PARAMS && cpu ? 0 : r.shared;
    double device = 0, host = 0, disk = 0;
    if (cpu) host = rank * ranks + shared + r.staging;
    else device = rank + r.staging;
    if (l->offload == DC_OFFLOAD_HOST) host += elsewhere * ranks;
    if (l->offload >= DC_OFFLOAD_DISK) {
      disk = (r.states + (l->offload == DC_OFFLOAD_PARAMS ? cpu ? r.shared / ranks : r.params : 0)) * ranks;
      if (!cpu) host += r.grads * ranks;
    }
    const double rooms[3] = {cpu ? 0 : at->device_bytes, at->host_bytes, at->disk_bytes};
    const double needs[3] = {device, host, disk};
    double *const told[3][2] = {{&out->device_bytes, &out->device_room},
                                {&out->host_bytes, &out->host_room},
                                {&out->disk_bytes, &out->disk_room}};
    for (int i = 0; i < 3; i++) {
      const double over = needs[i] <= 0 ? 0 : rooms[i] > 0 ? needs[i] / rooms[i] : INFINITY;
      out->overflow = cost_at_least(out->overflow, over);
      /* The fullest: not that which holds most, where ranks have unequal room. */
      if (over > fullest[i]) {
        fullest[i] = over;
        *told[i][0] = needs[i], *told[i][1] = rooms[i];
      }
    }
    for (int64_t i = 0; stages && i < x->pieces; i++)
      if (x->rank_of[i] == s) {
        stages[i].states_bytes = rank - act - at->reserve + (cpu ? (shared + r.staging) / ranks : r.staging);
        stages[i].activation_bytes = act;
      }
  }
  return DC_OK;
}

static void cost_stages_told(const dc__planner *p, const dc__shape *x, const dc_planner_layout *l,
                             dc_planner_stage *stages) {
  for (int64_t i = 0; i < x->pieces; i++) {
    const int64_t s = x->rank_of[i];
    const dc_planner_layer all = cost_layer_between(p->sums, x->cut[i], x->cut[i + 1]);
    const times one = cost_layers_time(p, x, &x->at[s], &all, (double)l->micro, 1);
    double rank_forward = 0;
    for (int64_t j = 0; j < x->pieces; j++)
      if (x->rank_of[j] == s) {
        const dc_planner_layer some = cost_layer_between(p->sums, x->cut[j], x->cut[j + 1]);
        rank_forward += cost_total(cost_layers_time(p, x, &x->at[s], &some, (double)l->micro, 1));
      }
    const double share = rank_forward > 0 ? cost_total(one) / rank_forward : 1;
    stages[i].begin = x->cut[i], stages[i].end = x->cut[i + 1], stages[i].rank = s;
    stages[i].forward = x->forward[s] * share, stages[i].backward = x->backward[s] * share;
    stages[i].hop = x->hop[s];
    stages[i].params = all.params + all.expert_params;
  }
}

static int cost_with_shares(const dc__planner *p, dc__shape *x, const dc_planner_layout *l, int uneven,
                            dc_planner_cost *out, dc_planner_stage *stages, int64_t *micro_of) {
  *out = (dc_planner_cost){0};
  double busy, least;
  int64_t slowest;
  for (int64_t s = 0; s < x->pp; s++) {
    (void)cost_rank_time(p, x, l, s, &x->at[s], cost_gathers(p, x, l, s), &x->forward[s], &x->backward[s]);
  }
  const double all = cost_pipeline_time(p, x, l, uneven, &busy, &slowest, &least);
  for (int64_t d = 0; micro_of && d < l->dp; d++) micro_of[d] = x->shared ? x->micro_of[d] : l->accumulation;
  once most = {0, 0, 0};
  for (int64_t s = 0; s < x->pp; s++) {
    const once t = cost_once_a_step(p, x, l, s);
    if (t.data + t.update + t.offload > most.data + most.update + most.offload) most = t;
  }
  double f, b;
  const parts t = cost_rank_time(p, x, l, slowest, &x->at[slowest], cost_gathers(p, x, l, slowest), &f, &b);
  const double m = f + b > 0 ? busy / (f + b) : 0;
  out->compute = m * (t.forward.compute + t.backward.compute);
  out->tensor = m * (t.forward.tensor + t.backward.tensor);
  out->sequence = m * (t.forward.sequence + t.backward.sequence);
  out->expert = m * (t.forward.expert + t.backward.expert);
  out->recompute = m * t.again;
  out->gather = m * t.gather;
  out->bubble = all - busy;
  out->data = most.data, out->update = most.update, out->offload = most.offload;
  out->step = all + most.data + most.update + most.offload;
  if (stages) cost_stages_told(p, x, l, stages);
  return cost_memory_of(p, x, l, out, stages);
}

int dc__planner_cost(const dc__planner *p, dc__shape *x, const dc_planner_layout *l, int uneven, dc_planner_cost *out,
                     dc_planner_stage *stages, int64_t *micro_of) {
  DC_TRY(cost_with_shares(p, x, l, uneven, out, stages, micro_of));
  if (!x->shared) return DC_OK;
  /* More micro-batches on fast nodes are more reductions for all: equal shares may be faster in the end. */
  dc_planner_cost even;
  DC_TRY(cost_with_shares(p, x, l, 0, &even, NULL, NULL));
  return cost_with_shares(p, x, l, even.step >= out->step, out, stages, micro_of);
}

int dc_planner_cost_of(const dc_planner_nodes *nodes, int64_t kinds, const dc_planner_model *model,
                       const dc_planner_layout *layout, int64_t uneven, dc_planner_cost *cost, dc_planner_stage *stages,
                       int64_t *micro_of) {
  if (!layout || !cost) return DC_FAIL(DC_E_INVALID, "layout or cost is NULL");
  dc__planner p;
  dc__shape x = {0};
  DC_TRY(dc__planner_open(&p, nodes, kinds, model));
  int rc = dc__shape_check(&p, layout);
  if (rc == DC_OK) rc = dc__shape_open(&x, layout->pp, layout->pp * layout->chunks, layout->dp);
  if (rc == DC_OK) rc = dc__shape_set(&p, &x, layout);
  if (rc == DC_OK) rc = dc__planner_cost(&p, &x, layout, uneven != 0, cost, stages, micro_of);
  dc__shape_close(&x);
  dc__planner_close(&p);
  return rc;
}
