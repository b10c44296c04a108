/* entry.pml: who is inside a communicator (comm/sync.c: dc__go_in, take_over, dc__leave).
 *
 * Threads of one process enter and leave, with nothing between them but that lock. The frequent side enters with
 * plain stores and loads; so every thread has a store buffer here (stores that the others do not see yet; `memory`
 * lets them out one by one at any time), and membarrier(2) empties all of them. A bias is a word that one thread,
 * its holder, uses; taking over means the next bias, and behind the last one all threads share a word by compare
 * and exchange.
 *
 * Checked: never two inside; what one did inside is seen by the next (a plain counter, behind the same buffers);
 * nobody is refused (DC_E_STATE) while nobody else is inside or about to be, when callers take turns (-DPOLITE);
 * nobody waits for ever.
 *
 * THREADS, ROUNDS, BIASES. Known bugs, each of which must be found:
 * -DBUG_NO_MEMBARRIER: who takes over does not make the holder's stores visible
 * -DBUG_ONE_WORD: all holders share one word (so it was once): who was taken over clears the mark of the next
 *   holder
 * -DBUG_NO_SECOND_LOOK: a holder does not look again after it has shown itself */
#ifndef THREADS
#define THREADS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef BIASES
#define BIASES 2
#endif
#define SHARED BIASES /* the bias of everybody */
#define COUNT (BIASES + 1)
#ifdef BUG_ONE_WORD
#define WORD(e) ((e) == SHARED -> SHARED : 0)
#else
#define WORD(e) (e)
#endif
#define ROOM 3

byte mem[COUNT + 1]; /* the words, and the plain counter */
byte bias;
byte holder[BIASES];
bool taking;
byte inside;  /* threads; for the assertions only */
byte entries;
bool turn; /* -DPOLITE: the callers' own lock */

typedef buffer {
  byte n;
  byte at[ROOM];
  byte value[ROOM]
}
buffer buf[THREADS];

/* The oldest store becomes visible. */
#define FLUSH(t)                                                         \
  mem[buf[t].at[0]] = buf[t].value[0];                                   \
  buf[t].at[0] = buf[t].at[1]; buf[t].value[0] = buf[t].value[1];        \
  buf[t].at[1] = buf[t].at[2]; buf[t].value[1] = buf[t].value[2];        \
  buf[t].at[2] = 0; buf[t].value[2] = 0;                                 \
  buf[t].n--
/* What a locked instruction does. */
#define DRAIN(t) do :: buf[t].n > 0 -> FLUSH(t) :: else -> break od

active proctype memory() {
end:
  do
  :: d_step { buf[0].n > 0 -> FLUSH(0) }
  :: d_step { buf[1].n > 0 -> FLUSH(1) }
#if THREADS > 2
  :: d_step { buf[2].n > 0 -> FLUSH(2) }
#endif
#if THREADS > 3
  :: d_step { buf[3].n > 0 -> FLUSH(3) }
#endif
  od
}

#define STORE(where, x) \
  d_step { buf[me].n < ROOM -> buf[me].at[buf[me].n] = where; buf[me].value[buf[me].n] = x; buf[me].n++ }
/* A thread sees its own stores at once. */
#define LOAD(where, x)                                                                      \
  d_step {                                                                                  \
    x = mem[where];                                                                         \
    if :: buf[me].n > 0 && buf[me].at[0] == where -> x = buf[me].value[0] :: else fi;       \
    if :: buf[me].n > 1 && buf[me].at[1] == where -> x = buf[me].value[1] :: else fi;       \
    if :: buf[me].n > 2 && buf[me].at[2] == where -> x = buf[me].value[2] :: else fi        \
  }
#define SEQ_CST_STORE(what, x) d_step { DRAIN(me); what = x }
#define COMPARE_EXCHANGE(where, won)                                          \
  d_step { DRAIN(me); won = (mem[where] == 0); mem[where] = 1 }

#ifdef BUG_NO_MEMBARRIER
#define MEMBARRIER skip
#else
#define MEMBARRIER d_step { i = 0; do :: i < THREADS -> DRAIN(i); i++ :: else -> break od; i = 0 }
#endif

active[THREADS] proctype caller() {
  byte me = _pid - 1, round, e, seen, i;
  bool won;

next:
  if
  :: round == ROUNDS -> goto out
  :: else -> round++
  fi;
#ifdef POLITE
  d_step { !turn -> DRAIN(me); turn = true };
#endif

again:
  e = bias;
  if
  :: e == SHARED -> goto shared
  :: e < SHARED && holder[e] == me -> skip
  :: else -> goto take_over
  fi;

  LOAD(WORD(e), seen);
#ifdef BUG_ONE_WORD
  if :: seen -> goto refused :: else fi;
#else
  assert(!seen); /* only from inside */
#endif
  STORE(WORD(e), 1);
#ifdef BUG_NO_SECOND_LOOK
  goto in;
#else
  if
  :: bias == e -> goto in
  :: else -> STORE(WORD(e), 0); goto take_over
  fi;
#endif

shared:
  skip;
  COMPARE_EXCHANGE(WORD(SHARED), won);
  if
  :: !won -> goto refused
  :: won && bias == SHARED -> goto in
  :: else -> STORE(WORD(SHARED), 0); goto again /* an attempt that was given up */
  fi;

take_over:
  skip;
  d_step { !taking -> DRAIN(me); taking = true };
  e = bias;
  if
  :: e == SHARED || holder[e] == me -> SEQ_CST_STORE(taking, false); goto again
  :: else
  fi;
#ifdef BUG_ONE_WORD
  skip;
#else
  COMPARE_EXCHANGE(WORD(e + 1), won);
  if
  :: won
  :: !won -> SEQ_CST_STORE(taking, false); goto refused
  fi;
#endif
  if
  :: e + 1 < SHARED -> holder[e + 1] = me
  :: else
  fi;
  SEQ_CST_STORE(bias, e + 1);
  MEMBARRIER;
  if
  :: mem[WORD(e)] == 0 ->
#ifdef BUG_ONE_WORD
    SEQ_CST_STORE(mem[WORD(e + 1)], 1);
#endif
    e++;
    SEQ_CST_STORE(taking, false);
    goto in
  :: else ->
    SEQ_CST_STORE(bias, e);
#ifndef BUG_ONE_WORD
    STORE(WORD(e + 1), 0);
#endif
    SEQ_CST_STORE(taking, false);
    goto refused
  fi;

in:
  skip;
  d_step { inside++; entries++; assert(inside == 1) };
  LOAD(COUNT, seen);
  STORE(COUNT, seen + 1);
  LOAD(COUNT, seen);
  d_step { inside--; assert(seen == entries) };
  STORE(WORD(e), 0);
#ifdef POLITE
  SEQ_CST_STORE(turn, false);
#endif
  goto next;

refused:
#ifdef POLITE
  assert(false);
#endif
  goto next;

out:
  skip
}
