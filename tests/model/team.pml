/* team.pml: ranks that wait in teams (comm/team.c) for steps that all wait for.
 *
 * Ranks 0 and 2 lead the teams {0, 1} and {2} (RANKS=3) or {2, 3} (RANKS=4). Each rank posts its cell; a leader waits
 * for its team's cells, says `in`, waits for the other team's `in`, says `go`, which is what its members wait for. Both
 * carry the least number of steps done of whom they speak for. All waits also end when all cells are posted (a look, or
 * the first thing that a rank does about an error); then the cells say how far all are. Cells and lines are rings of
 * CELLS, of which one is written again when all have done the step before.
 *
 * Words are released and acquired, so that interleavings are all that there is (for sleeping see sleep.pml, whose
 * protocol these words share). -DDIE: a rank may die anywhere; -DBUSY: a leader may at any step go by the cells alone
 * and say nothing.
 *
 * The last rank may post the next step before it reads this one, as with chunks that overlap.
 *
 * Checked: nobody waits for ever; who goes on finds all cells of the step; what a rank takes for done by all is; without
 * a death nobody fails. Bugs that must be found: BUG_PART (a leader that went by the cells says `go` with the least of
 * those that it had heard), BUG_NO_ALL (the look does not go by the cells), BUG_EARLY (`in` before the team is there),
 * BUG_NO_LOOK (a wait does not end by a death). */
#ifndef RANKS
#define RANKS 3
#endif
#ifndef CALLS
#define CALLS 4
#endif
#ifndef CELLS
#define CELLS 2
#endif
#define TEAM(r) ((r) / 2)
#define LEADS(r) ((r) % 2 == 0)
#define AT(r, s) ((r) * CELLS + (s) % CELLS)
#define LESS(a, b) ((a) < (b) -> (a) : (b))

byte posted[RANKS * CELLS], shown[RANKS * CELLS], done[RANKS];
byte in_word[2 * CELLS], in_done[2 * CELLS], go_word[2 * CELLS], go_done[2 * CELLS];
bool broken, dead[RANKS], died;

#define HAS(r) (posted[AT(r, s)] >= s + 1)
#define DID(r, n) (done[r] >= (n))
#if RANKS == 3
#define ALL_HAVE (HAS(0) && HAS(1) && HAS(2))
#define ALL_DID(n) (DID(0, n) && DID(1, n) && DID(2, n))
#define LACKS (dead[0] && !HAS(0) || dead[1] && !HAS(1) || dead[2] && !HAS(2))
#define LACKS_DONE(n) (dead[0] && !DID(0, n) || dead[1] && !DID(1, n) || dead[2] && !DID(2, n))
#else
#define ALL_HAVE (HAS(0) && HAS(1) && HAS(2) && HAS(3))
#define ALL_DID(n) (DID(0, n) && DID(1, n) && DID(2, n) && DID(3, n))
#define LACKS (dead[0] && !HAS(0) || dead[1] && !HAS(1) || dead[2] && !HAS(2) || dead[3] && !HAS(3))
#define LACKS_DONE(n) (dead[0] && !DID(0, n) || dead[1] && !DID(1, n) || dead[2] && !DID(2, n) || dead[3] && !DID(3, n))
#endif

#ifdef BUG_NO_ALL
#define BY_CELLS false
#else
#define BY_CELLS ALL_HAVE
#endif
#ifdef BUG_NO_LOOK
#define ENDED broken && !ALL_HAVE
#else
#define ENDED (broken || LACKS) && !ALL_HAVE
#endif
#ifdef DIE
#define MAY_DIE if :: !died -> d_step { died = true; dead[me] = true }; goto gone :: true fi
#else
#define MAY_DIE skip
#endif

#define TAKE(n) least = LESS(least, n)
/* All cells of the step are there: how far all are. */
#define LEARN                                                 \
  r = 0; least = shown[AT(me, s)];                            \
  do                                                          \
  :: r < RANKS -> TAKE(shown[AT(r, s)]); r++                  \
  :: else -> break                                            \
  od;                                                         \
  r = 0
/* Reads step n and is done with it. */
#define READ(n)                                               \
  r = 0;                                                      \
  do                                                          \
  :: r < RANKS ->                                             \
    assert(posted[AT(r, n)] == (n) + 1);                      \
    assert(done[r] >= all_done);                              \
    r++                                                       \
  :: else -> break                                            \
  od;                                                         \
  r = 0;                                                      \
  done[me]++

active[RANKS] proctype rank() {
  byte me = _pid, s, all_done, least, r;
  bool all, late; /* late: the step before is waited for and not read */

next:
  if
  :: s == CALLS && late -> d_step { READ(s - 1) }; goto out
  :: s == CALLS && !late -> goto out
  :: else
  fi;
  MAY_DIE;
  /* begin: the cell's last step is done by all */
  if
  :: s + 1 <= all_done + CELLS
  :: else ->
    if
    :: ALL_DID(s + 1 - CELLS) -> all_done = s + 1 - CELLS
    :: (broken || LACKS_DONE(s + 1 - CELLS)) && !ALL_DID(s + 1 - CELLS) -> goto failed
    fi
  fi;
  d_step { shown[AT(me, s)] = done[me]; posted[AT(me, s)] = s + 1 };
  MAY_DIE;
  if
  :: late -> d_step { READ(s - 1); late = false }
  :: else
  fi;
  least = shown[AT(me, s)];
  all = false;
#ifdef BUSY
  if
  :: LEADS(me) ->
    if
    :: ALL_HAVE -> d_step { LEARN }; goto whole
    :: ENDED -> goto failed
    fi
  :: true
  fi;
#endif
  if
  :: LEADS(me) ->
#ifndef BUG_EARLY
    if
    :: me + 1 < RANKS ->
      if
      :: d_step { HAS(me + 1) -> TAKE(shown[AT(me + 1, s)]) }
      :: ENDED -> goto failed
      fi
    :: else
    fi;
#endif
    d_step { in_done[AT(TEAM(me), s)] = least; in_word[AT(TEAM(me), s)] = s + 1 };
    MAY_DIE;
    if
    :: d_step { in_word[AT(1 - TEAM(me), s)] >= s + 1 -> TAKE(in_done[AT(1 - TEAM(me), s)]) }
    :: BY_CELLS -> all = true
    :: ENDED -> goto failed
    fi;
#ifndef BUG_PART
    if
    :: all -> d_step { LEARN }
    :: else
    fi;
#endif
    MAY_DIE;
    d_step { go_done[AT(TEAM(me), s)] = least; go_word[AT(TEAM(me), s)] = s + 1 }
  :: else ->
    if
    :: d_step { go_word[AT(TEAM(me), s)] >= s + 1 -> TAKE(go_done[AT(TEAM(me), s)]) }
    :: BY_CELLS -> d_step { LEARN }
    :: ENDED -> goto failed
    fi
  fi;
whole:
  skip;
  d_step {
    if
    :: least > all_done -> all_done = least
    :: else
    fi;
    least = 0
  };
  MAY_DIE;
  if
  :: d_step { READ(s) }
  :: s + 1 < CALLS && me == RANKS - 1 -> late = true /* as when chunks overlap: the next one is posted first */
  fi;
  s++;
  goto next;

failed:
  assert(died);
  broken = true;
gone:
out:
  skip
}
