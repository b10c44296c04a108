/* extent.c: a file of numbered extents whose generations change all at once.
 *
 * On disk, in blocks of DC_DISK_ALIGN, numbers in the machine's byte order:
 *
 *   block 0, 1       two super blocks; commit g writes number g % 2
 *   directory        the capacities, as they were when the file was laid out
 *   table 0, 1       per extent: generation, bytes, checksum and place of its value; commit g writes number g % 2
 *   extents          each `copies` times: a block with the header, then room for its capacity
 *
 * A commit that fails when its super block may have arrived leaves open which of the two generations a process would
 * find, so that neither's values may be written over: until it is repeated or undone writes are refused.
 *
 * A value is written where the committed table does not point, with its header, in any order; then the table, then the
 * super block. Until the last has arrived the old one stands, with values that nobody has touched. A header or value
 * that does not agree with the table was torn or lost. With one copy there is no place where the table does not point,
 * so there a value is torn by the end of the process, which the checksum tells.
 *
 * After an fdatasync that failed, what it was to bring to disk may be gone though the next one succeeds (Rebello et
 * al., "Can applications recover from fsync failures?", USENIX ATC 2020): such values are dropped, and no commit has
 * them.
 *
 * Owns the file and the tables in memory. `lock` guards the states; it is taken inside of the file's (hooks), so
 * nothing of file.c is called under it. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = DC_DISK_ALIGN, SUPERS = 2, VERSION = 1 };
static const char extent_super_magic[8] = "deepcEXT", extent_magic[8] = "deepcVAL";

struct super {
  char magic[8];
  uint32_t version, copies;
  uint64_t count, generation, id; /* id: random, of this file */
  uint32_t directory_crc, table_crc, reserved, crc; /* crc: of all before it */
};
struct header {
  char magic[8];
  uint64_t id, extent, generation;
  int64_t bytes;
  uint32_t value_crc, crc;
};
struct entry {
  uint64_t generation;
  int64_t bytes;
  uint32_t crc, copy;
};

struct extent {
  int64_t capacity, offset;
  struct entry now, committed;
  int reading;
  bool writing, failed;
  bool dropped, committed_dropped; /* `now`, `committed`: an fdatasync that was to bring it to disk has failed */
};

struct dc_extents {
  dc_file *file;
  struct super super; /* as committed */
  int64_t count, table_bytes, table_offset;
  int copies;
  pthread_mutex_t lock;
  bool committing;
  bool settled; /* the directory is on disk */
  uint64_t durable; /* values up to this generation are */
  bool unsure; /* a commit failed behind the point from which its super block may be on disk */
  bool named;  /* the folder's entry of the file is on disk, or it has none */
  struct extent *e;
};

struct operation {
  dc_extents *x;
  int64_t extent;
  struct entry entry; /* what is written, or is to be found */
  bool writes;
  const void *data;
  struct header *header; /* a block */
};

/* ---- layout ------------------------------------------------------------------------------------------------------ */
static bool extent_grow(int64_t *at, int64_t bytes) {
  int64_t rounded;
  return !__builtin_add_overflow(bytes, BLOCK - 1, &rounded) &&
         !__builtin_add_overflow(*at, rounded / BLOCK * BLOCK, at);
}

/* offsets: NULL, or of `count` numbers. */
static int extent_lay_out(const int64_t *capacity, int64_t count, int copies, struct extent *e, int64_t *table,
                          int64_t *end) {
  if (count < 1 || count > INT32_MAX || !capacity)
    return DC_FAIL(DC_E_INVALID, "%lld extents; there must be from 1 to %d, with their capacities", (long long)count,
                   INT32_MAX);
  if (copies < 1 || copies > 2) return DC_FAIL(DC_E_INVALID, "copies is %d; it must be 1 or 2", copies);
  int64_t at = SUPERS * BLOCK;
  bool fits = extent_grow(&at, count * (int64_t)sizeof *capacity);
  *table = at;
  for (int i = 0; i < SUPERS; i++) fits &= extent_grow(&at, count * (int64_t)sizeof(struct entry));
  for (int64_t i = 0; i < count && fits; i++) {
    if (capacity[i] < 0)
      return DC_FAIL(DC_E_INVALID, "extent %lld has capacity %lld", (long long)i, (long long)capacity[i]);
    if (e) e[i] = (struct extent){.capacity = capacity[i], .offset = at};
    for (int c = 0; c < copies && fits; c++) fits = extent_grow(&at, BLOCK) && extent_grow(&at, capacity[i]);
  }
  *end = at;
  return fits ? DC_OK : DC_FAIL(DC_E_OVERFLOW, "%lld extents need more than 2^63 bytes", (long long)count);
}

