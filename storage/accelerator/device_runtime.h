#ifndef OPTSTATE_STORAGE_ACCELERATOR_DEVICE_RUNTIME_H_
#define OPTSTATE_STORAGE_ACCELERATOR_DEVICE_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/unique_fd.h"

namespace optstate::accelerator {

// An address in the memory of a device. It is no pointer, so that the host
// cannot follow it by mistake.
struct DeviceAddress {
  uint64_t value = 0;

  bool is_null() const { return value == 0; }
  // Returns the pointer that a kernel is given. The host may not follow it.
  template <typename T>
  T* ForKernel() const {
    return reinterpret_cast<T*>(value);
  }
  bool operator==(const DeviceAddress&) const = default;
  friend DeviceAddress operator+(DeviceAddress address, uint64_t bytes) {
    return {address.value + bytes};
  }
};

struct DeviceInfo {
  std::string name;
  uint64_t memory_bytes = 0;
  // Names the device in every process of the machine. CUDA: its UUID, as
  // 8-4-4-4-12 lower case hexadecimal digits.
  std::string id;
};

// Memory of a device as another process gets it.
struct ExportedMemory {
  UniqueFd file;       // can be sent to that process
  uint64_t bytes = 0;  // of all of it, as it has to be mapped
  std::string device;  // DeviceInfo::id
};

// The errors of all that follows:
//   RESOURCE_EXHAUSTED   the device's memory is used up. Nothing has happened.
//   INVALID_ARGUMENT     an address or a range is not what it has to be.
//   FAILED_PRECONDITION  this driver, or device, does not do it, or the node
//   has
//                        to be mended first; with why and how.
//   UNAVAILABLE          this call failed, a later one may succeed.
//   INTERNAL             the device is lost for this process: a kernel ended
//                        with an error, or the hardware did. Each later call
//                        for the device fails in this way too.
// A call that only enqueues may return the error of an earlier one.

// A point in the work of a stream, for which threads may wait.
//
// Threads: one at a time.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Waits, asleep, until all is over that its stream had been given before
  // DeviceStream::Record(); returns at once when it was never recorded. An
  // error says that what was awaited did not come to its end.
  virtual absl::Status Wait() = 0;
  // Returns whether Wait() would return at once.
  virtual absl::StatusOr<bool> IsOver() = 0;
  // Returns the device's time from the point that `earlier` names, in the same
  // stream, to this one. Device::MakeTimedEvent() has made both, and both are
  // over: else an error.
  virtual absl::StatusOr<int64_t> NanosSince(DeviceEvent* earlier) = 0;
};

// Work that a device does in the order in which it is given; different streams
// go on at the same time. The calls enqueue and return, and wait only while the
// queue, which is bounded, is full.
//
// Threads: one at a time. Allocates nothing.
class DeviceStream {
 public:
  // Waits for all that it was given.
  virtual ~DeviceStream() = default;

  // Copies between the device and registered memory of the host, which must
  // stay as it is until the stream has passed the copy.
  virtual absl::Status CopyToDevice(DeviceAddress to, const void* from,
                                    size_t bytes) = 0;
  virtual absl::Status CopyToHost(void* to, DeviceAddress from,
                                  size_t bytes) = 0;
  // Copies within the memory of the device; the two ranges are apart.
  virtual absl::Status CopyOnDevice(DeviceAddress to, DeviceAddress from,
                                    size_t bytes) = 0;
  // Lets the event name this point. It outlives the work up to here.
  virtual absl::Status Record(DeviceEvent* event) = 0;
  // Lets what comes next wait for the event as it was recorded last.
  virtual absl::Status WaitFor(DeviceEvent* event) = 0;
  // Waits until all is over that the stream was given.
  virtual absl::Status Wait() = 0;
  // Returns the handle that launches for this kind of device take: a
  // cudaStream_t, an EmulatedStream*.
  virtual void* native_handle() = 0;
};

// A device that this process uses. It outlives its streams and events.
//
// Threads: thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  virtual const DeviceInfo& info() const = 0;

  // Allocates memory of the device, aligned to 256 bytes. `bytes` > 0.
  virtual absl::StatusOr<DeviceAddress> Allocate(uint64_t bytes) = 0;
  // Allocates likewise memory that other processes may map. It takes more than
  // `bytes`, up to a whole page of the device (2 MiB of a GPU).
  virtual absl::StatusOr<DeviceAddress> AllocateShareable(uint64_t bytes) = 0;
  // Returns what another process needs to map memory of AllocateShareable().
  virtual absl::StatusOr<ExportedMemory> Export(DeviceAddress memory) = 0;
  // Maps memory that some process has exported, in order to read it. Its values
  // are those of work that the other process has waited for. The memory is
  // there until each process that has it has freed it or ended: this one keeps
  // it when the one that made it dies. INVALID_ARGUMENT: it is no exported
  // memory of so many bytes, or another device's.
  virtual absl::StatusOr<DeviceAddress> Import(
      const ExportedMemory& exported) = 0;
  // Frees what one of these returned, once no work uses it any more.
  virtual void Free(DeviceAddress memory) = 0;

  // Pins memory of the host, so that copies of it are done by the device while
  // the host goes on. INVALID_ARGUMENT: a part of it is registered already.
  virtual absl::Status RegisterHost(absl::Span<std::byte> memory) = 0;
  // Ends the registration that begins there, once no copy uses it any more.
  virtual void UnregisterHost(std::byte* begin) = 0;

  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> MakeStream() = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> MakeEvent() = 0;
  // Makes an event that also knows when it was over, see NanosSince(). To
  // record it costs the device more.
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> MakeTimedEvent() = 0;
};

// The devices of one kind on this machine. It outlives what it opens.
//
// Threads: thread-safe.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  // Returns the devices that there are, perhaps none. FAILED_PRECONDITION, with
  // the reason, when it cannot know: there is no driver.
  virtual absl::StatusOr<std::vector<DeviceInfo>> Devices() = 0;
  // Opens a device of that list. NOT_FOUND: the list is shorter.
  virtual absl::StatusOr<std::unique_ptr<Device>> Open(size_t index) = 0;
};

}  // namespace optstate::accelerator

#endif  // OPTSTATE_STORAGE_ACCELERATOR_DEVICE_RUNTIME_H_
