#include "client/background_populate.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/interrupt.h"
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
  // All signals are blocked in the new thread from its first instruction: the
  // trainer's own threads handle the trainer's signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool has_thread = true;
  try {
    thread_ = std::thread([this, memory] { Run(memory); });
  } catch (const std::system_error&) {
    has_thread = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!has_thread) Run(memory);
}

void BackgroundPopulate::Run(absl::Span<std::byte> memory) {
  for (uint64_t at = 0; at < memory.size() && !stop_;) {
    const uint64_t bytes = std::min<uint64_t>(kSliceBytes, memory.size() - at);
    const absl::Status populated = populate_(memory.data() + at, bytes);
    absl::MutexLock lock(&mutex_);
    if (!populated.ok()) {
      failure_ = NoMemory(at, memory.size(), populated);
      return;
    }
    at += bytes;
    populated_.store(at, std::memory_order_release);
  }
}

absl::Status BackgroundPopulate::Await(uint64_t bytes,
                                       const InterruptCheck& interrupted) {
  while (!Has(bytes)) {
    {
      absl::MutexLock lock(&mutex_);
      const auto is_decided = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return Has(bytes) || !failure_.ok();
      };
      mutex_.AwaitWithTimeout(absl::Condition(&is_decided), kInterruptSlice);
      if (Has(bytes)) return absl::OkStatus();
      OPTSTATE_RETURN_IF_ERROR(failure_);
    }
    OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
  }
  return absl::OkStatus();
}

}  // namespace optstate::client
