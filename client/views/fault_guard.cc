#include "client/views/fault_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

namespace optstate::client {
namespace {

struct Slot {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> lost{false};
};

// A fixed array, because a signal handler may take no lock and allocate
// nothing.
std::array<Slot, 256> slots;
std::mutex slots_mutex;
struct sigaction former;
uintptr_t page_bytes;

// Maps a page of zeros where there is none. Async-signal-safe: mmap is nothing
// but a system call.
bool FillPage(uintptr_t address) {
  for (Slot& slot : slots) {
    const uintptr_t begin = slot.begin.load(std::memory_order_acquire);
    if (begin == 0 || address < begin ||
        address >= slot.end.load(std::memory_order_relaxed)) {
      continue;
    }
    auto* const page = reinterpret_cast<void*>(address & ~(page_bytes - 1));
    if (mmap(page, page_bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
      return false;
    }
    slot.lost.store(true, std::memory_order_release);
    return true;
  }
  return false;
}

void OnSigbus(int number, siginfo_t* info, void* context) {
  const bool is_fault = info->si_code > 0;  // else a process sent the signal
  if (is_fault && FillPage(reinterpret_cast<uintptr_t>(info->si_addr))) return;
  if ((former.sa_flags & SA_SIGINFO) != 0) {
    former.sa_sigaction(number, info, context);
    return;
  }
  if (former.sa_handler != SIG_DFL && former.sa_handler != SIG_IGN) {
    former.sa_handler(number);
    return;
  }
  // The access is repeated when this returns, and ends the process.
  sigaction(SIGBUS, &former, nullptr);
}

void Install() {
  static const bool installed = [] {
    page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    struct sigaction action = {};
    action.sa_sigaction = OnSigbus;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGBUS, &action, &former) == 0;
  }();
  static_cast<void>(installed);
}

}  // namespace

FaultGuard::FaultGuard(absl::Span<const std::byte> range) {
  if (range.empty()) return;
  const std::lock_guard<std::mutex> lock(slots_mutex);
  Install();
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].begin.load(std::memory_order_relaxed) != 0) continue;
    slots[i].end.store(begin + range.size(), std::memory_order_relaxed);
    slots[i].lost.store(false, std::memory_order_relaxed);
    slots[i].begin.store(begin, std::memory_order_release);
    slot_ = static_cast<int>(i);
    return;
  }
}

FaultGuard::FaultGuard(FaultGuard&& other) noexcept
    : slot_(std::exchange(other.slot_, -1)) {}

FaultGuard& FaultGuard::operator=(FaultGuard&& other) noexcept {
  std::swap(slot_, other.slot_);
  return *this;
}

FaultGuard::~FaultGuard() {
  if (slot_ >= 0) slots[slot_].begin.store(0, std::memory_order_release);
}

bool FaultGuard::lost() const {
  return slot_ >= 0 && slots[slot_].lost.load(std::memory_order_acquire);
}

}  // namespace optstate::client
