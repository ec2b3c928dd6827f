// Copies of whole parameters that emulated devices keep from step to step: the
// bits of the CPU's updates, whatever is kept, dropped, written or lost.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "proto/types/dtype.h"
#include "proto/types/optimizer.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/passes/non_separable_updater.h"
#include "server/scheduler/scheduler_test_job.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"
#include "storage/record_lag.h"
#include "storage/state_store.h"

namespace optstate::scheduler {
namespace {

using Access = storage::StateStore::Access;

constexpr uint64_t kStep = 3;
constexpr uint64_t kPlenty = 4 << 20;
constexpr OptimizerKind kKinds[] = {
    OptimizerKind::kLamb, OptimizerKind::kAdafactor, OptimizerKind::kMuon};

// A job that one executor updates.
class UpdatedJob {
 public:
  UpdatedJob(const SchedulerTestJob::Setup& setup, uint64_t batch_bytes)
      : job_(setup),
        executor_({.pool = &job_.pool(),
                   .undo = job_.memory().undo,
                   .batch_bytes = WholeBatch::TableBytes() + batch_bytes,
                   .records_max = 8}),
        counts_(&job_.plan(), &job_.memory()),
        updater_(&job_.plan(), &job_.memory(), &job_.pool(), &executor_,
                 &counts_, nullptr) {
    EXPECT_TRUE(updater_.Init().ok());
  }

  SchedulerTestJob& job() { return job_; }
  DeviceUpdateExecutor& executor() { return executor_; }
  void Update(uint64_t step) {
    ASSERT_TRUE(updater_.MakePass(job_.UpdateOf(step)).ok());
  }
  // Changes a master, as a load does.
  void Write(uint32_t parameter) {
    const auto pin = job_.store().PinSubGroup(
        job_.store().sub_groups().IndexOf(parameter, 0), Access::kWrite);
    ASSERT_TRUE(pin.ok()) << pin.status();
    float value;
    std::byte* const master = pin->record().master(parameter, 0);
    std::memcpy(&value, master, sizeof(value));
    value += 0.5f;
    std::memcpy(master, &value, sizeof(value));
  }

 private:
  SchedulerTestJob job_;
  DeviceUpdateExecutor executor_;
  StepCounts counts_;
  NonSeparableUpdater updater_;
};

// Two equal jobs: one updated by the CPU, one by devices that keep copies.
class KeptJob {
 public:
  struct Share {
    double cpu_fraction = 0;
    uint64_t device_bytes = kPlenty;
    size_t devices = 1;
    uint64_t batch_bytes = 1 << 20;
    accelerator::EmulatedFaults* faults = nullptr;
  };

  KeptJob(const SchedulerTestJob::Setup& setup, const Share& share)
      : runtime_(accelerator::MakeEmulatedRuntime(
            {.devices = share.devices,
             .memory_bytes = uint64_t{64} << 20,
             .faults = share.faults})),
        plain_(setup, share.batch_bytes),
        kept_(setup, share.batch_bytes) {
    for (size_t i = 0; i < share.devices; ++i) {
      devices_.push_back(*runtime_->Open(i));
      opened_.push_back(devices_.back().get());
    }
    ShareAgain(share);
  }
  void ShareAgain(const Share& share) {
    EXPECT_EQ(TryToShare(share), absl::OkStatus());
  }
  absl::Status TryToShare(const Share& share) {
    kept_.job().store().SetLag(nullptr);
    DeviceUpdateExecutor::Residents residents;
    residents.device_bytes = share.device_bytes;
    residents.parameters = kept_.job().layout().parameters().size();
    const absl::Status status = kept_.executor().Share(
        share.cpu_fraction, kept_.job().layout().optimizer(), opened_,
        EmulatedKernels(), residents);
    kept_.job().store().SetLag(kept_.executor().lag());
    return status;
  }
  ~KeptJob() {
    kept_.job().store().SetLag(nullptr);
    kept_.executor().Release();
  }

  // Updates these parameters, or all, of both; the states have to be equal.
  void Update(uint64_t step, std::vector<uint8_t> updated = {}) {
    if (updated.empty()) {
      updated.assign(plain_.job().layout().parameters().size(), 1);
    }
    for (UpdatedJob* const job : {&plain_, &kept_}) {
      job->job().SetUpdated(updated);
      job->job().FillGradients(step);
      job->Update(step);
    }
    EXPECT_EQ(kept_.job().State(), plain_.job().State()) << "step " << step;
  }
  void Write(uint32_t parameter) {
    plain_.Write(parameter);
    kept_.Write(parameter);
  }
  UpdatedJob& kept() { return kept_; }
  DeviceUpdateExecutor::Counters counters() {
    return kept_.executor().counters();
  }
  uint64_t kept_elements() {
    uint64_t elements = 0;
    for (const auto& device : counters().devices) {
      elements += device.resident_elements;
    }
    return elements;
  }
  // Returns the bytes of arrays that a step copies to the only device, in one
  // batch.
  uint64_t BytesOfUpdate(uint64_t step) {
    const uint64_t before = counters().devices[0].bytes_to_device;
    Update(step);
    return counters().devices[0].bytes_to_device - before -
           WholeBatch::TableBytes();
  }
  uint64_t elements() {
    uint64_t elements = 0;
    for (const ParameterSpec& spec : plain_.job().layout().parameters()) {
      elements += static_cast<uint64_t>(spec.numel);
    }
    return elements;
  }

