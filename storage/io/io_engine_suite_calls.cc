// Tests the calls that an engine makes: their order, bound and results.

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/io/io_engine_suite.h"

namespace optstate::io {
namespace {

// Lets each request's call of some number end with a result of the test's.
class ResultHook final : public IoHook {
 public:
  ResultHook(IoRequest::Kind kind, int64_t result, int times)
      : kind_(kind), result_(result), times_(times) {}
  int64_t OnEnd(const IoRequest& request, int64_t result) override {
    if (request.kind != kind_) return result;
    return calls_++ < times_ ? result_ : result;
  }
  int calls() const { return calls_; }

 private:
  const IoRequest::Kind kind_;
  const int64_t result_;
  const int times_;
  std::atomic<int> calls_ = 0;
};

// Cuts every call to `bytes`.
class ShortHook final : public IoHook {
 public:
  explicit ShortHook(uint64_t bytes) : bytes_(bytes) {}
  uint64_t OnBegin(const IoRequest& /*request*/, uint64_t bytes) override {
    ++calls_;
    return std::min(bytes, bytes_);
  }
  int calls() const { return calls_; }

 private:
  const uint64_t bytes_;
  std::atomic<int> calls_ = 0;
};

// Counts the calls under way, of which there are many: at first, each has to be
// repeated.
class CountHook final : public IoHook {
 public:
  uint64_t OnBegin(const IoRequest& /*request*/, uint64_t bytes) override {
    const int now = ++under_way_;
    int most = most_;
    while (most < now && !most_.compare_exchange_weak(most, now)) {
    }
    return bytes;
  }
  int64_t OnEnd(const IoRequest& request, int64_t result) override {
    --under_way_;
    if (request.kind != IoRequest::Kind::kRead) return result;
    return ++calls_ < 2000 ? -EAGAIN : result;
  }
  int most() const { return most_; }

 private:
  std::atomic<int> under_way_ = 0;
  std::atomic<int> calls_ = 0;
  std::atomic<int> most_ = 0;
};

// Keeps requests from being done until it is released.
class HoldHook final : public IoHook {
 public:
  int64_t OnEnd(const IoRequest& /*request*/, int64_t result) override {
    return released_ ? result : -EAGAIN;
  }
  void Release() { released_ = true; }

 private:
  std::atomic<bool> released_ = false;
};

std::vector<int> PrioritiesOf(absl::Span<IoRequest* const> requests) {
  std::vector<int> priorities;
  for (const IoRequest* request : requests) {
    priorities.push_back(static_cast<int>(request->priority));
  }
  return priorities;
}

TEST_P(IoEngineSuite, UrgentRequestsGoFirst) {
  Restart({.queue_depth = 1});
  const FileId file = Create("f", 12 * kSectorBytes);
  const IoBuffer buffer(kSectorBytes);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 4; ++i) {
    for (const IoPriority priority :
         {IoPriority::kBackground, IoPriority::kSwapIn, IoPriority::kSwapOut}) {
      requests.push_back(
          Read(file, requests.size() * kSectorBytes, buffer, priority));
    }
  }
  const std::vector<IoRequest*> order = RunAll(absl::MakeSpan(requests));
  EXPECT_EQ(PrioritiesOf(order),
            (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2}));
  for (int i = 0; i < 3; ++i) {
    for (int j = 1; j < 4; ++j) {
      EXPECT_LT(order[4 * i + j - 1], order[4 * i + j]) << "of one class";
    }
  }
}

