#include "storage/accelerator/emulated_stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/types/status_macros.h"

namespace optstate::accelerator {

void EmulatedDeviceState::Lose(const absl::Status& why) {
  const absl::MutexLock lock(&mu_);
  if (!lost_.ok()) return;
  lost_ = absl::InternalError(absl::StrCat(
      "the emulated device is lost for this process: ", why.message()));
  is_lost_.store(true, std::memory_order_release);
}

absl::Status EmulatedDeviceState::lost() const {
  if (!is_lost_.load(std::memory_order_acquire)) return absl::OkStatus();
  const absl::MutexLock lock(&mu_);
  return lost_;
}

absl::Status EmulatedEvent::Wait() {
  Await(recorded());
  return device_.lost();
}

absl::StatusOr<bool> EmulatedEvent::IsOver() {
  OPTSTATE_RETURN_IF_ERROR(device_.lost());
  const absl::MutexLock lock(&mu_);
  return over_ == recorded_;
}

absl::StatusOr<int64_t> EmulatedEvent::NanosSince(DeviceEvent* earlier) {
  OPTSTATE_RETURN_IF_ERROR(device_.lost());
  OPTSTATE_ASSIGN_OR_RETURN(const int64_t end_ns, OverAt());
  OPTSTATE_ASSIGN_OR_RETURN(const int64_t begin_ns,
                            static_cast<EmulatedEvent*>(earlier)->OverAt());
  return end_ns - begin_ns;
}

absl::StatusOr<int64_t> EmulatedEvent::OverAt() const {
  const absl::MutexLock lock(&mu_);
  if (recorded_ == 0 || over_ != recorded_) {
    return absl::UnavailableError("the event is not over, or not recorded");
  }
  return over_at_ns_;
}

uint64_t EmulatedEvent::Record() {
  const absl::MutexLock lock(&mu_);
  return ++recorded_;
}

uint64_t EmulatedEvent::recorded() const {
  const absl::MutexLock lock(&mu_);
  return recorded_;
}

void EmulatedEvent::End(uint64_t record) {
  const absl::MutexLock lock(&mu_);
  over_ = std::max(over_, record);
  over_at_ns_ = std::chrono::nanoseconds(
                    std::chrono::steady_clock::now().time_since_epoch())
                    .count();
}

void EmulatedEvent::Await(uint64_t record) {
  const absl::MutexLock lock(&mu_);
  const auto is_over = [this, record]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return over_ >= record;
  };
  mu_.Await(absl::Condition(&is_over));
}

EmulatedStream::EmulatedStream(EmulatedDeviceState* device)
    : device_(*device), thread_([this] { Run(); }) {}

EmulatedStream::~EmulatedStream() {
  {
    const absl::MutexLock lock(&mu_);
    ends_ = true;
  }
  thread_.join();
}

absl::Status EmulatedStream::CheckCopy(const std::byte* device,
                                       const void* host, size_t bytes) const {
  OPTSTATE_RETURN_IF_ERROR(device_.lost());
  if (device == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("a copy of ", bytes,
                     " bytes with an address that is not the device's"));
  }
  return device_.host.Check(host, bytes);
}

absl::Status EmulatedStream::CopyToDevice(DeviceAddress to, const void* from,
                                          size_t bytes) {
  Command command;
  command.kind = Kind::kCopyToDevice;
  command.device = device_.memory.Find(to, bytes);
  command.host = static_cast<std::byte*>(const_cast<void*>(from));
  command.bytes = bytes;
  OPTSTATE_RETURN_IF_ERROR(CheckCopy(command.device, from, bytes));
  return Enqueue(command);
}

absl::Status EmulatedStream::CopyToHost(void* to, DeviceAddress from,
                                        size_t bytes) {
  Command command;
  command.kind = Kind::kCopyToHost;
  command.device = device_.memory.Find(from, bytes);
  command.host = static_cast<std::byte*>(to);
  command.bytes = bytes;
  OPTSTATE_RETURN_IF_ERROR(CheckCopy(command.device, to, bytes));
  return Enqueue(command);
}

