#include "server/admin/shared_listing.h"

#include <utility>

namespace optstate::admin {

std::shared_ptr<const SharedListing::Jobs> SharedListing::Get(
    absl::FunctionRef<Jobs()> ask) {
  {
    absl::MutexLock lock(&mutex_);
    // The first question that begins after this call.
    const uint64_t wanted = begun_ + 1;
    const auto is_ready = [this, wanted]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return ended_ >= wanted || begun_ == ended_;
    };
    ++waiting_;
    mutex_.Await(absl::Condition(&is_ready));
    --waiting_;
    if (ended_ >= wanted) {
      return waiting_ == 0 ? std::exchange(last_, nullptr) : last_;
    }
    ++begun_;
  }
  auto jobs = std::make_shared<const Jobs>(ask());
  absl::MutexLock lock(&mutex_);
  ended_ = begun_;
  if (waiting_ != 0) last_ = jobs;
  return jobs;
}

size_t SharedListing::waiting() const {
  absl::MutexLock lock(&mutex_);
  return waiting_;
}

}  // namespace optstate::admin