int dc_extents_bytes(const int64_t *capacity, int64_t count, int copies, int64_t *bytes) {
  int64_t table, end;
  if (!bytes) return DC_FAIL(DC_E_INVALID, "bytes is NULL");
  DC_TRY(extent_lay_out(capacity, count, copies ? copies : 2, NULL, &table, &end));
  *bytes = end;
  return DC_OK;
}

static int64_t extent_place(const dc_extents *x, const struct extent *e, uint32_t copy) {
  return e->offset + copy * (BLOCK + dc__round_up(e->capacity, BLOCK));
}

static uint32_t extent_super_crc(const struct super *s) { return dc_crc32c(0, s, offsetof(struct super, crc)); }
static uint32_t extent_header_crc(const struct header *h) { return dc_crc32c(0, h, offsetof(struct header, crc)); }

/* `bytes` zeroed, in whole blocks. NULL: no memory. */
static void *extent_blocks(int64_t bytes) {
  void *p = NULL;
  const size_t size = (size_t)dc__round_up(bytes ? bytes : 1, BLOCK);
  if (posix_memalign(&p, BLOCK, size)) return NULL;
  return memset(p, 0, size);
}

/* ---- super block and table --------------------------------------------------------------------------------------- */
static int64_t extent_directory_bytes(int64_t count) { return dc__round_up(count * (int64_t)sizeof(int64_t), BLOCK); }

static int extent_write_directory(dc_extents *x, uint32_t *crc) {
  const int64_t bytes = extent_directory_bytes(x->count);
  int64_t *directory = extent_blocks(bytes);
  if (!directory) return DC_FAIL(DC_E_NOMEM, "%lld bytes", (long long)bytes);
  for (int64_t i = 0; i < x->count; i++) directory[i] = x->e[i].capacity;
  *crc = dc_crc32c(0, directory, (size_t)bytes);
  const dc_piece piece = {directory, bytes, SUPERS * BLOCK};
  const int rc = dc_file_write(x->file, &piece, 1);
  free(directory);
  return rc;
}

/* All that was written: values up to `generation`, and what holds them. */
static int extent_sync(dc_extents *x, uint64_t generation) {
  const int rc = dc_file_sync(x->file);
  pthread_mutex_lock(&x->lock);
  for (int64_t i = 0; i < x->count && rc; i++) {
    struct extent *e = &x->e[i];
    e->dropped |= e->now.generation > x->durable;
    e->committed_dropped |= e->committed.generation > x->durable;
  }
  if (!rc) x->durable = generation;
  pthread_mutex_unlock(&x->lock);
  return rc;
}

static int extent_write_super(dc_extents *x, const struct super *super, int64_t slot, bool durable) {
  struct super *block = extent_blocks(BLOCK);
  if (!block) return DC_FAIL(DC_E_NOMEM, "%s: a super block", dc__file_path(x->file));
  *block = *super;
  const dc_piece piece = {block, BLOCK, slot * BLOCK};
  int rc = dc_file_write(x->file, &piece, 1);
  if (!rc && durable) rc = extent_sync(x, super->generation);
  free(block);
  return rc;
}

