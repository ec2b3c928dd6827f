#include "server/session/durability/record_scrubber.h"

#include <algorithm>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "spdlog/spdlog.h"

namespace optstate::session {

absl::Status RecordScrubber::Start() {
  started_at_ = options_.clock();
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no thread to scrub records: ", error.what()));
  }
  return absl::OkStatus();
}

void RecordScrubber::Wake() {
  const absl::MutexLock lock(&mu_);
  woken_ = true;
}

// A scrub that begins after it was cancelled here sees in its progress that it
// is to end.
void RecordScrubber::Stop() {
  if (!thread_.joinable()) return;
  {
    const absl::MutexLock lock(&mu_);
    stopped_ = true;
  }
  verifier_.CancelScrub("the engine ends");
  thread_.join();
}

bool RecordScrubber::is_stopped() const {
  const absl::MutexLock lock(&mu_);
  return stopped_;
}

void RecordScrubber::Run() {
  absl::Time earliest = absl::InfinitePast();
  while (AwaitDue(earliest)) {
    const absl::Status scrubbed = Scrub();
    earliest = scrubbed.ok() ? absl::InfinitePast() : options_.clock() + kRetry;
  }
}

bool RecordScrubber::AwaitDue(absl::Time earliest) {
  const absl::MutexLock lock(&mu_);
  const auto is_called = [this] { return woken_ || stopped_; };
  while (!stopped_) {
    woken_ = false;
    const absl::Time since = verifier_.counted_from().value_or(started_at_);
    const absl::Duration left =
        std::max(earliest, since + options_.interval) - options_.clock();
    if (left <= absl::ZeroDuration()) return true;
    mu_.AwaitWithTimeout(absl::Condition(&is_called), left);
  }
  return false;
}

// A scrub that the job or an operator ends is usual: operators need not see it.
absl::Status RecordScrubber::Scrub() {
  absl::Status status = [this] {
    OPTSTATE_ASSIGN_OR_RETURN(const std::shared_ptr<Verification> scrub,
                              options_.begin());
    return scrub->Await(
        [this](const v1::VerifyJobProgress&) { return !is_stopped(); });
  }();
  if (status.ok()) return status;
  const bool is_usual = absl::IsFailedPrecondition(status) ||
                        absl::IsAborted(status) || absl::IsCancelled(status);
  spdlog::log(is_usual ? spdlog::level::debug : spdlog::level::warn,
              "scrub: tried again in {}: {}", absl::FormatDuration(kRetry),
              status.ToString());
  return status;
}

}  // namespace optstate::session
