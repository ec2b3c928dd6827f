// Runs NCCL itself on a GPU, with one rank: NCCL takes no two ranks on one
// device. Skips, and says why, where there is no GPU or no NCCL.

#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/collective/nccl/cuda_queue.h"
#include "client/collective/nccl/nccl_collective.h"
#include "client/collective/nccl/nccl_library.h"
#include "client/collective/nccl/shared_object.h"
#include "client/collective/testing/memory_store.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

// Memory of the device, by the driver, in the context that the queue uses.
class DeviceMemory {
 public:
  DeviceMemory(DeviceQueue* queue, size_t bytes) : queue_(*queue) {
    const absl::StatusOr<SharedObject> driver =
        SharedObject::Open("libcuda.so.1");
    EXPECT_TRUE(driver.ok()) << driver.status();
    if (!driver.ok()) return;
    EXPECT_TRUE(driver->Find("cuMemAlloc_v2", &allocate_).ok());
    EXPECT_TRUE(driver->Find("cuMemFree_v2", &free_).ok());
    EXPECT_TRUE(driver->Find("cuMemcpyHtoD_v2", &to_device_).ok());
    EXPECT_TRUE(driver->Find("cuMemcpyDtoH_v2", &to_host_).ok());
    InContext([&] { return allocate_(&address_, bytes); });
    bytes_ = bytes;
  }
  ~DeviceMemory() {
    if (address_ != 0) InContext([&] { return free_(address_); });
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  absl::Span<std::byte> span() const {
    return absl::MakeSpan(reinterpret_cast<std::byte*>(address_), bytes_);
  }
  void Write(const std::vector<float>& values) {
    InContext([&] { return to_device_(address_, values.data(), bytes_); });
  }
  std::vector<float> Read() {
    std::vector<float> values(bytes_ / sizeof(float));
    InContext([&] { return to_host_(values.data(), address_, bytes_); });
    return values;
  }

 private:
  void InContext(absl::FunctionRef<int()> call) {
    int result = 0;
    EXPECT_TRUE(queue_
                    .WithDevice([&] {
                      result = call();
                      return absl::OkStatus();
                    })
                    .ok());
    EXPECT_EQ(result, 0);
  }

  DeviceQueue& queue_;
  int (*allocate_)(uint64_t* address, size_t bytes) = nullptr;
  int (*free_)(uint64_t address) = nullptr;
  int (*to_device_)(uint64_t to, const void* from, size_t bytes) = nullptr;
  int (*to_host_)(void* to, uint64_t from, size_t bytes) = nullptr;
  uint64_t address_ = 0;
  size_t bytes_ = 0;
};

TEST(NcclDevice, OneRank) {
  absl::StatusOr<std::unique_ptr<DeviceQueue>> queue =
      MakeCudaQueue(/*device=*/0, /*stream=*/nullptr);
  if (!queue.ok()) GTEST_SKIP() << "no GPU: " << queue.status();
  const absl::StatusOr<nccl::Library> library = nccl::Library::Open("");
  if (!library.ok()) GTEST_SKIP() << library.status();
  std::cerr << library->path() << " is NCCL " << library->version() << "\n";
  // Another queue of the device, since the collective takes this one.
  absl::StatusOr<std::unique_ptr<DeviceQueue>> own =
      MakeCudaQueue(/*device=*/0, /*stream=*/nullptr);
  ASSERT_TRUE(own.ok()) << own.status();
  MemoryStore store;
  NcclOptions options;
  const absl::StatusOr<std::unique_ptr<Collective>> made =
      MakeNcclCollective(options, &store, *std::move(queue));
  ASSERT_TRUE(made.ok()) << made.status();
  Collective& collective = **made;
  const std::vector<float> values = {1, 2.5f, -3, 4};
  DeviceMemory a(own->get(), values.size() * sizeof(float));
  DeviceMemory b(own->get(), values.size() * sizeof(float));
  a.Write(values);
  const auto f32 = ElementType::kFloat32;
  EXPECT_TRUE(collective.AllReduce(f32, a.span(), b.span()).ok());
  EXPECT_EQ(b.Read(), values);
  EXPECT_TRUE(
      collective
          .AllReduceEach(f32, {{a.span(), a.span()}, {b.span(), b.span()}})
          .ok());
  EXPECT_TRUE(collective.ReduceScatter(f32, a.span(), b.span()).ok());
  EXPECT_TRUE(collective.Reduce(f32, 0, a.span(), b.span()).ok());
  EXPECT_TRUE(collective.AllGather(a.span(), b.span()).ok());
  EXPECT_TRUE(collective.Broadcast(0, b.span()).ok());
  EXPECT_TRUE(collective.Barrier().ok());
  EXPECT_EQ(b.Read(), values);
  std::vector<std::byte> host(16);
  const absl::Status refused =
      collective.AllReduce(f32, host, absl::MakeSpan(host));
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              testing::HasSubstr("cudaHostRegister"));
  collective.Abort("the test is over");
  EXPECT_TRUE(absl::IsAborted(collective.Barrier()));
}

}  // namespace
}  // namespace optstate::client
