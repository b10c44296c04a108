/* crc32c.c: CRC-32C (Castagnoli polynomial 0x1EDC6F41, reflected; RFC 3720 appendix B.4), over the processor's crc32
 * instruction where there is one, else eight tables (Kounavis & Berry, "A systematic approach to building high
 * performance software-based CRC generators", 2005). Both give equal values; DEEPC_ISA=scalar chooses the tables.
 *
 * The instruction takes a word a cycle but gives its result three cycles later, so three stretches of a block are
 * walked at a time and joined: the register of the first is moved over the length of the next by tables, as many zero
 * bytes would move it (Gopal et al., "Fast CRC computation for iSCSI polynomial using CRC32 instruction", 2011). */
#include "base/base.h"

#include <pthread.h>
#include <string.h>

enum { SLICES = 8, LONG = 8192, SHORT = 256 }; /* bytes of a stretch: of large blocks, of what they leave */
typedef uint32_t shift_table[4][256]; /* for each byte of the register */
static uint32_t crc_slices[SLICES][256];
static shift_table crc_shift_long, crc_shift_short;
static pthread_once_t crc_table_once = PTHREAD_ONCE_INIT;

/* What `bytes` zero bytes make of every value of each byte of the register. The map is linear: 32 images say it. */
static void crc_make_shift(shift_table table, int bytes) {
  uint32_t image[32];
  for (int bit = 0; bit < 32; bit++) {
    uint32_t crc = (uint32_t)1 << bit;
    for (int i = 0; i < bytes; i++) crc = (crc >> 8) ^ crc_slices[0][crc & 0xff];
    image[bit] = crc;
  }
  for (int place = 0; place < 4; place++)
    for (int value = 0; value < 256; value++) {
      table[place][value] = 0;
      for (int bit = 0; bit < 8; bit++)
        if (value >> bit & 1) table[place][value] ^= image[8 * place + bit];
    }
}

static void crc_make_tables(void) {
  const uint32_t reflected_polynomial = 0x82F63B78u;
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? reflected_polynomial : 0);
    crc_slices[0][byte] = crc;
  }
  for (int slice = 1; slice < SLICES; slice++)
    for (int byte = 0; byte < 256; byte++)
      crc_slices[slice][byte] = (crc_slices[slice - 1][byte] >> 8) ^ crc_slices[0][crc_slices[slice - 1][byte] & 0xff];
  crc_make_shift(crc_shift_long, LONG);
  crc_make_shift(crc_shift_short, SHORT);
}

static uint32_t crc_tables(uint32_t crc, const unsigned char *p, size_t bytes) {
  for (; bytes >= SLICES; p += SLICES, bytes -= SLICES) {
    crc ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    crc = crc_slices[7][crc & 0xff] ^ crc_slices[6][crc >> 8 & 0xff] ^ crc_slices[5][crc >> 16 & 0xff] ^
          crc_slices[4][crc >> 24] ^ crc_slices[3][p[4]] ^ crc_slices[2][p[5]] ^ crc_slices[1][p[6]] ^
          crc_slices[0][p[7]];
  }
  for (; bytes; p++, bytes--) crc = (crc >> 8) ^ crc_slices[0][(crc ^ *p) & 0xff];
  return crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>

static inline uint32_t crc_shift(const shift_table table, uint32_t crc) {
  return table[0][crc & 0xff] ^ table[1][crc >> 8 & 0xff] ^ table[2][crc >> 16 & 0xff] ^ table[3][crc >> 24];
}

static inline uint64_t crc_word(const unsigned char *p) {
  uint64_t word;
  memcpy(&word, p, 8);
  return word;
}

/* 3 * stretch bytes; `stretch`, a multiple of 8, is a constant where this is called, and `table` is its. */
__attribute__((target("sse4.2"), always_inline)) static inline uint32_t crc_three(uint32_t crc, const unsigned char *p,
                                                                                  int stretch,
                                                                                  const shift_table table) {
  uint64_t a = crc, b = 0, c = 0;
  for (int i = 0; i < stretch; i += 8) {
    a = _mm_crc32_u64(a, crc_word(p + i));
    b = _mm_crc32_u64(b, crc_word(p + stretch + i));
    c = _mm_crc32_u64(c, crc_word(p + 2 * stretch + i));
  }
  return crc_shift(table, crc_shift(table, (uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
}

__attribute__((target("sse4.2"))) static uint32_t crc_hardware(uint32_t crc, const unsigned char *p, size_t bytes) {
  for (; bytes >= 3 * LONG; p += 3 * LONG, bytes -= 3 * LONG) crc = crc_three(crc, p, LONG, crc_shift_long);
  for (; bytes >= 3 * SHORT; p += 3 * SHORT, bytes -= 3 * SHORT) crc = crc_three(crc, p, SHORT, crc_shift_short);
  uint64_t wide = crc;
  for (; bytes >= 8; p += 8, bytes -= 8) wide = _mm_crc32_u64(wide, crc_word(p));
  crc = (uint32_t)wide;
  for (; bytes; p++, bytes--) crc = _mm_crc32_u8(crc, *p);
  return crc;
}

static int crc_use_hardware(void) {
  int isa;
  return __builtin_cpu_supports("sse4.2") && dc_isa_current(&isa) == DC_OK && isa != DC_ISA_SCALAR;
}
#else
static uint32_t crc_hardware(uint32_t crc, const unsigned char *p, size_t bytes) { return crc_tables(crc, p, bytes); }
static int crc_use_hardware(void) { return 0; }
#endif

uint32_t dc_crc32c(uint32_t crc, const void *data, size_t bytes) {
  if (!data || !bytes) return crc;
  pthread_once(&crc_table_once, crc_make_tables);
  return ~(crc_use_hardware() ? crc_hardware : crc_tables)(~crc, data, bytes);
}
