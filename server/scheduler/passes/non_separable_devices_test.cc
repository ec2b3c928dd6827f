// Updates of whole parameters that are shared with emulated devices: the bits
// of the CPU's, whatever the share, and when a device fails.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "server/scheduler/executors/cpu_update_executor.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/passes/non_separable_updater.h"
#include "server/scheduler/scheduler_test_job.h"
#include "server/scheduler/step_observer.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kStep = 3;
constexpr OptimizerKind kKinds[] = {
    OptimizerKind::kLamb, OptimizerKind::kAdafactor, OptimizerKind::kMuon};
// Elements of SchedulerTestJob, and of its largest parameter.
constexpr uint64_t kElements = 100 * 130 + 1 + 70 * 64 + 3 * 50 + 90 * 91;
constexpr uint64_t kLargest = 100 * 130;

// A job of which devices update a part.
class SharedJob {
 public:
  struct Share {
    double cpu_fraction = 0;
    uint64_t batch_bytes = 1 << 20;  // without its tables
    size_t devices = 1;
    size_t records_max = 8;
    uint64_t device_bytes = 0;  // of each device, for copies of records
    accelerator::EmulatedFaults* faults = nullptr;
    StepObserver* observer = nullptr;
  };

  SharedJob(const SchedulerTestJob::Setup& setup, const Share& share)
      : job_(setup),
        runtime_(accelerator::MakeEmulatedRuntime(
            {.devices = share.devices,
             .memory_bytes = uint64_t{64} << 20,
             .faults = share.faults})),
        executor_({.pool = &job_.pool(),
                   .undo = job_.memory().undo,
                   .observer = share.observer,
                   .batch_bytes = WholeBatch::TableBytes() + share.batch_bytes,
                   .records_max = share.records_max}),
        counts_(&job_.plan(), &job_.memory()),
        updater_(&job_.plan(), &job_.memory(), &job_.pool(), &executor_,
                 &counts_, share.observer) {
    EXPECT_TRUE(updater_.Init().ok());
    for (size_t i = 0; i < share.devices; ++i) {
      devices_.push_back(*runtime_->Open(i));
      opened_.push_back(devices_.back().get());
    }
    DeviceUpdateExecutor::Residents residents;
    residents.device_bytes = share.device_bytes;
    EXPECT_EQ(executor_.Share(share.cpu_fraction, setup.optimizer, opened_,
                              EmulatedKernels(), residents),
              absl::OkStatus());
    job_.store().SetLag(executor_.lag());
  }

  SchedulerTestJob& job() { return job_; }
  DeviceUpdateExecutor::Counters counters() const {
    return executor_.counters();
  }
  DeviceUpdateExecutor& executor() { return executor_; }
  void Pass(uint64_t step) {
    ASSERT_TRUE(updater_.MakePass(job_.UpdateOf(step)).ok());
  }
  // Makes a pass; checks that each run has the step, and no slot names one.
  void Update(uint64_t step) {
    Pass(step);
    for (const auto& stamp : job_.run_stamps()) {
      EXPECT_EQ(stamp.load(), step);
    }
    for (const WorkerUndo& undo : job_.memory().undo) {
      EXPECT_EQ(undo.kind.load(), static_cast<uint64_t>(UndoKind::kNone));
    }
  }

 private:
  SchedulerTestJob job_;
  const std::unique_ptr<accelerator::DeviceRuntime> runtime_;
  std::vector<std::unique_ptr<accelerator::Device>> devices_;
  std::vector<accelerator::Device*> opened_;
  DeviceUpdateExecutor executor_;
  StepCounts counts_;
  NonSeparableUpdater updater_;
};

