#include "server/engine/loss_reporter.h"

#include <optional>
#include <string>

#include "optstate/v1/engine.pb.h"
#include "server/engine/versions.h"

namespace optstate::engine {

void LossReporter::TakeSupervisor(uint32_t control_version) {
  is_known_.store(control_version >= kControlVersionOfRankLost);
}

void LossReporter::Report(uint32_t rank, absl::string_view reason) {
  if (!is_known_.load() || draining_.load()) return;
  const std::optional<uint64_t> left_out = budget_.Take();
  if (!left_out.has_value()) return;
  v1::EngineEvent event;
  v1::EngineEvent::RankLost& lost = *event.mutable_rank_lost();
  lost.set_rank(rank);
  lost.set_committed_step(committed_step_());
  lost.set_reason(std::string(reason));
  lost.set_left_out(*left_out);
  (void)link_->Send(event);
}

}  // namespace optstate::engine
