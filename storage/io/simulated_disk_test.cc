#include "storage/io/simulated_disk.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/io/test_seed.h"

namespace optstate::io {
namespace {

using Kind = IoRequest::Kind;
using Effect = SimulatedFault::Effect;

constexpr uint64_t kBytes = 16 * kSectorBytes;
const char* const kPath = "/disk/f";

// An engine with one file of zeros. A write fills one sector of kSectorBytes
// with one value.
class SimulatedDiskTest : public testing::Test {
 protected:
  SimulatedDiskTest() { Start({}); }

  void Start(SimulatedDiskOptions options) {
    engine_ = nullptr;
    disk_ = std::make_unique<SimulatedDisk>(std::move(options));
    StartEngine(IoEngine::OpenMode::kCreate);
  }
  void StartEngine(IoEngine::OpenMode mode) {
    engine_ = nullptr;
    engine_ = MakeSimulatedIoEngine(disk_.get());
    const auto file = engine_->Open(kPath, kBytes, mode);
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *file;
  }
  // Goes on with another state of the disk.
  void Replace(std::unique_ptr<SimulatedDisk> disk) {
    engine_ = nullptr;
    disk_ = std::move(disk);
    StartEngine(IoEngine::OpenMode::kOpen);
  }

  IoRequest Request(Kind kind, uint64_t sector, char value) {
    IoRequest request;
    request.kind = kind;
    request.file = file_;
    if (kind == Kind::kSync) {
      request.priority = IoPriority::kBackground;
      return request;
    }
    request.offset_bytes = sector * kSectorBytes;
    request.buffer = absl::MakeSpan(buffers_[next_buffer_++ % kBuffers].bytes);
    std::memset(request.buffer.data(), value, request.buffer.size());
    return request;
  }
  size_t Finish() {
    size_t completed = 0;
    std::array<IoRequest*, 4> requests;
    while (engine_->in_flight() > 0) {
      completed += engine_->Poll(absl::MakeSpan(requests), true);
    }
    return completed;
  }
  absl::Status Run(IoRequest request) {
    engine_->Submit(&request);
    Finish();
    return request.status;
  }
  absl::Status Write(uint64_t sector, char value) {
    return Run(Request(Kind::kWrite, sector, value));
  }
  absl::Status Read(uint64_t sector) {
    return Run(Request(Kind::kRead, sector, 0));
  }
  absl::Status Sync() { return Run(Request(Kind::kSync, 0, 0)); }

  // Returns the first byte of each of a sector's eight sectors on the disk.
  static std::string At(const SimulatedDisk& disk, uint64_t sector) {
    std::string text;
    for (uint64_t i = 0; i < kSectorBytes; i += kSimulatedSectorBytes) {
      const auto bytes = disk.Read(kPath, sector * kSectorBytes + i, 1);
      text.push_back(bytes[0] == std::byte{0} ? '0'
                                              : static_cast<char>(bytes[0]));
    }
    return text;
  }
  // Returns what may be at a sector after a power cut.
  static std::set<std::string> AfterCrashes(const SimulatedDisk& disk,
                                            uint64_t sector) {
    std::set<std::string> found;
    for (uint64_t seed = 0; seed < 200; ++seed) {
      found.insert(At(*disk.CrashAtRandom(seed), sector));
    }
    return found;
  }
  static std::string All(char value) { return std::string(8, value); }

