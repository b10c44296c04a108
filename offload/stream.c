/* stream.c: arrays in a scratch file that are worked on cell by cell.
 *
 * On disk the parts of a cell, one of each array in whole blocks, lie behind each other, and the cells as well. In
 * memory there are `slots` of them, in any order:
 *
 *   free     holds nothing
 *   reading  on its way from disk, for the walk or ahead of a window
 *   given    the walk's caller works on it
 *   writing  on its way to disk
 *   kept     holds values of `valid` arrays; those in `dirty` are nowhere else
 *
 * What was written last of a part is in `parts`: its checksum and generation, and the checksum before it, which tells a
 * lost write (stale) from a torn or damaged block. A part changes there when its write is complete; until then its slot
 * has it. Generation 0 is all zeros and not on disk.
 *
 * Owns the file, the slots' memory and the tables. One thread at a time, so there is no lock. */
#include "file.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SLOTS_MOST = 1024 };
enum state { SLOT_FREE, SLOT_READING, SLOT_GIVEN, SLOT_WRITING, SLOT_KEPT };

struct part {
  uint64_t generation;
  uint32_t crc, before;
};

struct slot {
  enum state state;
  char *memory;
  int64_t cell;
  dc_io *io; /* of reading and writing; NULL if there was nothing to transfer */
  uint32_t valid, dirty, moving; /* arrays; moving: of the request */
  uint32_t crc[DC_STREAM_ARRAYS]; /* of what is written */
  uint64_t turn; /* the order in which slots were used */
};

struct array {
  char *name;
  int64_t elem_bytes, per, in_file, in_slot; /* offsets of its part within a cell and a slot */
};

struct dc_stream {
  dc_file *file;
  int narrays, nslots;
  int64_t elems, cell_elems, cells, cell_bytes, slot_bytes, memory_bytes, wait_ns;
  struct array array[DC_STREAM_ARRAYS];
  struct slot *slots;
  struct part *parts; /* [cells][narrays] */
  void *memory;
  uint64_t turns;
  bool walking, failed; /* failed: the walk gives no more cells */
  uint32_t reads; /* of the walk */
  int64_t take, ahead, last; /* the next cell to give; to begin reading; the end */
  int64_t window; /* the cell that was read last by a window, or -1 */
};

/* ---- layout ------------------------------------------------------------------------------------------------------ */
static int64_t stream_items(const struct array *a, int64_t elems) { return (elems - 1) / a->per + 1; }

/* Fills all but pointers. */
static int stream_lay_out(const dc_stream_config *k, dc_stream *s, int64_t *disk) {
  if (!k->arrays || k->narrays < 1 || k->narrays > DC_STREAM_ARRAYS)
    return DC_FAIL(DC_E_INVALID, "%lld arrays at %p; a stream has from 1 to %d", (long long)k->narrays,
                   (const void *)k->arrays, DC_STREAM_ARRAYS);
  if (k->elems < 1 || k->cell_elems < 1)
    return DC_FAIL(DC_E_INVALID, "%lld elements in cells of %lld; there must be at least 1", (long long)k->elems,
                   (long long)k->cell_elems);
  if (k->slots < 2 || k->slots > SLOTS_MOST)
    return DC_FAIL(DC_E_INVALID, "%d slots; there must be from 2 to %d", k->slots, SLOTS_MOST);
  s->narrays = (int)k->narrays;
  s->elems = k->elems;
  s->cell_elems = k->cell_elems < k->elems ? k->cell_elems : k->elems;
  s->cells = (s->elems - 1) / s->cell_elems + 1;
  s->nslots = k->slots < s->cells + 1 ? k->slots : (int)s->cells + 1; /* a cell more than there are helps nobody */
  bool fits = true;
  for (int i = 0; i < s->narrays; i++) {
    int64_t bytes, rounded;
    if (k->arrays[i].elem_bytes < 1)
      return DC_FAIL(DC_E_INVALID, "array %d has elements of %lld bytes", i, (long long)k->arrays[i].elem_bytes);
    const int64_t per = k->per ? k->per[i] : 1;
    if (per < 1 || (s->cells > 1 && s->cell_elems % per))
      return DC_FAIL(DC_E_INVALID, "array %d has an item for %lld elements, and cells are of %lld", i, (long long)per,
                     (long long)s->cell_elems);
    s->array[i] = (struct array){
        .elem_bytes = k->arrays[i].elem_bytes, .per = per, .in_file = s->cell_bytes, .in_slot = s->slot_bytes};
    fits = fits &&
           !__builtin_mul_overflow(stream_items(&s->array[i], s->cell_elems), k->arrays[i].elem_bytes, &bytes) &&
           !__builtin_add_overflow(bytes, 2 * DC_DISK_ALIGN, &rounded);
    if (!fits) break;
    rounded = dc__round_up(bytes, DC_DISK_ALIGN);
    fits = !__builtin_add_overflow(s->cell_bytes, rounded, &s->cell_bytes) &&
           !__builtin_add_overflow(s->slot_bytes, rounded + DC_DISK_ALIGN, &s->slot_bytes); /* staggered by a page */
  }
  fits = fits && !__builtin_mul_overflow(s->cell_bytes, s->cells, disk) &&
         !__builtin_mul_overflow(s->slot_bytes, s->nslots, &s->memory_bytes) &&
         s->memory_bytes < INT64_MAX - DC_DISK_ALIGN && s->cells < INT64_MAX / DC_STREAM_ARRAYS / 64;
  return fits ? DC_OK
              : DC_FAIL(DC_E_OVERFLOW, "%lld elements in cells of %lld need more than 2^63 bytes", (long long)s->elems,
                        (long long)s->cell_elems);
}

