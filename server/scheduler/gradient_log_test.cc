#include "server/scheduler/gradient_log.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kNumel = 1001;
constexpr GradientLog::TileBytes kBytes = {.gradient = kNumel * sizeof(float)};

kernels::UpdateFactors FactorsOf(const kernels::UpdateKernel& kernel,
                                 int64_t step) {
  kernels::UpdateInput input;
  input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
  input.step_count = step;
  input.step = static_cast<uint64_t>(step);
  return kernel.prepare(input);
}

// The record of one tile.
struct Record {
  std::vector<float> master = std::vector<float>(kNumel, 1.0f);
  std::vector<float> parameter = std::vector<float>(kNumel, 1.0f);
  std::vector<float> state[2] = {std::vector<float>(kNumel),
                                 std::vector<float>(kNumel)};

  // The parameter is its own master.
  kernels::TileView View() {
    kernels::TileView view;
    view.parameter = view.master = parameter.data();
    view.state[0] = state[0].data();
    view.state[1] = state[1].data();
    view.numel = kNumel;
    return view;
  }
};

class GradientLogTest : public ::testing::Test {
 protected:
  GradientLogTest()
      : kernel_(**kernels::FindUpdateKernel(kernels::UpdateKernelKey())),
        undo_(std::make_unique<WorkerUndo>()) {
    GradientLog::Room room = {
        .tiles = 3,
        .step_bytes = 3 * GradientLog::EntryBytes(kBytes.gradient),
        .parameter_bytes = 3 * 4096};
    file_.resize(GradientLog::BytesNeeded(room) / sizeof(uint64_t) + 1);
    log_ = GradientLog(Bytes());
    log_.Begin(room);
  }

  absl::Span<std::byte> Bytes() {
    return absl::MakeSpan(reinterpret_cast<std::byte*>(file_.data()),
                          file_.size() * sizeof(uint64_t));
  }
  GradientLog::TileBytes OwnBytes() const {
    return {.gradient = kBytes.gradient, .parameter = kNumel * sizeof(float)};
  }
  std::vector<float> Gradient(uint64_t step) const {
    std::mt19937_64 random(seed_ + step);
    std::normal_distribution<float> normal;
    std::vector<float> gradient(kNumel);
    for (float& each : gradient) each = normal(random);
    return gradient;
  }
  void Update(uint64_t step, Record* record) const {
    const std::vector<float> gradient = Gradient(step);
    const void* const address = gradient.data();
    kernels::TileView view = record->View();
    view.gradients = absl::MakeConstSpan(&address, 1);
    kernel_.apply(FactorsOf(kernel_, static_cast<int64_t>(step)), view);
  }
  void Write(uint64_t tile, uint64_t step) {
    log_.Write(tile, step, FactorsOf(kernel_, static_cast<int64_t>(step)),
               [&](std::byte* to) {
                 std::memcpy(to, Gradient(step).data(), kBytes.gradient);
               });
  }

  const uint64_t seed_ = kernels::TestSeed();
  const kernels::UpdateKernel& kernel_;
  const std::unique_ptr<WorkerUndo> undo_;
  std::vector<uint64_t> file_;
  GradientLog log_;
};

TEST_F(GradientLogTest, ReplayGivesTheBitsOfTheSteps) {
  Record wanted, lagging;
  ASSERT_TRUE(log_.AddTile(7, OwnBytes()));
  log_.MarkResident(0, 0, lagging.parameter.data(), OwnBytes());
  for (uint64_t step = 1; step <= 3; ++step) {
    Update(step, &wanted);
    Write(0, step);
  }
  // The parameter is not the lagging record's.
  lagging.parameter = wanted.parameter;
  EXPECT_EQ(Replay(log_, 0, 2, kernel_, lagging.View(), undo_.get()), 2u);
  EXPECT_NE(lagging.state[0], wanted.state[0]);
  EXPECT_EQ(Replay(log_, 0, 3, kernel_, lagging.View(), undo_.get()), 3u);
  EXPECT_EQ(lagging.state[0], wanted.state[0]);
  EXPECT_EQ(lagging.state[1], wanted.state[1]);
  EXPECT_EQ(lagging.parameter, wanted.parameter);
  EXPECT_EQ(std::memcmp(log_.kept_parameter(0), wanted.parameter.data(),
                        kNumel * sizeof(float)),
            0);
}

TEST_F(GradientLogTest, StepsThatLeaveARunOutAreNoneToReplay) {
  ASSERT_TRUE(log_.AddTile(0, OwnBytes()));
  Record record, wanted;
  log_.MarkResident(0, 10, record.parameter.data(), OwnBytes());
  for (const uint64_t step : {12, 17}) {
    Write(0, step);
    Update(step, &wanted);
  }
  EXPECT_EQ(Replay(log_, 0, 17, kernel_, record.View(), undo_.get()), 17u);
  EXPECT_EQ(record.state[0], wanted.state[0]);
}

TEST_F(GradientLogTest, AnIncompleteEntryIsNone) {
  ASSERT_TRUE(log_.AddTile(0, OwnBytes()));
  Record record;
  log_.MarkResident(0, 4, record.parameter.data(), OwnBytes());
  Write(0, 5);
  log_.EntryFor(0, 5).step.store(0);
  EXPECT_EQ(Replay(log_, 0, 5, kernel_, record.View(), undo_.get()), 4u);
  // Nor is one of a step that was not taken.
  Write(0, 5);
  EXPECT_EQ(Replay(log_, 0, 4, kernel_, record.View(), undo_.get()), 4u);
}

