// Runs the executors' suite with emulated devices and with a GPU, which skips
// where there is none, and tests what only a device's executor does.

#include "server/scheduler/executors/device_update_executor.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cpu/targets.h"
#include "kernels/test_seed.h"
#include "kernels/update_kernel.h"
#include "server/scheduler/executors/breaking_kernels.h"
#include "server/scheduler/executors/one_task.h"
#include "server/scheduler/executors/update_executor_suite.h"
#include "storage/accelerator/cuda_runtime.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::scheduler {
namespace {

constexpr size_t kPositions = WatchedUpdates::kPositions;
constexpr size_t kRunsInAll = kPositions * WatchedUpdates::kRuns;
constexpr size_t kNumel = WatchedUpdates::kNumel;
// A run of WatchedUpdates needs some 2,100 bytes.
constexpr uint64_t kBytesOfTwoRuns = 4500;

// An executor with devices of its own.
class DeviceExecutor final : public UpdateExecutor {
 public:
  struct Setup {
    uint64_t bytes = 0;  // of a batch, without its tables
    double cpu_fraction = 0;
    size_t devices = 1;
  };

  DeviceExecutor(WorkerPool* pool, absl::Span<WorkerUndo> undo,
                 std::unique_ptr<accelerator::DeviceRuntime> runtime,
                 const DeviceKernels* kernels, const Setup& setup)
      : runtime_(std::move(runtime)),
        executor_({.pool = pool,
                   .undo = undo,
                   .flat_elements = kRunsInAll * kNumel,
                   .batch_bytes = DeviceBatch::TableBytes() + setup.bytes}) {
    std::vector<accelerator::Device*> opened;
    for (size_t i = 0; i < setup.devices; ++i) {
      devices_.push_back(*runtime_->Open(i));
      opened.push_back(devices_.back().get());
    }
    EXPECT_EQ(executor_.Share(setup.cpu_fraction, OptimizerKind::kAdamW, opened,
                              kernels),
              absl::OkStatus());
  }

  absl::Status CanUpdate(const Layout& layout,
                         Accumulation accumulation) const override {
    return executor_.CanUpdate(layout, accumulation);
  }
  size_t slots() const override { return executor_.slots(); }
  void Reduce(const IndexRange& positions, ReduceTasks tasks) override {
    executor_.Reduce(positions, tasks);
  }
  absl::Status Update(const IndexRange& positions,
                      UpdateTasks* tasks) override {
    return executor_.Update(positions, tasks);
  }
  DeviceUpdateExecutor::Counters counters() const {
    return executor_.counters();
  }

 private:
  std::unique_ptr<accelerator::DeviceRuntime> runtime_;
  std::vector<std::unique_ptr<accelerator::Device>> devices_;
  DeviceUpdateExecutor executor_;
};

std::unique_ptr<DeviceExecutor> MakeEmulated(
    WorkerPool* pool, absl::Span<WorkerUndo> undo,
    const DeviceExecutor::Setup& setup,
    accelerator::EmulatedFaults* faults = nullptr) {
  return std::make_unique<DeviceExecutor>(
      pool, undo,
      accelerator::MakeEmulatedRuntime({.devices = setup.devices,
                                        .memory_bytes = uint64_t{64} << 20,
                                        .faults = faults}),
      EmulatedKernels(), setup);
}

std::unique_ptr<DeviceExecutor> MakeCuda(WorkerPool* pool,
                                         absl::Span<WorkerUndo> undo,
                                         const DeviceExecutor::Setup& setup) {
  return std::make_unique<DeviceExecutor>(
      pool, undo, accelerator::MakeCudaRuntime(), CudaKernels(), setup);
}

// Returns why there is no GPU; empty: there is.
std::string WhyNoCuda() {
  const auto devices = accelerator::MakeCudaRuntime()->Devices();
  if (!devices.ok()) return devices.status().ToString();
  return devices->empty() ? "this machine has no device of CUDA" : "";
}

template <uint64_t kBytes>
std::unique_ptr<UpdateExecutor> Make(WorkerPool* pool,
                                     absl::Span<WorkerUndo> undo) {
  return MakeEmulated(pool, undo, {.bytes = kBytes});
}

// Two devices, and a part of the CPU.
std::unique_ptr<UpdateExecutor> MakeShared(WorkerPool* pool,
                                           absl::Span<WorkerUndo> undo) {
  return MakeEmulated(
      pool, undo,
      {.bytes = kBytesOfTwoRuns, .cpu_fraction = 0.3, .devices = 2});
}

template <uint64_t kBytes, int kCpuPercent>
std::unique_ptr<UpdateExecutor> MakeOnCuda(WorkerPool* pool,
                                           absl::Span<WorkerUndo> undo) {
  return MakeCuda(pool, undo,
                  {.bytes = kBytes, .cpu_fraction = kCpuPercent / 100.0});
}

INSTANTIATE_TEST_SUITE_P(
    Devices, UpdateExecutorSuite,
    testing::Values(
        UpdateExecutorParam{"SmallBatches", 1, Make<kBytesOfTwoRuns>},
        UpdateExecutorParam{"LargeBatches", 3, Make<1 << 20>},
        UpdateExecutorParam{"Shared", 2, MakeShared},
        UpdateExecutorParam{"CudaSmallBatches", 2,
                            MakeOnCuda<kBytesOfTwoRuns, 0>, WhyNoCuda},
        UpdateExecutorParam{"CudaShared", 2, MakeOnCuda<1 << 20, 30>,
                            WhyNoCuda}),
    [](const auto& tested) { return tested.param.name; });

class DeviceUpdateExecutorTest : public testing::Test {
 protected:
  DeviceUpdateExecutorTest()
      : pool_(2, /*spin=*/false), undo_(2), updates_(/*slots=*/2) {}

