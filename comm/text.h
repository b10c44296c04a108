/* text.h: messages put together piece by piece, cut at the size of the shared error text. */
#ifndef DEEPC_COMM_TEXT_H
#define DEEPC_COMM_TEXT_H

#include <stdio.h>

#include "comm_impl.h"

typedef struct dc__text {
  char s[DC__TEXT];
  size_t n;
} dc__text;

__attribute__((format(printf, 2, 3))) static inline void text_add(dc__text *t, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  int n = vsnprintf(t->s + t->n, sizeof t->s - t->n, fmt, ap);
  va_end(ap);
  if (n > 0) t->n += (size_t)n < sizeof t->s - t->n ? (size_t)n : sizeof t->s - t->n - 1;
}

static inline void text_add_rank(dc__text *t, const dc_comm *c, int rank) {
  text_add(t, "rank %d", c->global_rank[rank]);
  if (c->global_rank[rank] != rank) text_add(t, " (%d in the group)", rank);
}

static inline void text_add_pid(dc__text *t, const dc_comm *c, int rank) {
  text_add_rank(t, c, rank);
  text_add(t, " (pid %d)", c->h->seat[rank].pid);
}

#endif
