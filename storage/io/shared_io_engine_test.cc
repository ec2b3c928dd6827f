#include "storage/io/shared_io_engine.h"

#include <stdlib.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::io {
namespace {

using ::testing::ElementsAre;

constexpr uint64_t kBytes = uint64_t{3} << 20;

// Keeps requests until it is told to end some.
class HoldingEngine final : public IoEngine {
 public:
  explicit HoldingEngine(std::vector<IoRequest*>* held) : held_(*held) {}
  absl::StatusOr<FileId> Open(const std::string&, uint64_t, OpenMode) override {
    return FileId{0};
  }
  absl::StatusOr<FileId> OpenExtent(const std::string&,
                                    const Extent&) override {
    return FileId{0};
  }
  void Close(FileId) override {}
  absl::Status Remove(const std::string&) override { return absl::OkStatus(); }
  absl::Status Rename(const std::string&, const std::string&) override {
    return absl::OkStatus();
  }
  void RegisterMemory(absl::Span<std::byte>) override {}
  void Submit(IoRequest* request) override { held_.push_back(request); }
  // Ends the oldest one if asked to wait.
  size_t Poll(absl::Span<IoRequest*> completed, bool wait) override {
    if (held_.empty() || !wait) return 0;
    completed[0] = held_.front();
    held_.erase(held_.begin());
    return 1;
  }
  void Wake() override {}
  size_t in_flight() const override { return held_.size(); }
  const char* name() const override { return "holding"; }

 private:
  std::vector<IoRequest*>& held_;
};

class SharedIoEngineTest : public testing::Test {
 protected:
  SharedIoEngineTest() : folder_(testing::TempDir() + "/shared-XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
    engine_ = ShareIoEngine(std::make_unique<HoldingEngine>(&held_),
                            Share(/*weight=*/100));
    for (IoRequest& request : requests_) {
      request.buffer = {static_cast<std::byte*>(nullptr), kBytes};
    }
  }
  ~SharedIoEngineTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<DiskShare> Share(uint32_t weight) const {
    auto share = DiskShare::Open(folder_ + "/shares", weight, {});
    if (!share.ok()) std::abort();
    return *std::move(share);
  }
  static int64_t Now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  // Far in the future, so that it counts as long as the test runs.
  static int64_t Later() { return Now() + 3'600'000'000'000; }
  void SubmitAll() {
    for (IoRequest& request : requests_) engine_->Submit(&request);
    PassOn();
  }
  void PassOn() {
    IoRequest* completed = nullptr;
    ASSERT_EQ(engine_->Poll({&completed, 1}, /*wait=*/false), 0u);
  }
  IoRequest* Poll() {
    IoRequest* completed = nullptr;
    return engine_->Poll({&completed, 1}, /*wait=*/true) == 1 ? completed
                                                              : nullptr;
  }

  std::string folder_;
  std::vector<IoRequest*> held_;
  std::unique_ptr<IoEngine> engine_;
  std::array<IoRequest, 16> requests_;
};

TEST_F(SharedIoEngineTest, AloneAllPass) {
  SubmitAll();
  EXPECT_EQ(held_.size(), requests_.size());
}

TEST_F(SharedIoEngineTest, BesideAnotherTheWeightsPartIsUnderWay) {
  const auto other = Share(300);
  other->NoteActive(Later());
  SubmitAll();
  // A quarter of 24 MiB.
  EXPECT_EQ(held_.size(), 2u);
  EXPECT_EQ(engine_->in_flight(), requests_.size());
  for (size_t left = requests_.size(); left > 0; --left) {
    PassOn();
    EXPECT_EQ(held_.size(), std::min<size_t>(left, 2));
    ASSERT_EQ(Poll(), &requests_[requests_.size() - left]);
    EXPECT_EQ(engine_->in_flight(), left - 1);
  }
  EXPECT_EQ(Poll(), nullptr);
}

TEST_F(SharedIoEngineTest, OneIsAlwaysUnderWayAndTheMostUrgentIsNext) {
  const auto other = Share(1'000'000);
  other->NoteActive(Later());
  requests_[0].priority = IoPriority::kBackground;
  requests_[1].priority = IoPriority::kSwapOut;
  engine_->Submit(&requests_[0]);
  PassOn();
  for (int i : {1, 2}) engine_->Submit(&requests_[i]);
  PassOn();
  EXPECT_THAT(held_, ElementsAre(&requests_[0]));
  for (int i : {2, 1}) {
    Poll();
    PassOn();
    EXPECT_THAT(held_, ElementsAre(&requests_[i]));
  }
}

TEST_F(SharedIoEngineTest, WhenTheOtherIsDoneAllPass) {
  auto other = Share(300);
  other->NoteActive(Later());
  SubmitAll();
  other = nullptr;
  PassOn();
  EXPECT_EQ(held_.size(), requests_.size());
}

}  // namespace
}  // namespace optstate::io