/* The folder's entry of the file: a loss of power takes the file with it where that is not on disk, whoever made it. */
static int extent_sync_folder(dc_extents *x) {
  const char *path = dc__file_path(x->file), *slash = strrchr(path, '/');
  char *folder = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
  if (!folder) return DC_FAIL(DC_E_NOMEM, "the name of a folder");
  int fd, failed, rc = DC_OK;
  do fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR);
  do failed = fd < 0 || fsync(fd);
  while (failed && errno == EINTR);
  if (fd < 0 || (failed && errno != EINVAL)) /* EINVAL: the file system has no such thing */
    rc = DC_FAIL(DC_E_IO, "%s: its folder can't be brought to disk: %s", path, strerror(errno));
  if (fd >= 0) close(fd);
  free(folder);
  x->named = rc == DC_OK;
  return rc;
}

/* Table and super block of `generation`, from entries `now`. begun: set when the super block may be on disk. */
static int extent_write_tables(dc_extents *x, uint64_t generation, bool durable, struct super *written, bool *begun) {
  struct entry *table = extent_blocks(x->table_bytes);
  if (!table)
    return DC_FAIL(DC_E_NOMEM, "%s: a table of %lld bytes", dc__file_path(x->file), (long long)x->table_bytes);
  for (int64_t i = 0; i < x->count; i++) table[i] = x->e[i].now;
  *written = x->super;
  written->generation = generation;
  written->table_crc = dc_crc32c(0, table, (size_t)x->table_bytes);
  written->crc = extent_super_crc(written);
  const int64_t which = (int64_t)(generation % SUPERS);
  const dc_piece to_table = {table, x->table_bytes, x->table_offset + which * x->table_bytes};
  int rc = dc_file_write(x->file, &to_table, 1);
  if (!rc && durable) rc = extent_sync(x, generation);
  if (!rc) {
    *begun = true;
    rc = extent_write_super(x, written, which, durable);
  }
  free(table);
  return rc;
}

/* super->magic[0] is 0 if there is none: the file is empty, or was not laid out to the end. */
static int extent_find_super(dc_file *f, struct super *super) {
  int64_t size;
  memset(super, 0, sizeof *super);
  DC_TRY(dc__file_size(f, &size));
  if (!size) return DC_OK;
  struct super *both = extent_blocks(SUPERS * BLOCK);
  if (!both) return DC_FAIL(DC_E_NOMEM, "%d bytes", SUPERS * BLOCK);
  const dc_piece piece = {both, SUPERS * BLOCK, 0};
  int rc = size < SUPERS * BLOCK ? DC_OK : dc_file_read(f, &piece, 1);
  bool blank = !rc && size >= SUPERS * BLOCK;
  for (int i = 0; i < SUPERS && !rc; i++) {
    const struct super *s = (const struct super *)((const char *)both + i * BLOCK);
    const bool whole = !memcmp(s->magic, extent_super_magic, 8) && s->crc == extent_super_crc(s);
    if (whole && (!super->magic[0] || s->generation > super->generation)) *super = *s;
    for (int k = 0; k < BLOCK && blank; k++) blank = !((const char *)s)[k];
  }
  free(both);
  if (!rc && !super->magic[0] && !blank)
    rc = DC_FAIL(
        DC_E_CORRUPT,
        "%s is not a file of extents, or its first blocks are damaged; open it with DC_FILE_TRUNCATE to begin anew",
        dc__file_path(f));
  if (!rc && super->magic[0] && super->version != VERSION)
    rc = DC_FAIL(DC_E_CORRUPT, "%s is a file of extents of version %u; this libdeepc (%s) knows version %d",
                 dc__file_path(f), super->version, DC_VERSION_STRING, VERSION);
  return rc;
}

static int extent_check_blocks(const dc_extents *x, const char *what, const void *blocks, int64_t bytes, uint32_t crc) {
  return dc_crc32c(0, blocks, (size_t)bytes) == crc
             ? DC_OK
             : DC_FAIL(DC_E_CORRUPT, "%s: the %s of generation %llu is damaged (its checksum differs)",
                       dc__file_path(x->file), what, (unsigned long long)x->super.generation);
}