  static constexpr size_t kBuffers = 64;
  struct Buffer {
    alignas(kSectorBytes) std::array<std::byte, kSectorBytes> bytes;
  };
  std::vector<Buffer> buffers_ = std::vector<Buffer>(kBuffers);
  size_t next_buffer_ = 0;
  std::unique_ptr<SimulatedDisk> disk_;
  std::unique_ptr<IoEngine> engine_;
  FileId file_;
};

TEST_F(SimulatedDiskTest, SyncedWritesSurviveEveryCrash) {
  EXPECT_EQ(Write(3, 'a'), absl::OkStatus());
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(AfterCrashes(*disk_, 3), std::set<std::string>{All('a')});
  Replace(disk_->CrashAtRandom(1));
  EXPECT_EQ(At(*disk_, 3), All('a'));
  EXPECT_EQ(Write(3, 'b'), absl::OkStatus());
  EXPECT_EQ(At(*disk_, 3), All('b'));
}

TEST_F(SimulatedDiskTest, StatesDoNotShareWhatIsWrittenLater) {
  EXPECT_EQ(Write(3, 'a'), absl::OkStatus());
  EXPECT_EQ(Sync(), absl::OkStatus());
  const auto crashed = disk_->CrashAtRandom(1);
  const auto killed = disk_->AfterKill(1);
  EXPECT_EQ(Write(3, 'b'), absl::OkStatus());
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(At(*crashed, 3), All('a'));
  EXPECT_EQ(At(*killed, 3), All('a'));
  EXPECT_EQ(At(*disk_, 3), All('b'));
}

TEST_F(SimulatedDiskTest, UnsyncedWritesAreOldOrNewOrTorn) {
  EXPECT_EQ(Write(3, 'a'), absl::OkStatus());
  const std::set<std::string> found = AfterCrashes(*disk_, 3);
  EXPECT_EQ(found.count(All('0')), 1);
  EXPECT_EQ(found.count(All('a')), 1);
  EXPECT_GT(found.size(), 2);
}

TEST_F(SimulatedDiskTest, CrashesAreEnumeratedOnceEach) {
  EXPECT_EQ(Write(0, 'a'), absl::OkStatus());
  EXPECT_EQ(Write(0, 'b'), absl::OkStatus());
  std::set<std::string> found;
  uint64_t visits = 0;
  const auto visit = [&](std::unique_ptr<SimulatedDisk> disk) {
    found.insert(At(*disk, 0));
    ++visits;
  };
  EXPECT_TRUE(disk_->ForEachCrash(10000, visit));
  EXPECT_EQ(visits, 6561);  // 3 to the power of 8
  EXPECT_EQ(found.size(), 6561);
  visits = 0;
  EXPECT_FALSE(disk_->ForEachCrash(6560, visit));
  EXPECT_EQ(visits, 6560);
  EXPECT_EQ(Sync(), absl::OkStatus());
  visits = 0;
  EXPECT_TRUE(disk_->ForEachCrash(10000, visit));
  EXPECT_EQ(visits, 1);
}

TEST_F(SimulatedDiskTest, CrashChoiceKnowsTheWrites) {
  EXPECT_EQ(Write(0, 'a'), absl::OkStatus());
  EXPECT_EQ(Write(0, 'b'), absl::OkStatus());
  const auto disk = disk_->Crash([](const CrashSector& sector) {
    EXPECT_EQ(sector.path, kPath);
    EXPECT_EQ(sector.writes.size(), 2);
    EXPECT_LT(sector.writes[0], sector.writes[1]);
    return static_cast<int>(sector.sector % 3);
  });
  EXPECT_EQ(At(*disk, 0), "0ab0ab0a");
}

TEST_F(SimulatedDiskTest, SyncIsForWritesThatWereCompletedBefore) {
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  IoRequest write = Request(Kind::kWrite, 2, 'b');
  IoRequest sync = Request(Kind::kSync, 0, 0);
  engine_->Submit(&write);
  engine_->Submit(&sync);
  EXPECT_EQ(Finish(), 2);
  EXPECT_EQ(AfterCrashes(*disk_, 1), std::set<std::string>{All('a')});
  EXPECT_GT(AfterCrashes(*disk_, 2).size(), 2);
}

// A sync does not cover a write that was under way when it was submitted, even
// when the sync had to wait until that write ended.
TEST_F(SimulatedDiskTest, SyncThatWaitsIsForWritesBeforeItsSubmission) {
  engine_ = nullptr;
  engine_ = MakeSimulatedIoEngine(disk_.get(), /*queue_depth=*/1);
  file_ = *engine_->Open(kPath, kBytes, IoEngine::OpenMode::kOpen);
  IoRequest write = Request(Kind::kWrite, 2, 'b');
  IoRequest sync = Request(Kind::kSync, 0, 0);
  engine_->Submit(&write);
  engine_->Submit(&sync);
  EXPECT_EQ(Finish(), 2);
  EXPECT_GT(AfterCrashes(*disk_, 2).size(), 2);
}

TEST_F(SimulatedDiskTest, WriteUnderWayMayBeOnTheMedium) {
  IoRequest write = Request(Kind::kWrite, 1, 'a');
  engine_->Submit(&write);
  std::array<IoRequest*, 1> completed;
  EXPECT_EQ(engine_->Poll(absl::MakeSpan(completed), false), 0);
  EXPECT_EQ(AfterCrashes(*disk_, 1).count(All('a')), 1);
  EXPECT_EQ(AfterCrashes(*disk_, 1).count(All('0')), 1);
  // A kill tears it as well.
  std::set<std::string> found;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    found.insert(At(*disk_->AfterKill(seed), 1));
  }
  EXPECT_GT(found.size(), 2);
}

TEST_F(SimulatedDiskTest, KillKeepsWhatIsCompletedButDoesNotSyncIt) {
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  Replace(disk_->AfterKill(1));
  EXPECT_EQ(At(*disk_, 1), All('a'));
  EXPECT_EQ(AfterCrashes(*disk_, 1).count(All('0')), 1);
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(AfterCrashes(*disk_, 1), std::set<std::string>{All('a')});
}

TEST_F(SimulatedDiskTest, ErrorsComeOnceOrForGoodWhereTheyAreSet) {
  disk_->AddFault({.kind = Kind::kRead,
                   .begin = 2 * kSectorBytes,
                   .end = 3 * kSectorBytes,
                   .skip = 1});
  EXPECT_EQ(Read(1), absl::OkStatus());
  EXPECT_EQ(Read(2), absl::OkStatus());
  EXPECT_TRUE(absl::IsDataLoss(Read(2)));
  EXPECT_EQ(Read(2), absl::OkStatus());
  disk_->AddFault({.kind = Kind::kWrite,
                   .path = kPath,
                   .times = SimulatedFault::kForever,
                   .error_number = ENOSPC});
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(absl::IsResourceExhausted(Write(1, 'a')));
  }
  EXPECT_EQ(Read(2), absl::OkStatus());
  disk_->ClearFaults();
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
}

