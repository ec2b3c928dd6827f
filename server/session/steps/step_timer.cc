#include "server/session/steps/step_timer.h"

#include <algorithm>

namespace optstate::session {
namespace {

// In the order of StepTimer::Phase.
constexpr const char* kPhaseNames[] = {"staging", "waiting", "decide", "update",
                                       "publish"};
constexpr char kDiskWait[] = "disk wait";

int64_t NanosOf(std::chrono::steady_clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

}  // namespace

StepTimer::Phase StepTimer::Enter(Phase phase) {
  const auto now = clock_();
  if (phase_ != Phase::kNone) {
    current_.ns[static_cast<size_t>(phase_)] +=
        static_cast<uint64_t>(std::chrono::nanoseconds(now - since_).count());
    RecordPhase(now);
  }
  since_ = now;
  const Phase before = phase_;
  phase_ = phase;
  return before;
}

void StepTimer::RecordPhase(std::chrono::steady_clock::time_point end) {
  if (spans_ == nullptr || !spans_->on()) return;
  spans_->Record({.name = kPhaseNames[static_cast<size_t>(phase_)],
                  .lane = 0,
                  .begin_ns = NanosOf(since_),
                  .end_ns = NanosOf(end),
                  .step = spans_->step()});
}

void StepTimer::NoteDiskWait(uint64_t ns) {
  current_.disk_wait_ns = current_.disk_wait_ns.value_or(0) + ns;
}

void StepTimer::Histogram::Count(uint64_t ns) {
  const double s = static_cast<double>(ns) / 1e9;
  const auto* bound = std::lower_bound(kBoundsS.begin(), kBoundsS.end(), s);
  ++steps[static_cast<size_t>(bound - kBoundsS.begin())];
  sum_s += s;
}

void StepTimer::Finish(uint64_t update_bytes) {
  Enter(Phase::kNone);
  current_.update_bytes = update_bytes;
  kept_[finished_++ % kKept] = current_;
  for (size_t phase = 0; phase < kPhases; ++phase) {
    histograms_[phase].Count(current_.ns[phase]);
  }
  if (current_.disk_wait_ns.has_value()) {
    if (!disk_waits_.has_value()) disk_waits_.emplace();
    disk_waits_->Count(*current_.disk_wait_ns);
  }
  current_ = Times{};
  if (trace_ != nullptr) trace_->EndStep();
}

void StepTimer::Drop() {
  if (trace_ != nullptr) trace_->DropStep();
  phase_ = Phase::kNone;
  current_ = Times{};
}

void StepTimer::Describe(v1::Job* job) const {
  if (finished_ == 0) return;
  const uint64_t count = std::min<uint64_t>(finished_, kKept);
  Times sum;
  for (size_t i = 0; i < count; ++i) {
    for (size_t phase = 0; phase < kPhases; ++phase) {
      sum.ns[phase] += kept_[i].ns[phase];
    }
    sum.update_bytes += kept_[i].update_bytes;
    if (kept_[i].disk_wait_ns.has_value()) {
      sum.disk_wait_ns = sum.disk_wait_ns.value_or(0) + *kept_[i].disk_wait_ns;
    }
  }
  Fill(kept_[(finished_ - 1) % kKept], 1, job->mutable_last_step_times());
  Fill(sum, count, job->mutable_mean_step_times());
  for (size_t phase = 0; phase < kPhases; ++phase) {
    histograms_[phase].Describe(kPhaseNames[phase], job);
  }
  if (disk_waits_.has_value()) disk_waits_->Describe(kDiskWait, job);
}

void StepTimer::Histogram::Describe(const char* phase, v1::Job* job) const {
  v1::PhaseHistogram* histogram = job->add_step_phases();
  histogram->set_phase(phase);
  histogram->mutable_bounds_s()->Assign(kBoundsS.begin(), kBoundsS.end());
  histogram->mutable_steps()->Assign(steps.begin(), steps.end());
  histogram->set_sum_s(sum_s);
}

void StepTimer::Fill(const Times& sum, uint64_t steps, v1::StepTimes* times) {
  const auto mean_of = [&](Phase phase) {
    return sum.ns[static_cast<size_t>(phase)] / steps;
  };
  times->set_steps(static_cast<uint32_t>(steps));
  times->set_staging_ns(mean_of(Phase::kStaging));
  times->set_waiting_ns(mean_of(Phase::kWaiting));
  times->set_decide_ns(mean_of(Phase::kDecide));
  times->set_update_ns(mean_of(Phase::kUpdate));
  times->set_publish_ns(mean_of(Phase::kPublish));
  times->set_update_bytes(sum.update_bytes / steps);
  if (sum.disk_wait_ns.has_value()) {
    times->set_disk_wait_ns(*sum.disk_wait_ns / steps);
  }
}

}  // namespace optstate::session
