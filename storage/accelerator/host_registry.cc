#include "storage/accelerator/host_registry.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace optstate::accelerator {
namespace {

uint64_t ValueOf(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

}  // namespace

absl::Status HostRegistry::Add(absl::Span<const std::byte> memory) {
  const uint64_t begin = ValueOf(memory.data());
  const uint64_t end = begin + memory.size();
  if (memory.empty()) {
    return absl::InvalidArgumentError("no bytes are to be registered");
  }
  const absl::MutexLock lock(&mu_);
  const auto next = end_of_begin_.upper_bound(begin);
  const bool meets_next = next != end_of_begin_.end() && next->first < end;
  const bool meets_last =
      next != end_of_begin_.begin() && std::prev(next)->second > begin;
  if (meets_next || meets_last) {
    return absl::InvalidArgumentError(
        absl::StrCat("a part of the ", memory.size(), " bytes at 0x",
                     absl::Hex(begin), " is registered already"));
  }
  end_of_begin_.emplace(begin, end);
  return absl::OkStatus();
}

bool HostRegistry::Remove(const std::byte* begin) {
  const absl::MutexLock lock(&mu_);
  return end_of_begin_.erase(ValueOf(begin)) != 0;
}

absl::Status HostRegistry::Check(const void* begin, size_t bytes) const {
  const uint64_t address = ValueOf(begin);
  const absl::ReaderMutexLock lock(&mu_);
  const auto next = end_of_begin_.upper_bound(address);
  if (next != end_of_begin_.begin() &&
      std::prev(next)->second - address >= bytes &&
      std::prev(next)->second >= address) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the ", bytes, " bytes of the host at 0x",
                   absl::Hex(address), " are not registered with the device"));
}

}  // namespace optstate::accelerator