/* What the file says of its extents, against what the caller expects. */
static int extent_read_directory(dc_extents *x, const int64_t *capacity, int64_t count) {
  const char *path = dc__file_path(x->file);
  x->count = (int64_t)x->super.count;
  x->copies = (int)x->super.copies;
  if (x->count < 1 || x->count > INT32_MAX)
    return DC_FAIL(DC_E_CORRUPT, "%s says it has %lld extents", path, (long long)x->count);
  if (capacity && count != x->count)
    return DC_FAIL(DC_E_SHAPE, "%s has %lld extents, %lld are expected; use its own, or DC_FILE_TRUNCATE to begin anew",
                   path, (long long)x->count, (long long)count);
  int64_t end;
  int64_t *found = extent_blocks(extent_directory_bytes(x->count));
  x->e = calloc((size_t)x->count, sizeof *x->e);
  int rc = found && x->e ? DC_OK : DC_FAIL(DC_E_NOMEM, "%s: %lld extents", path, (long long)x->count);
  const dc_piece piece = {found, extent_directory_bytes(x->count), SUPERS * BLOCK};
  if (!rc) rc = dc_file_read(x->file, &piece, 1);
  if (!rc) rc = extent_check_blocks(x, "directory", found, piece.bytes, x->super.directory_crc);
  for (int64_t i = 0; i < x->count && !rc && capacity; i++)
    if (capacity[i] != found[i])
      rc = DC_FAIL(DC_E_SHAPE, "extent %lld of %s has room for %lld bytes, %lld are expected", (long long)i, path,
                   (long long)found[i], (long long)capacity[i]);
  if (!rc) rc = extent_lay_out(found, x->count, x->copies, x->e, &x->table_offset, &end);
  free(found);
  return rc;
}

static int extent_read_table(dc_extents *x) {
  x->table_bytes = dc__round_up(x->count * (int64_t)sizeof(struct entry), BLOCK);
  struct entry *table = extent_blocks(x->table_bytes);
  if (!table) return DC_FAIL(DC_E_NOMEM, "a table of %lld bytes", (long long)x->table_bytes);
  const int64_t which = (int64_t)(x->super.generation % SUPERS);
  const dc_piece piece = {table, x->table_bytes, x->table_offset + which * x->table_bytes};
  int rc = dc_file_read(x->file, &piece, 1);
  if (!rc) rc = extent_check_blocks(x, "table", table, x->table_bytes, x->super.table_crc);
  for (int64_t i = 0; i < x->count && !rc; i++) {
    struct extent *e = &x->e[i];
    e->now = e->committed = table[i];
    if (e->now.bytes < 0 || e->now.bytes > e->capacity || e->now.copy >= (uint32_t)x->copies)
      rc = DC_FAIL(DC_E_CORRUPT, "%s: the table's row of extent %lld is senseless", dc__file_path(x->file),
                   (long long)i);
  }
  free(table);
  return rc;
}

static uint64_t extent_new_id(void) {
  uint64_t id;
  if (getrandom(&id, sizeof id, GRND_NONBLOCK) != sizeof id) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    id = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
  }
  return id;
}

static int extent_make(dc_extents *x, const int64_t *capacity, int64_t count, int copies) {
  const char *path = dc__file_path(x->file);
  if (!dc__file_writes(x->file) || !capacity)
    return DC_FAIL(DC_E_CORRUPT, "%s holds no extents; to lay it out give their capacities and DC_FILE_WRITE", path);
  int64_t end;
  x->count = count;
  x->copies = copies ? copies : 2;
  x->table_bytes = dc__round_up(count * (int64_t)sizeof(struct entry), BLOCK);
  DC_TRY(dc_extents_bytes(capacity, count, copies, &end));
  if (!(x->e = calloc((size_t)count, sizeof *x->e)))
    return DC_FAIL(DC_E_NOMEM, "%s: %lld extents", path, (long long)count);
  DC_TRY(extent_lay_out(capacity, count, x->copies, x->e, &x->table_offset, &end));
  DC_TRY(dc__file_reserve(x->file, end));
  memcpy(x->super.magic, extent_super_magic, 8);
  x->super.version = VERSION;
  x->super.copies = (uint32_t)x->copies;
  x->super.count = (uint64_t)count;
  x->super.id = extent_new_id();
  DC_TRY(extent_write_directory(x, &x->super.directory_crc));
  struct super made;
  bool begun;
  DC_TRY(extent_write_tables(x, 0, false, &made, &begun));
  x->super = made;
  return DC_OK;
}

