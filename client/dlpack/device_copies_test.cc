// Tests copies of tensors on devices with a model of the driver, whose device
// memory is host memory. On a machine with a GPU nothing of it has run.

#include "client/dlpack/device_copies.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using testing::HasSubstr;

// The calls of a thread, as the driver has them.
struct Model {
  std::vector<std::string> calls;
  int current = -1;  // the device of the current context
  std::string failing;
};
Model model;

int Note(const std::string& call) {
  model.calls.push_back(call);
  return call == model.failing ? 700 : 0;
}

CopyDriver Driver() {
  CopyDriver driver;
  driver.init = [](unsigned int) { return Note("init"); };
  driver.device_get = [](int* device, int ordinal) {
    *device = ordinal;
    return ordinal < 2 ? 0 : 101;
  };
  driver.primary_context_retain = [](void** context, int device) {
    static int contexts[2] = {0, 1};
    *context = &contexts[device];
    return 0;
  };
  driver.primary_context_release = [](int device) {
    return Note("release " + std::to_string(device));
  };
  driver.context_push = [](void* context) {
    model.current = *static_cast<int*>(context);
    return Note("push");
  };
  driver.context_pop = [](void** context) {
    *context = nullptr;
    model.current = -1;
    return Note("pop");
  };
  driver.stream_synchronize = [](void* stream) {
    EXPECT_EQ(reinterpret_cast<uint64_t>(stream), DeviceCopies::kStream);
    return Note("synchronize");
  };
  driver.copy_to_host = [](void* to, uint64_t from, size_t bytes) {
    EXPECT_EQ(model.current, 1);
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return Note("to host");
  };
  driver.copy_to_device = [](uint64_t to, const void* from, size_t bytes) {
    EXPECT_EQ(model.current, 1);
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return Note("to device");
  };
  driver.error_name = [](int error, const char** name) {
    *name = "MADE_UP";
    return error == 700 ? 0 : 1;
  };
  return driver;
}

class DeviceCopiesTest : public testing::Test {
 protected:
  DeviceCopiesTest() { model = Model(); }

  // A tensor of 2 x 3 floats on device 1, behind 4 others.
  ForeignTensor OnDevice() {
    ForeignTensor tensor;
    tensor.data = memory_;
    tensor.byte_offset = 4 * sizeof(float);
    tensor.device_type = 2;
    tensor.device_id = 1;
    tensor.dtype_code = 2;
    tensor.dtype_bits = 32;
    tensor.dtype_lanes = 1;
    tensor.ndim = 2;
    tensor.shape = shape_;
    return tensor;
  }

  float memory_[10] = {0, 0, 0, 0, 1, 2, 3, 4, 5, 6};
  int64_t shape_[2] = {2, 3};
  std::vector<std::byte> buffer_;
  const DeviceCopies copies_{Driver()};
};

TEST_F(DeviceCopiesTest, ValuesComeToTheHost) {
  const auto host = copies_.ToHost(OnDevice(), &buffer_);
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->device_type, 1);
  EXPECT_EQ(host->byte_offset, 0u);
  EXPECT_EQ(std::memcmp(host->data, memory_ + 4, 6 * sizeof(float)), 0);
  EXPECT_EQ(model.current, -1);
  // The next copy needs no memory.
  const std::byte* const before = buffer_.data();
  ASSERT_TRUE(copies_.ToHost(OnDevice(), &buffer_).ok());
  EXPECT_EQ(buffer_.data(), before);
}

TEST_F(DeviceCopiesTest, ValuesGoToTheDevice) {
  const auto place = copies_.PlaceOnHost(OnDevice(), &buffer_);
  ASSERT_TRUE(place.ok()) << place.status();
  const float values[] = {7, 8, 9, 10, 11, 12};
  std::memcpy(place->data, values, sizeof(values));
  ASSERT_TRUE(copies_.ToDevice(*place, OnDevice()).ok());
  EXPECT_EQ(std::memcmp(memory_ + 4, values, sizeof(values)), 0);
  EXPECT_EQ(memory_[3], 0);
  EXPECT_EQ(model.calls,
            (std::vector<std::string>{"init", "push", "to device",
                                      "synchronize", "pop", "release 1"}));
}

TEST_F(DeviceCopiesTest, HostMemoryIsTakenAsItIs) {
  ForeignTensor tensor = OnDevice();
  for (const int32_t type : {1, 3, 11}) {
    tensor.device_type = type;
    const auto host = copies_.ToHost(tensor, &buffer_);
    ASSERT_TRUE(host.ok()) << host.status();
    EXPECT_EQ(host->data, tensor.data);
    EXPECT_EQ(host->byte_offset, tensor.byte_offset);
    EXPECT_TRUE(copies_.ToDevice(*host, tensor).ok());
  }
  EXPECT_TRUE(model.calls.empty());
}

TEST_F(DeviceCopiesTest, NothingIsCopiedOfNoElements) {
  shape_[0] = 0;
  ForeignTensor tensor = OnDevice();
  tensor.data = nullptr;
  const auto host = copies_.ToHost(tensor, &buffer_);
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->data, nullptr);
  EXPECT_TRUE(copies_.ToDevice(*host, tensor).ok());
  EXPECT_TRUE(model.calls.empty());
}

TEST_F(DeviceCopiesTest, WhatIsWrongIsSaid) {
  const auto says = [&](const ForeignTensor& tensor, absl::StatusCode code,
                        const char* text) {
    const absl::Status status = copies_.ToHost(tensor, &buffer_).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(status.message(), HasSubstr(text));
    EXPECT_EQ(model.current, -1);
  };
  using enum absl::StatusCode;
  ForeignTensor tensor = OnDevice();
  tensor.device_type = 10;
  says(tensor, kUnimplemented, "of DLPack's type 10");
  tensor = OnDevice();
  const int64_t strides[] = {1, 2};
  tensor.strides = strides;
  says(tensor, kInvalidArgument, "not contiguous");
  const int64_t huge[] = {int64_t{1} << 62, 4};
  tensor = OnDevice();
  tensor.shape = huge;
  says(tensor, kInvalidArgument, "more elements than can be");
  const int64_t large[] = {int64_t{1} << 61, 3};
  tensor.shape = large;
  says(tensor, kInvalidArgument, "more bytes than can be");
  tensor = OnDevice();
  tensor.data = nullptr;
  says(tensor, kInvalidArgument, "has no memory");
  tensor = OnDevice();
  tensor.device_id = 2;
  says(tensor, kInternal, "cuDeviceGet: unknown error [101]");
  model.failing = "to host";
  says(OnDevice(), kInternal, "cuMemcpyDtoH: MADE_UP [700]");

  const auto place = copies_.PlaceOnHost(OnDevice(), &buffer_);
  ASSERT_TRUE(place.ok());
  tensor = OnDevice();
  tensor.is_read_only = true;
  EXPECT_THAT(copies_.ToDevice(*place, tensor).message(),
              HasSubstr("read-only"));
  tensor = OnDevice();
  tensor.is_copy = true;
  EXPECT_THAT(copies_.ToDevice(*place, tensor).message(), HasSubstr("lost"));
}

TEST_F(DeviceCopiesTest, WithoutADriverItSaysSo) {
  const auto opened = DeviceCopies::Open();
  if (opened.ok()) GTEST_SKIP() << "there is a driver here";
  EXPECT_TRUE(absl::IsNotFound(opened.status())) << opened.status();
  EXPECT_THAT(opened.status().message(), HasSubstr("no CUDA driver"));
}

}  // namespace
}  // namespace optstate::client
