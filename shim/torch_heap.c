/* torch_heap.c: lets torch's CPU tensors of at least 128 KiB live in the core's heap (ops/base/heap.c), where a
 * step finds the memory of the one before.
 *
 * torch has no C interface for a CPU allocator (c10::SetCPUAllocator takes a C++ class whose layout changes), but all
 * of it goes through two functions of the C library that libc10.so imports: posix_memalign and free. Their slots in
 * libc10's table of imported functions (ELF gABI, "Global Offset Table" and DT_JMPREL) are pointed here; nothing else
 * of the process is touched. free() stays here for good, because blocks of the heap may live longer than the wish for
 * it. Where a slot is not found (another build of torch), nothing changes.
 *
 * What is not the heap's goes to the functions that the slots held before: libc10 may have been bound to another
 * allocator than this library, and memory must be freed by the one that gave it.
 *
 * Owns the slots' old values. Assumes that what libc10 got from posix_memalign is freed by libc10 (c10::free_cpu):
 * there is no other way to a tensor's memory. */
#include "base/base.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT };
#endif

enum { SLOTS = 8 };

struct slots {
  void **memalign[SLOTS], **free[SLOTS];
  int memaligns, frees;
  uintptr_t begin, end; /* of libc10.so's own memory */
  uintptr_t relro_begin, relro_end;
};

/* Whether `at` is the executable's entry for the function `name` in its procedure linkage table (PLT). */
struct plt_search {
  const char *name;
  uintptr_t at;
  bool found;
};

static atomic_bool heap_wanted;
static size_t heap_smallest; /* bytes: set before the first slot is written */
static pthread_once_t heap_once = PTHREAD_ONCE_INIT; /* not a mutex: a child of a fork could find that held */
static struct slots heap_found;
static bool heap_patched;
/* What the slots held: set before the first slot is written. */
static int (*heap_old_memalign)(void **, size_t, size_t);
static void (*heap_old_free)(void *);

static int heap_memalign(void **out, size_t alignment, size_t bytes) {
  if (bytes >= heap_smallest && alignment <= 4096 && atomic_load_explicit(&heap_wanted, memory_order_relaxed)) {
    void *at = dc_heap_take(bytes);
    if (at) {
      *out = at;
      return 0;
    }
  }
  return heap_old_memalign(out, alignment, bytes);
}

/* glibc would abort the process: here nothing is freed, and it is counted (heap_foreign_frees). */
static void heap_warn_once(const void *p) {
  static atomic_flag told = ATOMIC_FLAG_INIT;
  if (!atomic_flag_test_and_set(&told))
    fprintf(stderr,
            "deepc: torch freed %p, which is no block of the heap for large tensors, or was freed before; that is an "
            "error in the program (a pointer freed twice, or from inside of a tensor) and is ignored from here on\n",
            p);
}

static void heap_free(void *p) {
  int given = dc_heap_give(p);
  if (!given) heap_old_free(p);
  else if (given < 0) heap_warn_once(p);
}

#if defined(__x86_64__) || defined(__aarch64__)
struct tables {
  const ElfW(Rela) * rela[2];
  size_t count[2];
  const ElfW(Sym) * symbols;
  const char *names;
};

/* glibc writes absolute addresses into a loaded object's dynamic section, other C libraries leave offsets. */
static const void *heap_at(const struct dl_phdr_info *info, ElfW(Addr) value) {
  return (const void *)(value < info->dlpi_addr ? value + info->dlpi_addr : value);
}

static bool heap_read_tables(const struct dl_phdr_info *info, const ElfW(Dyn) * d, struct tables *t) {
  bool is_rela = true;
  for (; d->d_tag != DT_NULL; d++) switch (d->d_tag) {
    case DT_JMPREL: t->rela[0] = heap_at(info, d->d_un.d_ptr); break;
    case DT_PLTRELSZ: t->count[0] = d->d_un.d_val / sizeof(ElfW(Rela)); break;
    case DT_PLTREL: is_rela = d->d_un.d_val == DT_RELA; break;
    case DT_RELA: t->rela[1] = heap_at(info, d->d_un.d_ptr); break;
    case DT_RELASZ: t->count[1] = d->d_un.d_val / sizeof(ElfW(Rela)); break;
    case DT_SYMTAB: t->symbols = heap_at(info, d->d_un.d_ptr); break;
    case DT_STRTAB: t->names = heap_at(info, d->d_un.d_ptr); break;
    default: break;
    }
  return is_rela && t->symbols && t->names;
}

static void heap_note(struct slots *s, const char *name, void **slot) {
  if (!strcmp(name, "posix_memalign") && s->memaligns < SLOTS) s->memalign[s->memaligns++] = slot;
  if (!strcmp(name, "free") && s->frees < SLOTS) s->free[s->frees++] = slot;
}

