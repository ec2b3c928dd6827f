#include "client/ctl/offload_search.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {
namespace {

std::string Milliseconds(std::optional<double> seconds) {
  return absl::StrFormat("%.4g ms", 1e3 * seconds.value_or(0));
}

double FractionOf(const v1::Job& job) {
  return job.storage().has_offload_fraction() ? job.storage().offload_fraction()
                                              : 1;
}

// Looks at a job's steps, and changes its fraction between them.
class Searching {
 public:
  Searching(std::string job, const OffloadControls& controls)
      : job_(std::move(job)), controls_(controls) {}

  absl::Status Run() {
    OPTSTATE_ASSIGN_OR_RETURN(const v1::Job before, controls_.look());
    if (before.has_speculation()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", job_,
          " speculates: parts of its updates are taken during backward(), so "
          "that their times cannot be compared. Set a number"));
    }
    in_force_ = FractionOf(before);
    seen_step_ = before.committed_step();
    OPTSTATE_RETURN_IF_ERROR(Set());
    while (!search_.is_over()) {
      if (controls_.await()) return GiveUp();
      OPTSTATE_RETURN_IF_ERROR(Look());
    }
    return absl::OkStatus();
  }

  const FractionSearch& search() const { return search_; }
  // Nothing: the job was not found.
  std::optional<double> in_force() const { return in_force_; }

 private:
  absl::Status Set() {
    OPTSTATE_RETURN_IF_ERROR(controls_.set(search_.fraction()));
    in_force_ = search_.fraction();
    return absl::OkStatus();
  }

  absl::Status Look() {
    OPTSTATE_ASSIGN_OR_RETURN(const v1::Job job, controls_.look());
    // An engine that is being started again does not say where its job is.
    if (job.ranks_unknown() || job.state_unknown()) return absl::OkStatus();
    if (job.committed_step() < seen_step_) {
      return absl::FailedPreconditionError(
          absl::StrCat("job ", job_, " has gone back from step ", seen_step_,
                       " to ", job.committed_step()));
    }
    if (job.committed_step() == seen_step_) return absl::OkStatus();
    seen_step_ = job.committed_step();
    const uint64_t update_ns = job.last_step_times().update_ns();
    if (!job.last_outcome().applied() || update_ns == 0) {
      return absl::OkStatus();
    }
    search_.Note(static_cast<double>(update_ns) / 1e9);
    controls_.show(
        absl::StrFormat("job %s: step %d, offload_fraction %.4g, %d tried",
                        job_, seen_step_, *in_force_, search_.tried()));
    return search_.fraction() == in_force_ ? absl::OkStatus() : Set();
  }

  absl::Status GiveUp() {
    const std::optional<double> best = search_.best();
    if (best.has_value() && best != in_force_) {
      OPTSTATE_RETURN_IF_ERROR(controls_.set(*best));
      in_force_ = *best;
    }
    return absl::CancelledError("the search was interrupted");
  }

  const std::string job_;
  const OffloadControls& controls_;
  FractionSearch search_;
  std::optional<double> in_force_;
  uint64_t seen_step_ = 0;
};

}  // namespace

absl::StatusOr<FractionSearch> SearchOffload(const std::string& job,
                                             const OffloadControls& controls) {
  Searching searching(job, controls);
  const absl::Status status = searching.Run();
  if (status.ok()) return searching.search();
  const std::optional<double> in_force = searching.in_force();
  if (!in_force.has_value()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), " (offload_fraction is ",
                                   absl::StrFormat("%.4g", *in_force), ")"));
}

std::string OffloadSearchText(const FractionSearch& search) {
  const double best = search.best().value_or(search.fraction());
  return absl::StrCat(
      absl::StrFormat("%.4g", best), " is the fastest of ", search.tried(),
      " that were tried, with ", Milliseconds(search.SecondsOf(best)),
      " an update; the CPU alone takes ", Milliseconds(search.SecondsOf(1)),
      ", devices alone ", Milliseconds(search.SecondsOf(0)));
}

}  // namespace optstate::ctl
