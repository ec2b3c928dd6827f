#include "server/scheduler/passes/gradient_stager.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "kernels/reduce.h"
#include "proto/types/runs.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/scheduler_test_job.h"
#include "storage/format/rank_mark.h"

namespace optstate::scheduler {
namespace {

using JobSetup = SchedulerTestJob::Setup;

struct Staged {
  explicit Staged(const JobSetup& setup)
      : job(setup),
        executor(&job.pool(), job.memory().undo, nullptr),
        sums_of_squares(job.layout().run_count(), -1),
        stager(&job.plan(), &job.memory(), &executor,
               absl::MakeSpan(sums_of_squares)) {}

  // Calls visit(run, dtype, addresses by rank, numel, begin of the parameter).
  template <typename Visitor>
  void ForEachRunOfPiece(const Piece& piece, const Visitor& visit) {
    const uint32_t p = piece.parameter;
    const DType dtype = job.layout().parameters()[p].gradient_dtype;
    ForEachRun(job.layout(), p, piece.begin, piece.begin + piece.numel,
               [&](uint64_t run, uint64_t begin, uint64_t numel) {
                 std::vector<const void*> from;
                 for (const std::byte* area : job.gradient_areas()) {
                   from.push_back(area + piece.gradient_offset_bytes +
                                  (begin - piece.begin) * SizeInBytes(dtype));
                 }
                 visit(run, dtype, from, numel, begin);
               });
  }

  SchedulerTestJob job;
  CpuUpdateExecutor executor;
  std::vector<double> sums_of_squares;
  GradientStager stager;
};

TEST(GradientStagerTest, StagesARanksPiecesAlone) {
  Staged staged({.ranks = 2});
  staged.stager.Stage(staged.job.StagingOf(1, 0));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (const Piece& piece : staged.job.partitions()[rank].pieces) {
      staged.ForEachRunOfPiece(
          piece, [&](uint64_t run, DType dtype, const auto& from,
                     uint64_t numel, uint64_t /*begin*/) {
            EXPECT_EQ(
                staged.sums_of_squares[run],
                rank == 0 ? -1 : kernels::SumOfSquares(dtype, from[1], numel));
          });
    }
  }
}

TEST(GradientStagerTest, LeavesRepeatsAlone) {
  Staged staged({});
  std::vector<StageAction> actions(4, StageAction::kNothing);
  actions[1] = StageAction::kStage;
  StagingRequest request = staged.job.StagingOf(0, 0);
  request.first_piece = 2;
  request.actions = actions;
  staged.stager.Stage(request);
  for (uint64_t run = 0; run < staged.sums_of_squares.size(); ++run) {
    EXPECT_EQ(staged.sums_of_squares[run] >= 0,
              staged.job.plan().ParameterOfRun(run) == 3);
  }
}

TEST(GradientStagerTest, SumsTheRanksThatHavePushed) {
  Staged staged({.ranks = 3, .replicated = true});
  const StagingRequest all = staged.job.StagingOf(0, 0);
  const auto has_pushed = [](uint32_t rank, uint32_t p) {
    return rank != p % 3;
  };
  staged.stager.Stage({.gradient_areas = all.gradient_areas,
                       .actions = all.actions,
                       .has_pushed = has_pushed});
  for (const Piece& piece : staged.job.partitions()[0].pieces) {
    staged.ForEachRunOfPiece(
        piece, [&](uint64_t run, DType dtype, std::vector<const void*> from,
                   uint64_t numel, uint64_t /*begin*/) {
          from.erase(from.begin() + piece.parameter % 3);
          EXPECT_EQ(staged.sums_of_squares[run],
                    kernels::SumOfSquares(dtype, from, numel));
        });
  }
}

TEST(GradientStagerTest, AddsMicroStepsOnceEach) {
  for (const AccumulateDType sum_dtype :
       {AccumulateDType::kFloat32, AccumulateDType::kGradient}) {
    Staged staged({.accumulation = sum_dtype});
    SchedulerTestJob& job = staged.job;
    std::vector<std::vector<float>> expected(job.layout().run_count());
    const auto stage = [&](uint64_t seed, uint32_t epoch, uint32_t micro,
                           bool adds, bool first) {
      job.FillGradients(seed);
      staged.stager.Stage(job.StagingOf(0, storage::StagedMark(epoch, micro)));
      for (const Piece& piece : job.partitions()[0].pieces) {
        const DType dtype = job.plan().sum_dtype(piece.parameter);
        staged.ForEachRunOfPiece(piece, [&](uint64_t run, DType from_dtype,
                                            const auto& from, uint64_t numel,
                                            uint64_t begin) {
          expected[run].resize(numel);
          if (adds) {
            kernels::Accumulate(from_dtype, from, first, dtype,
                                expected[run].data(), numel);
          }
          EXPECT_EQ(
              std::memcmp(job.store().sums(piece.parameter, begin),
                          expected[run].data(), numel * SizeInBytes(dtype)),
              0);
          EXPECT_EQ(staged.sums_of_squares[run],
                    kernels::SumOfSquares(dtype, expected[run].data(), numel));
          EXPECT_EQ(job.staged_marks()[run].load(),
                    storage::StagedMark(epoch, micro));
        });
      }
    };
    stage(1, 5, 0, /*adds=*/true, /*first=*/true);
    stage(2, 5, 1, /*adds=*/true, /*first=*/false);
    stage(3, 5, 1, /*adds=*/false, /*first=*/false);  // a repeat
    stage(4, 6, 0, /*adds=*/true, /*first=*/true);    // another epoch
  }
}

}  // namespace
}  // namespace optstate::scheduler
