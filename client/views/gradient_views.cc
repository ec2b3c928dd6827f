#include "client/views/gradient_views.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "client/views/streaming_copy.h"
#include "proto/types/os_error.h"

namespace optstate::client {
namespace {

bool Contains(absl::Span<std::byte> whole, absl::Span<const std::byte> part) {
  const auto begin = reinterpret_cast<uintptr_t>(whole.data());
  const auto at = reinterpret_cast<uintptr_t>(part.data());
  return at >= begin && at - begin <= whole.size() &&
         part.size() <= whole.size() - (at - begin);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GradientViews>> GradientViews::Map(
    absl::Span<std::byte> area) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t lead = reinterpret_cast<uintptr_t>(area.data()) % page;
  const uint64_t bytes = (lead + area.size() + page - 1) / page * page;
  if (bytes == 0) {
    return absl::UnimplementedError("there is no gradient area");
  }
  // An old size of 0 leaves the old mapping and makes another one of the same
  // pages. The seals of the segment refuse a new mapping of the file itself.
  void* const data = mremap(area.data() - lead, 0, bytes, MREMAP_MAYMOVE);
  if (data == MAP_FAILED) {
    return absl::UnimplementedError(
        absl::StrCat("the gradient area cannot be mapped a second time: ",
                     OsError(errno, "mremap").message()));
  }
  auto* const first = static_cast<std::byte*>(data);
  const auto distance =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) + lead -
                           reinterpret_cast<uintptr_t>(area.data()));
  return std::unique_ptr<GradientViews>(
      new GradientViews(absl::MakeSpan(first, bytes),
                        absl::MakeSpan(first + lead, area.size()), distance));
}

GradientViews::~GradientViews() { munmap(pages_.data(), pages_.size()); }

absl::Status GradientViews::Put(void* to,
                                absl::Span<const std::byte> gradient) {
  if (!Contains(area_, {static_cast<const std::byte*>(to), gradient.size()})) {
    return absl::InvalidArgumentError(
        "a gradient's place is outside of the gradient views");
  }
  StreamingCopy(to, gradient.data(), gradient.size(), area_.size());
  StreamingFence();
  return absl::OkStatus();
}

absl::Status GradientViews::Keep(
    absl::Span<const absl::Span<const std::byte>> parts) {
  if (is_private_) return absl::OkStatus();
  for (const absl::Span<const std::byte> part : parts) {
    if (!Contains(area_, part)) {
      return absl::InvalidArgumentError(
          "a part is outside of the gradient views");
    }
  }
  void* const data = mmap(nullptr, pages_.size(), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a copy of gradients: ",
                     OsError(errno, "mmap").message()));
  }
  for (const absl::Span<const std::byte> part : parts) {
    std::memcpy(static_cast<std::byte*>(data) + (part.data() - pages_.data()),
                part.data(), part.size());
  }
  // One call replaces the mapping, so that a reader never finds a hole.
  if (mremap(data, pages_.size(), pages_.size(), MREMAP_MAYMOVE | MREMAP_FIXED,
             pages_.data()) == MAP_FAILED) {
    absl::Status status = OsError(errno, "mremap over the gradients");
    munmap(data, pages_.size());
    return status;
  }
  is_private_ = true;
  return absl::OkStatus();
}

}  // namespace optstate::client