  // Updates all positions, and checks that no bit is lost.
  DeviceUpdateExecutor::Counters UpdateAll(uint64_t bytes,
                                           double cpu_fraction = 0,
                                           size_t devices = 1) {
    const auto executor = MakeEmulated(
        &pool_, absl::MakeSpan(undo_),
        {.bytes = bytes, .cpu_fraction = cpu_fraction, .devices = devices},
        &faults_);
    EXPECT_EQ(executor->slots(), 2u);
    EXPECT_TRUE(executor->Update({0, kPositions, kPositions}, &updates_).ok());
    EXPECT_EQ(updates_.opened(), std::vector<int>(kPositions, 1));
    EXPECT_EQ(updates_.open_slots(), 0u);
    for (size_t run = 0; run < kRunsInAll; ++run) {
      EXPECT_TRUE(updates_.IsStamped(run)) << run;
    }
    updates_.CheckValues();
    DeviceUpdateExecutor::Counters counters = executor->counters();
    EXPECT_EQ(counters.device_elements + counters.cpu_elements,
              kRunsInAll * kNumel);
    return counters;
  }

  accelerator::EmulatedFaults faults_;
  WorkerPool pool_;
  std::vector<WorkerUndo> undo_;
  WatchedUpdates updates_;
};

TEST_F(DeviceUpdateExecutorTest, TheDeviceDoesAllOfIt) {
  const auto counters = UpdateAll(kBytesOfTwoRuns);
  EXPECT_EQ(counters.device_elements, kRunsInAll * kNumel);
  EXPECT_TRUE(counters.failure.ok()) << counters.failure;
}

TEST_F(DeviceUpdateExecutorTest, EachDeviceCountsWhatItHasAndDoes) {
  const auto counters = UpdateAll(kBytesOfTwoRuns, /*cpu_fraction=*/0.3,
                                  /*devices=*/2);
  ASSERT_EQ(counters.devices.size(), 2u);
  uint64_t elements = 0;
  size_t batches = 0;
  for (const DeviceUpdateExecutor::DeviceCounters& one : counters.devices) {
    EXPECT_GE(one.batch_bytes, one.batches * kBytesOfTwoRuns);
    // Parameter and two states of float come back; two gradients go there too.
    EXPECT_GE(one.bytes_to_host, one.elements * 12);
    EXPECT_GE(one.bytes_to_device, one.elements * 20);
    EXPECT_EQ(one.recent.elements, one.elements);
    EXPECT_EQ(one.recent.copied_bytes, one.bytes_to_device + one.bytes_to_host);
    EXPECT_GT(one.recent.busy_ns, 0);
    EXPECT_TRUE(one.failure.ok());
    elements += one.elements;
    batches += one.batches;
  }
  EXPECT_EQ(elements, counters.device_elements);
  EXPECT_EQ(batches, 6u);
}

TEST_F(DeviceUpdateExecutorTest, TheCpuDoesItsFraction) {
  for (const double fraction : {0.25, 0.5, 0.9}) {
    updates_.Reset();
    const auto counters = UpdateAll(kBytesOfTwoRuns, fraction, /*devices=*/2);
    EXPECT_NEAR(static_cast<double>(counters.cpu_elements),
                fraction * kRunsInAll * kNumel, kNumel)
        << fraction;
  }
}

TEST_F(DeviceUpdateExecutorTest, AFractionChangesBetweenPasses) {
  const auto runtime = accelerator::MakeEmulatedRuntime({});
  const auto device = runtime->Open(0);
  ASSERT_TRUE(device.ok());
  accelerator::Device* const devices[] = {device->get()};
  DeviceUpdateExecutor executor({.pool = &pool_,
                                 .undo = absl::MakeSpan(undo_),
                                 .flat_elements = kRunsInAll * kNumel});
  uint64_t by_device = 0;
  for (const double fraction : {1.0, 0.0, 0.5, 1.0, 0.0}) {
    updates_.Reset();
    ASSERT_EQ(executor.Share(fraction, OptimizerKind::kAdamW, devices,
                             EmulatedKernels()),
              absl::OkStatus());
    ASSERT_TRUE(executor.Update({0, kPositions, kPositions}, &updates_).ok());
    updates_.CheckValues();
    const uint64_t now = executor.counters().device_elements;
    EXPECT_NEAR(static_cast<double>(now - by_device),
                (1 - fraction) * kRunsInAll * kNumel, kNumel);
    by_device = now;
  }
}

TEST_F(DeviceUpdateExecutorTest, ALaunchThatFailsIsDoneByTheCpu) {
  faults_.FailLaunchAfter(5);
  const auto counters = UpdateAll(kBytesOfTwoRuns);
  EXPECT_TRUE(absl::IsUnavailable(counters.failure)) << counters.failure;
  EXPECT_GE(counters.cpu_elements, kNumel);
  EXPECT_LE(counters.cpu_elements, 2 * kNumel) << "the device goes on";
}

TEST_F(DeviceUpdateExecutorTest, WhatALostDeviceLeavesIsDoneByTheCpu) {
  // In the middle of a batch, which has five commands.
  faults_.LoseAfter(22);
  const auto counters = UpdateAll(kBytesOfTwoRuns);
  EXPECT_TRUE(absl::IsInternal(counters.failure)) << counters.failure;
  EXPECT_GE(counters.device_elements, kNumel);
  EXPECT_GT(counters.cpu_elements, kRunsInAll * kNumel / 2);
}

TEST_F(DeviceUpdateExecutorTest, TheOtherDeviceGoesOnWhenOneIsLost) {
  faults_.LoseAfter(22);
  const auto counters = UpdateAll(kBytesOfTwoRuns, /*cpu_fraction=*/0,
                                  /*devices=*/2);
  EXPECT_TRUE(absl::IsInternal(counters.failure)) << counters.failure;
  EXPECT_GT(counters.device_elements, kRunsInAll * kNumel / 3);
  EXPECT_GT(counters.cpu_elements, kRunsInAll * kNumel / 4);
  ASSERT_EQ(counters.devices.size(), 2u);
  EXPECT_NE(counters.devices[0].is_lost, counters.devices[1].is_lost);
  for (const DeviceUpdateExecutor::DeviceCounters& one : counters.devices) {
    EXPECT_EQ(one.is_lost, !one.failure.ok());
  }
}

// By a former executor of the same process, as that of a job's former shape.
TEST_F(DeviceUpdateExecutorTest, ADeviceThatWasLostBeforeIsLeftOut) {
  const auto runtime =
      accelerator::MakeEmulatedRuntime({.devices = 2, .faults = &faults_});
  std::unique_ptr<accelerator::Device> opened[2];
  accelerator::Device* devices[2];
  for (size_t i = 0; i < 2; ++i) {
    opened[i] = *runtime->Open(i);
    devices[i] = opened[i].get();
  }
  const DeviceUpdateExecutor::Options options = {
      .pool = &pool_,
      .undo = absl::MakeSpan(undo_),
      .flat_elements = kRunsInAll * kNumel};
  size_t lost = 2;
  for (const bool is_first : {true, false}) {
    updates_.Reset();
    DeviceUpdateExecutor executor(options);
    ASSERT_EQ(
        executor.Share(0, OptimizerKind::kAdamW, devices, EmulatedKernels()),
        absl::OkStatus());
    if (is_first) faults_.LoseAfter(0);
    ASSERT_TRUE(executor.Update({0, kPositions, kPositions}, &updates_).ok());
    updates_.CheckValues();
    const auto counters = executor.counters();
    if (is_first) lost = counters.devices[0].is_lost ? 0 : 1;
    EXPECT_TRUE(counters.devices[lost].is_lost);
    EXPECT_TRUE(absl::IsInternal(counters.devices[lost].failure));
    EXPECT_FALSE(counters.devices[1 - lost].is_lost);
    EXPECT_EQ(counters.cpu_elements > 0, is_first);
  }
}

TEST_F(DeviceUpdateExecutorTest, ATaskThatFitsInNoBatchIsDoneByTheCpu) {
  const auto counters = UpdateAll(/*bytes=*/1000);
  EXPECT_EQ(counters.cpu_elements, kRunsInAll * kNumel);
  EXPECT_TRUE(counters.failure.ok());
}

// Updates until a kernel of the GPU ends with an error, which stays for the
// process, and ends it: with 0, if the CPU has done the rest.
[[noreturn]] void LoseTheGpu() {
  WorkerPool pool(2, /*spin=*/false);
  std::vector<WorkerUndo> undo(2);
  WatchedUpdates updates(/*slots=*/2);
  const BreakingKernels kernels(/*launches=*/3);
  DeviceExecutor executor(&pool, absl::MakeSpan(undo),
                          accelerator::MakeCudaRuntime(), &kernels,
                          {.bytes = kBytesOfTwoRuns});
  EXPECT_TRUE(executor.Update({0, kPositions, kPositions}, &updates).ok());
  updates.CheckValues();
  const auto counters = executor.counters();
  EXPECT_TRUE(absl::IsInternal(counters.failure)) << counters.failure;
  EXPECT_TRUE(counters.devices[0].is_lost);
  EXPECT_GT(counters.cpu_elements, 0u);
  std::_Exit(testing::Test::HasFailure() ? 1 : 0);
}

// In a process of its own, whose driver is of no use behind it.
TEST(DeviceUpdateExecutorDeathTest, AGpuThatIsLostCostsNoBits) {
  if (const std::string why = WhyNoCuda(); !why.empty()) GTEST_SKIP() << why;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(LoseTheGpu(), testing::ExitedWithCode(0), "");
}

class DeviceUpdateExecutorShareTest : public testing::Test {
 protected:
  static constexpr uint64_t kMemory = uint64_t{1} << 30;
  static constexpr uint64_t kBatch = DeviceUpdateExecutor::kBatchBytes;