int dc_stream_bytes(const dc_stream_config *config, int64_t *disk, int64_t *memory) {
  dc_stream_config k;
  DC_TRY(DC__SIZED(dc_stream_config, reserved, config, &k));
  if (!disk || !memory) return DC_FAIL(DC_E_INVALID, "disk and memory must not be NULL");
  dc_stream s = {0};
  DC_TRY(stream_lay_out(&k, &s, disk));
  *memory = s.memory_bytes;
  return DC_OK;
}

static int64_t stream_elems_of(const dc_stream *s, int64_t cell) {
  const int64_t left = s->elems - cell * s->cell_elems;
  return left < s->cell_elems ? left : s->cell_elems;
}

static size_t stream_bytes_of(const dc_stream *s, int64_t cell, int array) {
  return (size_t)(stream_items(&s->array[array], stream_elems_of(s, cell)) * s->array[array].elem_bytes);
}

static struct part *stream_part(const dc_stream *s, int64_t cell, int array) {
  return &s->parts[cell * s->narrays + array];
}

/* ---- checksums --------------------------------------------------------------------------------------------------- */
struct sums {
  const dc_stream *s;
  const struct slot *slot;
  uint32_t arrays, crc[DC_STREAM_ARRAYS];
};

static void stream_sum_range(int64_t begin, int64_t end, void *ctx) {
  struct sums *t = ctx;
  for (int64_t i = begin; i < end; i++)
    if (t->arrays >> i & 1)
      t->crc[i] = dc_crc32c(0, t->slot->memory + t->s->array[i].in_slot, stream_bytes_of(t->s, t->slot->cell, (int)i));
}

static void stream_sum(struct sums *t, const dc_stream *s, const struct slot *slot, uint32_t arrays) {
  t->s = s;
  t->slot = slot;
  t->arrays = arrays;
  dc_parallel_for(s->narrays, 1, stream_sum_range, t);
}

