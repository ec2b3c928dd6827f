#include "server/scheduler/executors/batch_memory.h"

#include <sys/mman.h>

#include <cerrno>

#include "absl/types/span.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/observe/trace_recorder.h"

namespace optstate::scheduler {

absl::StatusOr<std::unique_ptr<BatchMemory>> BatchMemory::Make(
    accelerator::Device* device, uint64_t host_bytes, uint64_t device_bytes) {
  std::unique_ptr<BatchMemory> memory(new BatchMemory(device, host_bytes));
  OPTSTATE_RETURN_IF_ERROR(memory->Init(device_bytes));
  return memory;
}

absl::Status BatchMemory::Init(uint64_t device_bytes) {
  void* const pages = ::mmap(nullptr, host_bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) {
    return OsError(errno, "mmap of memory for copies to a device");
  }
  host_ = static_cast<std::byte*>(pages);
  OPTSTATE_RETURN_IF_ERROR(
      device_.RegisterHost(absl::MakeSpan(host_, host_bytes_)));
  is_registered_ = true;
  OPTSTATE_ASSIGN_OR_RETURN(memory_, device_.Allocate(device_bytes));
  OPTSTATE_ASSIGN_OR_RETURN(is_over_, device_.MakeEvent());
  for (auto& point : points_) {
    OPTSTATE_ASSIGN_OR_RETURN(point, device_.MakeTimedEvent());
  }
  OPTSTATE_ASSIGN_OR_RETURN(stream_, device_.MakeStream());
  return absl::OkStatus();
}

void BatchMemory::Mark(Point point) {
  if (!is_timed_) return;
  if (point == Point::kBegin) begin_ns_ = observe::TraceNowNs();
  is_timed_ = stream_->Record(points_[static_cast<size_t>(point)].get()).ok();
}

std::optional<BatchTimes> BatchMemory::Times() const {
  if (!is_timed_) return std::nullopt;
  std::array<int64_t, kPoints> at_ns = {begin_ns_};
  for (size_t i = 1; i < kPoints; ++i) {
    const auto since = points_[i]->NanosSince(points_[0].get());
    if (!since.ok()) return std::nullopt;
    at_ns[i] = begin_ns_ + *since;
  }
  return BatchTimes{at_ns[0], at_ns[1], at_ns[2], at_ns[3]};
}

BatchMemory::~BatchMemory() {
  stream_.reset();  // waits for its copies
  if (!memory_.is_null()) device_.Free(memory_);
  if (is_registered_) device_.UnregisterHost(host_);
  if (host_ != nullptr) ::munmap(host_, host_bytes_);
}

}  // namespace optstate::scheduler