  // Asks for a share of a device, and returns the error.
  static absl::Status Share(double fraction, size_t devices,
                            uint64_t memory_bytes, uint64_t batch_bytes,
                            OptimizerKind kind = OptimizerKind::kAdamW) {
    const auto runtime =
        accelerator::MakeEmulatedRuntime({.memory_bytes = memory_bytes});
    const auto device = runtime->Open(0);
    WorkerPool pool(1, /*spin=*/false);
    std::vector<WorkerUndo> undo(1);
    DeviceUpdateExecutor executor({.pool = &pool,
                                   .undo = absl::MakeSpan(undo),
                                   .batch_bytes = batch_bytes});
    accelerator::Device* const opened[] = {device->get()};
    return executor.Share(fraction, kind,
                          absl::MakeConstSpan(opened).first(devices),
                          EmulatedKernels());
  }
};

TEST_F(DeviceUpdateExecutorShareTest, ADeviceWithoutMemoryIsRefused) {
  const absl::Status refused = Share(0, 1, uint64_t{1} << 20, kBatch);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
}

TEST_F(DeviceUpdateExecutorShareTest, BadArgumentsAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(Share(0, 0, kMemory, kBatch)));
  EXPECT_TRUE(
      absl::IsInvalidArgument(Share(0, 1, kMemory, DeviceBatch::TableBytes())));
  for (const double fraction : {-0.1, 1.1, std::nan("")}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Share(fraction, 1, kMemory, kBatch)))
        << fraction;
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Share(0.5, 1, kMemory, kBatch)))
      << "of which elements";
  EXPECT_TRUE(Share(0, 1, kMemory, kBatch).ok());
}

