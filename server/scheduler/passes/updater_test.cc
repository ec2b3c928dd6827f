#include "server/scheduler/passes/updater.h"

#include <cstring>
#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/scheduler_test_job.h"
#include "server/scheduler/tile_view.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kStep = 4;

struct Updates {
  explicit Updates(const SchedulerTestJob::Setup& setup)
      : job(setup),
        executor(&job.pool(), job.memory().undo, nullptr),
        counts(&job.plan(), &job.memory()),
        speculation(&job.plan(), &job.memory(), &job.pool()),
        updater(&job.plan(), &job.memory(), &executor, &counts, &speculation) {}

  SchedulerTestJob job;
  CpuUpdateExecutor executor;
  StepCounts counts;
  Speculation speculation;
  Updater updater;
};

// Updates runs one by one, with the kernels alone; those of one rank.
void UpdateAlone(SchedulerTestJob* job, const std::vector<uint64_t>& left_out) {
  const StepUpdate update = job->UpdateOf(kStep);
  const StepCounts counts(&job->plan(), &job->memory());
  for (const Piece& piece : job->partitions()[0].pieces) {
    const uint32_t p = piece.parameter;
    if (update.updated[p] == 0) continue;
    const kernels::UpdateKernel& kernel = *job->plan().kernel(p).functions;
    const kernels::UpdateFactors factors =
        kernel.prepare(counts.InputOf(p, update));
    job->plan().ForEachRunOf(
        p, [&](uint64_t run, uint64_t begin, uint64_t numel) {
          for (const uint64_t other : left_out) {
            if (run == other) return;
          }
          const DType dtype = job->layout().parameters()[p].gradient_dtype;
          const void* const gradient = job->gradient_areas()[0] +
                                       piece.gradient_offset_bytes +
                                       begin * SizeInBytes(dtype);
          kernels::TileView view = TileViewOf(
              job->layout(), job->RecordOf(p, begin), p, begin, numel);
          view.gradients = absl::MakeConstSpan(&gradient, 1);
          kernel.apply(factors, view);
        });
  }
}

TEST(UpdaterTest, EachRunIsUpdatedByItsKernel) {
  for (const StateFormat state : {StateFormat::kFloat32, StateFormat::kBFloat16,
                                  StateFormat::kDynamic8}) {
    const SchedulerTestJob::Setup setup = {.state = state};
    Updates updates(setup);
    SchedulerTestJob expected(setup);
    // Factors follow from each parameter's own count.
    for (SchedulerTestJob* job : {&updates.job, &expected}) {
      job->step_counts()[1] = 7;  // of the kernel and record of parameter 0
    }
    ASSERT_TRUE(updates.updater.MakePass(updates.job.UpdateOf(kStep)).ok());
    UpdateAlone(&expected, {});
    EXPECT_EQ(updates.job.State(), expected.State());
    for (const auto& stamp : updates.job.run_stamps()) {
      EXPECT_EQ(stamp.load(), kStep);
    }
  }
}

TEST(UpdaterTest, RunsWithTheStampAndParametersWithoutGradientAreLeftAlone) {
  Updates updates({});
  SchedulerTestJob expected({});
  const std::vector<uint64_t> done = {0, 2,
                                      updates.job.layout().first_run(5) + 1};
  for (const uint64_t run : done) updates.job.run_stamps()[run] = kStep;
  std::vector<uint8_t> updated(updates.job.layout().parameters().size(), 1);
  updated[3] = 0;
  updates.job.SetUpdated(updated);
  expected.SetUpdated(updated);
  ASSERT_TRUE(updates.updater.MakePass(updates.job.UpdateOf(kStep)).ok());
  UpdateAlone(&expected, done);
  EXPECT_EQ(updates.job.State(), expected.State());
  EXPECT_EQ(updates.job.run_stamps()[updates.job.layout().first_run(3)].load(),
            0u);
}

TEST(UpdaterTest, ATaskSaysWhatADeviceNeeds) {
  // Stands in for a device: looks at the tasks and does none.
  class Recorder final : public UpdateExecutor {
   public:
    absl::Status CanUpdate(const Layout&, Accumulation) const override {
      return absl::OkStatus();
    }
    size_t slots() const override { return 1; }
    void Reduce(const IndexRange&, ReduceTasks) override {}
    absl::Status Update(const IndexRange& positions,
                        UpdateTasks* tasks) override {
      for (size_t i = positions.begin; i < positions.end; ++i) {
        if (!tasks->Open(0, i).ok()) return absl::InternalError("open");
        tasks->ForEachTask(0, [&](UpdateTask& task) {
          EXPECT_EQ(task.view.gradients.size(), 2u);
          elements[task.run] = task.view.numel;
          keys[task.run] = *task.key;
          factors[task.run] = *task.factors;
          EXPECT_EQ(task.step, kStep);
          EXPECT_EQ(task.undo, UndoPolicy::kInPlace);
        });
        tasks->Close(0);
      }
      return absl::OkStatus();
    }
    std::map<uint64_t, size_t> elements;
    std::map<uint64_t, kernels::UpdateKernelKey> keys;
    std::map<uint64_t, kernels::UpdateFactors> factors;
  };
  SchedulerTestJob job({.ranks = 2, .replicated = true});
  Recorder recorder;
  const StepCounts counts(&job.plan(), &job.memory());
  Speculation speculation(&job.plan(), &job.memory(), &job.pool());
  Updater updater(&job.plan(), &job.memory(), &recorder, &counts, &speculation);
  const StepUpdate update = job.UpdateOf(kStep);
  ASSERT_TRUE(updater.MakePass(update).ok());
  for (uint32_t p = 0; p < job.layout().parameters().size(); ++p) {
    const kernels::UpdateFactors factors =
        job.plan().kernel(p).functions->prepare(counts.InputOf(p, update));
    job.plan().ForEachRunOf(p, [&](uint64_t run, uint64_t, uint64_t numel) {
      EXPECT_EQ(recorder.elements[run], numel);
      EXPECT_EQ(recorder.keys[run].parameter,
                job.layout().parameters()[p].dtype);
      EXPECT_EQ(std::memcmp(&recorder.factors[run], &factors, sizeof(factors)),
                0);
    });
  }
  EXPECT_EQ(recorder.elements.size(), job.layout().run_count());
}

}  // namespace
}  // namespace optstate::scheduler