 private:
  const std::unique_ptr<accelerator::DeviceRuntime> runtime_;
  std::vector<std::unique_ptr<accelerator::Device>> devices_;
  std::vector<accelerator::Device*> opened_;
  UpdatedJob plain_;
  UpdatedJob kept_;
};

TEST(KeptParametersTest, BitsAreThoseOfTheCpu) {
  for (const OptimizerKind kind : kKinds) {
    for (const StateFormat state :
         {StateFormat::kFloat32, StateFormat::kBFloat16,
          StateFormat::kDynamic8}) {
      // Muon's products take long here.
      if (kind == OptimizerKind::kMuon && state == StateFormat::kDynamic8) {
        continue;
      }
      for (const double fraction : {0.0, 0.3}) {
        // The largest parameter has no room with the second.
        for (const uint64_t device_bytes : {kPlenty, uint64_t{110000}}) {
          KeptJob job({.optimizer = kind,
                       .state = state,
                       .master = fraction == 0 ? MasterFormat::kSplit
                                               : MasterFormat::kFloat32},
                      {.cpu_fraction = fraction,
                       .device_bytes = device_bytes,
                       .devices = fraction == 0 ? size_t{1} : size_t{2}});
          for (uint64_t step = kStep; step < kStep + 4; ++step) {
            job.Update(step);
          }
          EXPECT_TRUE(job.counters().failure.ok());
          EXPECT_GT(job.kept_elements(), 0u);
          if (kind == OptimizerKind::kLamb && state == StateFormat::kFloat32 &&
              fraction == 0) {
            EXPECT_EQ(job.kept_elements() == job.elements(),
                      device_bytes == kPlenty);
          }
        }
      }
    }
  }
}

TEST(KeptParametersTest, OnlyGradientsGoToTheDevice) {
  for (const OptimizerKind kind :
       {OptimizerKind::kLamb, OptimizerKind::kAdafactor}) {
    KeptJob job({.optimizer = kind}, {});
    const uint64_t first = job.BytesOfUpdate(kStep);
    // Masters at least.
    EXPECT_GT(first, 2 * job.elements() * sizeof(float));
    // Each array begins at a multiple of 16 bytes.
    EXPECT_LE(job.BytesOfUpdate(kStep + 1),
              job.elements() * sizeof(float) +
                  16 * job.kept().job().layout().parameters().size());
  }
}

TEST(KeptParametersTest, StatesThatAreRoundedGoToTheDeviceEachTime) {
  KeptJob job(
      {.optimizer = OptimizerKind::kLamb, .state = StateFormat::kBFloat16}, {});
  job.Update(kStep);
  const uint64_t bytes = job.BytesOfUpdate(kStep + 1);
  EXPECT_GT(bytes, 3 * job.elements() * sizeof(float));
  EXPECT_LT(bytes, 4 * job.elements() * sizeof(float));
}

// A parameter without a gradient keeps its copy; it counts in a later step.
TEST(KeptParametersTest, ParametersThatAStepLeavesOutStay) {
  KeptJob job({.optimizer = OptimizerKind::kLamb}, {});
  const size_t parameters = job.kept().job().layout().parameters().size();
  std::mt19937 random(1);
  job.Update(kStep);
  for (uint64_t step = kStep + 1; step < kStep + 8; ++step) {
    std::vector<uint8_t> updated(parameters);
    for (uint8_t& each : updated) each = random() % 2;
    updated[step % parameters] = 1;
    job.Update(step, updated);
  }
  const uint64_t bytes = job.BytesOfUpdate(kStep + 8);
  EXPECT_LT(bytes, 2 * job.elements() * sizeof(float));
}

TEST(KeptParametersTest, ARecordThatIsWrittenIsCopiedAnew) {
  for (const OptimizerKind kind : kKinds) {
    KeptJob job({.optimizer = kind}, {});
    job.Update(kStep);
    const uint64_t without = job.BytesOfUpdate(kStep + 1);
    job.Write(0);
    EXPECT_GT(job.BytesOfUpdate(kStep + 2), without);
    EXPECT_EQ(job.BytesOfUpdate(kStep + 3), without);
  }
}

TEST(KeptParametersTest, CopiesThatAreDroppedAreMadeAnew) {
  KeptJob job({.optimizer = OptimizerKind::kLamb}, {});
  const uint64_t first = job.BytesOfUpdate(kStep);
  job.kept().executor().DropCopies();
  EXPECT_EQ(job.BytesOfUpdate(kStep + 1), first);
  EXPECT_LT(job.BytesOfUpdate(kStep + 2), first);
}

// No record in host memory ever lags behind a copy.
TEST(KeptParametersTest, ReadersWaitForNothing) {
  KeptJob job({.optimizer = OptimizerKind::kLamb}, {});
  storage::RecordLag* const lag = job.kept().executor().lag();
  ASSERT_NE(lag, nullptr);
  const SubGroup& first = job.kept().job().store().sub_groups()[0];
  EXPECT_FALSE(lag->Concerns(first, /*is_written=*/true)) << "no copy yet";
  job.Update(kStep);
  EXPECT_FALSE(lag->Concerns(first, /*is_written=*/false));
  EXPECT_TRUE(lag->Concerns(first, /*is_written=*/true));
}

// In each order of failing commands the CPU does what the device does not, and
// no copy counts that the device has half written.
TEST(KeptParametersTest, WhatADeviceLeavesIsDoneByTheCpu) {
  for (const bool is_lost : {false, true}) {
    for (int64_t commands = 0; commands < 18; ++commands) {
      accelerator::EmulatedFaults faults;
      KeptJob job({.optimizer = OptimizerKind::kLamb},
                  {.devices = 2, .batch_bytes = 260000, .faults = &faults});
      job.Update(kStep);
      if (is_lost) {
        faults.LoseAfter(commands);
      } else {
        faults.FailLaunchAfter(commands % 3);
      }
      for (uint64_t step = kStep + 1; step < kStep + 4; ++step) {
        job.Update(step);
      }
      EXPECT_FALSE(job.counters().failure.ok()) << commands;
    }
  }
}

// Whatever has room, and with the same parameters in each pass.
TEST(KeptParametersTest, TheCpuHasItsFractionPassForPass) {
  for (const uint64_t device_bytes : {kPlenty, uint64_t{110000}}) {
    for (const double fraction : {0.3, 0.5, 0.8}) {
      KeptJob job({.optimizer = OptimizerKind::kLamb},
                  {.cpu_fraction = fraction, .device_bytes = device_bytes});
      uint64_t first = 0;
      for (uint64_t step = kStep; step < kStep + 20; ++step) {
        const uint64_t before = job.counters().cpu_elements;
        job.Update(step);
        const uint64_t now = job.counters().cpu_elements - before;
        if (first == 0) first = now;
        EXPECT_EQ(now, first) << step;
      }
      // Half of the largest parameter.
      EXPECT_NEAR(static_cast<double>(first),
                  fraction * static_cast<double>(job.elements()), 100 * 65);
    }
  }
}

TEST(KeptParametersTest, AShareThatFailsLeavesNoCopy) {
  KeptJob::Share share;
  KeptJob job({.optimizer = OptimizerKind::kLamb}, share);
  job.Update(kStep);
  share.device_bytes = uint64_t{1} << 30;  // the device has less
  const absl::Status refused = job.TryToShare(share);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(job.kept().executor().lag(), nullptr);
  EXPECT_EQ(job.kept_elements(), 0u);
  const uint64_t by_devices = job.counters().device_elements;
  job.Update(kStep + 1);
  EXPECT_EQ(job.counters().device_elements, by_devices + job.elements());
}

TEST(KeptParametersTest, ALostDeviceKeepsNothingAndOthersDo) {
  accelerator::EmulatedFaults faults;
  KeptJob::Share share = {.devices = 2, .faults = &faults};
  KeptJob job({.optimizer = OptimizerKind::kLamb}, share);
  job.Update(kStep);
  faults.LoseAfter(0);
  job.Update(kStep + 1);
  job.Update(kStep + 2);
  EXPECT_EQ(job.kept_elements(), job.elements()) << "all on the other one";
  uint64_t step = kStep + 3;
  for (const double fraction : {0.0, 1.0, 0.0}) {
    share.cpu_fraction = fraction;
    job.ShareAgain(share);
    job.Update(step++);
    job.Update(step++);
  }
  const auto counters = job.counters();
  const size_t lost = counters.devices[0].is_lost ? 0 : 1;
  EXPECT_TRUE(counters.devices[lost].is_lost);
  EXPECT_FALSE(counters.devices[1 - lost].is_lost);
  EXPECT_EQ(counters.devices[lost].resident_elements, 0u);
  EXPECT_EQ(counters.devices[1 - lost].resident_elements, job.elements());
}

TEST(KeptParametersTest, AnotherShareBeginsAnew) {
  KeptJob job({.optimizer = OptimizerKind::kLamb}, {});
  job.Update(kStep);
  job.kept().job().store().SetLag(nullptr);
  job.kept().executor().Release();
  EXPECT_EQ(job.kept().executor().lag(), nullptr);
  EXPECT_EQ(job.kept_elements(), 0u);
  job.Update(kStep + 1);
}

}  // namespace
}  // namespace optstate::scheduler
