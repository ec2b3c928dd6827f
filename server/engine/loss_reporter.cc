#include "server/engine/loss_reporter.h"

#include <string>

#include "optstate/v1/engine.pb.h"
#include "server/engine/versions.h"

namespace optstate::engine {

void LossReporter::TakeSupervisor(uint32_t control_version) {
  is_known_.store(control_version >= kControlVersionOfRankLost);
}

void LossReporter::Report(uint32_t rank, absl::string_view reason) {
  if (!is_known_.load() || draining_.load()) return;
  if (!budget_.Take().has_value()) return;
  v1::EngineEvent event;
  v1::EngineEvent::RankLost& lost = *event.mutable_rank_lost();
  lost.set_rank(rank);
  lost.set_committed_step(committed_step_());
  lost.set_reason(std::string(reason));
  (void)link_->Send(event);
}

}  // namespace optstate::engine