// A later urgent request overtakes those that wait, but none that the kernel
// has.
TEST_P(IoEngineSuite, UrgentRequestOvertakesThoseThatWait) {
  HoldHook hook;
  Restart({.queue_depth = 1, .hook = &hook});
  const FileId file = Create("f", 8 * kSectorBytes);
  const IoBuffer buffer(kSectorBytes);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 7; ++i) {
    requests.push_back(
        Read(file, i * kSectorBytes, buffer, IoPriority::kBackground));
  }
  for (IoRequest& request : requests) engine().Submit(&request);
  std::array<IoRequest*, 8> completed;
  EXPECT_EQ(engine().Poll(absl::MakeSpan(completed), false), 0);
  IoRequest urgent = Read(file, 7 * kSectorBytes, buffer, IoPriority::kSwapIn);
  engine().Submit(&urgent);
  EXPECT_EQ(engine().Poll(absl::MakeSpan(completed), false), 0);
  hook.Release();
  std::vector<IoRequest*> order;
  while (engine().in_flight() > 0) {
    const size_t count = engine().Poll(absl::MakeSpan(completed), true);
    order.insert(order.end(), completed.begin(), completed.begin() + count);
  }
  ASSERT_EQ(order.size(), 8);
  EXPECT_TRUE(order[0] == &urgent || order[1] == &urgent);
}

TEST_P(IoEngineSuite, KernelHasNoMoreThanQueueDepth) {
  CountHook hook;
  Restart({.queue_depth = 3, .hook = &hook});
  const FileId file = Create("f", 64 * kSectorBytes);
  // Bytes that were never written would be read without the disk.
  EXPECT_EQ(Run(Write(file, 0, IoBuffer(64 * kSectorBytes))), absl::OkStatus());
  const IoBuffer buffer(kSectorBytes);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 64; ++i) {
    requests.push_back(Read(file, i * kSectorBytes, buffer));
  }
  RunAll(absl::MakeSpan(requests));
  EXPECT_LE(hook.most(), 3);
}

TEST_P(IoEngineSuite, PollReturnsWhatFits) {
  const FileId file = Create("f", 10 * kSectorBytes);
  const IoBuffer buffer(kSectorBytes);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 10; ++i) {
    requests.push_back(Read(file, i * kSectorBytes, buffer));
  }
  for (IoRequest& request : requests) engine().Submit(&request);
  EXPECT_EQ(engine().in_flight(), 10);
  std::set<IoRequest*> seen;
  std::array<IoRequest*, 3> completed;
  while (engine().in_flight() > 0) {
    const size_t before = engine().in_flight();
    const size_t count = engine().Poll(absl::MakeSpan(completed), true);
    EXPECT_LE(count, 3);
    EXPECT_EQ(engine().in_flight(), before - count);
    seen.insert(completed.begin(), completed.begin() + count);
  }
  EXPECT_EQ(seen.size(), 10);
}

TEST_P(IoEngineSuite, PollReturnsWhenNothingIsUnderWay) {
  std::array<IoRequest*, 1> completed;
  EXPECT_EQ(engine().Poll(absl::MakeSpan(completed), true), 0);
  EXPECT_EQ(engine().in_flight(), 0);
}

TEST_P(IoEngineSuite, WakeEndsTheNextPoll) {
  HoldHook hook;
  Restart({.hook = &hook});
  const FileId file = Create("f", kSectorBytes);
  const IoBuffer buffer(kSectorBytes);
  IoRequest request = Read(file, 0, buffer);
  engine().Submit(&request);
  std::array<IoRequest*, 1> completed;
  for (int i = 0; i < 3; ++i) {
    engine().Wake();
    engine().Wake();
    EXPECT_EQ(engine().Poll(absl::MakeSpan(completed), true), 0);
  }
  hook.Release();
  EXPECT_EQ(engine().Poll(absl::MakeSpan(completed), true), 1);
  EXPECT_EQ(request.status, absl::OkStatus());
}

TEST_P(IoEngineSuite, WakeFromAnotherThread) {
  HoldHook hook;
  Restart({.hook = &hook});
  const FileId file = Create("f", kSectorBytes);
  const IoBuffer buffer(kSectorBytes);
  IoRequest request = Read(file, 0, buffer);
  engine().Submit(&request);
  std::array<IoRequest*, 1> completed;
  for (int i = 0; i < 100; ++i) {
    std::thread waker([this] { engine().Wake(); });
    EXPECT_EQ(engine().Poll(absl::MakeSpan(completed), true), 0);
    waker.join();
  }
  hook.Release();
  EXPECT_EQ(engine().Poll(absl::MakeSpan(completed), true), 1);
}

