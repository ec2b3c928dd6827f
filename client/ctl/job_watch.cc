#include "client/ctl/job_watch.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/ctl/names.h"

namespace optstate::ctl {
namespace {

std::string PhaseText(const v1::Job& job) {
  return absl::StrCat("phase ", Name(job.phase()),
                      job.reason().empty() ? "" : ": ", job.reason());
}

std::string RanksText(const v1::Job& job) {
  return absl::StrCat(
      job.ranks_unknown() ? kUnknown : absl::StrCat(job.session_count()),
      " of ", job.state_unknown() ? kUnknown : absl::StrCat(job.world_size()),
      " ranks attached");
}

// Takes fields that a look could not tell from the look before, so that they
// do not seem to change.
v1::Job WithKnown(v1::Job job, const v1::Job& before) {
  if (job.ranks_unknown()) job.set_session_count(before.session_count());
  if (job.state_unknown()) {
    job.set_world_size(before.world_size());
    job.set_committed_step(before.committed_step());
  }
  return job;
}

}  // namespace

std::vector<std::string> JobWatch::Look(const JobLook& look, absl::Time now) {
  const bool is_first = !std::exchange(looked_, true);
  if (!look.has_value()) {
    const bool was_there = std::exchange(last_, std::nullopt).has_value();
    if (was_there) return {"deleted"};
    return is_first ? std::vector<std::string>{"there is no such job"}
                    : std::vector<std::string>();
  }
  if (!last_.has_value()) {
    last_ = look;
    return {absl::StrCat(is_first ? "" : "created, ", PhaseText(*look), ", ",
                         RanksText(*look), ", ", StepText(*look, now))};
  }
  const v1::Job job = WithKnown(*look, *last_);
  std::vector<std::string> texts = Compare(job, now);
  last_ = job;
  return texts;
}

std::string JobWatch::StepText(const v1::Job& job, absl::Time now) {
  told_step_ = job.committed_step();
  step_told_at_ = now;
  return absl::StrCat("committed step ", job.committed_step());
}

std::vector<std::string> JobWatch::Compare(const v1::Job& job, absl::Time now) {
  std::vector<std::string> texts;
  if (job.engine_restarts() > last_->engine_restarts()) {
    texts.push_back(absl::StrCat("engine restarted, ", job.engine_restarts(),
                                 " restarts so far"));
  } else if (job.engine_pid() != last_->engine_pid() && job.engine_pid() != 0) {
    texts.push_back(absl::StrCat("engine ", job.engine_pid(),
                                 " in the place of ", last_->engine_pid()));
  }
  if (job.phase() != last_->phase()) texts.push_back(PhaseText(job));
  if (job.session_count() != last_->session_count() ||
      job.world_size() != last_->world_size()) {
    texts.push_back(RanksText(job));
  }
  const uint64_t step = job.committed_step();
  if (step < last_->committed_step()) {
    texts.push_back(absl::StrCat(StepText(job, now), ", rolled back from ",
                                 last_->committed_step()));
  } else if (step != told_step_ && now >= step_told_at_ + step_interval_) {
    texts.push_back(StepText(job, now));
  }
  return texts;
}

absl::StatusOr<WatchGoal> ParseGoal(absl::string_view text) {
  WatchGoal goal;
  absl::string_view step = text;
  absl::string_view phase = text;
  if (text == "deleted") return goal;
  if (absl::ConsumePrefix(&step, "committed_step=") &&
      absl::SimpleAtoi(step, &goal.step)) {
    goal.kind = WatchGoal::Kind::kCommittedStep;
    return goal;
  }
  if (absl::ConsumePrefix(&phase, "phase=") &&
      v1::JobPhase_Parse(
          absl::StrCat("JOB_PHASE_", absl::AsciiStrToUpper(phase)),
          &goal.phase) &&
      goal.phase != v1::JOB_PHASE_UNSPECIFIED) {
    goal.kind = WatchGoal::Kind::kPhase;
    return goal;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", text,
      "\" is nothing to wait for: use committed_step=N, phase=ready|failed|"
      "loading|recovering|empty, or deleted"));
}

absl::StatusOr<bool> IsReached(const WatchGoal& goal, const JobLook& look) {
  if (goal.kind == WatchGoal::Kind::kDeleted) return !look.has_value();
  if (!look.has_value()) {
    return absl::NotFoundError("there is no such job, or no longer");
  }
  const bool is_failed = look->phase() == v1::JOB_PHASE_FAILED;
  if (goal.kind == WatchGoal::Kind::kPhase && look->phase() == goal.phase) {
    return true;
  }
  if (goal.kind == WatchGoal::Kind::kCommittedStep && !look->state_unknown() &&
      look->committed_step() >= goal.step) {
    return true;
  }
  if (!is_failed) return false;
  return absl::FailedPreconditionError(
      absl::StrCat("the job is FAILED: ", look->reason()));
}

}  // namespace optstate::ctl
