/* crc32c.c: CRC-32C (Castagnoli polynomial 0x1EDC6F41, reflected; RFC 3720 appendix B.4), over the processor's crc32
 * instruction where there is one, else eight tables (Kounavis & Berry, "A systematic approach to building high
 * performance software-based CRC generators", 2005). Both give equal values; DEEPC_ISA=scalar chooses the tables.
 *
 * One chain of crc32 instructions retires 8 bytes every 3 cycles, about a third of what the units can do, but already
 * above what a disk takes; the interleaved form needs shift tables and is not worth its code yet. */
#include "base/base.h"

#include <pthread.h>
#include <string.h>

enum { SLICES = 8 };
static uint32_t crc_slices[SLICES][256];
static pthread_once_t crc_table_once = PTHREAD_ONCE_INIT;

static void crc_make_table(void) {
  const uint32_t reflected_polynomial = 0x82F63B78u;
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? reflected_polynomial : 0);
    crc_slices[0][byte] = crc;
  }
  for (int slice = 1; slice < SLICES; slice++)
    for (int byte = 0; byte < 256; byte++)
      crc_slices[slice][byte] = (crc_slices[slice - 1][byte] >> 8) ^ crc_slices[0][crc_slices[slice - 1][byte] & 0xff];
}

static uint32_t crc_tables(uint32_t crc, const unsigned char *p, size_t bytes) {
  pthread_once(&crc_table_once, crc_make_table);
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

__attribute__((target("sse4.2"))) static uint32_t crc_hardware(uint32_t crc, const unsigned char *p, size_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= 8; p += 8, bytes -= 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    wide = _mm_crc32_u64(wide, word);
  }
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
  return ~(crc_use_hardware() ? crc_hardware : crc_tables)(~crc, data, bytes);
}
