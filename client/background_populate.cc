#include "client/background_populate.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <system_error>

// The kernel's ABI, newer than the headers of older systems.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace optstate::client {
namespace {

// The work between two checks whether to stop: about a millisecond.
constexpr size_t kSliceBytes = 4 << 20;

}  // namespace

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
  try {
    thread_ = std::thread([this, memory] { Run(memory); });
  } catch (const std::system_error&) {
    // The system gives no thread; the pages are mapped as they are written.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void BackgroundPopulate::Run(absl::Span<std::byte> memory) const {
  for (size_t at = 0; at < memory.size() && !stop_; at += kSliceBytes) {
    const size_t bytes = std::min(kSliceBytes, memory.size() - at);
    // An older kernel does not support this.
    if (madvise(memory.data() + at, bytes, MADV_POPULATE_WRITE) != 0) return;
  }
}

}  // namespace optstate::client
