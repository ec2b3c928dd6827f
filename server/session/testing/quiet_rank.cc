#include "server/session/testing/quiet_rank.h"

#include "gtest/gtest.h"

namespace optstate::session {

QuietRank::QuietRank(const JobHarness::Setup& setup)
    : harness_(setup),
      parameters_(static_cast<uint32_t>(setup.layout.parameters.size())),
      accumulates_(setup.accumulate),
      calls_per_step_(static_cast<int>(parameters_) + (accumulates_ ? 2 : 1)),
      area_(2 << 20),
      groups_(setup.layout.groups.size(), AdamHyperparams()) {
  harness_.Start(harness_.RandomTensors(1));
  harness_.Detach(0);
  AttachSpec attach;
  attach.layout_hash = harness_.layout().hash();
  attach.gradient_area = area_.data();
  attach.gradient_area_bytes = area_.size();
  attach.listener = this;
  const absl::Status attached = harness_.job().Attach(attach).status();
  EXPECT_TRUE(attached.ok()) << attached;
  commit_.groups = groups_;
  commit_.max_norm = 1;
}

void QuietRank::Step() {
  const uint64_t step = ++commit_.step;
  Job& job = harness_.job();
  for (uint32_t p = 0; p < parameters_; ++p) {
    failed_ |= !job.Push(0, step, 0, p, 1).ok();
  }
  if (accumulates_) failed_ |= !job.Push(0, step, 1, 0, parameters_).ok();
  job.Commit(0, step, commit_);
}

void QuietRank::OnStepDone(uint64_t /*request_id*/, const absl::Status& status,
                           const StepOutcome& outcome) {
  if (status.ok() && outcome.applied) ++applied_;
}

}  // namespace optstate::session
