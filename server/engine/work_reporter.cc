#include "server/engine/work_reporter.h"

#include "absl/time/time.h"
#include "optstate/v1/engine.pb.h"

namespace optstate::engine {
namespace {

// Far below the supervisor's patience, which is 20 seconds at an engine's end.
constexpr absl::Duration kInterval = absl::Seconds(1);

}  // namespace

WorkReporter::WorkReporter(SupervisorLink* link,
                           const std::atomic<uint64_t>* disk_bytes)
    : link_(*link),
      disk_bytes_(*disk_bytes),
      reported_bytes_(disk_bytes_.load(std::memory_order_relaxed)),
      thread_([this] { Run(); }) {}

WorkReporter::~WorkReporter() {
  end_.Notify();
  thread_.join();
}

void WorkReporter::Run() {
  while (!end_.WaitForNotificationWithTimeout(kInterval)) {
    link_.Collect();
    const uint64_t now = disk_bytes_.load(std::memory_order_relaxed);
    if (now == reported_bytes_) continue;
    v1::EngineEvent event;
    event.mutable_working()->set_disk_bytes(now);
    // A supervisor that does not read just now is told at the next interval.
    if (link_.Send(event)) reported_bytes_ = now;
  }
}

}  // namespace optstate::engine
