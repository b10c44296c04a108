/* calm.pml: nobody writes into a buffer whose owner's call has failed and returned (comm/coll_direct.c: work_if_sound,
 * work_range; comm/fault.c: dc__break, dc__await_calm).
 *
 * Rank 0 owns a buffer. The others may work in it, piece by piece: each shows that it works, looks whether the group is
 * sound, looks again before every piece, and shows that it has finished. Anybody may break the group at any time, as
 * the caller of dc_comm_abort does in a thread of its own; rank 0 sees that, waits until nobody works, and returns. A
 * worker's stores may lie in its store buffer while its next loads are done already. A worker may also die anywhere,
 * which rank 0 sees.
 *
 * Checked: no piece is written after rank 0 has returned; rank 0 does return.
 *
 * RANKS, PIECES. Known bugs, each of which must be found:
 * -DBUG_NO_FENCE: a worker does not make it visible that it works before it looks at the group
 * -DBUG_LOOK_FIRST: a worker looks whether the group is sound only before it shows that it works
 * -DBUG_NO_WAIT: the owner returns at once
 * -DBUG_NO_DEATH: the owner waits for the dead */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef PIECES
#define PIECES 2
#endif

bool broken, returned;
bool working[RANKS]; /* as the others see it */
bool shown[RANKS];   /* in the store buffer: not visible yet */
bool dead[RANKS];

active proctype breaker() { broken = true }

/* Store buffers empty themselves at any time. */
active proctype memory() {
  byte r;
end:
  do
  :: d_step { shown[1] -> working[1] = true; shown[1] = false }
#if RANKS > 2
  :: d_step { shown[2] -> working[2] = true; shown[2] = false }
#endif
  od
}

proctype worker(byte me) {
  byte piece;
#ifdef BUG_LOOK_FIRST
  if
  :: broken -> goto out
  :: else
  fi;
#endif
#ifdef BUG_NO_FENCE
  shown[me] = true;
#else
  working[me] = true;
#endif
#ifndef BUG_LOOK_FIRST
  if
  :: broken -> goto over
  :: else
  fi;
#endif
  do
  :: piece < PIECES ->
    if
    :: dead[me] = true; goto out
    :: true
    fi;
#ifndef BUG_LOOK_FIRST
    if
    :: broken -> break
    :: else
    fi;
#endif
    assert(!returned); /* the piece */
    piece++
  :: else -> break
  od;
over:
  skip;
  d_step { shown[me] = false; working[me] = false };
out:
  skip
}

active proctype owner() {
  byte r = 1;
  broken;
#ifndef BUG_NO_WAIT
  do
  :: r < RANKS ->
#ifdef BUG_NO_DEATH
    !working[r];
#else
    !working[r] || dead[r];
#endif
    r++
  :: else -> break
  od;
#endif
  returned = true
}

init {
  byte r = 1;
  atomic {
    do
    :: r < RANKS -> run worker(r); r++
    :: else -> break
    od
  }
}