static int stream_check(const dc_stream *s, const struct slot *slot) {
  struct sums t;
  stream_sum(&t, s, slot, slot->moving);
  for (int i = 0; i < s->narrays; i++) {
    const struct part *p = stream_part(s, slot->cell, i);
    if (!(slot->moving >> i & 1) || t.crc[i] == p->crc) continue;
    const long long begin = slot->cell * s->cell_elems, end = begin + stream_elems_of(s, slot->cell);
    if (p->generation > 1 && t.crc[i] == p->before)
      return DC_FAIL(DC_E_CORRUPT,
                     "%s: elements [%lld, %lld) of '%s' are stale: generation %llu is there, %llu was written last",
                     dc__file_path(s->file), begin, end, s->array[i].name, (unsigned long long)p->generation - 1,
                     (unsigned long long)p->generation);
    return DC_FAIL(DC_E_CORRUPT,
                   "%s: elements [%lld, %lld) of '%s', generation %llu, are torn or damaged: checksum %08x, not %08x",
                   dc__file_path(s->file), begin, end, s->array[i].name, (unsigned long long)p->generation, t.crc[i],
                   p->crc);
  }
  return DC_OK;
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */
static int64_t stream_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static struct slot *stream_find(dc_stream *s, int64_t cell) {
  for (int i = 0; i < s->nslots; i++)
    if (s->slots[i].state != SLOT_FREE && s->slots[i].cell == cell) return &s->slots[i];
  return NULL;
}

static void stream_empty(struct slot *slot) {
  slot->state = SLOT_FREE;
  slot->valid = slot->dirty = slot->moving = 0;
}

/* Starts the transfer of slot->moving. */
static int stream_start(dc_stream *s, struct slot *slot, bool writes) {
  dc_piece pieces[DC_STREAM_ARRAYS];
  int n = 0;
  for (int i = 0; i < s->narrays; i++)
    if (slot->moving >> i & 1)
      pieces[n++] = (dc_piece){slot->memory + s->array[i].in_slot,
                               dc__round_up((int64_t)stream_bytes_of(s, slot->cell, i), DC_DISK_ALIGN),
                               slot->cell * s->cell_bytes + s->array[i].in_file};
  slot->io = NULL;
  if (!n) return DC_OK;
  return writes ? dc_file_write_start(s->file, pieces, n, &slot->io)
                : dc_file_read_start(s->file, pieces, n, &slot->io);
}

/* Waits for the slot's request, if it has one. */
static int stream_wait(dc_stream *s, struct slot *slot) {
  if (!slot->io) return DC_OK;
  int done = 0, rc = dc_io_test(slot->io, &done);
  if (!rc && !done) {
    const int64_t begin = stream_now_ns();
    rc = dc_io_wait(slot->io, 0);
    s->wait_ns += stream_now_ns() - begin;
  } else if (!rc) {
    rc = dc_io_wait(slot->io, 0);
  }
  dc_io_free(slot->io);
  slot->io = NULL;
  return rc;
}

/* The slot, which holds `cell` or nothing, begins to read those of `arrays` that it has not. */
static int stream_start_read(dc_stream *s, struct slot *slot, int64_t cell, uint32_t arrays) {
  slot->cell = cell;
  slot->turn = ++s->turns;
  slot->moving = arrays & ~slot->valid;
  for (int i = 0; i < s->narrays; i++)
    if (slot->moving >> i & 1 && !stream_part(s, cell, i)->generation) {
      memset(slot->memory + s->array[i].in_slot, 0, stream_bytes_of(s, cell, i));
      slot->moving &= ~(1u << i);
      slot->valid |= 1u << i;
    }
  slot->state = SLOT_READING;
  const int rc = stream_start(s, slot, false);
  if (rc) {
    slot->moving = 0;
    slot->state = SLOT_KEPT;
  }
  return rc;
}

/* reading -> kept. After a failure it has what it had before. */
static int stream_finish_read(dc_stream *s, struct slot *slot) {
  int rc = stream_wait(s, slot);
  if (!rc && slot->moving) rc = stream_check(s, slot);
  slot->state = SLOT_KEPT;
  if (!rc) slot->valid |= slot->moving;
  slot->moving = 0;
  return rc;
}

/* kept -> writing. After a failure it is kept and dirty. */
static int stream_start_write(dc_stream *s, struct slot *slot) {
  struct sums t;
  stream_sum(&t, s, slot, slot->dirty);
  memcpy(slot->crc, t.crc, sizeof slot->crc);
  slot->moving = slot->dirty;
  slot->turn = ++s->turns;
  const int rc = stream_start(s, slot, true);
  slot->state = rc ? SLOT_KEPT : SLOT_WRITING;
  if (rc) slot->moving = 0;
  return rc;
}

/* writing -> kept. */
static int stream_finish_write(dc_stream *s, struct slot *slot) {
  const int rc = stream_wait(s, slot);
  for (int i = 0; i < s->narrays && !rc; i++)
    if (slot->moving >> i & 1) {
      struct part *p = stream_part(s, slot->cell, i);
      *p = (struct part){p->generation + 1, slot->crc[i], p->crc};
      slot->dirty &= ~(1u << i);
    }
  slot->moving = 0;
  slot->state = SLOT_KEPT;
  return rc;
}

/* The slot in `state` that was used longest ago, or NULL. */
static struct slot *stream_oldest(dc_stream *s, enum state state, bool clean) {
  struct slot *found = NULL;
  for (int i = 0; i < s->nslots; i++) {
    struct slot *slot = &s->slots[i];
    if (slot->state == state && !(clean && slot->dirty) && (!found || slot->turn < found->turn)) found = slot;
  }
  return found;
}

/* Writes that are complete, in the order in which they were begun: a look costs a system call, and those before are
 * most often complete first. The first failure. */
static int stream_reap(dc_stream *s) {
  int done = 1;
  for (struct slot *slot; (slot = stream_oldest(s, SLOT_WRITING, false));) {
    if (slot->io) DC_TRY(dc_io_test(slot->io, &done));
    if (!done) return DC_OK;
    DC_TRY(stream_finish_write(s, slot));
  }
  return DC_OK;
}

/* One that holds nothing that is not on disk, emptied; NULL if there is none without waiting. */
static struct slot *stream_free_slot(dc_stream *s) {
  struct slot *slot = stream_oldest(s, SLOT_FREE, false);
  if (!slot) slot = stream_oldest(s, SLOT_KEPT, true);
  if (slot) stream_empty(slot);
  return slot;
}

/* ---- open and close ---------------------------------------------------------------------------------------------- */
static void stream_free(dc_stream *s) {
  for (int i = 0; i < s->narrays; i++) free(s->array[i].name);
  free(s->slots);
  free(s->parts);
  dc_mem_free(s->memory);
  free(s);
}

static int stream_make(const dc_file_config *file, const dc_stream_config *k, dc_stream *s) {
  dc_file_config f;
  int64_t disk = 0;
  int registered;
  DC_TRY(DC__SIZED(dc_file_config, reserve_bytes, file, &f));
  DC_TRY(stream_lay_out(k, s, &disk));
  if (!(f.flags & DC_FILE_WRITE))
    return DC_FAIL(DC_E_INVALID, "%s: a stream's file is opened with DC_FILE_WRITE", f.path ? f.path : "(NULL)");
  f.struct_size = sizeof f;
  f.reserve_bytes = disk;
  s->window = -1;
  for (int i = 0; i < s->narrays; i++)
    if (!(s->array[i].name = strdup(k->arrays[i].name ? k->arrays[i].name : "")))
      return DC_FAIL(DC_E_NOMEM, "the name of array %d", i);
  s->slots = calloc((size_t)s->nslots, sizeof *s->slots);
  s->parts = calloc((size_t)(s->cells * s->narrays), sizeof *s->parts);
  if (!s->slots || !s->parts) return DC_FAIL(DC_E_NOMEM, "the table of %lld cells", (long long)s->cells);
  DC_TRY(dc_mem_alloc((size_t)s->memory_bytes + DC_DISK_ALIGN, 0, &s->memory));
  char *at = (char *)(((uintptr_t)s->memory + DC_DISK_ALIGN - 1) / DC_DISK_ALIGN * DC_DISK_ALIGN);
  for (int i = 0; i < s->nslots; i++) s->slots[i].memory = at + i * s->slot_bytes;
  DC_TRY(dc_file_open(&f, &s->file));
  return dc_file_register(s->file, at, s->memory_bytes, &registered); /* where it can't be, that costs nothing else */
}

int dc_stream_open(const dc_file_config *file, const dc_stream_config *config, dc_stream **out) {
  dc_stream_config k;
  DC_TRY(DC__SIZED(dc_stream_config, reserved, config, &k));
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  dc_stream *s = calloc(1, sizeof *s);
  if (!s) return DC_FAIL(DC_E_NOMEM, "a stream");
  const int rc = stream_make(file, &k, s);
  if (rc) {
    dc_file_close(s->file);
    stream_free(s);
    return rc;
  }
  *out = s;
  return DC_OK;
}

int dc_stream_close(dc_stream *s) {
  if (!s) return DC_OK;
  for (int i = 0; i < s->nslots; i++) {
    dc_io_free(s->slots[i].io);
    s->slots[i].io = NULL;
  }
  DC_TRY(dc_file_close(s->file));
  stream_free(s);
  return DC_OK;
}

dc_file *dc_stream_file(dc_stream *s) { return s ? s->file : NULL; }

static int stream_mine(const dc_stream *s) {
  return s ? dc__file_mine(s->file) : DC_FAIL(DC_E_INVALID, "the stream is NULL");
}

int dc_stream_get_info(dc_stream *s, dc_stream_info *info) {
  dc_stream_info found;
  DC_TRY(stream_mine(s));
  DC_TRY(DC__SIZED(dc_stream_info, wait_ns, info, &found));
  found.cells = s->cells;
  found.cell_elems = s->cell_elems;
  found.disk_bytes = s->cells * s->cell_bytes;
  found.memory_bytes = s->memory_bytes;
  found.unsaved = 0;
  for (int i = 0; i < s->nslots; i++) found.unsaved += s->slots[i].dirty != 0;
  found.wait_ns = s->wait_ns;
  const size_t size = info->struct_size;
  memcpy(info, &found, size < sizeof found ? size : sizeof found);
  return DC_OK;
}

/* ---- the walk ---------------------------------------------------------------------------------------------------- */
static int stream_not_walking(const dc_stream *s) {
  DC_TRY(stream_mine(s));
  return s->walking ? DC_FAIL(DC_E_STATE, "%s: in a walk, which ends with dc_stream_end", dc__file_path(s->file))
                    : DC_OK;
}

int dc_stream_begin(dc_stream *s, int64_t first, int64_t last, uint32_t reads) {
  DC_TRY(stream_not_walking(s));
  if (first < 0 || last < first || last > s->cells || reads >> s->narrays)
    return DC_FAIL(DC_E_INVALID, "%s: cells [%lld, %lld) of %lld, arrays 0x%x of %d", dc__file_path(s->file),
                   (long long)first, (long long)last, (long long)s->cells, reads, s->narrays);
  DC_TRY(dc_stream_flush(s));
  s->walking = true;
  s->failed = false;
  s->reads = reads;
  s->take = s->ahead = first;
  s->last = last;
  return DC_OK;
}

/* Begins to read as many cells as there is room for. */
static int stream_fill(dc_stream *s) {
  for (; s->ahead < s->last; s->ahead++) {
    struct slot *slot = stream_find(s, s->ahead);
    if (!slot) slot = stream_free_slot(s);
    if (!slot) return DC_OK;
    DC_TRY(stream_start_read(s, slot, s->ahead, s->reads));
  }
  return DC_OK;
}

/* *out: the slot of the next cell, read and checked. */
static int stream_next(dc_stream *s, struct slot **out) {
  DC_TRY(stream_reap(s));
  DC_TRY(stream_fill(s));
  while (s->ahead == s->take) { /* every slot is on its way to disk */
    struct slot *writing = stream_oldest(s, SLOT_WRITING, false);
    if (!writing) return DC_FAIL(DC_E_STATE, "%s: no slot is free", dc__file_path(s->file));
    DC_TRY(stream_finish_write(s, writing));
    DC_TRY(stream_fill(s));
  }
  *out = stream_find(s, s->take);
  return stream_finish_read(s, *out);
}

int dc_stream_next(dc_stream *s, dc_stream_cell *cell) {
  dc_stream_cell found;
  struct slot *slot = NULL;
  DC_TRY(stream_mine(s));
  DC_TRY(DC__SIZED(dc_stream_cell, data, cell, &found));
  if (!s->walking || s->failed || s->take == s->last || stream_oldest(s, SLOT_GIVEN, false))
    return DC_FAIL(DC_E_STATE, "%s: %s", dc__file_path(s->file),
                   !s->walking          ? "not in a walk; dc_stream_begin first"
                   : s->failed          ? "the walk has failed; dc_stream_end, and begin another"
                   : s->take == s->last ? "the walk has no more cells; dc_stream_end"
                                        : "the cell before is not done; dc_stream_done first");
  const int rc = stream_next(s, &slot);
  if (rc) {
    s->failed = true;
    return rc;
  }
  slot->state = SLOT_GIVEN;
  s->take++;
  found.cell = slot->cell;
  found.begin = slot->cell * s->cell_elems;
  found.elems = stream_elems_of(s, slot->cell);
  for (int i = 0; i < DC_STREAM_ARRAYS; i++) found.data[i] = i < s->narrays ? slot->memory + s->array[i].in_slot : NULL;
  const size_t size = cell->struct_size;
  memcpy(cell, &found, size < sizeof found ? size : sizeof found);
  return DC_OK;
}

int dc_stream_done(dc_stream *s, uint32_t writes) {
  DC_TRY(stream_mine(s));
  struct slot *slot = stream_oldest(s, SLOT_GIVEN, false);
  if (!slot) return DC_FAIL(DC_E_STATE, "%s: no cell is given", dc__file_path(s->file));
  if (writes >> s->narrays)
    return DC_FAIL(DC_E_INVALID, "%s: arrays 0x%x of %d", dc__file_path(s->file), writes, s->narrays);
  slot->valid = slot->dirty = writes; /* what else the caller may have touched there is not the arrays' value */
  slot->state = SLOT_KEPT;
  const int rc = writes ? stream_start_write(s, slot) : DC_OK;
  s->failed |= rc != DC_OK;
  return rc;
}

int dc_stream_end(dc_stream *s) {
  DC_TRY(stream_mine(s));
  int rc = DC_OK;
  char text[512];
  for (int i = 0; i < s->nslots; i++) {
    struct slot *slot = &s->slots[i];
    int failed = DC_OK;
    if (slot->state == SLOT_WRITING) failed = stream_finish_write(s, slot);
    else if (slot->state == SLOT_READING) (void)stream_finish_read(s, slot); /* nobody wants it */
    else if (slot->state == SLOT_GIVEN) stream_empty(slot);
    if (!failed || rc) continue;
    rc = failed;
    strncpy(text, dc_last_error(), sizeof text - 1);
    text[sizeof text - 1] = 0;
  }
  s->walking = false;
  return rc ? DC_FAIL(rc, "%s", text) : DC_OK;
}

/* ---- windows ----------------------------------------------------------------------------------------------------- */
int dc_stream_flush(dc_stream *s) {
  DC_TRY(stream_not_walking(s));
  for (int i = 0; i < s->nslots; i++)
    if (s->slots[i].state == SLOT_KEPT && s->slots[i].dirty) DC_TRY(stream_start_write(s, &s->slots[i]));
  return dc_stream_end(s);
}

/* A slot that may be emptied, after waiting if it must be. */
static int stream_make_room(dc_stream *s, struct slot **slot) {
  while (!(*slot = stream_free_slot(s))) {
    struct slot *old = stream_oldest(s, SLOT_READING, false);
    if (old) {
      (void)stream_finish_read(s, old); /* read ahead for nobody: who wants it asks again */
    } else if ((old = stream_oldest(s, SLOT_WRITING, false))) {
      DC_TRY(stream_finish_write(s, old));
    } else { /* all at once, so that who writes one cell after the other seldom waits */
      while ((old = stream_oldest(s, SLOT_KEPT, false))) DC_TRY(stream_start_write(s, old));
    }
  }
  return DC_OK;
}

/* The slot of `cell`, kept, with `arrays` of it. whole: they are written over and need no values. */
static int stream_open_cell(dc_stream *s, int64_t cell, uint32_t arrays, bool whole, struct slot **out) {
  struct slot *slot = stream_find(s, cell);
  if (slot && slot->state == SLOT_READING && stream_finish_read(s, slot) && !slot->dirty) stream_empty(slot);
  if (slot && slot->state == SLOT_WRITING) (void)stream_finish_write(s, slot); /* if it fails the values are here */
  if (!slot || slot->state == SLOT_FREE) {
    DC_TRY(stream_make_room(s, &slot));
    slot->cell = cell;
    slot->state = SLOT_KEPT;
  }
  slot->turn = ++s->turns;
  *out = slot;
  if (whole || !(arrays & ~slot->valid)) return DC_OK;
  DC_TRY(stream_start_read(s, slot, cell, arrays));
  return stream_finish_read(s, slot);
}

/* Whoever reads windows in order finds the next cell on its way. */
static void stream_read_ahead(dc_stream *s, int64_t cell, uint32_t arrays) {
  const bool in_order = cell == s->window + 1;
  s->window = cell;
  if (!in_order || cell + 1 == s->cells || stream_find(s, cell + 1)) return;
  struct slot *slot = stream_oldest(s, SLOT_FREE, false);
  struct slot *kept = stream_oldest(s, SLOT_KEPT, true);
  if (!slot && kept && kept->cell != cell) slot = kept;
  if (!slot) return;
  stream_empty(slot);
  (void)stream_start_read(s, slot, cell + 1, arrays); /* its failure is told to who wants it */
}

/* begin, elems: items of the array. */
static int stream_window(dc_stream *s, int array, int64_t begin, int64_t elems, char *to, const char *from) {
  DC_TRY(stream_not_walking(s));
  const int64_t there = array < 0 || array >= s->narrays ? 0 : stream_items(&s->array[array], s->elems);
  if (!there || begin < 0 || elems < 0 || begin > there || elems > there - begin)
    return DC_FAIL(DC_E_INVALID, "%s: elements [%lld, %lld + %lld) of array %d; there are %lld of %d arrays",
                   dc__file_path(s->file), (long long)begin, (long long)begin, (long long)elems, array,
                   (long long)there, s->narrays);
  if (elems && !to && !from) return DC_FAIL(DC_E_INVALID, "%s: data is NULL", dc__file_path(s->file));
  const int64_t size = s->array[array].elem_bytes, of_cell = stream_items(&s->array[array], s->cell_elems);
  const uint32_t bit = 1u << array;
  while (elems) {
    const int64_t cell = begin / of_cell, at = begin - cell * of_cell;
    const int64_t whole = stream_items(&s->array[array], stream_elems_of(s, cell)), room = whole - at;
    const int64_t n = elems < room ? elems : room;
    struct slot *slot;
    DC_TRY(stream_open_cell(s, cell, bit, from && n == whole, &slot));
    char *data = slot->memory + s->array[array].in_slot + at * size;
    if (to) {
      if (s->window != cell) stream_read_ahead(s, cell, bit);
      memcpy(to, data, (size_t)(n * size));
      to += n * size;
    } else {
      memcpy(data, from, (size_t)(n * size));
      slot->valid |= bit;
      slot->dirty |= bit;
      from += n * size;
    }
    begin += n;
    elems -= n;
  }
  return DC_OK;
}

/* After a failure: writes under way then are waited for, so that what became of them, which has the same cause, is not
 * told to a later call, whose cause is gone. Cells that could not be written stay in memory. */
static int stream_settle(dc_stream *s, int rc) {
  if (!rc || !s || s->walking || dc__file_mine(s->file)) return rc;
  char text[512];
  strncpy(text, dc_last_error(), sizeof text - 1);
  text[sizeof text - 1] = 0;
  for (int i = 0; i < s->nslots; i++)
    if (s->slots[i].state == SLOT_WRITING) (void)stream_finish_write(s, &s->slots[i]);
  return DC_FAIL(rc, "%s", text);
}

int dc_stream_read(dc_stream *s, int array, int64_t begin, int64_t elems, void *data) {
  return stream_settle(s, stream_window(s, array, begin, elems, data, NULL));
}

int dc_stream_write(dc_stream *s, int array, int64_t begin, int64_t elems, const void *data) {
  return stream_settle(s, stream_window(s, array, begin, elems, NULL, data));
}

int dc_stream_drop(dc_stream *s, int array, int64_t cell) {
  DC_TRY(stream_not_walking(s));
  if (array < 0 || array >= s->narrays || cell < 0 || cell >= s->cells)
    return DC_FAIL(DC_E_INVALID, "%s: cell %lld of array %d; there are %lld of %d arrays", dc__file_path(s->file),
                   (long long)cell, array, (long long)s->cells, s->narrays);
  struct slot *slot = stream_find(s, cell);
  if (slot && slot->state == SLOT_READING) (void)stream_finish_read(s, slot);
  if (slot && slot->state == SLOT_WRITING) (void)stream_finish_write(s, slot);
  if (slot) {
    slot->valid &= ~(1u << array);
    slot->dirty &= ~(1u << array);
  }
  *stream_part(s, cell, array) = (struct part){0};
  return DC_OK;
}
