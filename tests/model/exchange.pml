/* exchange.pml: the exchange between ranks (comm/sync.c: begin, post, wait, wait_rank, skip, done;
 * comm/coll_staged.c: the order in which collectives call them; comm/open.c: leaving).
 *
 * Every rank has rings of CELLS cells and of SLOTS slots, and SMALLS small slots, and makes CALLS calls. Which
 * ones is chosen freely when the first rank comes to each: all wait for all (whole, in two chunks with the second
 * one begun early, or in two phases), the root gives to the others and waits for nobody, the others give to the
 * root and don't wait. Data goes through the cell, a small slot, or a slot, and is the number of its step; so a
 * place that is filled before all have read it, or read before it is filled, gives a wrong number. Posted words
 * and done counters are released and acquired, so that interleavings are all that there is (for sleeping see
 * sleep.pml). A wait ends when what it waits for is there, or when the periodic look finds something: that look is
 * a guard here.
 *
 * Checked: nobody waits for ever, no place is filled while another still needs it, and what is read is of the
 * right step.
 * -DDIE: a rank may die at any point, also between the two halves of breaking the group. Nobody waits for ever, and
 *   nobody gets an error unless somebody died.
 * -DODD: one rank makes another call once, or leaves one out. Whoever waits gets past a step only if all (or the
 *   root) that it waited for made the same calls as itself until there, and data is read only then.
 *
 * RANKS (2 to 4), CALLS, CELLS, SLOTS, AHEAD; WAYS and PLACES: which calls there are (see ANY_WAY, ANY_PLACE). Known
 * bugs, each of which must be found, by -DBUG_...: CELL_EARLY, SLOT_EARLY, SMALL_EARLY (a place is filled one step
 * too early, or without asking), DONE_FIRST (done before the read), LEARN_MOST (the furthest rank's counter stands
 * for all), NO_LOOK (a wait without the look), CALL_ONLY (a fingerprint of the call instead of all calls so far),
 * NO_COMPARE (a wait for the root does not compare). */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 3
#endif
#ifndef CELLS
#define CELLS 3
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef AHEAD
#define AHEAD 1
#endif
#define SMALLS 2 /* GIVE chooses between two */
#ifndef WAYS
#define WAYS 1
#endif
#ifndef PLACES
#define PLACES 6
#endif
#define NOBODY 255

/* A call: who waits for whom, and through what. */
#define ALL 0
#define FROM 1   /* + root: root waits for nobody, the others for root */
#define TO 5     /* + root: root waits for all, the others for nobody */
#define CHUNKS 9
#define PHASES 10
#define CELL 1
#define SMALL 2
#define SLOT 3 /* of PLACES, 4 to 6 are mixtures */
#define CALL(way, place) ((way) * 4 + (place))
#define WAY(call) ((call) / 4)
#define PLACE(call) ((call) % 4)

byte call[CALLS], takers[CALLS]; /* 0: not chosen yet, or all have made it */
byte posted[RANKS * CELLS], shown_done[RANKS * CELLS], number[RANKS * CELLS], in_cell[RANKS * CELLS];
byte small[RANKS * SMALLS], slot[RANKS * SLOTS];
byte done[RANKS];
bool has_left[RANKS];
byte broken; /* 0 sound, 1 breaking, 2 broken */
#ifdef DIE
bool dead[RANKS];
bool died;
#define DEAD(r) dead[r]
#else
#define DEAD(r) false
#endif
#ifdef ODD
/* One rank differs from the others, once. So the hash of all calls so far is that of the others, or one other. */
#define STEPS (2 * CALLS)
byte hash[RANKS * CELLS];
bool history[RANKS * STEPS]; /* what the hashes stand for; for the assertions only */
bool is_odd;                 /* somebody was */
#endif

#define AT(r, ring, s) ((r) * ring + (s) % ring)
#define MORE(a, b) ((a) > (b) -> (a) : (b))