/* empty: what the file holds goes; not before the lock says that nobody else has it. */
static int extent_open(dc_extents *x, const int64_t *capacity, int64_t count, int copies, bool empty) {
  if (dc__file_writes(x->file)) DC_TRY(dc__file_lock(x->file));
  if (empty) DC_TRY(dc__file_empty(x->file, SUPERS * BLOCK));
  DC_TRY(extent_find_super(x->file, &x->super));
  if (!x->super.magic[0]) return extent_make(x, capacity, count, copies);
  if (copies && copies != (int)x->super.copies)
    return DC_FAIL(DC_E_SHAPE, "%s keeps %u copies of an extent, %d are expected", dc__file_path(x->file),
                   x->super.copies, copies);
  DC_TRY(extent_read_directory(x, capacity, count));
  x->durable = x->super.generation;
  x->settled = x->durable > 0;
  return extent_read_table(x);
}

int dc_extents_open(const dc_file_config *config, const int64_t *capacity, int64_t count, int copies,
                    dc_extents **out) {
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  if (copies < 0 || copies > 2)
    return DC_FAIL(DC_E_INVALID, "copies is %d; it must be 1 or 2, or 0 for the file's", copies);
  if (!capacity != !count)
    return DC_FAIL(DC_E_INVALID, "capacity is %p for %lld extents", (void *)capacity, (long long)count);
  int64_t bytes;
  if (capacity) DC_TRY(dc_extents_bytes(capacity, count, copies, &bytes));
  dc_file_config k;
  DC_TRY(DC__SIZED(dc_file_config, reserve_bytes, config, &k));
  k.struct_size = sizeof k;
  /* Not by dc_file_open, which knows no lock; what it refuses (a file that is only read, a nameless one) it still
   * sees. The layout reserves what it needs. */
  const bool empty = k.flags & DC_FILE_TRUNCATE && k.flags & DC_FILE_WRITE && !(k.flags & DC_FILE_NAMELESS);
  if (empty) k.flags &= ~DC_FILE_TRUNCATE, k.reserve_bytes = 0;
  dc_extents *x = calloc(1, sizeof *x);
  if (!x) return DC_FAIL(DC_E_NOMEM, "a file of extents");
  x->named = k.flags & DC_FILE_NAMELESS;
  int rc = dc_file_open(&k, &x->file);
  if (!rc) rc = extent_open(x, capacity, count, copies, empty);
  if (rc) {
    dc_file_close(x->file);
    free(x->e);
    free(x);
    return rc;
  }
  pthread_mutex_init(&x->lock, NULL);
  *out = x;
  return DC_OK;
}

int dc_extents_close(dc_extents *x) {
  if (!x) return DC_OK;
  const bool mine = !dc__file_mine(x->file);
  DC_TRY(dc_file_close(x->file));
  if (mine) pthread_mutex_destroy(&x->lock);
  free(x->e);
  free(x);
  return DC_OK;
}

dc_file *dc_extents_file(dc_extents *x) { return x ? x->file : NULL; }

/* ---- one extent -------------------------------------------------------------------------------------------------- */
static void extent_complete(void *owner, int status) {
  struct operation *o = owner;
  struct extent *e = &o->x->e[o->extent];
  pthread_mutex_lock(&o->x->lock);
  if (o->writes) {
    e->writing = e->dropped = false;
    e->failed = status != DC_OK;
    e->now = status ? (struct entry){0} : o->entry;
  } else {
    e->reading--;
  }
  pthread_mutex_unlock(&o->x->lock);
}

