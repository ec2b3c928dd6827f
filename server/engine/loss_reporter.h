#ifndef OPTSTATE_SERVER_ENGINE_LOSS_REPORTER_H_
#define OPTSTATE_SERVER_ENGINE_LOSS_REPORTER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/engine/supervisor_link.h"
#include "server/observe/event_budget.h"

namespace optstate::engine {

// Tells the supervisor of ranks whose connection ended without a detach, for an
// event.
//
// It says nothing while the job drains, and to a supervisor that does not know
// this message. A loss that no supervisor takes just now is not told later:
// connections over TLS end with their supervisor, as at an upgrade, and are no
// losses. A flood of them does not hold up other reports: what is left out of
// it is counted, and told with the next one.
//
// Threads: thread-safe.
class LossReporter {
 public:
  // `link` outlives the object. `committed_step` tells the job's.
  LossReporter(SupervisorLink* link, std::function<uint64_t()> committed_step)
      : link_(link), committed_step_(std::move(committed_step)) {}

  // A supervisor has introduced itself, which speaks `control_version`.
  void TakeSupervisor(uint32_t control_version);
  void SetDraining(bool draining) { draining_.store(draining); }
  void Report(uint32_t rank, absl::string_view reason);

 private:
  // As many as a large job has ranks, and some more.
  static constexpr double kBurst = 256;
  static constexpr absl::Duration kInterval = absl::Milliseconds(100);

  SupervisorLink* const link_;
  const std::function<uint64_t()> committed_step_;
  observe::EventBudget budget_{kBurst, kInterval};
  std::atomic<bool> is_known_{false};
  std::atomic<bool> draining_{false};
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_LOSS_REPORTER_H_