TEST_F(DeviceUpdateExecutorShareTest, EveryOptimizerIsShared) {
  for (const OptimizerInfo& info : Optimizers()) {
    const absl::Status shared = Share(0, 1, kMemory, kBatch, info.kind);
    EXPECT_TRUE(shared.ok()) << info.name << " " << shared;
  }
}

// A kind of device that has kernels of nothing.
class NoKernels final : public DeviceKernels {
 public:
  absl::Status CanUpdate(OptimizerKind kind) const override {
    return absl::UnimplementedError(InfoOf(kind).name);
  }
  absl::Status Update(OptimizerKind, uint32_t, accelerator::DeviceAddress,
                      uint32_t, accelerator::DeviceAddress,
                      accelerator::DeviceStream*) const override {
    return absl::InternalError("not asked for");
  }
  absl::Status UpdateWhole(OptimizerKind, accelerator::DeviceAddress, uint32_t,
                           uint32_t,
                           accelerator::DeviceStream*) const override {
    return absl::InternalError("not asked for");
  }
  absl::Status Digest(accelerator::DeviceAddress, uint32_t,
                      accelerator::DeviceAddress,
                      accelerator::DeviceStream*) const override {
    return absl::InternalError("not asked for");
  }
};

TEST_F(DeviceUpdateExecutorShareTest, WithoutAKernelTheOptimizerIsRefused) {
  const auto runtime = accelerator::MakeEmulatedRuntime({});
  const auto device = runtime->Open(0);
  ASSERT_TRUE(device.ok()) << device.status();
  accelerator::Device* const opened[] = {device->get()};
  WorkerPool pool(1, /*spin=*/false);
  std::vector<WorkerUndo> undo(1);
  DeviceUpdateExecutor executor({.pool = &pool, .undo = absl::MakeSpan(undo)});
  const NoKernels kernels;
  const absl::Status refused =
      executor.Share(0, OptimizerKind::kMuon, opened, &kernels);
  EXPECT_TRUE(absl::IsUnimplemented(refused)) << refused;
  EXPECT_EQ(refused.message(), "muon");
  EXPECT_TRUE(executor.Share(1, OptimizerKind::kMuon, {}, &kernels).ok())
      << "the CPU has all";
}

