#include "client/ctl/set_progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/ctl/output.h"

namespace optstate::ctl {
namespace {

// Returns " at 1.0 GiB/s, 3 s left", when `part` of the whole, from 0 to 1, and
// so many bytes were done in this time; "" while nothing is.
std::string RateText(double part, uint64_t bytes, absl::Duration elapsed) {
  const double s = absl::ToDoubleSeconds(elapsed);
  if (part <= 0 || s <= 0) return "";
  return absl::StrFormat(
      " at %s/s, %.0f s left",
      HumanBytes(static_cast<uint64_t>(static_cast<double>(bytes) / s)),
      s * (1 - part) / part);
}

}  // namespace

std::string SetProgress::Look(const v1::Job& job, uint64_t memory_bytes,
                              absl::Time now, absl::Duration left) {
  const v1::DiskState& disk = job.disk();
  std::string text = Writes(disk, now);
  if (text.empty()) text = Reserves(disk, memory_bytes, now);
  if (text.empty()) return Waiting(left);
  return absl::StrCat("setting job ", job_, ": ", text);
}

std::string SetProgress::Waiting(absl::Duration left) const {
  return absl::StrFormat(
      "setting job %s: waits for its engine, %.0f s more at the most", job_,
      absl::ToDoubleSeconds(std::max(left, absl::ZeroDuration())));
}

std::string SetProgress::Writes(const v1::DiskState& disk, absl::Time now) {
  const uint64_t left = disk.records_to_write();
  if (left == 0) {
    writing_.reset();
    return "";
  }
  // More than before: it is another commit's.
  if (!writing_.has_value() || left > writing_->records) {
    writing_ = Begin{
        .at = now, .records = left, .bytes_written = disk.bytes_written()};
  }
  const uint64_t all = writing_->records;
  const double part =
      static_cast<double>(all - left) / static_cast<double>(all);
  const uint64_t bytes =
      disk.bytes_written() -
      std::min(writing_->bytes_written, disk.bytes_written());
  return absl::StrFormat("%.0f%%, %d of %d records written%s", part * 100,
                         all - left, all,
                         RateText(part, bytes, now - writing_->at));
}

std::string SetProgress::Reserves(const v1::DiskState& disk,
                                  uint64_t memory_bytes, absl::Time now) {
  if (memory_bytes == 0 || disk.frame_bytes() == 0) return "";
  if (!reserving_.has_value()) {
    reserving_ = Begin{.at = now,
                       .memory_bytes = memory_bytes,
                       .frame_bytes = disk.frames() * disk.frame_bytes()};
  }
  const uint64_t frames =
      std::min(disk.records(), host_budget_ / disk.frame_bytes());
  const uint64_t wanted = frames * disk.frame_bytes();
  if (wanted <= reserving_->frame_bytes) return "";
  const uint64_t all = wanted - reserving_->frame_bytes;
  const uint64_t done = std::min(
      memory_bytes - std::min(reserving_->memory_bytes, memory_bytes), all);
  if (done == 0) return "";
  const double part = static_cast<double>(done) / static_cast<double>(all);
  return absl::StrFormat("%.0f%%, %s of %s of memory reserved%s", part * 100,
                         HumanBytes(done), HumanBytes(all),
                         RateText(part, done, now - reserving_->at));
}

}  // namespace optstate::ctl
