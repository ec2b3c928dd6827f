// CRC-32C for release binaries on machines without libisal: same signature and
// convention as isa-l's crc32_iscsi (the caller inverts before and after), eight
// bytes at a time by table, or the CPU's instruction where there is one.
#include <pthread.h>
#include <stdint.h>
#include <string.h>

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void FillTable(void) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0);
    }
    table[0][byte] = crc;
  }
  for (int slice = 1; slice < 8; ++slice) {
    for (int byte = 0; byte < 256; ++byte) {
      const uint32_t crc = table[slice - 1][byte];
      table[slice][byte] = (crc >> 8) ^ table[0][crc & 0xFF];
    }
  }
}

static uint32_t CrcByTable(const unsigned char* data, int size, uint32_t crc) {
  pthread_once(&table_once, FillTable);
  for (; size >= 8; size -= 8, data += 8) {
    crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 |
           (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
    crc = table[7][crc & 0xFF] ^ table[6][(crc >> 8) & 0xFF] ^
          table[5][(crc >> 16) & 0xFF] ^ table[4][crc >> 24] ^
          table[3][data[4]] ^ table[2][data[5]] ^ table[1][data[6]] ^
          table[0][data[7]];
  }
  for (; size > 0; --size, ++data) {
    crc = (crc >> 8) ^ table[0][(crc ^ *data) & 0xFF];
  }
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t CrcByInstruction(
    const unsigned char* data, int size, uint32_t crc) {
  uint64_t wide = crc;
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    memcpy(&word, data, sizeof(word));
    wide = __builtin_ia32_crc32di(wide, word);
  }
  crc = (uint32_t)wide;
  for (; size > 0; --size, ++data) crc = __builtin_ia32_crc32qi(crc, *data);
  return crc;
}
#endif

unsigned int optstate_fallback_crc32_iscsi(unsigned char* data, int size,
                                           unsigned int crc) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) {
    return CrcByInstruction(data, size, crc);
  }
#endif
  return CrcByTable(data, size, crc);
}
