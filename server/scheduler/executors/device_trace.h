#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_TRACE_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_TRACE_H_

#include <cstddef>

#include "server/observe/trace_recorder.h"
#include "server/scheduler/executors/update_batch.h"

namespace optstate::scheduler {

// Records what devices do of batches, and when, in three lanes for each device.
//
// Threads: one at a time.
class DeviceTrace {
 public:
  // `recorder` outlives the object.
  explicit DeviceTrace(observe::TraceRecorder* recorder);

  bool on() const { return source_.on(); }
  // Records a batch that the device, an index, has done; one without times, as
  // it was submitted before the trace began, is left out.
  void Record(size_t device, const UpdateBatch& batch);

 private:
  observe::TraceSource source_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_DEVICE_TRACE_H_
