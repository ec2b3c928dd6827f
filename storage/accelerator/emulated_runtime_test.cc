// Tests what only an emulated device has: kernels that are functions, memory
// that the host cannot touch, and faults.

#include "storage/accelerator/emulated_runtime.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "storage/accelerator/emulated_stream.h"
#include "storage/accelerator/host_buffer.h"

namespace optstate::accelerator {
namespace {

constexpr size_t kBytes = 1000;

struct AddArguments {
  const uint8_t* from;
  uint8_t* to;
  size_t bytes;
};

// Adds one to each byte.
absl::Status AddOne(const EmulatedMemory& memory, const void* arguments) {
  const auto& add = *static_cast<const AddArguments*>(arguments);
  const uint8_t* const from = memory.Find(add.from, add.bytes);
  uint8_t* const to = memory.Find(add.to, add.bytes);
  if (from == nullptr || to == nullptr) {
    return absl::InternalError("an illegal address");
  }
  std::transform(from, from + add.bytes, to,
                 [](uint8_t x) { return static_cast<uint8_t>(x + 1); });
  return absl::OkStatus();
}

class EmulatedRuntimeTest : public testing::Test {
 protected:
  EmulatedRuntimeTest() {
    EmulatedOptions options;
    options.memory_bytes = 1 << 20;
    options.faults = &faults_;
    runtime_ = MakeEmulatedRuntime(options);
    device_ = *runtime_->Open(0);
    memory_ = *device_->Allocate(2 * kBytes);
    buffer_ = std::make_unique<HostBuffer>(device_.get(), kBytes);
    stream_ = *device_->MakeStream();
  }

  absl::Status Launch(const AddArguments& arguments) {
    auto* const stream = static_cast<EmulatedStream*>(stream_->native_handle());
    return stream->Launch(AddOne, &arguments, sizeof(arguments));
  }
  AddArguments Add() const {
    return {memory_.ForKernel<const uint8_t>(),
            (memory_ + kBytes).ForKernel<uint8_t>(), kBytes};
  }
  // Has the device add one to each byte of the buffer.
  absl::Status AddToBuffer() {
    absl::Status status =
        stream_->CopyToDevice(memory_, buffer_->data(), kBytes);
    status.Update(Launch(Add()));
    status.Update(
        stream_->CopyToHost(buffer_->data(), memory_ + kBytes, kBytes));
    status.Update(stream_->Wait());
    return status;
  }

  EmulatedFaults faults_;
  std::unique_ptr<DeviceRuntime> runtime_;
  std::unique_ptr<Device> device_;
  DeviceAddress memory_;
  std::unique_ptr<HostBuffer> buffer_;
  std::unique_ptr<DeviceStream> stream_;
};

TEST_F(EmulatedRuntimeTest, AKernelIsAFunctionInItsStream) {
  for (int round = 1; round <= 50; ++round) {
    ASSERT_TRUE(AddToBuffer().ok());
    EXPECT_EQ(buffer_->bytes(),
              std::vector<std::byte>(kBytes, static_cast<std::byte>(round)));
  }
}

TEST_F(EmulatedRuntimeTest, TheHostCannotTouchTheDevicesMemory) {
  EXPECT_DEATH(*memory_.ForKernel<volatile uint8_t>() = 1, "");
  EXPECT_DEATH((void)*memory_.ForKernel<volatile uint8_t>(), "");
}

TEST_F(EmulatedRuntimeTest, ACopyOutsideOfAnAllocationIsRefused) {
  EXPECT_EQ(
      stream_->CopyToDevice(memory_ + (kBytes + 1), buffer_->data(), kBytes)
          .code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(
      stream_->CopyOnDevice(memory_, memory_ + (kBytes + 1), kBytes).code(),
      absl::StatusCode::kInvalidArgument);
  const DeviceAddress host = {reinterpret_cast<uint64_t>(buffer_->data())};
  EXPECT_EQ(stream_->CopyToDevice(host, buffer_->data(), kBytes).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(AddToBuffer().ok());
}

TEST_F(EmulatedRuntimeTest, AnAddressOfTheHostInAKernelLosesTheDevice) {
  AddArguments wrong = Add();
  wrong.from = reinterpret_cast<const uint8_t*>(buffer_->data());
  ASSERT_TRUE(Launch(wrong).ok());
  const absl::Status lost = stream_->Wait();
  EXPECT_EQ(lost.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(absl::StrContains(lost.message(), "an illegal address")) << lost;
  // Whatever comes now ends like this, and nothing waits for ever.
  EXPECT_EQ(AddToBuffer(), lost);
  EXPECT_EQ(device_->Allocate(1).status(), lost);
  EXPECT_EQ(device_->AllocateShareable(1).status(), lost);
  EXPECT_EQ(device_->Export(memory_).status(), lost);
  EXPECT_EQ(device_->Import({}).status(), lost);
  EXPECT_EQ(stream_->CopyOnDevice(memory_, memory_ + kBytes, 1), lost);
  EXPECT_EQ(device_->MakeStream().status(), lost);
  EXPECT_EQ(device_->MakeEvent().status(), lost);
  EXPECT_EQ(device_->RegisterHost({}), lost);
  EXPECT_EQ(runtime_->Open(0).status(), absl::OkStatus());
}

TEST_F(EmulatedRuntimeTest, AFailedLaunchLeavesTheDevice) {
  faults_.FailLaunchAfter(1);
  EXPECT_TRUE(AddToBuffer().ok());
  EXPECT_EQ(AddToBuffer().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(AddToBuffer().ok());
}

TEST_F(EmulatedRuntimeTest, AnExportIsRefusedOnce) {
  const DeviceAddress shared = *device_->AllocateShareable(kBytes);
  faults_.RefuseExportAfter(1);
  EXPECT_TRUE(device_->Export(shared).ok());
  EXPECT_EQ(device_->Export(shared).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(device_->Export(shared).ok());
}

TEST_F(EmulatedRuntimeTest, ALostDeviceWakesWhoWaits) {
  const std::unique_ptr<DeviceEvent> event = *device_->MakeEvent();
  const std::unique_ptr<DeviceStream> other = *device_->MakeStream();
  buffer_->bytes().assign(kBytes, std::byte{7});
  faults_.LoseAfter(1);
  // The last of the enqueuing calls may know already.
  absl::Status status = stream_->CopyToDevice(memory_, buffer_->data(), kBytes);
  status.Update(Launch(Add()));
  status.Update(stream_->CopyToHost(buffer_->data(), memory_ + kBytes, kBytes));
  status.Update(stream_->Record(event.get()));
  status.Update(other->WaitFor(event.get()));
  EXPECT_EQ(event->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(event->IsOver().status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(other->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(stream_->Wait().code(), absl::StatusCode::kInternal);
  // The commands behind the fault were not done.
  EXPECT_EQ(buffer_->bytes(), std::vector<std::byte>(kBytes, std::byte{7}));
}

TEST_F(EmulatedRuntimeTest, OutOfMemorySaysWhatIsLeft) {
  const absl::Status refused = device_->Allocate(1 << 20).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(absl::StrContains(refused.message(), "1046576 of 1048576"))
      << refused;
}

}  // namespace
}  // namespace optstate::accelerator
