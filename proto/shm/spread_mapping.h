#ifndef OPTSTATE_PROTO_SHM_SPREAD_MAPPING_H_
#define OPTSTATE_PROTO_SHM_SPREAD_MAPPING_H_

#include <cstdint>

namespace optstate::shm {

// Mappings of files for arrays that are walked side by side, element by
// element.
//
// AMD's first cache looks a line up by a hash of bits 12 to 27 of its virtual
// address and holds, of each set, but one line a hash (Lipp et al., "Take A
// Way", ASIA CCS 2020). Arrays that lie a multiple of 256 MiB apart throw each
// other out with every element, and Linux puts mappings side by side: arrays
// of 64 Mi floats lie just so. An update then takes twice as long from memory,
// three times in the caches (kernels:spread_benchmark). So the begins of large
// mappings differ in bits 21 to 27, as long as there are fewer than 128 of
// them; then as few as can be share theirs. Bits below would do as well, but
// huge pages want these.
//
// Thread-safe, also in a child that a threaded process forked.

// Mappings smaller than this are put wherever the system likes.
inline constexpr uint64_t kSpreadBytesMin = uint64_t{2} << 20;

// As mmap(nullptr, bytes, prot, MAP_SHARED, fd, 0): MAP_FAILED, and errno.
void* MapSpread(int fd, uint64_t bytes, int prot);

// Of what MapSpread gave, whole.
void UnmapSpread(void* data, uint64_t bytes);

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_SPREAD_MAPPING_H_