// After a load stamps begin anew.
TEST_F(GradientLogTest, EntriesOfFormerTimesAreForgotten) {
  ASSERT_TRUE(log_.AddTile(0, OwnBytes()));
  Record record, wanted;
  log_.MarkResident(0, 96, record.parameter.data(), OwnBytes());
  for (uint64_t step = 97; step <= 100; ++step) Write(0, step);
  log_.MarkSettled(0);
  log_.MarkResident(0, 0, record.parameter.data(), OwnBytes());
  Write(0, 101);
  Update(101, &wanted);
  EXPECT_EQ(Replay(log_, 0, 101, kernel_, record.View(), undo_.get()), 101u);
  EXPECT_EQ(record.state[0], wanted.state[0]);
}

TEST_F(GradientLogTest, AKilledReplayIsFinishedFromEachOfItsElements) {
  Record wanted;
  for (uint64_t step = 1; step <= 2; ++step) Update(step, &wanted);
  ASSERT_TRUE(log_.AddTile(7, OwnBytes()));
  for (uint64_t begin = 0; begin <= kNumel; begin += 77) {
    // Elements before `begin` have step 2, the others step 1.
    Record half;
    Update(1, &half);
    log_.MarkResident(0, 1, half.parameter.data(), OwnBytes());
    Write(0, 2);
    auto* const master = reinterpret_cast<float*>(log_.kept_parameter(0));
    const auto take = [&](const std::vector<float>& from, float* to) {
      std::copy_n(from.data(), begin, to);
    };
    take(wanted.parameter, master);
    for (int k = 0; k < 2; ++k) take(wanted.state[k], half.state[k].data());
    undo_->Begin(UndoKind::kReplay, 7, 2);
    undo_->slot.progress.store(kernels::UndoProgress(begin));
    const kernels::UpdateKernelKey key;
    ASSERT_TRUE(
        FinishReplay(log_, 0, key, kernel_, half.View(), undo_.get()).ok());
    EXPECT_EQ(half.state[0], wanted.state[0]) << begin;
    EXPECT_EQ(half.state[1], wanted.state[1]) << begin;
    EXPECT_EQ(log_.applied(0).load(), 2u);
    EXPECT_EQ(undo_->kind.load(), 0u);
  }
}

TEST_F(GradientLogTest, ASlotWithoutItsGradientIsDamage) {
  ASSERT_TRUE(log_.AddTile(7, OwnBytes()));
  Record record;
  log_.MarkResident(0, 1, record.parameter.data(), OwnBytes());
  undo_->Begin(UndoKind::kReplay, 7, 2);
  const absl::Status finished = FinishReplay(
      log_, 0, kernels::UpdateKernelKey(), kernel_, record.View(), undo_.get());
  EXPECT_TRUE(absl::IsDataLoss(finished)) << finished;
}

TEST_F(GradientLogTest, RoomIsBounded) {
  EXPECT_TRUE(log_.AddTile(1, kBytes));
  EXPECT_EQ(log_.kept_parameter(0), nullptr);
  EXPECT_FALSE(log_.AddTile(
      2, {.gradient = 3 * GradientLog::EntryBytes(kBytes.gradient)}));
  EXPECT_FALSE(log_.AddTile(2, {.gradient = 4, .parameter = 3 * 4096 + 64}));
  EXPECT_TRUE(log_.AddTile(2, OwnBytes()));
  EXPECT_TRUE(log_.AddTile(3, kBytes));
  EXPECT_FALSE(log_.AddTile(4, {.gradient = 4}));
  EXPECT_EQ(log_.tiles(), 3u);
}

TEST_F(GradientLogTest, SaysWhetherARecordLags) {
  EXPECT_FALSE(GradientLog::HasResidents({}));
  EXPECT_FALSE(GradientLog::HasResidents(Bytes()));
  ASSERT_TRUE(log_.AddTile(1, kBytes));
  EXPECT_FALSE(GradientLog::HasResidents(Bytes()));
  log_.MarkResident(0, 1, nullptr, kBytes);
  EXPECT_TRUE(GradientLog::HasResidents(Bytes()));
  log_.MarkSettled(0);
  EXPECT_FALSE(GradientLog::HasResidents(Bytes()));
}

// Whatever is in the file, no address is outside of it.
TEST_F(GradientLogTest, DamageIsFound) {
  ASSERT_TRUE(log_.AddTile(1, OwnBytes()));
  const std::vector<GradientLog::TileBytes> by_run(2, OwnBytes());
  ASSERT_TRUE(log_.Check(2, by_run).ok());
  const std::vector<uint64_t> whole = file_;
  const auto check = [&] { return log_.Check(2, by_run); };
  for (size_t word = 0; word < 3; ++word) {
    for (const uint64_t value : {~uint64_t{0}, uint64_t{1} << 40}) {
      file_[word] = value;
      EXPECT_THAT(check().message(), HasSubstr("gradient_log")) << word;
      file_ = whole;
      log_ = GradientLog(Bytes());
    }
  }
  const size_t table = 8;
  for (size_t word = table; word < table + 3; ++word) {
    file_[word] = 1 << 30;
    EXPECT_TRUE(absl::IsDataLoss(check())) << word;
    file_ = whole;
    log_ = GradientLog(Bytes());
  }
  EXPECT_TRUE(absl::IsDataLoss(
      GradientLog(Bytes().first(Bytes().size() / 2)).Check(2, by_run)));
  std::fill(file_.begin(), file_.end(), 0);
  EXPECT_TRUE(log_.is_empty());
  EXPECT_TRUE(check().ok());
}

}  // namespace
}  // namespace optstate::scheduler