TEST_F(SimulatedDiskTest, ShortCallsAreResumed) {
  disk_->AddFault({.effect = Effect::kShort, .times = 4, .bytes = 1024});
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  EXPECT_EQ(At(*disk_, 1), All('a'));
}

TEST_F(SimulatedDiskTest, CallsAreDisturbedAtRandom) {
  Start({.seed = TestSeed(), .short_one_in = 2, .interrupted_one_in = 2});
  uint64_t calls = 0;
  uint64_t short_calls = 0;
  uint64_t interrupted = 0;
  disk_->SetHook([&](const SimulatedEvent& event) {
    if (event.kind != SimulatedEvent::Kind::kWriteEnded) return;
    ++calls;
    if (event.result < 0) ++interrupted;
    if (event.result > 0 && event.bytes % kSectorBytes != 0) ++short_calls;
  });
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  EXPECT_EQ(At(*disk_, 1), All('a'));
  EXPECT_GT(interrupted, 0);
  EXPECT_GT(short_calls, 0);
  EXPECT_GT(calls, 50 + interrupted);
}

TEST_F(SimulatedDiskTest, LostSyncSucceedsWithoutEffect) {
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  disk_->AddFault({.effect = Effect::kLostSync, .kind = Kind::kSync});
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(AfterCrashes(*disk_, 1).count(All('0')), 1);
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(AfterCrashes(*disk_, 1).count(All('0')), 0);
}

// Retrying a failed sync is of no use; writing again is.
TEST_F(SimulatedDiskTest, FailedSyncDropsItsWrites) {
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  disk_->AddFault({.kind = Kind::kSync});
  EXPECT_TRUE(absl::IsDataLoss(Sync()));
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(At(*disk_, 1), All('a'));
  EXPECT_EQ(AfterCrashes(*disk_, 1).count(All('0')), 1);
  EXPECT_EQ(Write(1, 'b'), absl::OkStatus());
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(AfterCrashes(*disk_, 1), std::set<std::string>{All('b')});
}

TEST_F(SimulatedDiskTest, MisdirectedWrite) {
  disk_->AddFault({.effect = Effect::kMisdirect, .bytes = 5 * kSectorBytes});
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  EXPECT_EQ(At(*disk_, 1), All('0'));
  EXPECT_EQ(At(*disk_, 5), All('a'));
}