#define HAS_POSTED(r, s) (posted[AT(r, CELLS, s)] >= (s) + 1)
#define HAS_DONE(r, n) (done[r] >= (n))
#define GONE(r) (DEAD(r) || has_left[r])
#if RANKS == 2
#define EVERY(f, x) (f(0, x) && f(1, x))
#define LACKS(f, x) (GONE(0) && !f(0, x) || GONE(1) && !f(1, x))
#elif RANKS == 3
#define EVERY(f, x) (f(0, x) && f(1, x) && f(2, x))
#define LACKS(f, x) (GONE(0) && !f(0, x) || GONE(1) && !f(1, x) || GONE(2) && !f(2, x))
#else
#define EVERY(f, x) (f(0, x) && f(1, x) && f(2, x) && f(3, x))
#define LACKS(f, x) (GONE(0) && !f(0, x) || GONE(1) && !f(1, x) || GONE(2) && !f(2, x) || GONE(3) && !f(3, x))
#endif
#ifdef ODD
/* Two that hold step s and differ: with the lowest rank that is there, as compare() does it. */
#define HOLDS(r, s) (posted[AT(r, CELLS, s)] == (s) + 1)
#define PAIR(a, b, s) (HOLDS(a, s) && HOLDS(b, s) && hash[AT(a, CELLS, s)] != hash[AT(b, CELLS, s)])
#if RANKS == 2
#define DIFFER(s) PAIR(0, 1, s)
#elif RANKS == 3
#define DIFFER(s) (PAIR(0, 1, s) || PAIR(0, 2, s) || PAIR(1, 2, s))
#else
#define DIFFER(s) (PAIR(0, 1, s) || PAIR(0, 2, s) || PAIR(0, 3, s) || PAIR(1, 2, s) || PAIR(1, 3, s) || PAIR(2, 3, s))
#endif
#define SAME_AS(r, s) (hash[AT(r, CELLS, s)] == hash[AT(me, CELLS, s)])
#else
#define DIFFER(s) false
#define SAME_AS(r, s) true
#endif

/* Once between what others can see of a rank. */
#ifdef DIE
#define MAY_DIE if :: !died -> d_step { died = true; dead[me] = true }; goto gone :: true fi
#else
#define MAY_DIE skip
#endif

/* The look, and everything else that ends a wait. */
#ifdef BUG_NO_LOOK
#define ENDED(f, x) (broken > 0)
#else
#define ENDED(f, x) (broken > 0 || LACKS(f, x))
#endif

/* Who has to wait here waits for up to AHEAD further steps, of those that it has done itself. */
#define WANTED(n) ((n) + AHEAD <= done[me] -> (n) + AHEAD : MORE(n, done[me]))
#define AWAIT_DONE(n)                                               \
  if                                                                \
  :: (n) <= all_done                                                \
  :: else ->                                                        \
    if                                                              \
    :: d_step { EVERY(HAS_DONE, n) -> TAKE_LEAST }                  \
    :: else ->                                                      \
      if                                                            \
      :: d_step { EVERY(HAS_DONE, WANTED(n)) -> TAKE_LEAST }        \
      :: ENDED(HAS_DONE, WANTED(n)) -> goto failed                  \
      fi                                                            \
    fi                                                              \
  fi
#define TAKE_LEAST                                                  \
  r = 0; least = done[0];                                           \
  do                                                                \
  :: r < RANKS -> least = (done[r] < least -> done[r] : least); r++ \
  :: else -> break                                                  \
  od;                                                               \
  all_done = least; r = 0; least = 0

#ifdef BUG_CELL_EARLY
#define FOR_CELL (begun >= CELLS -> begun - CELLS : 0)
#else
#define FOR_CELL (begun + 1 >= CELLS -> begun + 1 - CELLS : 0)
#endif
#ifdef BUG_SLOT_EARLY
#define FOR_SLOT FOR_CELL
#else
#define FOR_SLOT MORE(slot_used[begun % SLOTS], FOR_CELL)
#endif

/* Begins a step, fills its place, posts it. */
#define GIVE                                                                                                           \
  MAY_DIE;                                                                                                             \
  assert(begun - done[me] < SLOTS);                                                                                    \
  if                                                                                                                   \
  :: place == SLOT -> AWAIT_DONE(FOR_SLOT)                                                                             \
  :: else -> AWAIT_DONE(FOR_CELL)                                                                                      \
  fi;                                                                                                                  \
  if                                                                                                                   \
  :: place == SMALL ->                                                                                                 \
    d_step {                                                                                                           \
      use = (small_used[0] <= all_done -> 0 : (small_used[1] <= all_done || small_used[1] < small_used[0] -> 1 : 0))   \
    };                                                                                                                 \
    AWAIT_SMALL                                                                                                        \
  :: else                                                                                                              \
  fi;                                                                                                                  \
  d_step { FILL; SHOW BETWEEN posted[AT(me, CELLS, begun)] = begun + 1; begun++ }