TEST_P(IoEngineSuite, ShortCallsAreResumed) {
  constexpr uint64_t kBytes = 5 * kSectorBytes;
  IoBuffer written(kBytes);
  written.Fill(1);
  int round = 0;
  for (const uint64_t bytes : {512, 1536, 4096, 8192}) {
    ShortHook hook(bytes);
    Restart({.hook = &hook});
    const FileId file = Create("f" + std::to_string(round++), 2 * kBytes);
    const int calls = static_cast<int>((kBytes + bytes - 1) / bytes);
    EXPECT_EQ(Run(Write(file, kBytes, written)), absl::OkStatus());
    EXPECT_EQ(hook.calls(), calls);
    IoBuffer read(kBytes);
    EXPECT_EQ(Run(Read(file, kBytes, read)), absl::OkStatus());
    EXPECT_EQ(hook.calls(), 2 * calls);
    EXPECT_TRUE(read == written) << bytes;
  }
}

TEST_P(IoEngineSuite, InterruptedCallsAreRepeated) {
  int round = 0;
  for (const int error_number : {EINTR, EAGAIN}) {
    for (const Kind kind : {Kind::kRead, Kind::kWrite}) {
      ResultHook hook(kind, -error_number, 3);
      Restart({.hook = &hook});
      const FileId file = Create("f" + std::to_string(round++), kSectorBytes);
      IoBuffer written(kSectorBytes);
      IoBuffer read(kSectorBytes);
      written.Fill(1);
      EXPECT_EQ(Run(Write(file, 0, written)), absl::OkStatus());
      EXPECT_EQ(Run(Sync(file)), absl::OkStatus());
      EXPECT_EQ(Run(Read(file, 0, read)), absl::OkStatus());
      EXPECT_EQ(hook.calls(), 4);
      EXPECT_TRUE(read == written);
    }
  }
}

// Its repetition would succeed, whatever the first one has lost.
TEST_P(IoEngineSuite, AnInterruptedSyncIsAnErrorAndIsNotRepeated) {
  int round = 0;
  for (const int error_number : {EINTR, EAGAIN}) {
    ResultHook hook(Kind::kSync, -error_number, 3);
    Restart({.hook = &hook});
    const FileId file = Create("f" + std::to_string(round++), kSectorBytes);
    EXPECT_FALSE(Run(Sync(file)).ok()) << error_number;
    EXPECT_EQ(hook.calls(), 1);
  }
}

TEST_P(IoEngineSuite, ErrorsHaveTheirCodesAndAreNotRepeated) {
  const struct {
    int error_number;
    absl::StatusCode code;
  } kErrors[] = {
      {EIO, absl::StatusCode::kDataLoss},
      {ENOSPC, absl::StatusCode::kResourceExhausted},
      {EDQUOT, absl::StatusCode::kResourceExhausted},
      {ENODEV, absl::StatusCode::kUnavailable},
      {EROFS, absl::StatusCode::kUnavailable},
  };
  int round = 0;
  for (const auto& error : kErrors) {
    for (const Kind kind : {Kind::kRead, Kind::kWrite, Kind::kSync}) {
      ResultHook hook(kind, -error.error_number, 1);
      Restart({.hook = &hook});
      const std::string name = "f" + std::to_string(round++);
      const FileId file = Create(name, 2 * kSectorBytes);
      const IoBuffer buffer(kSectorBytes);
      IoRequest request =
          kind == Kind::kSync ? Sync(file) : Read(file, kSectorBytes, buffer);
      request.kind = kind;
      const absl::Status status = Run(request);
      EXPECT_EQ(status.code(), error.code) << status;
      EXPECT_EQ(hook.calls(), 1);
      EXPECT_NE(status.message().find(Path(name)), std::string::npos) << status;
      if (kind != Kind::kSync) {
        EXPECT_NE(status.message().find(std::to_string(kSectorBytes)),
                  std::string::npos)
            << status;
      }
      // The engine goes on.
      EXPECT_EQ(Run(request), absl::OkStatus());
    }
  }
}

