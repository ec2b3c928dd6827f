#ifndef OPTSTATE_SERVER_SCHEDULER_INDEX_RANGE_H_
#define OPTSTATE_SERVER_SCHEDULER_INDEX_RANGE_H_

#include <cstddef>

namespace optstate::scheduler {

// Indices [begin, end) of [0, total).
struct IndexRange {
  size_t begin = 0;
  size_t end = 0;
  size_t total = 0;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_INDEX_RANGE_H_
