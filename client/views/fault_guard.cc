#include "client/views/fault_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::client {

struct FaultGuard::Slot {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<uintptr_t> end{0};
  std::atomic<uintptr_t> zeros{0};  // where zeros begin; `end`: there are none
  std::atomic<int> protection{0};
};

namespace {

// Slots are in blocks that are never freed, because a signal handler, which may
// take no lock and allocate nothing, can be looking at any of them.
struct Block {
  std::array<FaultGuard::Slot, 64> slots;
  std::atomic<Block*> next{nullptr};
};

Block first_block;
std::mutex slots_mutex;
struct sigaction former;
uintptr_t page_bytes;

FaultGuard::Slot* FindSlot(uintptr_t address) {
  for (Block* block = &first_block; block != nullptr;
       block = block->next.load(std::memory_order_acquire)) {
    for (FaultGuard::Slot& slot : block->slots) {
      const uintptr_t begin = slot.begin.load(std::memory_order_acquire);
      if (begin != 0 && address >= begin &&
          address < slot.end.load(std::memory_order_relaxed)) {
        return &slot;
      }
    }
  }
  return nullptr;
}

// Maps zeros from the page on to where there are zeros already: one mapping,
// because a process can have only some ten thousands of them.
// Async-signal-safe: mmap is nothing but a system call.
bool FillFrom(uintptr_t address) {
  FaultGuard::Slot* const slot = FindSlot(address);
  if (slot == nullptr) return false;
  const uintptr_t page = address & ~(page_bytes - 1);
  uintptr_t zeros = slot->zeros.load(std::memory_order_acquire);
  // A fault within the zeros: another thread has just mapped them, and the
  // access is repeated.
  if (page >= zeros) return true;
  if (mmap(reinterpret_cast<void*>(page), zeros - page,
           slot->protection.load(std::memory_order_relaxed),
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
           0) == MAP_FAILED) {
    return false;
  }
  while (page < zeros && !slot->zeros.compare_exchange_weak(
                             zeros, page, std::memory_order_acq_rel)) {
  }
  return true;
}

void OnSigbus(int number, siginfo_t* info, void* context) {
  // Else a process sent the signal, or the memory itself has failed.
  const bool is_fault = info->si_code == BUS_ADRERR;
  const int error = errno;
  if (is_fault && FillFrom(reinterpret_cast<uintptr_t>(info->si_addr))) {
    errno = error;
    return;
  }
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

// Needs slots_mutex.
FaultGuard::Slot* FreeSlot() {
  for (Block* block = &first_block;;) {
    for (FaultGuard::Slot& slot : block->slots) {
      if (slot.begin.load(std::memory_order_relaxed) == 0) return &slot;
    }
    Block* next = block->next.load(std::memory_order_relaxed);
    if (next == nullptr) {
      next = new Block;
      block->next.store(next, std::memory_order_release);
    }
    block = next;
  }
}

}  // namespace

FaultGuard::FaultGuard(absl::Span<const std::byte> range, int protection) {
  if (range.empty()) return;
  const std::lock_guard<std::mutex> lock(slots_mutex);
  Install();
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  // An access behind the file's end may be anywhere in the last page.
  const uintptr_t end =
      (begin + range.size() + page_bytes - 1) & ~(page_bytes - 1);
  slot_ = FreeSlot();
  slot_->end.store(end, std::memory_order_relaxed);
  slot_->zeros.store(end, std::memory_order_relaxed);
  slot_->protection.store(protection, std::memory_order_relaxed);
  slot_->begin.store(begin, std::memory_order_release);
}

FaultGuard::FaultGuard(FaultGuard&& other) noexcept
    : slot_(std::exchange(other.slot_, nullptr)) {}

FaultGuard& FaultGuard::operator=(FaultGuard&& other) noexcept {
  std::swap(slot_, other.slot_);
  return *this;
}

FaultGuard::~FaultGuard() {
  if (slot_ != nullptr) slot_->begin.store(0, std::memory_order_release);
}

bool FaultGuard::lost() const {
  return slot_ != nullptr && slot_->zeros.load(std::memory_order_acquire) !=
                                 slot_->end.load(std::memory_order_relaxed);
}

std::string NameOfFile(int file) {
  char name[PATH_MAX];
  const std::string link = absl::StrCat("/proc/self/fd/", file);
  const ssize_t length = readlink(link.c_str(), name, sizeof(name));
  return length < 0 ? "" : std::string(name, static_cast<size_t>(length));
}

absl::Status CutShort(absl::string_view name, absl::string_view detail) {
  return absl::DataLossError(absl::StrCat(
      "the job's file ", name, " was cut short by another process", detail,
      ", so that its parameters are not whole. Delete the job (optctl delete "
      "job) and begin it again from a checkpoint"));
}

absl::Status CheckNotCutShort(int file, uint64_t bytes,
                              const FaultGuard& guard) {
  struct stat info;
  if (fstat(file, &info) != 0) return OsError(errno, "fstat of the parameters");
  if (static_cast<uint64_t>(info.st_size) >= bytes && !guard.lost()) {
    return absl::OkStatus();
  }
  return CutShort(NameOfFile(file),
                  absl::StrCat(", to ", info.st_size, " bytes of ", bytes));
}

}  // namespace optstate::client