static int heap_find_slots(struct dl_phdr_info *info, size_t size, void *out) {
  (void)size;
  const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
  if (strcmp(name ? name + 1 : "", "libc10.so")) return 0;
  struct slots *s = out;
  struct tables t = {0};
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *p = &info->dlpi_phdr[i];
    if (p->p_type == PT_LOAD) {
      uintptr_t begin = info->dlpi_addr + p->p_vaddr, end = begin + p->p_memsz;
      if (!s->begin || begin < s->begin) s->begin = begin;
      if (end > s->end) s->end = end;
    }
    if (p->p_type == PT_GNU_RELRO)
      s->relro_begin = info->dlpi_addr + p->p_vaddr, s->relro_end = s->relro_begin + p->p_memsz;
    if (p->p_type == PT_DYNAMIC && !heap_read_tables(info, (const ElfW(Dyn) *)(info->dlpi_addr + p->p_vaddr), &t))
      return 1;
  }
  for (int k = 0; k < 2; k++)
    for (size_t i = 0; t.rela[k] && i < t.count[k]; i++) {
      unsigned type = (unsigned)ELF64_R_TYPE(t.rela[k][i].r_info);
      if (type != JUMP_SLOT && type != GLOB_DAT) continue;
      heap_note(s, t.names + t.symbols[ELF64_R_SYM(t.rela[k][i].r_info)].st_name,
                (void **)(info->dlpi_addr + t.rela[k][i].r_offset));
    }
  return 1;
}

/* The executable is the first object. Its symbol of a function that others define has a value only where that is the
 * address of its PLT entry (System V ABI, AMD64, "Function Addresses"). */
static int heap_find_plt_entry(struct dl_phdr_info *info, size_t size, void *search) {
  (void)size;
  struct plt_search *of = search;
  struct tables t = {0};
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC &&
        !heap_read_tables(info, (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr), &t))
      return 1;
  for (size_t i = 0; t.rela[0] && i < t.count[0]; i++) {
    const ElfW(Sym) *symbol = &t.symbols[ELF64_R_SYM(t.rela[0][i].r_info)];
    if (symbol->st_shndx == SHN_UNDEF && symbol->st_value && info->dlpi_addr + symbol->st_value == of->at &&
        !strcmp(t.names + symbol->st_name, of->name))
      of->found = true;
  }
  return 1;
}
#else
static int heap_find_slots(struct dl_phdr_info *info, size_t size, void *out) {
  (void)info, (void)size, (void)out;
  return 1;
}
static int heap_find_plt_entry(struct dl_phdr_info *info, size_t size, void *search) {
  (void)info, (void)size, (void)search;
  return 1;
}
#endif

/* A slot may lie in a page that the loader made read-only (RELRO). */
static bool heap_write_slot(const struct slots *s, void **slot, void *value) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)slot & ~(page - 1);
  bool sealed = (uintptr_t)slot >= s->relro_begin && (uintptr_t)slot < s->relro_end;
  if (sealed && mprotect((void *)begin, page, PROT_READ | PROT_WRITE)) return false;
  __atomic_store_n(slot, value, __ATOMIC_RELEASE);
  if (sealed) mprotect((void *)begin, page, PROT_READ);
  return true;
}

/* What all of these slots hold; NULL if they differ. A slot that the loader has not bound yet (lazy binding) points
 * into libc10's own code, and would be bound, over what is written here, when that is called: then what it would find.
 * An executable with fixed addresses that takes a function's address (Debian's python3 of free) makes its PLT entry,
 * which jumps to the function, that address for everyone: a slot for libc10's calls holds the function, one for where
 * it takes the address the entry. */
static void *heap_old_value(const struct slots *s, void **const slot[], int n, const char *name) {
  void *value = NULL, *entry = NULL;
  for (int i = 0; i < n; i++) {
    void *v = __atomic_load_n(slot[i], __ATOMIC_ACQUIRE);
    if (!v || ((uintptr_t)v >= s->begin && (uintptr_t)v < s->end)) v = dlsym(RTLD_DEFAULT, name);
    struct plt_search of = {.name = name, .at = (uintptr_t)v};
    dl_iterate_phdr(heap_find_plt_entry, &of);
    if (of.found) entry = v;
    else if (!v || (value && v != value)) return NULL;
    else value = v;
  }
  return value ? value : entry;
}

static bool heap_patch(void) {
  dl_iterate_phdr(heap_find_slots, &heap_found);
  if (!heap_found.memaligns || !heap_found.frees || !dc_heap_usable()) return false;
  void *memalign = heap_old_value(&heap_found, heap_found.memalign, heap_found.memaligns, "posix_memalign");
  void *release = heap_old_value(&heap_found, heap_found.free, heap_found.frees, "free");
  if (!memalign || !release) return false;
  memcpy(&heap_old_memalign, &memalign, sizeof memalign); /* C has no cast from an object's pointer to a function's */
  memcpy(&heap_old_free, &release, sizeof release);
  heap_smallest = dc_heap_smallest();
  for (int i = 0; i < heap_found.frees; i++) /* first: no block may come that is not freed here */
    if (!heap_write_slot(&heap_found, heap_found.free[i], (void *)heap_free)) return false;
  for (int i = 0; i < heap_found.memaligns; i++)
    if (!heap_write_slot(&heap_found, heap_found.memalign[i], (void *)heap_memalign)) return false;
  return true;
}

static void heap_patch_once(void) { heap_patched = heap_patch(); }

/* on: torch's large CPU tensors are taken from the core's heap from now on; otherwise from the C library again (those
 * that live stay where they are). Returns 1 if they are now taken from the heap. Any thread. */
DC_API int dct_heap_use(int on) {
  if (on) pthread_once(&heap_once, heap_patch_once);
  atomic_store(&heap_wanted, on && heap_patched);
  return on && heap_patched;
}