static void extent_drop(void *owner) {
  struct operation *o = owner;
  free(o->header);
  free(o);
}

/* What came is what the table says was written. */
static int extent_check(void *owner) {
  const struct operation *o = owner;
  const struct header *h = o->header;
  const char *path = dc__file_path(o->x->file);
  const unsigned long long extent = (unsigned long long)o->extent, wanted = o->entry.generation;
  if (memcmp(h->magic, extent_magic, 8) || h->crc != extent_header_crc(h) || h->id != o->x->super.id ||
      h->extent != extent)
    return DC_FAIL(DC_E_CORRUPT, "extent %llu of %s, generation %llu: its header is torn or damaged", extent, path,
                   wanted);
  if (h->generation != o->entry.generation)
    return DC_FAIL(DC_E_CORRUPT, "extent %llu of %s is stale: generation %llu is there, %llu was written last", extent,
                   path, (unsigned long long)h->generation, wanted);
  const uint32_t crc = dc_crc32c(0, o->data, (size_t)o->entry.bytes);
  if (h->bytes != o->entry.bytes || h->value_crc != o->entry.crc || crc != o->entry.crc)
    return DC_FAIL(DC_E_CORRUPT, "extent %llu of %s, generation %llu, is torn or damaged: checksum %08x, not %08x",
                   extent, path, wanted, crc, o->entry.crc);
  return DC_OK;
}

static const dc__io_hooks extent_write_hooks = {extent_complete, NULL, extent_drop};
static const dc__io_hooks extent_read_hooks = {extent_complete, extent_check, extent_drop};

static int extent_look_at(const dc_extents *x, int64_t extent, const void *data, int64_t bytes) {
  if (!x) return DC_FAIL(DC_E_INVALID, "the file of extents is NULL");
  DC_TRY(dc__file_mine(x->file));
  if (extent < 0 || extent >= x->count)
    return DC_FAIL(DC_E_INVALID, "%s has no extent %lld, but %lld of them from 0 on", dc__file_path(x->file),
                   (long long)extent, (long long)x->count);
  if (bytes < 0 || (bytes && !data))
    return DC_FAIL(DC_E_INVALID, "extent %lld of %s: %lld bytes at %p", (long long)extent, dc__file_path(x->file),
                   (long long)bytes, data);
  return DC_OK;
}

/* Under x->lock: may this operation begin? Fills o->entry. */
static int extent_admit(dc_extents *x, struct operation *o, int64_t bytes) {
  struct extent *e = &x->e[o->extent];
  const char *path = dc__file_path(x->file);
  const long long n = o->extent;
  if (e->writing || (o->writes && e->reading))
    return DC_FAIL(DC_E_STATE, "extent %lld of %s is being %s; wait for that request first", n, path,
                   e->writing ? "written" : "read");
  if (o->writes) {
    if (x->committing) return DC_FAIL(DC_E_STATE, "%s is being committed; write after that", path);
    if (x->unsure)
      return DC_FAIL(DC_E_STATE, "the last commit of %s failed when it may have arrived; commit again, or roll back",
                     path);
    o->entry.generation = x->super.generation + 1;
    o->entry.bytes = bytes;
    o->entry.copy = x->copies == 2 && e->committed.generation ? 1 - e->committed.copy : 0;
    e->writing = true;
    return DC_OK;
  }
  if (e->failed)
    return DC_FAIL(DC_E_STATE, "the last write of extent %lld of %s failed; write it again, or roll back", n, path);
  if (!e->now.generation) return DC_FAIL(DC_E_STATE, "extent %lld of %s was never written", n, path);
  if (e->now.bytes != bytes)
    return DC_FAIL(DC_E_SHAPE, "extent %lld of %s holds %lld bytes, %lld are asked for", n, path,
                   (long long)e->now.bytes, (long long)bytes);
  o->entry = e->now;
  e->reading++;
  return DC_OK;
}

