#ifndef OPTSTATE_SERVER_SCHEDULER_WORKERS_MEMORY_BANDWIDTH_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKERS_MEMORY_BANDWIDTH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace optstate::scheduler {

// Returns the bytes per second of memory that this many workers read and write,
// in the mix of an update: two arrays rewritten in place, one read. The result
// is the best of some passes over more than the caches hold, in 80 ms.
// Allocating the memory before takes 10 ms as a rule, seconds in a virtual
// machine whose host has to find it first. 0: there is too little memory, or
// `stop` became true meanwhile.
double MeasureMemoryBandwidth(int workers, const std::atomic<bool>& stop);

// Returns the bytes that the measurement takes for a moment, where this many
// are available: a quarter of them at most, or else 0.
size_t MemoryBandwidthBytes(int workers, uint64_t available_bytes);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKERS_MEMORY_BANDWIDTH_H_
