#include "storage/io/disk_share.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"

namespace optstate::io {
namespace {

constexpr size_t kSlots = 256;
// An engine without a request for this long does not use the disk.
constexpr int64_t kLatelyNs = 100'000'000;

}  // namespace

struct alignas(64) DiskShare::Slot {
  std::atomic<int64_t> active_ns;  // 0: never
  std::atomic<uint32_t> weight;
  std::atomic<uint32_t> user;
  std::atomic<uint32_t> user_weight;  // 0: of a former build
};

absl::StatusOr<std::unique_ptr<DiskShare>> DiskShare::Open(
    const std::string& path, uint32_t weight, User user) {
  constexpr off_t kBytes = kSlots * sizeof(Slot);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!fd.ok()) return OsError(errno, absl::StrCat("open ", path));
  // Reserved, so that no access can raise SIGBUS; bytes that are there stay.
  if (::fallocate(fd.get(), 0, 0, kBytes) != 0 &&
      (errno != EOPNOTSUPP || ::ftruncate(fd.get(), kBytes) != 0)) {
    return OsError(errno, absl::StrCat("fallocate of ", path));
  }
  size_t own = 0;
  for (; own < kSlots; ++own) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(own * sizeof(Slot));
    lock.l_len = sizeof(Slot);
    if (::fcntl(fd.get(), F_OFD_SETLK, &lock) == 0) break;
    if (errno != EAGAIN && errno != EACCES) {
      return OsError(errno, absl::StrCat("lock of ", path));
    }
  }
  if (own == kSlots) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, ": all ", kSlots, " slots are taken"));
  }
  void* const memory =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return OsError(errno, absl::StrCat("mmap ", path));
  std::unique_ptr<DiskShare> share(new DiskShare(
      std::move(fd), static_cast<Slot*>(memory), own, weight, user));
  Slot& slot = share->slots_[own];
  slot.active_ns.store(0, std::memory_order_relaxed);
  slot.weight.store(weight, std::memory_order_relaxed);
  slot.user.store(user.id, std::memory_order_relaxed);
  slot.user_weight.store(user.weight, std::memory_order_relaxed);
  return share;
}

DiskShare::~DiskShare() {
  slots_[own_].active_ns.store(0, std::memory_order_relaxed);
  // A former build that takes the slot next would not say a user.
  slots_[own_].user_weight.store(0, std::memory_order_relaxed);
  ::munmap(slots_, kSlots * sizeof(Slot));
}

void DiskShare::NoteActive(int64_t now_ns) {
  slots_[own_].active_ns.store(now_ns, std::memory_order_relaxed);
}

double DiskShare::Part(int64_t now_ns) const {
  double of_user = weight_;     // of this user's processes
  double users = user_.weight;  // of all users
  std::array<uint32_t, kSlots> others = {};
  size_t other_count = 0;
  for (size_t i = 0; i < kSlots; ++i) {
    const Slot& slot = slots_[i];
    const int64_t active_ns = slot.active_ns.load(std::memory_order_relaxed);
    if (i == own_ || active_ns == 0 || now_ns - active_ns > kLatelyNs) continue;
    const uint32_t weight = slot.weight.load(std::memory_order_relaxed);
    const uint32_t user = slot.user.load(std::memory_order_relaxed);
    const uint32_t user_weight =
        slot.user_weight.load(std::memory_order_relaxed);
    if (user_weight == 0) {
      users += weight;
      continue;
    }
    if (user == user_.id) {
      of_user += weight;
      continue;
    }
    const uint32_t* const begin = others.data();
    const uint32_t* const end = begin + other_count;
    if (std::find(begin, end, user) != end) continue;
    others[other_count++] = user;
    users += user_weight;
  }
  return user_.weight / users * (weight_ / of_user);
}

}  // namespace optstate::io
