/* sleep.pml: no wake-up is lost (comm/wait.h: dc__publish; comm/wait.c: wait_sleep; linux futex).
 *
 * Rank 0 advances a word STEPS times; the others wait for each value. Who advances stores the value and then reads
 * the number of sleepers; who goes to sleep counts itself and then reads the value. A store may lie in the
 * poster's store buffer (a queue, let out by `memory` at any time) while its next load is already done: so one of
 * the two sides must make the store visible, and here the sleeper does, by membarrier(2), which empties the
 * buffers of all. -DFENCES: without membarrier every store is a full fence. The word goes on while some still
 * sleep for an older value; the periodic look (20 ms) is left out: a lost wake-up is a deadlock here. A rank waits
 * on two words of its poster in turns, as it does on the cells of a ring.
 *
 * -DBELL: messages (comm/p2p_ring.c: dc__ring_bell). What is waited for are many words; who sleeps does it on a bell of
 * its own, which whoever stores one of the words rings if somebody sleeps. Every store is a full fence there.
 *
 * RANKS, STEPS. Known bugs, each of which must be found:
 * -DBUG_NO_FENCE: nobody makes the store visible
 * -DBUG_EARLY_FENCE: the sleeper's fence comes before it counts itself
 * -DBUG_NO_COMPARE: the sleep does not compare the value once more
 * -DBUG_WAKE_ONE: the poster wakes one sleeper of a word only
 * -DBELL -DBUG_BELL_LATE: who goes to sleep reads its bell behind its last look at the words */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef STEPS
#define STEPS 3
#endif
#define ROOM 2
#define WORDS 2
#define W(step) ((step) % WORDS)

byte value[WORDS], sleepers; /* as the others see them; one number for all words of the poster */
byte bell[RANKS];
bool asleep[RANKS]; /* in futex_wait */
byte on[RANKS];     /* of which word */
byte buffered, first, second; /* the poster's buffer: steps whose values are on their way */

#define FLUSH value[W(first)] = first; first = second; second = 0; buffered--
#define DRAIN if :: buffered > 0 -> FLUSH :: else fi; if :: buffered > 0 -> FLUSH :: else fi

active proctype memory() {
end:
  do
  :: d_step { buffered > 0 -> FLUSH }
  od
}

active proctype poster() {
  byte step = 1, r;
  bool woken;
  do
  :: step <= STEPS ->
#if defined(FENCES) || defined(BELL)
    d_step { DRAIN; value[W(step)] = step };
#else
    d_step { buffered < ROOM -> if :: buffered == 0 -> first = step :: else -> second = step fi; buffered++ };
#endif
    if
    :: sleepers > 0 ->
      d_step { /* the kernel: a fence, then under the lock of the word */
        DRAIN;
        r = 1;
        woken = false;
        do
        :: r < RANKS ->
#ifdef BELL
          bell[r]++;
          asleep[r] = false;
#else
#ifdef BUG_WAKE_ONE
          if :: !woken && asleep[r] && on[r] == W(step) -> asleep[r] = false; woken = true :: else fi;
#else
          if :: asleep[r] && on[r] == W(step) -> asleep[r] = false :: else fi;
#endif
#endif
          r++
        :: else -> break
        od;
        r = 0;
        woken = false
      }
    :: else
    fi;
    step++
  :: else -> break
  od
}

#if defined(FENCES) || defined(BELL)
#define MEMBARRIER skip
#else
#define MEMBARRIER d_step { DRAIN; skip }
#endif

proctype waiter(byte me) {
  byte step = 1, seen;
  bool there;
  do
  :: step <= STEPS ->
    do
    :: value[W(step)] >= step -> break
    :: else ->
#ifdef BUG_EARLY_FENCE
      MEMBARRIER;
#endif
      sleepers++;
#ifndef BUG_NO_FENCE
#ifndef BUG_EARLY_FENCE
      MEMBARRIER;
#endif
#endif
#ifdef BELL
#ifndef BUG_BELL_LATE
      seen = bell[me];
#endif
      there = value[W(step)] >= step;
#ifdef BUG_BELL_LATE
      seen = bell[me];
#endif
      if
      :: !there ->
        d_step { if :: bell[me] == seen -> asleep[me] = true :: else fi };
        !asleep[me]
      :: else
      fi;
      there = false;
#else
      seen = value[W(step)];
      if
      :: seen < step ->
#ifdef BUG_NO_COMPARE
        d_step { asleep[me] = true; on[me] = W(step) };
#else
        d_step { /* the kernel, under the lock of the word */
          if
          :: value[W(step)] == seen -> asleep[me] = true; on[me] = W(step)
          :: else
          fi
        };
#endif
        !asleep[me]
      :: else
      fi;
#endif
      seen = 0;
      sleepers--
    od;
    step++
  :: else -> break
  od
}

init {
  byte r = 1;
  atomic {
    do
    :: r < RANKS -> run waiter(r); r++
    :: else -> break
    od
  }
}