static int extent_run(dc_extents *x, struct operation *o, int64_t bytes, dc_io **out) {
  struct extent *e = &x->e[o->extent];
  pthread_mutex_lock(&x->lock);
  int rc = extent_admit(x, o, bytes);
  pthread_mutex_unlock(&x->lock);
  if (rc) return rc;
  if (o->writes) {
    *o->header = (struct header){
        .id = x->super.id, .extent = (uint64_t)o->extent, .generation = o->entry.generation, .bytes = bytes};
    memcpy(o->header->magic, extent_magic, 8);
    o->header->value_crc = o->entry.crc = dc_crc32c(0, o->data, (size_t)bytes);
    o->header->crc = extent_header_crc(o->header);
  }
  const int64_t at = extent_place(x, e, o->entry.copy);
  const dc_piece pieces[2] = {{o->header, BLOCK, at}, {(void *)(uintptr_t)o->data, bytes, at + BLOCK}};
  rc = dc__file_start(x->file, o->writes ? DC__DISK_WRITE : DC__DISK_READ, pieces, bytes ? 2 : 1,
                      o->writes ? &extent_write_hooks : &extent_read_hooks, o, out);
  if (rc) { /* nothing was begun */
    pthread_mutex_lock(&x->lock);
    if (o->writes) e->writing = false;
    else e->reading--;
    pthread_mutex_unlock(&x->lock);
  }
  return rc;
}

static int extent_start(dc_extents *x, int64_t extent, const void *data, int64_t bytes, bool writes, dc_io **out) {
  DC_TRY(extent_look_at(x, extent, data, bytes));
  if (!out) return DC_FAIL(DC_E_INVALID, "out is NULL");
  if (writes && !dc__file_writes(x->file))
    return DC_FAIL(DC_E_INVALID, "%s was opened for reading; open it with DC_FILE_WRITE", dc__file_path(x->file));
  if (writes && bytes > x->e[extent].capacity)
    return DC_FAIL(DC_E_SHAPE, "extent %lld of %s has room for %lld bytes, %lld are to be written", (long long)extent,
                   dc__file_path(x->file), (long long)x->e[extent].capacity, (long long)bytes);
  struct operation *o = calloc(1, sizeof *o);
  if (!o || !(o->header = extent_blocks(BLOCK))) {
    free(o);
    return DC_FAIL(DC_E_NOMEM, "a header of %d bytes", BLOCK);
  }
  o->x = x;
  o->extent = extent;
  o->data = data;
  o->writes = writes;
  const int rc = extent_run(x, o, bytes, out);
  if (rc) extent_drop(o);
  return rc;
}

int dc_extent_write_start(dc_extents *x, int64_t extent, const void *data, int64_t bytes, dc_io **out) {
  return extent_start(x, extent, data, bytes, true, out);
}

int dc_extent_read_start(dc_extents *x, int64_t extent, void *data, int64_t bytes, dc_io **out) {
  return extent_start(x, extent, data, bytes, false, out);
}

static int extent_whole(dc_extents *x, int64_t extent, const void *data, int64_t bytes, bool writes) {
  dc_io *io = NULL;
  DC_TRY(extent_start(x, extent, data, bytes, writes, &io));
  const int rc = dc_io_wait(io, 0);
  dc_io_free(io);
  return rc;
}

int dc_extent_write(dc_extents *x, int64_t extent, const void *data, int64_t bytes) {
  return extent_whole(x, extent, data, bytes, true);
}

int dc_extent_read(dc_extents *x, int64_t extent, void *data, int64_t bytes) {
  return extent_whole(x, extent, data, bytes, false);
}