// The request can be submitted again, and then begins anew.
TEST_P(IoEngineSuite, ErrorAfterAShortCallEndsTheRequest) {
  class Hook final : public IoHook {
   public:
    uint64_t OnBegin(const IoRequest& /*request*/, uint64_t bytes) override {
      return std::min<uint64_t>(bytes, kSectorBytes);
    }
    int64_t OnEnd(const IoRequest& /*request*/, int64_t result) override {
      return ++calls_ == 2 ? -EIO : result;
    }
    int calls() const { return calls_; }

   private:
    std::atomic<int> calls_ = 0;
  } hook;
  Restart({.hook = &hook});
  const FileId file = Create("f", 4 * kSectorBytes);
  IoBuffer written(4 * kSectorBytes);
  written.Fill(1);
  IoRequest request = Write(file, 0, written);
  RunAll(absl::MakeSpan(&request, 1));
  EXPECT_TRUE(absl::IsDataLoss(request.status)) << request.status;
  EXPECT_EQ(hook.calls(), 2);
  RunAll(absl::MakeSpan(&request, 1));
  EXPECT_EQ(request.status, absl::OkStatus());
  EXPECT_EQ(hook.calls(), 6);
  IoBuffer read(4 * kSectorBytes);
  EXPECT_EQ(Run(Read(file, 0, read)), absl::OkStatus());
  EXPECT_TRUE(read == written);
}

TEST_P(IoEngineSuite, DestructionWaitsForTheKernel) {
  constexpr uint64_t kBytes = uint64_t{1} << 20;
  constexpr uint64_t kRequests = 24;
  IoBuffer content(kRequests * kBytes);
  content.Fill(7);
  // Bytes that were never written would be read without the disk.
  EXPECT_EQ(Run(Write(Create("f", kRequests * kBytes), 0, content)),
            absl::OkStatus());
  for (int round = 0; round < 5; ++round) {
    Restart({.queue_depth = static_cast<int>(kRequests)});
    const FileId file = Open("f", kRequests * kBytes);
    const IoBuffer buffer(kRequests * kBytes);
    std::vector<IoRequest> requests;
    for (uint64_t i = 0; i < kRequests; ++i) {
      requests.push_back(Read(file, i * kBytes, buffer));
      requests[i].buffer = buffer.span().subspan(i * kBytes, kBytes);
    }
    for (IoRequest& request : requests) engine().Submit(&request);
    std::array<IoRequest*, 1> completed;
    engine().Poll(absl::MakeSpan(completed), false);
    Restart({});
    // Nothing touches the buffer any more, and the lock is free.
    std::fill(buffer.span().begin(), buffer.span().end(), std::byte{8});
    IoBuffer read(kRequests * kBytes);
    EXPECT_EQ(Run(Read(Open("f", kRequests * kBytes), 0, read)),
              absl::OkStatus());
    EXPECT_TRUE(read == content);
    EXPECT_TRUE(std::all_of(buffer.span().begin(), buffer.span().end(),
                            [](std::byte b) { return b == std::byte{8}; }));
  }
}

TEST_P(IoEngineSuite, DestructionDropsWhatWaits) {
  Restart({.queue_depth = 1});
  const FileId file = Create("f", 8 * kSectorBytes);
  const IoBuffer buffer(kSectorBytes);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 8; ++i) {
    requests.push_back(Read(file, i * kSectorBytes, buffer));
  }
  for (IoRequest& request : requests) engine().Submit(&request);
  Restart({});
  Open("f", 8 * kSectorBytes);
}

TEST_P(IoEngineSuite, SyncsAmongWrites) {
  const FileId file = Create("f", 32 * kSectorBytes);
  IoBuffer buffer(kSectorBytes);
  buffer.Fill(1);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 32; ++i) {
    requests.push_back(Write(file, i * kSectorBytes, buffer));
    if (i % 4 == 0) requests.push_back(Sync(file));
  }
  for (const IoRequest* request : RunAll(absl::MakeSpan(requests))) {
    EXPECT_EQ(request->status, absl::OkStatus());
  }
}

}  // namespace
}  // namespace optstate::io
