/* team.h: ranks of a large group in teams: who waits for all ranks waits for its team only, and one rank of each team,
 * its leader, for the other leaders.
 *
 * With n ranks that all wait for all, each step moves n (n - 1) cache lines. In teams of m it moves n for the arrivals,
 * (n / m)^2 between leaders and n for the word that all are there. Small groups have no teams, and their calls go
 * the same way as ever. */
#ifndef DEEPC_TEAM_H
#define DEEPC_TEAM_H

#include "comm_impl.h"
#include "numa.h"
#include "sync.h"

enum { DC__TEAM_RANKS = 8 }; /* of a team at most, and of a group without teams */
enum { DC__TEAM_AUTO = -1, DC__TEAM_NONE = 0 };

/* What a leader says of one step. */
typedef struct dc__team_line {
  _Alignas(DC__LINE) _Atomic uint32_t posted; /* number of the step + 1, modulo 2^32 */
  _Atomic uint32_t done;                      /* steps that all of whom it speaks had done */
  _Atomic uint64_t hash;                      /* of the calls of all of whom it speaks */
  uint32_t data[DC__INLINE / 4];              /* the result of a tiny call */
} dc__team_line;

enum { DC__TEAM_IN, DC__TEAM_GO };
/* Of one team, in the arena. */
typedef struct dc__team_seat {
  _Alignas(DC__LINE) _Atomic uint32_t sleepers[2]; /* other leaders, for some `in`; members, for some `go` */
} dc__team_seat;

/* Private. Of `teams` teams this rank is in number `mine`. */
typedef struct dc__team {
  int teams, mine, members; /* members: of its team, without the leader */
  bool leads;
  uint64_t hash; /* of this rank's calls, up to the step that it waits for */
  int64_t done;  /* what all have done, for dc__team_give() */
  int16_t member[DC_COMM_MAX_RANKS];
  dc__team_seat *seats; /* [teams] */
  dc__team_line *lines; /* [teams][IN, GO][cells]: the team has arrived; all ranks have */
} dc__team;

static inline dc__team_line *dc__team_at(const dc_comm *c, int team, int what, int64_t step) {
  return &c->team->lines[((int64_t)team * 2 + what) * c->cells + step % c->cells];
}

/* Bytes of the teams' seats and lines in the arena of `size` ranks. */
int64_t dc__team_bytes(int size, int cells);
/* Puts each rank into a team[r], numbered by their lowest ranks; how many teams there are, 1: the group has none.
 * wanted: ranks of each team in rank order, DC__TEAM_AUTO: by what the ranks are bound to, DC__TEAM_NONE. */
int dc__team_plan(int size, const dc__spot *spot, int wanted, int32_t *team);
/* DEEPC_TEAM, or what is best without it. With more ranks than cores (crowded) that is no teams: a step then costs one
 * turn of each rank on a core, and teams ask for more (docs/lab/many-ranks.md). */
int dc__team_wanted(bool crowded, int *wanted);
/* Takes c's team from the seats, which group rank 0 has filled; area: of dc__team_bytes. */
int dc__team_open(dc_comm *c, void *area);
void dc__team_close(dc_comm *c);

/* dc__wait, for steps that every rank waits for at once and does nothing else before: through the teams if there are.
 */
int dc__team_wait(dc_comm *c, int64_t step);
static inline int dc__wait_all(dc_comm *c, int64_t step) {
  return __builtin_expect(!c->team, 1) ? dc__wait(c, step) : dc__team_wait(c, step);
}

/* In a group with teams: the same for a step whose result of up to DC__INLINE bytes is equal on all ranks. A leader
 * gets DC__TEAM_READ, reads the step and gives the result to its team, where all get it in `out` (DC__TEAM_TAKEN);
 * DC__TEAM_READ_ALONE: read it yourself, and give nobody anything. */
enum { DC__TEAM_TAKEN, DC__TEAM_READ, DC__TEAM_READ_ALONE };
int dc__team_take(dc_comm *c, int64_t step, void *out, int64_t bytes, int *what);
void dc__team_give(dc_comm *c, int64_t step, const void *result, int64_t bytes);

/* One whole step: every rank shows `bytes` <= slot_bytes of `mine`; all[size * bytes] is everyone's, in rank order.
 * With 0 bytes a meeting; the pointers may be NULL then. */
int dc__share(dc_comm *c, const dc_call *call, const void *mine, int64_t bytes, void *all);

#endif
