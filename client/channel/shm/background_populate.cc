#include "client/channel/shm/background_populate.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/endpoint/interrupt.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The work between two checks whether to stop: some milliseconds.
constexpr uint64_t kSliceBytes = 4 << 20;

absl::Status NoMemory(uint64_t populated, uint64_t bytes,
                      const absl::Status& cause) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "memory for the gradients ran out after the session was opened: ",
      populated, " of ", bytes, " bytes were to be had (", cause.message(),
      "); close the session, free memory on this node or raise the limit of "
      "the process's cgroup, and open it again"));
}

}  // namespace

BackgroundPopulate::BackgroundPopulate(PopulateFunction populate)
    : populate_(std::move(populate)) {}

BackgroundPopulate::~BackgroundPopulate() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
}

void BackgroundPopulate::Start(absl::Span<std::byte> memory) {
  memory_ = memory;
  {
    absl::MutexLock lock(&mutex_);
    is_done_.resize((memory.size() + kSliceBytes - 1) / kSliceBytes);
  }
  // All signals are blocked in the new thread from its first instruction: the
  // trainer's own threads handle the trainer's signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] {
      while (!stop_ && PopulateNext(memory_.size())) {
      }
    });
  } catch (const std::system_error&) {
    // The waiting threads populate too.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool BackgroundPopulate::PopulateNext(uint64_t bytes) {
  uint64_t begin;
  uint64_t end;
  {
    absl::MutexLock lock(&mutex_);
    if (begun_ >= bytes || !failure_.ok()) return false;
    begin = begun_;
    end = begun_ = std::min<uint64_t>(begin + kSliceBytes, memory_.size());
  }
  const absl::Status populated = populate_(memory_.data() + begin, end - begin);
  absl::MutexLock lock(&mutex_);
  if (!populated.ok()) {
    if (failure_.ok()) {
      failure_ = NoMemory(populated_.load(), memory_.size(), populated);
    }
    return false;
  }
  // Slices may be done in another order than they were begun.
  is_done_[begin / kSliceBytes] = true;
  uint64_t at = populated_.load();
  while (at < begun_ && is_done_[at / kSliceBytes]) {
    at = std::min<uint64_t>(at + kSliceBytes, memory_.size());
  }
  populated_.store(at, std::memory_order_release);
  return true;
}

bool BackgroundPopulate::AwaitDecided(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto is_decided = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return Has(bytes) || !failure_.ok();
  };
  return mutex_.AwaitWithTimeout(absl::Condition(&is_decided), kInterruptSlice);
}

absl::Status BackgroundPopulate::Await(uint64_t bytes,
                                       const InterruptCheck& interrupted) {
  if (Has(bytes)) return absl::OkStatus();
  absl::Time ask = absl::Now() + kInterruptSlice;
  while (PopulateNext(bytes) || !AwaitDecided(bytes)) {
    if (absl::Now() < ask) continue;
    OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
    ask = absl::Now() + kInterruptSlice;
  }
  if (Has(bytes)) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  return failure_;
}

}  // namespace optstate::client
