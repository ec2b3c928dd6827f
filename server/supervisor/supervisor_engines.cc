// The part of the supervisor that waits for engines.

#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/supervisor/supervisor.h"

namespace optstate::supervisor {

void Supervisor::WakeEngineWaiters(
    const std::string& name, const absl::StatusOr<std::string>& executable) {
  while (true) {
    auto node = engine_waiters_.extract(name);
    if (node.empty()) return;
    node.mapped()(executable);
  }
}

absl::StatusOr<std::string> Supervisor::AwaitEngineAfter(
    const std::string& name, absl::Time deadline,
    const std::function<absl::Status(JobHost*)>& begin) {
  struct Outcome {
    absl::Notification done;
    absl::StatusOr<std::string> executable;
  };
  const auto outcome = std::make_shared<Outcome>();
  RunInLoop([&] {
    const auto found = hosts_.find(name);
    const absl::Status begun =
        found == hosts_.end() ? WhyNoHost(name) : begin(found->second.get());
    const auto finish =
        [outcome](const absl::StatusOr<std::string>& executable) {
          outcome->executable = executable;
          outcome->done.Notify();
        };
    if (!begun.ok()) return finish(begun);
    AddEngineWaiter(name, finish);
  });
  if (outcome->done.WaitForNotificationWithDeadline(deadline)) {
    return outcome->executable;
  }
  return absl::DeadlineExceededError(
      absl::StrCat("the engine of job \"", name, "\" is not ready yet"));
}

absl::StatusOr<std::string> Supervisor::AwaitEngine(const std::string& name,
                                                    absl::Time deadline) {
  return AwaitEngineAfter(name, deadline,
                          [](JobHost*) { return absl::OkStatus(); });
}

absl::Status Supervisor::ReplaceEngine(const std::string& name,
                                       absl::Time deadline) {
  return AwaitEngineAfter(name, deadline,
                          [](JobHost* host) { return host->ReplaceEngine(); })
      .status();
}

}  // namespace optstate::supervisor
