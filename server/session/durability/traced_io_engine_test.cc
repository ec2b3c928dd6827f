#include "server/session/durability/traced_io_engine.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"

namespace optstate::session {
namespace {

using io::IoEngine;
using io::IoRequest;
using io::kSectorBytes;

class TracedIoEngineTest : public testing::Test {
 protected:
  TracedIoEngineTest() : disk_({.folders = {"/fast", "/slow", "/elsewhere"}}) {
    v1::NvmeSettings nvme;
    nvme.add_directories("/fast");
    nvme.add_directories("/slow");
    engine_ =
        TraceIoEngine(io::MakeSimulatedIoEngine(&disk_), nvme, &recorder_);
  }

  io::FileId Open(const std::string& path) {
    const absl::StatusOr<io::FileId> file =
        engine_->Open(path, 4 * kSectorBytes, IoEngine::OpenMode::kCreate);
    EXPECT_TRUE(file.ok()) << file.status();
    return *file;
  }
  absl::Status Run(IoRequest::Kind kind, io::FileId file, uint64_t bytes) {
    alignas(kSectorBytes) static std::array<std::byte, 2 * kSectorBytes> buffer;
    request_ = IoRequest();
    request_.kind = kind;
    request_.file = file;
    request_.buffer = absl::MakeSpan(buffer).first(bytes);
    engine_->Submit(&request_);
    IoRequest* completed = nullptr;
    while (engine_->Poll({&completed, 1}, /*wait=*/true) == 0) {
    }
    return completed->status;
  }
  void BeginTrace() {
    ASSERT_TRUE(recorder_.Begin(1).ok());
    recorder_.Arm();
    recorder_.BeginStep(1);
  }
  // Ends the trace and returns "lane: name bytes" of each span.
  std::vector<std::string> EndTrace() {
    v1::TraceChunk chunk;
    EXPECT_FALSE(recorder_.Take(&chunk));
    recorder_.Disarm();
    recorder_.End();
    std::vector<std::string> spans;
    for (const v1::TraceSpan& span : chunk.spans()) {
      const v1::TraceLane& lane = chunk.lanes(static_cast<int>(span.lane()));
      EXPECT_EQ(lane.group(), "disks");
      EXPECT_EQ(span.step(), 0u);
      EXPECT_GE(span.duration_ns(), 0);
      spans.push_back(lane.name() + ": " + span.name() + " " +
                      std::to_string(span.bytes() / kSectorBytes));
    }
    return spans;
  }

  io::SimulatedDisk disk_;
  observe::TraceRecorder recorder_;
  std::unique_ptr<IoEngine> engine_;
  IoRequest request_;
};

TEST_F(TracedIoEngineTest, EachRequestIsASpanOfItsDirectory) {
  const io::FileId fast = Open("/fast/file");
  const io::FileId slow = Open("/slow/file");
  const io::FileId other = Open("/elsewhere/file");
  EXPECT_TRUE(Run(IoRequest::Kind::kWrite, fast, kSectorBytes).ok());
  BeginTrace();
  EXPECT_TRUE(Run(IoRequest::Kind::kWrite, fast, 2 * kSectorBytes).ok());
  EXPECT_TRUE(Run(IoRequest::Kind::kRead, fast, kSectorBytes).ok());
  EXPECT_TRUE(Run(IoRequest::Kind::kSync, slow, 0).ok());
  EXPECT_TRUE(Run(IoRequest::Kind::kWrite, other, kSectorBytes).ok());
  EXPECT_EQ(EndTrace(),
            (std::vector<std::string>{
                "writes of /fast: write 2", "reads of /fast: read 1",
                "syncs of /slow: sync 0", "writes of /elsewhere: write 1"}));
}

TEST_F(TracedIoEngineTest, ARequestThatFailsMovesNothing) {
  const io::FileId file = Open("/fast/file");
  io::SimulatedFault fault;
  fault.kind = IoRequest::Kind::kRead;
  fault.path = "/fast/file";
  disk_.AddFault(fault);
  BeginTrace();
  EXPECT_FALSE(Run(IoRequest::Kind::kRead, file, kSectorBytes).ok());
  EXPECT_EQ(EndTrace(), (std::vector<std::string>{"reads of /fast: read 0"}));
}

// An object that was measured in one trace is used again before the next.
TEST_F(TracedIoEngineTest, WhatWasUnderWayBeforeTheTraceIsNotInIt) {
  const io::FileId file = Open("/fast/file");
  BeginTrace();
  EXPECT_TRUE(Run(IoRequest::Kind::kWrite, file, kSectorBytes).ok());
  EXPECT_EQ(EndTrace().size(), 1u);
  alignas(kSectorBytes) static std::array<std::byte, kSectorBytes> buffer;
  const int64_t measured_ns = request_.submitted_ns;
  EXPECT_NE(measured_ns, 0);
  request_ = IoRequest();
  request_.kind = IoRequest::Kind::kWrite;
  request_.file = file;
  request_.buffer = absl::MakeSpan(buffer);
  request_.submitted_ns = measured_ns;
  engine_->Submit(&request_);
  BeginTrace();
  IoRequest* completed = nullptr;
  while (engine_->Poll({&completed, 1}, /*wait=*/true) == 0) {
  }
  EXPECT_TRUE(EndTrace().empty());
}

// The records of a job may be made anew within a trace.
TEST_F(TracedIoEngineTest, TheEngineMayEndWithinATrace) {
  const io::FileId file = Open("/fast/file");
  BeginTrace();
  EXPECT_TRUE(Run(IoRequest::Kind::kWrite, file, kSectorBytes).ok());
  engine_ = nullptr;
  EXPECT_EQ(EndTrace(), (std::vector<std::string>{"writes of /fast: write 1"}));
}

}  // namespace
}  // namespace optstate::session
