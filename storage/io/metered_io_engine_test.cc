#include "storage/io/metered_io_engine.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "gtest/gtest.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"

namespace optstate::io {
namespace {

TEST(MeteredIoEngineTest, CountsTheBytesOfRequestsThatSucceed) {
  SimulatedDisk disk(SimulatedDiskOptions{});
  std::atomic<uint64_t> done_bytes = 0;
  const std::unique_ptr<IoEngine> engine =
      MeterIoEngine(MakeSimulatedIoEngine(&disk), &done_bytes);
  const absl::StatusOr<FileId> file =
      engine->Open("/disk/file", 4 * kSectorBytes, IoEngine::OpenMode::kCreate);
  ASSERT_TRUE(file.ok()) << file.status();
  alignas(kSectorBytes) static std::array<std::byte, 2 * kSectorBytes> bytes;
  const auto run = [&](IoRequest::Kind kind, uint64_t count) {
    IoRequest request;
    request.kind = kind;
    request.file = *file;
    request.buffer = absl::MakeSpan(bytes).first(count);
    engine->Submit(&request);
    IoRequest* completed = nullptr;
    while (engine->Poll({&completed, 1}, /*wait=*/true) == 0) {
    }
    return completed->status;
  };
  EXPECT_TRUE(run(IoRequest::Kind::kWrite, 2 * kSectorBytes).ok());
  EXPECT_EQ(done_bytes, 2 * kSectorBytes);
  EXPECT_TRUE(run(IoRequest::Kind::kRead, kSectorBytes).ok());
  EXPECT_TRUE(run(IoRequest::Kind::kSync, 0).ok());
  EXPECT_EQ(done_bytes, 3 * kSectorBytes);
  SimulatedFault fault;
  fault.kind = IoRequest::Kind::kRead;
  fault.path = "/disk/file";
  disk.AddFault(fault);
  EXPECT_FALSE(run(IoRequest::Kind::kRead, kSectorBytes).ok());
  EXPECT_EQ(done_bytes, 3 * kSectorBytes);
}

}  // namespace
}  // namespace optstate::io