/* ---- all extents ------------------------------------------------------------------------------------------------- */
/* Waits for all requests; then, under the lock, no write may begin until committing is false again. */
static int extent_stand_still(dc_extents *x) {
  if (!x) return DC_FAIL(DC_E_INVALID, "the file of extents is NULL");
  DC_TRY(dc__file_drain(x->file));
  if (!dc__file_writes(x->file))
    return DC_FAIL(DC_E_INVALID, "%s was opened for reading; open it with DC_FILE_WRITE", dc__file_path(x->file));
  const char *what = NULL;
  int64_t which = -1;
  pthread_mutex_lock(&x->lock);
  if (x->committing) what = "is being committed by another thread";
  for (int64_t i = 0; i < x->count && !what; i++)
    if (x->e[i].writing) what = "is being written by another thread", which = i;
  if (!what) x->committing = true;
  pthread_mutex_unlock(&x->lock);
  return what ? DC_FAIL(DC_E_STATE, "%s: extent %lld (-1: all) %s", dc__file_path(x->file), (long long)which, what)
              : DC_OK;
}

int dc_extents_commit(dc_extents *x, int durable) {
  DC_TRY(extent_stand_still(x));
  int rc = DC_OK;
  for (int64_t i = 0; i < x->count && !rc; i++)
    if (x->e[i].failed || x->e[i].dropped)
      rc = DC_FAIL(DC_E_STATE, "%s can't be committed: %s extent %lld failed; write it again, or roll back",
                   dc__file_path(x->file), x->e[i].failed ? "a write of" : "the sync that was to bring to disk",
                   (long long)i);
  struct super written;
  bool begun = false;
  uint32_t crc;
  if (!rc && durable && !x->settled) rc = extent_write_directory(x, &crc);
  if (!rc && durable && !x->named) rc = extent_sync_folder(x);
  if (!rc) rc = extent_write_tables(x, x->super.generation + 1, durable, &written, &begun);
  pthread_mutex_lock(&x->lock);
  if (rc) {
    x->unsure |= begun;
  } else {
    x->unsure = false;
    x->super = written;
    x->settled |= durable;
    for (int64_t i = 0; i < x->count; i++) x->e[i].committed = x->e[i].now, x->e[i].committed_dropped = false;
  }
  x->committing = false;
  pthread_mutex_unlock(&x->lock);
  return rc;
}

int dc_extents_rollback(dc_extents *x) {
  DC_TRY(extent_stand_still(x));
  int rc = DC_OK; /* over the super block that may have arrived */
  if (x->unsure) rc = extent_write_super(x, &x->super, (int64_t)((x->super.generation + 1) % SUPERS), true);
  pthread_mutex_lock(&x->lock);
  for (int64_t i = 0; i < x->count && !rc; i++) {
    x->e[i].now = x->e[i].committed;
    x->e[i].failed = false;
    x->e[i].dropped = x->e[i].committed_dropped;
  }
  x->unsure &= rc != DC_OK;
  if (!rc && x->durable > x->super.generation) x->durable = x->super.generation; /* the number is given again */
  x->committing = false;
  pthread_mutex_unlock(&x->lock);
  return rc;
}

int dc_extents_get_info(dc_extents *x, dc_extents_info *info) {
  dc_extents_info found;
  if (!x) return DC_FAIL(DC_E_INVALID, "the file of extents is NULL");
  DC_TRY(dc__file_mine(x->file));
  DC_TRY(DC__SIZED(dc_extents_info, reserved, info, &found));
  pthread_mutex_lock(&x->lock);
  found.count = x->count;
  found.generation = (int64_t)x->super.generation;
  found.copies = x->copies;
  pthread_mutex_unlock(&x->lock);
  const size_t size = info->struct_size;
  memcpy(info, &found, size < sizeof found ? size : sizeof found);
  return DC_OK;
}

int dc_extent_get_info(dc_extents *x, int64_t extent, dc_extent_info *info) {
  dc_extent_info found;
  DC_TRY(extent_look_at(x, extent, NULL, 0));
  DC_TRY(DC__SIZED(dc_extent_info, generation, info, &found));
  pthread_mutex_lock(&x->lock);
  found.capacity = x->e[extent].capacity;
  found.bytes = x->e[extent].now.bytes;
  found.generation = (int64_t)x->e[extent].now.generation;
  pthread_mutex_unlock(&x->lock);
  const size_t size = info->struct_size;
  memcpy(info, &found, size < sizeof found ? size : sizeof found);
  return DC_OK;
}