DeviceExecutor* tested_executor = nullptr;
uint64_t elements_given = 0;

bool ApplyByDevice(const kernels::UpdateKernelKey& key,
                   const kernels::UpdateFactors& factors,
                   const kernels::TileView& view) {
  OneTask task(key, factors, view);
  elements_given += view.numel;
  return tested_executor->Update({0, 1, 1}, &task).ok() && task.is_done();
}

// Compares every optimizer, dtype and format, with odd lengths.
void CompareWithCpu(DeviceExecutor* executor) {
  tested_executor = executor;
  elements_given = 0;
  std::mt19937 random(kernels::TestSeed());
  namespace cpu = kernels::cpu;
  for (const kernels::UpdateKernelKey& key : cpu::AllKeys()) {
    const kernels::UpdateFactors factors = cpu::FirstFactors(key);
    for (const size_t numel : {1, 255, 257, 1003}) {
      const auto elements = cpu::RandomElements(numel, &random);
      ASSERT_EQ(cpu::Apply({.target = cpu::PlainTarget(),
                            .flat_begin = 512,
                            .apply = &ApplyByDevice},
                           key, factors, elements),
                cpu::Apply({.target = cpu::SupportedTargets().front(),
                            .flat_begin = 512},
                           key, factors, elements))
          << cpu::NameOfKey(key) << " x " << numel;
    }
  }
  EXPECT_GT(elements_given, 0u);
  const DeviceUpdateExecutor::Counters counters = executor->counters();
  EXPECT_EQ(counters.device_elements, elements_given);
  EXPECT_TRUE(counters.failure.ok()) << counters.failure;
  tested_executor = nullptr;
}

TEST(DeviceUpdateExecutorParityTest, BitsAreThoseOfTheCpu) {
  WorkerPool pool(1, /*spin=*/false);
  std::vector<WorkerUndo> undo(1);
  CompareWithCpu(
      MakeEmulated(&pool, absl::MakeSpan(undo), {.bytes = 1 << 20}).get());
}

TEST(DeviceUpdateExecutorParityTest, BitsOfCudaAreThoseOfTheCpu) {
  if (const std::string why = WhyNoCuda(); !why.empty()) GTEST_SKIP() << why;
  WorkerPool pool(1, /*spin=*/false);
  std::vector<WorkerUndo> undo(1);
  CompareWithCpu(
      MakeCuda(&pool, absl::MakeSpan(undo), {.bytes = 1 << 20}).get());
}

}  // namespace
}  // namespace optstate::scheduler
