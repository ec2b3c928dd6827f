#ifndef OPTSTATE_PROTO_SHM_SPREAD_MAPPING_H_
#define OPTSTATE_PROTO_SHM_SPREAD_MAPPING_H_

#include <cstdint>

namespace optstate::shm {

// Mappings of files for arrays that are walked side by side, element by
// element.
//
// The first-level cache of AMD processors finds a line by a hash of bits 12 to
// 27 of its virtual address and holds, of each set, only one line per hash
// (Lipp et al., "Take A Way", ASIA CCS 2020). Arrays that lie a multiple of 256
// MiB apart evict each other with every element, and Linux places mappings side
// by side: arrays of 64 Mi floats lie exactly so. An update then takes twice as
// long from memory, three times in the caches (kernels:spread_benchmark).
// Therefore the begins of large mappings differ in bits 21 to 27, as long as
// there are fewer than 128 mappings; beyond that as few as possible share a
// begin. Lower bits would also do, but huge pages need these.
//
// Thread-safe, also in a child that a threaded process forked.

// The size below which a mapping is placed by the system.
inline constexpr uint64_t kSpreadBytesMin = uint64_t{2} << 20;

// Behaves as mmap(nullptr, bytes, prot, MAP_SHARED, fd, 0), with MAP_FAILED and
// errno.
void* MapSpread(int fd, uint64_t bytes, int prot);

// Unmaps a whole mapping of MapSpread.
void UnmapSpread(void* data, uint64_t bytes);

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_SPREAD_MAPPING_H_