absl::Status EmulatedStream::CopyOnDevice(DeviceAddress to, DeviceAddress from,
                                          size_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(device_.lost());
  Command command;
  command.kind = Kind::kCopyOnDevice;
  command.device = device_.memory.Find(to, bytes);
  command.host = device_.memory.Find(from, bytes);
  command.bytes = bytes;
  if (command.device == nullptr || command.host == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("a copy on the device of ", bytes,
                     " bytes with an address that is not the device's"));
  }
  return Enqueue(command);
}

absl::Status EmulatedStream::Record(DeviceEvent* event) {
  OPTSTATE_RETURN_IF_ERROR(device_.lost());
  Command command;
  command.kind = Kind::kRecord;
  command.event = static_cast<EmulatedEvent*>(event);
  command.record = command.event->Record();
  return Enqueue(command);
}

absl::Status EmulatedStream::WaitFor(DeviceEvent* event) {
  OPTSTATE_RETURN_IF_ERROR(device_.lost());
  Command command;
  command.kind = Kind::kWaitFor;
  command.event = static_cast<EmulatedEvent*>(event);
  command.record = command.event->recorded();
  return Enqueue(command);
}

absl::Status EmulatedStream::Launch(Kernel kernel, const void* arguments,
                                    size_t bytes) {
  OPTSTATE_RETURN_IF_ERROR(device_.lost());
  if (device_.faults != nullptr && device_.faults->FailsLaunch()) {
    return absl::UnavailableError("an injected failure of a launch");
  }
  if (bytes > kArgumentBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a kernel has ", bytes, " bytes of arguments, at most ",
                     kArgumentBytesMax, " may be"));
  }
  Command command;
  command.kernel = kernel;
  std::memcpy(command.arguments, arguments, bytes);
  return Enqueue(command);
}

absl::Status EmulatedStream::Wait() {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &EmulatedStream::IsIdle));
  return device_.lost();
}

absl::Status EmulatedStream::Enqueue(const Command& command) {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(this, &EmulatedStream::HasRoom));
  commands_[given_ % kCommandsMax] = command;
  ++given_;
  return absl::OkStatus();
}

void EmulatedStream::Run() {
  while (true) {
    const Command* command = nullptr;
    {
      const absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &EmulatedStream::HasWork));
      if (IsIdle()) return;
      command = &commands_[done_ % kCommandsMax];
    }
    // The slot is not written to until the command counts as done.
    Do(*command);
    const absl::MutexLock lock(&mu_);
    ++done_;
  }
}

void EmulatedStream::Do(const Command& command) {
  if (command.kind == Kind::kRecord) {
    command.event->End(command.record);
  } else if (command.kind == Kind::kWaitFor) {
    command.event->Await(command.record);
  } else if (device_.faults != nullptr && device_.faults->LosesDevice()) {
    device_.Lose(absl::InternalError("an injected fault"));
  } else if (device_.lost().ok()) {
    DoWork(command);
  }
}

void EmulatedStream::DoWork(const Command& command) {
  if (command.kind == Kind::kKernel) {
    const absl::Status status =
        command.kernel(device_.memory, command.arguments);
    if (!status.ok()) device_.Lose(status);
    return;
  }
  if (command.kind == Kind::kCopyOnDevice) {
    std::memcpy(command.device, command.host, command.bytes);
    return;
  }
  if (device_.link_bytes_per_s != 0) {
    // The time that a real link would take.
    absl::SleepFor(
        absl::Seconds(static_cast<double>(command.bytes) /
                      static_cast<double>(device_.link_bytes_per_s)));
  }
  if (command.kind == Kind::kCopyToDevice) {
    std::memcpy(command.device, command.host, command.bytes);
  } else {
    std::memcpy(command.host, command.device, command.bytes);
  }
}

}  // namespace optstate::accelerator