#if RANKS > 3
#define BETWEEN ; /* saves states */
#else
#define BETWEEN }; d_step {
#endif
#ifdef BUG_SMALL_EARLY
#define AWAIT_SMALL skip
#else
#define AWAIT_SMALL AWAIT_DONE(small_used[use])
#endif
/* in one instant: nobody may look at either */
#define FILL                                                                                                           \
  if                                                                                                                   \
  :: place == CELL -> in_cell[AT(me, CELLS, begun)] = begun + 1                                                        \
  :: place == SMALL ->                                                                                                 \
    small_used[use] = begun + 1; number[AT(me, CELLS, begun)] = use; small[me * SMALLS + use] = begun + 1              \
  :: place == SLOT -> slot_used[begun % SLOTS] = begun + 1; slot[AT(me, SLOTS, begun)] = begun + 1                     \
  fi;                                                                                                                  \
  use = 0
#ifdef ODD
#ifdef BUG_CALL_ONLY
#define FINGERPRINT way * 4 + place + 1
#else
#define FINGERPRINT h
#endif
#define SHOW                                                                                                           \
  history[AT(me, STEPS, begun)] = h;                                                                                   \
  hash[AT(me, CELLS, begun)] = FINGERPRINT;                                                                            \
  shown_done[AT(me, CELLS, begun)] = done[me]
#else
#define SHOW shown_done[AT(me, CELLS, begun)] = done[me]
#endif

/* Waits for all to post step s, compares, and learns how far all are; in one instant, as nobody may change the cells
 * meanwhile. */
#define WAIT_ALL(s)                                                                                                    \
  if                                                                                                                   \
  :: d_step { EVERY(HAS_POSTED, s) && EVERY(SAME_AS, s) -> LEARN(s) }                                                  \
  :: EVERY(HAS_POSTED, s) && !EVERY(SAME_AS, s) -> goto failed                                                         \
  :: ENDED(HAS_POSTED, s) || DIFFER(s) -> goto failed                                                                  \
  fi
#ifdef BUG_LEARN_MOST
#define BETTER >
#else
#define BETTER <
#endif
#define LEARN(s)                                                                                                       \
  r = 0; least = done[me];                                                                                             \
  do                                                                                                                   \
  :: r < RANKS ->                                                                                                      \
    least = (shown_done[AT(r, CELLS, s)] BETTER least -> shown_done[AT(r, CELLS, s)] : least);                         \
    r++                                                                                                                \
  :: else -> break                                                                                                     \
  od;                                                                                                                  \
  all_done = MORE(all_done, least); r = 0; least = 0
#ifdef BUG_NO_COMPARE
#define COMPARED true
#else
#define COMPARED SAME_AS(root, s)
#endif
#define WAIT_ROOT                                                                                                      \
  if                                                                                                                   \
  :: HAS_POSTED(root, s) && COMPARED                                                                                   \
  :: HAS_POSTED(root, s) && !COMPARED -> goto failed                                                                   \
  :: ENDED(HAS_POSTED, s) || DIFFER(s) -> goto failed                                                                  \
  fi

/* What rank r gave in step s lies at its place. */
#define VALUE(r, s)                                                                                                    \
  (place == CELL -> in_cell[AT(r, CELLS, s)] :                                                                         \
    (place == SMALL -> small[(r) * SMALLS + number[AT(r, CELLS, s)]] : slot[AT(r, SLOTS, s)]))
#define READ(from, to)                                                                                                 \
  r = from;                                                                                                            \
  do                                                                                                                   \
  :: r < to -> SAME_HISTORY(r, s); assert(VALUE(r, s) == s + 1); r++                                                   \
  :: else -> break                                                                                                     \
  od;                                                                                                                  \
  r = 0
#ifdef ODD
#define SAME_HISTORY(r, s) assert(history[AT(r, STEPS, s)] == history[AT(me, STEPS, s)])
#else
#define SAME_HISTORY(r, s) skip
#endif
/* In one instant, at any time after the wait: what was overwritten before is still overwritten then. */
#ifdef BUG_DONE_FIRST
#define READ_AND_DONE(from, to) done[me]++; d_step { READ(from, to) }
#else
#define READ_AND_DONE(from, to) d_step { READ(from, to); done[me]++ }
#endif

