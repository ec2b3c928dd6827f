#include "server/scheduler/passes/log_replay.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/scheduler_test_job.h"
#include "server/scheduler/tile_view.h"
#include "server/scheduler/worker_undo.h"

namespace optstate::scheduler {
namespace {

using ::testing::HasSubstr;

// A job whose records lag behind devices that are gone, and an equal one that
// takes the same steps at once. Each run is a tile of the log, which has the
// gradients of one rank, or the sums of those of three. Masters of bfloat16
// parameters are whole, or halves.
class LogReplayTest : public ::testing::TestWithParam<
                          std::tuple<GradientLog::Content, MasterFormat>> {
 protected:
  LogReplayTest() {
    GradientLog::Room room;
    ForEachRun(
        [&](uint32_t p, uint64_t /*run*/, uint64_t /*begin*/, uint64_t numel) {
          const GradientLog::TileBytes bytes = BytesOf(p, numel);
          ++room.tiles;
          room.step_bytes += GradientLog::EntryBytes(bytes.gradient);
          room.parameter_bytes += GradientLog::EntryBytes(bytes.parameter);
        });
    file_.resize(GradientLog::BytesNeeded(room) / sizeof(uint64_t) + 1);
    log_ =
        GradientLog(absl::MakeSpan(reinterpret_cast<std::byte*>(file_.data()),
                                   file_.size() * sizeof(uint64_t)));
    log_.Begin(room, std::get<0>(GetParam()));
    ForEachRun([&](uint32_t p, uint64_t run, uint64_t begin, uint64_t numel) {
      const GradientLog::TileBytes bytes = BytesOf(p, numel);
      ASSERT_TRUE(log_.AddTile(run, bytes));
      log_.MarkResident(log_.tiles() - 1, /*step=*/0,
                        View(lagging_, p, begin, numel).parameter, bytes);
    });
  }

  static bool is_sum() {
    return std::get<0>(GetParam()) == GradientLog::Content::kSum;
  }
  static SchedulerTestJob::Setup SetupOf() {
    return {.master = std::get<1>(GetParam())};
  }
  // Calls visit(parameter, run, begin, numel).
  template <typename Visitor>
  void ForEachRun(const Visitor& visit) const {
    const auto count =
        static_cast<uint32_t>(lagging_.layout().parameters().size());
    for (uint32_t p = 0; p < count; ++p) {
      lagging_.plan().ForEachRunOf(
          p, [&](uint64_t run, uint64_t begin, uint64_t numel) {
            visit(p, run, begin, numel);
          });
    }
  }
  GradientLog::TileBytes BytesOf(uint32_t parameter, uint64_t numel) const {
    const StepPlan& plan = lagging_.plan();
    const kernels::UpdateKernelKey& key =
        is_sum() ? plan.sum_kernel(parameter).key : plan.kernel(parameter).key;
    return {.gradient = numel * SizeInBytes(key.gradient),
            .parameter = key.master == MasterFormat::kFloat32
                             ? 0
                             : numel * SizeInBytes(key.parameter)};
  }
  static kernels::TileView View(const SchedulerTestJob& job, uint32_t parameter,
                                uint64_t begin, uint64_t numel) {
    return TileViewOf(job.layout(), job.RecordOf(parameter, begin), parameter,
                      begin, numel);
  }
  // Logs a step for the lagging job, and takes it with the other.
  void Log(uint64_t step) {
    uint64_t tile = 0;
    ForEachRun([&](uint32_t p, uint64_t run, uint64_t begin, uint64_t numel) {
      const StepPlan::Kernel& kernel = lagging_.plan().kernel(p);
      kernels::UpdateInput input;
      input.hyperparams = DefaultHyperparams(OptimizerKind::kAdamW);
      input.step_count = static_cast<int64_t>(step);
      input.step = step;
      const kernels::UpdateFactors factors = kernel.functions->prepare(input);
      std::mt19937_64 random(seed_ + 1000 * step + run);
      std::normal_distribution<float> normal;
      const size_t ranks = is_sum() ? 3 : 1;
      const uint64_t bytes = numel * SizeInBytes(kernel.key.gradient);
      std::vector<std::vector<std::byte>> gradients(ranks);
      std::vector<const void*> addresses;
      for (std::vector<std::byte>& gradient : gradients) {
        std::vector<float> values(numel);
        for (float& value : values) value = normal(random);
        gradient.resize(bytes);
        kernels::CastFromFloat(kernel.key.gradient, values.data(),
                               gradient.data(), numel);
        addresses.push_back(gradient.data());
      }
      log_.Write(tile++, step, factors, [&](std::byte* to) {
        if (!is_sum()) {
          std::memcpy(to, addresses[0], bytes);
          return;
        }
        kernels::Accumulate(kernel.key.gradient, addresses, /*first=*/true,
                            reinterpret_cast<float*>(to), numel);
      });
      kernels::TileView view = View(wanted_, p, begin, numel);
      view.gradients = addresses;
      kernel.functions->apply(factors, view);
    });
  }
  // Has the devices have taken the steps that are logged, of which `step` is
  // the last: new are the parameters that they have sent back, and the stamps.
  // A parameter that is a part of its master comes from the log.
  void SetStamps(uint64_t step) {
    ForEachRun([&](uint32_t p, uint64_t /*run*/, uint64_t begin,
                   uint64_t numel) {
      if (BytesOf(p, numel).parameter != 0) return;
      std::memcpy(View(lagging_, p, begin, numel).parameter,
                  View(wanted_, p, begin, numel).parameter,
                  numel * SizeInBytes(lagging_.plan().kernel(p).key.parameter));
    });
    for (std::atomic<uint64_t>& stamp : lagging_.run_stamps()) stamp = step;
  }
  absl::Status Replay() {
    return ReplayLog(lagging_.plan(), lagging_.memory(), &log_,
                     &lagging_.pool());
  }
  bool IsWanted() const { return lagging_.State() == wanted_.State(); }

  const uint64_t seed_ = kernels::TestSeed();
  SchedulerTestJob lagging_{SetupOf()};
  SchedulerTestJob wanted_{SetupOf()};
  std::vector<uint64_t> file_;
  GradientLog log_;
};

TEST_P(LogReplayTest, AnEmptyLogChangesNothing) {
  GradientLog none;
  EXPECT_TRUE(
      ReplayLog(lagging_.plan(), lagging_.memory(), &none, &lagging_.pool())
          .ok());
  EXPECT_TRUE(IsWanted());
}

TEST_P(LogReplayTest, RecordsGetTheStepsOfTheirStamps) {
  Log(1);
  Log(2);
  SetStamps(2);
  EXPECT_FALSE(IsWanted());
  ASSERT_TRUE(Replay().ok());
  EXPECT_TRUE(IsWanted());
  EXPECT_EQ(log_.tiles(), 0u) << "none lags any more";
  ASSERT_TRUE(Replay().ok());
  EXPECT_TRUE(IsWanted());
}

// The process died after it had logged a step, before any run took it.
TEST_P(LogReplayTest, AStepThatWasNotTakenIsLeftOut) {
  Log(1);
  SetStamps(1);
  const std::vector<std::byte> after_one = wanted_.State();
  Log(2);
  ASSERT_TRUE(Replay().ok());
  EXPECT_EQ(lagging_.State(), after_one);
}

// It died while a device's new parameters were written over a parameter that
// is a part of its master.
TEST_P(LogReplayTest, AParameterThatIsHalfWrittenIsPutRight) {
  Log(1);
  SetStamps(1);
  ForEachRun([&](uint32_t p, uint64_t /*run*/, uint64_t begin, uint64_t numel) {
    if (BytesOf(p, numel).parameter == 0) return;
    std::memset(View(lagging_, p, begin, numel).parameter, 0x7f, numel);
  });
  ASSERT_TRUE(Replay().ok());
  EXPECT_TRUE(IsWanted());
}

TEST_P(LogReplayTest, RecordsThatAreSettledAreLeftAlone) {
  Log(1);
  SetStamps(1);
  const std::vector<std::byte> before = lagging_.State();
  for (uint64_t tile = 0; tile < log_.tiles(); ++tile) log_.MarkSettled(tile);
  ASSERT_TRUE(Replay().ok());
  EXPECT_EQ(lagging_.State(), before);
}

TEST_P(LogReplayTest, AStepThatTheLogLacksIsDataLoss) {
  Log(1);
  SetStamps(2);
  const absl::Status lacks = Replay();
  EXPECT_TRUE(absl::IsDataLoss(lacks)) << lacks;
  EXPECT_THAT(lacks.message(), HasSubstr("gradient_log: the record of run "));
  EXPECT_THAT(lacks.message(), HasSubstr("is of step 1, the gradients up to "
                                         "step 2 are not there"));
}

TEST_P(LogReplayTest, ALogThatIsCutOffIsDataLoss) {
  Log(1);
  SetStamps(1);
  file_.resize(file_.size() / 2);
  log_ = GradientLog(absl::MakeSpan(reinterpret_cast<std::byte*>(file_.data()),
                                    file_.size() * sizeof(uint64_t)));
  const absl::Status damaged = Replay();
  EXPECT_TRUE(absl::IsDataLoss(damaged)) << damaged;
  EXPECT_FALSE(IsWanted());
}

// It died as it replayed, before it wrote an element of the run.
TEST_P(LogReplayTest, ARunThatIsInFlightIsFinished) {
  Log(1);
  Log(2);
  SetStamps(2);
  lagging_.undo(0).Begin(UndoKind::kReplay, log_.run(2), 1);
  ASSERT_TRUE(Replay().ok());
  EXPECT_TRUE(IsWanted());
  EXPECT_EQ(lagging_.undo(0).kind.load(), 0u);
}

TEST_P(LogReplayTest, ASlotOfARunThatWasSettledIsFree) {
  Log(1);
  SetStamps(1);
  const std::vector<std::byte> before = lagging_.State();
  for (uint64_t tile = 0; tile < log_.tiles(); ++tile) log_.MarkSettled(tile);
  lagging_.undo(1).Begin(UndoKind::kReplay, log_.run(0), 1);
  ASSERT_TRUE(Replay().ok());
  EXPECT_EQ(lagging_.undo(1).kind.load(), 0u);
  EXPECT_EQ(lagging_.State(), before);
}

// The slots of the step in progress are its own: the spare one is used.
TEST_P(LogReplayTest, SlotsOfAStepInProgressStay) {
  Log(1);
  SetStamps(1);
  for (size_t worker = 0; worker < 2; ++worker) {
    lagging_.undo(worker).Begin(UndoKind::kReplace, worker, 7);
  }
  ASSERT_TRUE(Replay().ok());
  EXPECT_TRUE(IsWanted());
  for (size_t worker = 0; worker < 2; ++worker) {
    EXPECT_EQ(lagging_.undo(worker).kind.load(),
              static_cast<uint64_t>(UndoKind::kReplace));
    EXPECT_EQ(lagging_.undo(worker).run, worker);
    EXPECT_EQ(lagging_.undo(worker).stamp, 7u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Content, LogReplayTest,
    ::testing::Combine(::testing::Values(GradientLog::Content::kGradient,
                                         GradientLog::Content::kSum),
                       ::testing::Values(MasterFormat::kFloat32,
                                         MasterFormat::kSplit)));

}  // namespace
}  // namespace optstate::scheduler
