#ifndef OPTSTATE_SERVER_ENGINE_WORK_REPORTER_H_
#define OPTSTATE_SERVER_ENGINE_WORK_REPORTER_H_

#include <atomic>
#include <cstdint>
#include <thread>

#include "absl/synchronization/notification.h"
#include "server/engine/supervisor_link.h"

namespace optstate::engine {

// While this object lives, the supervisor is told whenever the job's disk I/O
// has gone on, so that it does not kill an engine that opens or ends a large
// job. That holds for a supervisor, too, that has come in the place of another
// meanwhile. A disk that hangs is not reported as work.
//
// Threads: nothing else receives from the link meanwhile.
class WorkReporter {
 public:
  // Both outlive this object.
  WorkReporter(SupervisorLink* link, const std::atomic<uint64_t>* disk_bytes);
  WorkReporter(const WorkReporter&) = delete;
  WorkReporter& operator=(const WorkReporter&) = delete;
  ~WorkReporter();

 private:
  void Run();

  SupervisorLink& link_;
  const std::atomic<uint64_t>& disk_bytes_;
  // disk_bytes_ at the last report. It is first read before the thread starts,
  // so that work done just after the constructor is reported.
  uint64_t reported_bytes_;
  absl::Notification end_;
  std::thread thread_;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_WORK_REPORTER_H_