// Returns the state after these steps by the CPU alone.
std::vector<std::byte> StateByCpu(const SchedulerTestJob::Setup& setup,
                                  const std::vector<uint64_t>& steps) {
  SchedulerTestJob job(setup);
  CpuUpdateExecutor executor(&job.pool(), job.memory().undo, nullptr);
  const StepCounts counts(&job.plan(), &job.memory());
  NonSeparableUpdater updater(&job.plan(), &job.memory(), &job.pool(),
                              &executor, &counts, nullptr);
  EXPECT_TRUE(updater.Init().ok());
  const std::vector<std::byte> before = job.State();
  for (const uint64_t step : steps) {
    EXPECT_TRUE(updater.MakePass(job.UpdateOf(step)).ok());
  }
  EXPECT_NE(job.State(), before);
  return job.State();
}

TEST(NonSeparableDevicesTest, BitsAreThoseOfTheCpu) {
  for (const OptimizerKind kind : kKinds) {
    for (const StateFormat state :
         {StateFormat::kFloat32, StateFormat::kBFloat16,
          StateFormat::kDynamic8}) {
      // Muon's products take long here.
      if (kind == OptimizerKind::kMuon && state == StateFormat::kDynamic8) {
        continue;
      }
      for (const MasterFormat master :
           {MasterFormat::kFloat32, MasterFormat::kSplit}) {
        const SchedulerTestJob::Setup setup = {.optimizer = kind,
                                               .state = state,
                                               .master = master,
                                               .ranks = 2,
                                               .replicated = true};
        const std::vector<std::byte> expected =
            StateByCpu(setup, {kStep, kStep + 1});
        for (const double fraction : {0.0, 0.3}) {
          for (const size_t devices : {1, 2}) {
            SharedJob shared(setup,
                             {.cpu_fraction = fraction, .devices = devices});
            shared.Update(kStep);
            shared.Update(kStep + 1);
            EXPECT_EQ(shared.job().State(), expected)
                << InfoOf(kind).name << " " << fraction << " " << devices;
            const auto counters = shared.counters();
            EXPECT_TRUE(counters.failure.ok()) << counters.failure;
            EXPECT_EQ(counters.device_elements + counters.cpu_elements,
                      2 * kElements);
            EXPECT_EQ(counters.cpu_elements == 0, fraction == 0);
            EXPECT_GT(counters.device_elements, 0u);
            EXPECT_EQ(counters.too_large_elements, 0u);
          }
        }
      }
    }
  }
}

// Batches hold few parameters, and few records are open at a time.
TEST(NonSeparableDevicesTest, ManyBatchesGiveTheSameBits) {
  for (const OptimizerKind kind : kKinds) {
    const SchedulerTestJob::Setup setup = {.optimizer = kind};
    const std::vector<std::byte> expected = StateByCpu(setup, {kStep});
    for (const size_t records_max : {2, 3}) {
      SharedJob shared(setup, {.cpu_fraction = 0.1,
                               .batch_bytes = 210000,
                               .devices = 2,
                               .records_max = records_max});
      shared.Update(kStep);
      EXPECT_EQ(shared.job().State(), expected) << records_max;
    }
  }
}

TEST(NonSeparableDevicesTest, AParameterThatFitsInNoBatchIsTheCpus) {
  const SchedulerTestJob::Setup setup = {.optimizer = OptimizerKind::kLamb};
  // The largest takes 16 bytes for each element.
  SharedJob shared(setup, {.batch_bytes = 16 * kLargest - 16});
  shared.Update(kStep);
  EXPECT_EQ(shared.job().State(), StateByCpu(setup, {kStep}));
  const auto counters = shared.counters();
  EXPECT_EQ(counters.too_large_elements, kLargest);
  EXPECT_EQ(counters.cpu_elements, kLargest);
  EXPECT_EQ(counters.device_elements, kElements - kLargest);
}

