#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_TIMES_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_TIMES_H_

#include <cstdint>

namespace optstate::scheduler {

// When the parts of a batch were over, as its device has measured it, on the
// host's steady clock: the stream begins with the batch when the host submits
// it, for it has nothing else to do.
struct BatchTimes {
  int64_t begin_ns = 0;
  int64_t copied_ns = 0;    // all is on the device
  int64_t computed_ns = 0;  // the kernel is over
  int64_t end_ns = 0;       // the results are on the host
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_BATCH_TIMES_H_