TEST_F(SimulatedDiskTest, FlippedBitSurvives) {
  EXPECT_EQ(Write(1, 'a'), absl::OkStatus());
  disk_->Flip(kPath, kSectorBytes, std::byte{2});
  EXPECT_EQ(At(*disk_, 1), "caaaaaaa");
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(AfterCrashes(*disk_, 1), std::set<std::string>{"caaaaaaa"});
}

TEST_F(SimulatedDiskTest, LostFileAndLostDevice) {
  disk_->SetGone(true);
  EXPECT_TRUE(absl::IsUnavailable(Read(1)));
  EXPECT_TRUE(absl::IsUnavailable(Write(1, 'a')));
  EXPECT_TRUE(absl::IsUnavailable(Sync()));
  engine_->Close(file_);
  EXPECT_TRUE(absl::IsUnavailable(
      engine_->Open(kPath, kBytes, IoEngine::OpenMode::kOpen).status()));
  disk_->SetGone(false);
  disk_->LoseFile(kPath);
  EXPECT_TRUE(absl::IsNotFound(
      engine_->Open(kPath, kBytes, IoEngine::OpenMode::kOpen).status()));
}

// Returns the order in which 16 reads are completed.
std::vector<uint64_t> CompletionOrder(uint64_t seed) {
  SimulatedDisk disk({.seed = seed, .latency_us_max = 1000});
  const auto engine = MakeSimulatedIoEngine(&disk);
  const auto file = engine->Open(kPath, kBytes, IoEngine::OpenMode::kCreate);
  alignas(kSectorBytes) static std::array<std::byte, kSectorBytes> buffer;
  std::array<IoRequest, 16> requests;
  for (uint64_t i = 0; i < requests.size(); ++i) {
    requests[i].file = *file;
    requests[i].offset_bytes = i * kSectorBytes;
    requests[i].buffer = absl::MakeSpan(buffer);
    engine->Submit(&requests[i]);
  }
  std::vector<uint64_t> order;
  std::array<IoRequest*, 4> completed;
  while (engine->in_flight() > 0) {
    const size_t count =
        engine->Poll(absl::MakeSpan(completed), order.size() % 2 == 0);
    for (size_t i = 0; i < count; ++i) {
      order.push_back(completed[i]->offset_bytes / kSectorBytes);
    }
  }
  return order;
}

TEST(SimulatedIoEngineTest, OrderFollowsFromTheSeed) {
  std::set<std::vector<uint64_t>> orders;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    orders.insert(CompletionOrder(seed));
    EXPECT_EQ(CompletionOrder(seed), CompletionOrder(seed));
  }
  EXPECT_EQ(orders.size(), 10);
}

// A record that says which data is valid, written with or without a sync
// between. The disk has to find the missing one.
class CrashPointsTest : public SimulatedDiskTest {
 protected:
  // Returns the crash states, at all points of some updates, in which the
  // record is newer than its data.
  int Violations(bool sync_between) {
    Start({.seed = TestSeed(), .latency_us_max = 300});
    int violations = 0;
    uint64_t points = 0;
    disk_->SetHook([&](const SimulatedEvent&) {
      ++points;
      for (uint64_t seed = 0; seed < 20; ++seed) {
        const auto crashed = disk_->CrashAtRandom(points * 1000 + seed);
        const char record = At(*crashed, 0)[0];
        if (record != '0' && At(*crashed, record % 2 + 1) != All(record)) {
          ++violations;
        }
      }
    });
    for (char value = 'a'; value < 'h'; ++value) {
      // Two slots take turns; the record is in the first sector.
      EXPECT_EQ(Write(static_cast<uint64_t>(value % 2 + 1), value),
                absl::OkStatus());
      if (sync_between) {
        EXPECT_EQ(Sync(), absl::OkStatus());
      }
      EXPECT_EQ(Write(0, value), absl::OkStatus());
      EXPECT_EQ(Sync(), absl::OkStatus());
    }
    EXPECT_GE(points, 42);
    disk_->SetHook(nullptr);
    return violations;
  }
};

TEST_F(CrashPointsTest, CorrectProtocolHasNoViolation) {
  EXPECT_EQ(Violations(/*sync_between=*/true), 0);
}

TEST_F(CrashPointsTest, MissingSyncIsFound) {
  EXPECT_GT(Violations(/*sync_between=*/false), 0);
}

}  // namespace
}  // namespace optstate::io
