#include "server/scheduler/executors/shared_parameters.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::scheduler {

absl::StatusOr<std::unique_ptr<SharedParameters>> SharedParameters::Make(
    absl::Span<accelerator::Device* const> devices, uint64_t run_count) {
  std::unique_ptr<SharedParameters> made(new SharedParameters);
  const uint64_t bytes = shm::DeviceParametersBytes(run_count);
  OPTSTATE_ASSIGN_OR_RETURN(
      made->table_,
      shm::SealedSegment::Create("optstate-device-parameters", bytes));
  shm::DeviceParametersHeader* const header = made->header();
  header->magic = shm::kDeviceParametersMagic;
  header->version = shm::kDeviceParametersVersion;
  header->segment_bytes = bytes;
  header->run_count = run_count;
  for (accelerator::Device* const device : devices) {
    made->memories_.emplace_back().device = device;
  }
  return made;
}

SharedParameters::~SharedParameters() {
  if (table_.data() != nullptr) header()->is_over.store(1);
  for (const Memory& memory : memories_) {
    if (!memory.begin.is_null()) memory.device->Free(memory.begin);
  }
}

absl::Status SharedParameters::Open(size_t device, uint64_t bytes) {
  if (is_open(device)) return absl::OkStatus();
  if (bytes >> shm::kDeviceParameterOffsetBits != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(bytes, " bytes of parameters on a device"));
  }
  Memory& memory = memories_[device];
  OPTSTATE_ASSIGN_OR_RETURN(memory.begin,
                            memory.device->AllocateShareable(bytes));
  memory.bytes = bytes;
  return absl::OkStatus();
}

void SharedParameters::Close(size_t device) {
  Memory& memory = memories_[device];
  if (is_open(device)) memory.device->Free(memory.begin);
  memory.begin = accelerator::DeviceAddress();
  memory.bytes = 0;
  memory.used_bytes = 0;
}

uint64_t SharedParameters::AddPlace(size_t device, uint64_t run,
                                    uint64_t bytes) {
  Memory& memory = memories_[device];
  const uint64_t taken = Aligned(bytes);
  if (!is_open(device) || taken > memory.bytes - memory.used_bytes) {
    return kNoPlace;
  }
  const uint64_t place = memory.used_bytes;
  memory.used_bytes += taken;
  entry(run).place.store(shm::DeviceParameterPlace(device, place),
                         std::memory_order_relaxed);
  return place;
}

absl::StatusOr<DeviceParameters> SharedParameters::Export(size_t device) const {
  DeviceParameters exported;
  exported.device = device;
  exported.table.reset(::fcntl(table_.fd(), F_DUPFD_CLOEXEC, 0));
  if (!exported.table.ok()) {
    return OsError(errno, "fcntl(F_DUPFD_CLOEXEC) of the table of parameters");
  }
  const Memory& memory = memories_[device];
  OPTSTATE_ASSIGN_OR_RETURN(exported.memory,
                            memory.device->Export(memory.begin));
  return exported;
}

}  // namespace optstate::scheduler