#if WAYS == 0
#define ANY_WAY :: way = FROM :: way = TO + 1
#elif WAYS == 1
#define ANY_WAY :: way = ALL :: way = FROM :: way = TO + 1
#elif WAYS == 2
#define ANY_WAY :: way = ALL :: way = FROM :: way = FROM + 1 :: way = TO :: way = TO + 1
#else
#define ANY_WAY :: way = ALL :: way = FROM :: way = TO + 1 :: way = CHUNKS :: way = PHASES
#endif
#if PLACES == 1
#define ANY_PLACE :: place = CELL
#elif PLACES == 2
#define ANY_PLACE :: place = SMALL
#elif PLACES == 3
#define ANY_PLACE :: place = SLOT
#elif PLACES == 4
#define ANY_PLACE :: place = CELL :: place = SMALL
#elif PLACES == 5
#define ANY_PLACE :: place = SMALL :: place = SLOT
#else
#define ANY_PLACE :: place = CELL :: place = SMALL :: place = SLOT
#endif
#define CHOOSE                                            \
  if ANY_WAY fi;                                          \
  if                                                      \
  :: way == CHUNKS -> place = SLOT                        \
  :: else -> if ANY_PLACE fi                              \
  fi

#if WAYS == 0 /* one program only; who is odd still has its choice */
#define PLAN way = (k % 2 == 0 -> FROM : TO + 1); if ANY_PLACE fi
#else
#define PLAN CHOOSE
#endif

active[RANKS] proctype rank() {
  byte me = _pid, k, begun, all_done, way, place, root, s, use, r, least, given, taken, steps;
  byte slot_used[SLOTS], small_used[SMALLS];
  bool waited;
#ifdef ODD
  bool h;
  byte before; /* the call that it left out, or one behind it: what the others make when it makes the next */
#endif

next:
  if
  :: k == CALLS -> goto out
  :: else
  fi;
  atomic {
    if
    :: call[k] == 0 -> PLAN; call[k] = CALL(way, place)
    :: else -> way = WAY(call[k]); place = PLACE(call[k])
    fi;
    takers[k]++;
    if
    :: takers[k] == RANKS -> call[k] = 0; takers[k] = 0 /* it need not be told apart any more */
    :: else
    fi;
    k++;
#ifdef ODD
    if
    :: before != 0 && !h -> h = (before != CALL(way, place)); before = CALL(way, place)
    :: else
    fi;
    if
    :: !is_odd && (RANKS < 4 || me != 2) /* as 3 */ ->
      is_odd = true;
      before = CALL(way, place);
      CHOOSE;
      if
      :: before == CALL(way, place) /* so it leaves the call out */ -> way = 0; place = 0; goto next
      :: else -> before = 0; h = true
      fi
    :: true
    fi;
#endif
    root = (way >= TO && way < CHUNKS -> way - TO : (way >= FROM && way < TO -> way - FROM : NOBODY));
    steps = (way >= CHUNKS -> 2 : 1)
  };

again:
  if
  :: taken == steps -> given = 0; taken = 0; way = 0; place = 0; root = 0; s = 0; steps = 0; goto next
  :: taken < steps && given == taken -> goto give
  :: given > taken && given < steps && way == CHUNKS && EVERY(HAS_DONE, FOR_SLOT) && begun - done[me] < SLOTS ->
    goto give
  :: given > taken
  fi;
  MAY_DIE;
  s = begun - (given - taken);
  if
  :: way == ALL || way >= CHUNKS || way == TO + me -> WAIT_ALL(s)
  :: way >= FROM && way < TO && me != root -> WAIT_ROOT
  :: else
  fi;
  if
  :: way == PHASES && given < steps -> waited = true; goto give
  :: else
  fi;

read:
  if
  :: way == ALL || way >= CHUNKS || way == TO + me -> READ_AND_DONE(0, RANKS)
  :: way >= FROM && way < TO && me != root -> READ_AND_DONE(root, root + 1)
  :: else -> done[me]++
  fi;
  taken++;
  goto again;

give:
  GIVE;
  given++;
  if
  :: waited -> waited = false; goto read
  :: else -> goto again
  fi;

failed:
#ifdef ODD
  assert(is_odd);
#else
#ifdef DIE
  assert(died);
#else
  assert(false);
#endif
#endif
#if RANKS > 3
  d_step { broken = 2; has_left[me] = true; s = 0 }; /* saves states */
  goto gone;
#endif
  if
#ifdef DIE
  :: d_step { broken == 0 -> broken = 1 };
    MAY_DIE;
    broken = 2
#else
  :: d_step { broken == 0 -> broken = 2 }
#endif
  :: broken > 0 /* waits for the text, but not for ever */
  fi;

out:
  MAY_DIE;
  has_left[me] = true;
gone:
  skip
}