TEST(NonSeparableDevicesTest, WhatALostDeviceLeavesIsDoneByTheCpu) {
  for (const OptimizerKind kind : kKinds) {
    const SchedulerTestJob::Setup setup = {.optimizer = kind,
                                           .state = StateFormat::kBFloat16};
    const std::vector<std::byte> expected =
        StateByCpu(setup, {kStep, kStep + 1});
    // One batch has all, and five commands.
    for (int64_t commands = 0; commands < 10; ++commands) {
      accelerator::EmulatedFaults faults;
      SharedJob shared(setup, {.faults = &faults});
      faults.LoseAfter(commands);
      shared.Update(kStep);
      shared.Update(kStep + 1);
      EXPECT_EQ(shared.job().State(), expected) << commands;
      const auto counters = shared.counters();
      EXPECT_EQ(counters.device_elements + counters.cpu_elements,
                2 * kElements);
      if (commands < 4) {
        EXPECT_TRUE(absl::IsInternal(counters.failure)) << counters.failure;
        EXPECT_EQ(counters.device_elements, 0u);
      }
    }
  }
}

TEST(NonSeparableDevicesTest, ALaunchThatFailsIsDoneByTheCpu) {
  const SchedulerTestJob::Setup setup = {.optimizer = OptimizerKind::kLamb};
  accelerator::EmulatedFaults faults;
  SharedJob shared(setup, {.faults = &faults});
  faults.FailLaunchAfter(0);
  shared.Update(kStep);
  EXPECT_TRUE(absl::IsUnavailable(shared.counters().failure));
  EXPECT_EQ(shared.counters().device_elements, 0u);
  shared.Update(kStep + 1);
  EXPECT_EQ(shared.counters().device_elements, kElements)
      << "the device goes on";
  EXPECT_EQ(shared.job().State(), StateByCpu(setup, {kStep, kStep + 1}));
}

TEST(NonSeparableDevicesTest, AnObserverHearsOfEachRunOnce) {
  class Observer final : public StepObserver {
   public:
    void OnRunUpdated(uint64_t step, uint64_t run) override {
      EXPECT_EQ(step, kStep);
      ++runs_[run];
    }
    // Says whether each of so many runs was updated once.
    bool HeardOfEach(size_t runs) const {
      for (size_t run = 0; run < runs; ++run) {
        if (runs_[run] != 1) return false;
      }
      return true;
    }

   private:
    std::vector<std::atomic<int>> runs_ = std::vector<std::atomic<int>>(100);
  };
  for (const double fraction : {0.0, 0.5, 1.0}) {
    Observer observer;
    SharedJob shared({.optimizer = OptimizerKind::kLamb},
                     {.cpu_fraction = fraction, .observer = &observer});
    shared.Update(kStep);
    const uint64_t runs = shared.job().layout().run_count();
    ASSERT_LE(runs, 100u);
    EXPECT_TRUE(observer.HeardOfEach(runs)) << fraction;
  }
}

TEST(NonSeparableDevicesTest, ABatchHasRoomForTheLargestParameter) {
  constexpr uint64_t kMin = DeviceUpdateExecutor::kBatchBytes;
  constexpr uint64_t kMax = DeviceUpdateExecutor::kWholeBatchBytesMax;
  const auto bytes_for = [](OptimizerKind kind, int64_t rows) {
    LayoutSpec spec;
    spec.optimizer = kind;
    spec.groups.resize(1);
    spec.parameters.push_back(
        {.name = "a", .shape = {rows, 1024}, .numel = rows * 1024});
    return DeviceUpdateExecutor::BatchBytesFor(*Layout::Make(std::move(spec)));
  };
  constexpr int64_t kMi = 1024;  // rows
  EXPECT_EQ(bytes_for(OptimizerKind::kAdamW, 64 * kMi), kMin);
  EXPECT_EQ(bytes_for(OptimizerKind::kLamb, 10), kMin);
  EXPECT_EQ(bytes_for(OptimizerKind::kLamb, 4 * kMi),
            WholeBatch::TableBytes() + (uint64_t{64} << 20));
  EXPECT_EQ(bytes_for(OptimizerKind::kLamb, 64 * kMi), kMax);
}

}  // namespace
}  // namespace optstate::scheduler
