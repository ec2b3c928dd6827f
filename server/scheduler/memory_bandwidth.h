#ifndef OPTSTATE_SERVER_SCHEDULER_MEMORY_BANDWIDTH_H_
#define OPTSTATE_SERVER_SCHEDULER_MEMORY_BANDWIDTH_H_

#include <atomic>

namespace optstate {

// Bytes per second that this many workers read and write of memory, in the mix
// of an update: two arrays rewritten in place, one read. The best of some
// passes over more than the caches hold, in 80 ms. Before, it takes the memory:
// 10 ms as a rule, seconds in a virtual machine whose host has to find it
// first. 0: there is none, or `stop` became true meanwhile.
double MeasureMemoryBandwidth(int workers, const std::atomic<bool>& stop);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_MEMORY_BANDWIDTH_H_
