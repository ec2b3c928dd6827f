// Tests records that stay on devices, beside a copy that the CPU's kernels
// alone update: whatever happens between the steps, no bit differs. With
// emulated devices, and with a GPU, which skips where there is none.

#include <algorithm>
#include <cstring>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "kernels/test_keys.h"
#include "kernels/test_seed.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "storage/accelerator/cuda_runtime.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"

namespace optstate::scheduler {
namespace {

constexpr size_t kPositions = 9;
constexpr size_t kRunsOfPosition = 4;
constexpr size_t kRuns = kPositions * kRunsOfPosition;
constexpr size_t kNumels[] = {1, 101, 1000, kTileElements, 257};
// Each run has a tile of its own.
constexpr uint64_t kFlatEnd = kRuns * kTileElements;
constexpr size_t kSlots = 16;
constexpr size_t kWorkers = 3;

struct alignas(64) Line {
  std::byte bytes[64];
};

uint64_t LinesOf(uint64_t bytes) {
  return (bytes + sizeof(Line) - 1) / sizeof(Line);
}

absl::Span<std::byte> BytesOf(std::vector<Line>* lines) {
  return {reinterpret_cast<std::byte*>(lines->data()),
          lines->size() * sizeof(Line)};
}

// The arrays of one run: the parameter, then the master, if it is another
// array, and the states with their scales. Behind each are zeros, which nobody
// writes.
class Record {
 public:
  Record(const kernels::UpdateKernelKey& key, size_t numel, uint64_t flat_begin)
      : parameter_bytes_(numel * SizeInBytes(key.parameter)) {
    lines_.reserve((2 + 2 * kStateArraysMax) * (LinesOf(4 * numel) + 1));
    view_.numel = numel;
    view_.flat_begin = flat_begin;
    view_.parameter = view_.master = Add(parameter_bytes_);
    if (key.master != MasterFormat::kParameter) view_.master = Add(4 * numel);
    const size_t blocks =
        (numel + kQuantizedBlockElements - 1) / kQuantizedBlockElements;
    for (int k = 0; k < kStateArraysMax; ++k) {
      if (!HasStateArray(InfoOf(key.optimizer), k, key.options)) continue;
      view_.state[k] = Add(numel * SizeInBytes(key.state));
      if (key.state != StateFormat::kDynamic8) continue;
      view_.scale[k] = static_cast<float*>(Add(4 * blocks));
    }
  }

  const kernels::TileView& view() const { return view_; }
  absl::Span<std::byte> all() { return BytesOf(&lines_); }
  absl::Span<std::byte> parameter() { return all().first(parameter_bytes_); }

 private:
  void* Add(uint64_t bytes) {
    const size_t begin = lines_.size();
    lines_.resize(begin + LinesOf(bytes) + 1);
    return lines_.data() + begin;
  }

  const size_t parameter_bytes_;
  std::vector<Line> lines_;  // has room for all, so that it stays where it is
  kernels::TileView view_;
};

struct Run {
  kernels::UpdateKernelKey key;
  const kernels::UpdateKernel* kernel = nullptr;
  std::unique_ptr<Record> tested;
  std::unique_ptr<Record> wanted;  // updated by the CPU's kernel alone
  std::vector<float> gradient;     // room for any dtype
  kernels::UpdateFactors factors;
  int64_t step_count = 0;
  bool is_visited = false;  // in this step
  uint64_t wanted_stamp = 0;
  std::atomic<uint64_t> stamp{0};
  uint64_t numel() const { return tested->view().numel; }
  bool IsIn(uint64_t begin, uint64_t end) const {
    const uint64_t at = tested->view().flat_begin;
    return begin <= at && at < end;
  }
};

struct Param {
  std::string name;
  std::vector<kernels::UpdateKernelKey> keys;  // which runs have in turn
  bool is_cuda = false;
};
void PrintTo(const Param& param, std::ostream* out) { *out << param.name; }

// The memory of a job, its updates in one step, and a process that does them.
class Job final : public UpdateTasks {
 public:
  struct Setup {
    size_t devices = 1;
    size_t records_max = kSlots;
    uint64_t batch_bytes = 256 << 10;  // without its tables
  };

  Job(const Param& param, const Setup& setup, uint64_t seed)
      : param_(param),
        setup_(setup),
        random_(seed),
        runs_(kRuns),
        position_of_slot_(kSlots, kPositions),
        pool_(kWorkers, /*spin=*/false),
        undo_(std::make_unique<WorkerUndo[]>(kWorkers)),
        runtime_(param.is_cuda ? accelerator::MakeCudaRuntime()
                               : accelerator::MakeEmulatedRuntime(
                                     {.devices = 2, .faults = &faults_})) {
    for (size_t i = 0; i < kRuns; ++i) MakeRun(i);
    Overwrite(0, kFlatEnd);
    log_.resize(LinesOf(GradientLog::BytesNeeded(room_)));
    StartProcess();
  }

  std::vector<Run>& runs() { return runs_; }
  accelerator::EmulatedFaults& faults() { return faults_; }
  DeviceUpdateExecutor& executor() { return *executor_; }
  absl::Span<std::byte> log() { return BytesOf(&log_); }
  // Returns the bytes of all records on a device.
  uint64_t record_bytes() const { return record_bytes_; }

  absl::Status Share(double cpu_fraction, uint64_t device_bytes,
                     uint64_t log_tiles = kRuns) {
    std::vector<accelerator::Device*> opened;
    for (const auto& device : devices_) opened.push_back(device.get());
    GradientLog::Room room = room_;
    room.tiles = log_tiles;
    return executor_->Share(cpu_fraction, param_.keys[0].optimizer, opened,
                            param_.is_cuda ? CudaKernels() : EmulatedKernels(),
                            {device_bytes, setup_.batch_bytes, log(), room});
  }
  // Takes the next step, or one further on, with so many of the runs.
  void Step(uint32_t visited_percent = 100) {
    step_ += random_() % 8 == 0 ? 1 + random_() % 6 : 1;
    for (Run& run : runs_) {
      run.is_visited = random_() % 100 < visited_percent;
      if (!run.is_visited) continue;
      Advance(&run);
      run.wanted_stamp = step_;
    }
    EXPECT_TRUE(executor_->Update({0, kPositions, kPositions}, this).ok());
    EXPECT_EQ(position_of_slot_, std::vector<size_t>(kSlots, kPositions));
    for (Run& run : runs_) {
      EXPECT_EQ(run.stamp.load(), run.wanted_stamp) << NameOf(run);
      EXPECT_TRUE(run.tested->parameter() == run.wanted->parameter())
          << "the parameter of " << NameOf(run);
    }
  }
  // Brings a range of the flat space up to date, as passes do that pin
  // sub-groups, and checks it.
  void MakeCurrent(uint64_t begin, uint64_t end, bool is_written) {
    constexpr uint64_t kElements = 3 * kTileElements;
    pool_.ParallelFor((end - begin + kElements - 1) / kElements, [&](size_t i) {
      SubGroup sub_group;
      sub_group.begin = begin + i * kElements;
      sub_group.end = std::min(end, sub_group.begin + kElements);
      executor_->lag()->MakeCurrent(sub_group, is_written);
    });
    CheckRecords(begin, end);
  }
  // Gives the records of a range new values.
  void Overwrite(uint64_t begin, uint64_t end) {
    for (Run& run : runs_) {
      if (!run.IsIn(begin, end)) continue;
      std::memcpy(run.wanted->view().master, RandomFloats(run.numel()).data(),
                  4 * run.numel());
      // Its states, and the parameter with its master.
      Advance(&run);
      const auto from = run.wanted->all();
      std::copy(from.begin(), from.end(), run.tested->all().begin());
    }
  }
  // Checks all bytes, when no record is on a device.
  void CheckSettled() {
    EXPECT_FALSE(GradientLog::HasResidents(log()));
    CheckRecords(0, kFlatEnd);
    for (size_t i = 0; i < kWorkers; ++i) EXPECT_EQ(undo_[i].kind.load(), 0u);
  }
  // Lets the process die, and another one go on, which begins as ReplayLog().
  void Restart() {
    executor_.reset();
    devices_.clear();
    GradientLog log(this->log());
    pool_.ParallelFor(log.tiles(), [&](size_t tile) {
      if (!log.is_resident(tile)) return;
      const Run& run = runs_[log.run(tile)];
      WorkerUndo* const undo = &undo_[WorkerPool::CurrentParticipant()];
      EXPECT_EQ(Replay(log, tile, run.stamp.load(), *run.kernel,
                       run.tested->view(), undo),
                run.stamp.load());
      log.MarkSettled(tile);
    });
    CheckSettled();
    StartProcess();
  }

  absl::Status Open(size_t slot, size_t position) override {
    EXPECT_EQ(position_of_slot_[slot], kPositions) << "the slot is open";
    position_of_slot_[slot] = position;
    return absl::OkStatus();
  }
  void ForEachTask(size_t slot,
                   absl::FunctionRef<void(UpdateTask&)> visit) override {
    // These are overwritten behind the visit: an executor that does the task
    // later has copied them.
    kernels::UpdateFactors factors;
    const void* gradient = nullptr;
    for (Run& run : RunsIn(slot)) {
      if (!run.is_visited) continue;
      factors = run.factors;
      gradient = run.gradient.data();
      UpdateTask task;
      task.run = static_cast<uint64_t>(&run - runs_.data());
      task.step = step_;
      task.view = run.tested->view();
      task.view.gradients = absl::MakeConstSpan(&gradient, 1);
      task.key = &run.key;
      task.kernel = run.kernel;
      task.factors = &factors;
      task.stamp = &run.stamp;
      visit(task);
      std::memset(static_cast<void*>(&factors), 0xFF, sizeof(factors));
      gradient = nullptr;
    }
  }
  void Close(size_t slot) override {
    // The gradients are gone then.
    for (Run& run : RunsIn(slot)) {
      std::memset(run.gradient.data(), 0xFF, 4 * run.numel());
    }
    position_of_slot_[slot] = kPositions;
  }

 private:
  void MakeRun(size_t i) {
    Run& run = runs_[i];
    run.key = param_.keys[i % param_.keys.size()];
    run.kernel = *kernels::FindUpdateKernel(run.key);
    const size_t numel = kNumels[random_() % std::size(kNumels)];
    // Neighbours in the flat space are not those of a position.
    const uint64_t flat_begin = i * 7 % kRuns * kTileElements;
    run.wanted = std::make_unique<Record>(run.key, numel, flat_begin);
    run.tested = std::make_unique<Record>(run.key, numel, flat_begin);
    run.gradient.resize(numel);
    ++room_.tiles;
    room_.step_bytes +=
        GradientLog::EntryBytes(numel * SizeInBytes(run.key.gradient));
    room_.master_bytes += LinesOf(4 * numel) * sizeof(Line);
    record_bytes_ += ResidentRecords::RecordBytes(run.key, run.tested->view());
  }
  void StartProcess() {
    faults_.FailLaunchAfter(-1);
    faults_.LoseAfter(-1);
    for (size_t i = 0; i < setup_.devices; ++i) {
      devices_.push_back(*runtime_->Open(i));
    }
    executor_.reset(new DeviceUpdateExecutor(
        {.pool = &pool_,
         .undo = {undo_.get(), kWorkers},
         .batch_bytes = DeviceBatch::TableBytes() + setup_.batch_bytes,
         .records_max = setup_.records_max}));
  }
  std::vector<float> RandomFloats(size_t numel) {
    std::normal_distribution<float> normal;
    std::vector<float> floats(numel);
    for (float& each : floats) each = normal(random_);
    return floats;
  }
  // Updates the copy with another gradient.
  void Advance(Run* run) {
    kernels::CastFromFloat(run->key.gradient, RandomFloats(run->numel()).data(),
                           run->gradient.data(), run->numel());
    kernels::UpdateInput input;
    // With weight decay: most states depend on the master then.
    const kernels::Variant variant = {run->key.optimizer, run->key.options};
    input.hyperparams = kernels::SettingsOf(variant)[1].hyperparams;
    input.step_count = ++run->step_count;
    input.gradient_factor = 0.37;
    input.step = step_;
    run->factors = run->kernel->prepare(input);
    kernels::TileView view = run->wanted->view();
    const void* const gradient = run->gradient.data();
    view.gradients = absl::MakeConstSpan(&gradient, 1);
    run->kernel->apply(run->factors, view);
  }
  void CheckRecords(uint64_t begin, uint64_t end) {
    for (Run& run : runs_) {
      EXPECT_TRUE(!run.IsIn(begin, end) ||
                  run.tested->all() == run.wanted->all())
          << "the record of " << NameOf(run);
    }
  }
  absl::Span<Run> RunsIn(size_t slot) {
    return absl::MakeSpan(runs_).subspan(
        position_of_slot_[slot] * kRunsOfPosition, kRunsOfPosition);
  }
  std::string NameOf(const Run& run) const {
    return absl::StrCat("run ", &run - runs_.data(), " at step ", step_);
  }

  const Param& param_;
  const Setup setup_;
  std::mt19937_64 random_;
  std::vector<Run> runs_;
  std::vector<size_t> position_of_slot_;  // kPositions: none
  uint64_t step_ = 0;
  GradientLog::Room room_;
  uint64_t record_bytes_ = 0;
  std::vector<Line> log_;
  WorkerPool pool_;
  const std::unique_ptr<WorkerUndo[]> undo_;
  accelerator::EmulatedFaults faults_;
  const std::unique_ptr<accelerator::DeviceRuntime> runtime_;
  std::vector<std::unique_ptr<accelerator::Device>> devices_;
  std::unique_ptr<DeviceUpdateExecutor> executor_;
};

class DeviceResidentsTest : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (!GetParam().is_cuda) return;
    const auto devices = accelerator::MakeCudaRuntime()->Devices();
    if (devices.ok() && !devices->empty()) return;
    GTEST_SKIP() << "no device of CUDA: " << devices.status();
  }

  const uint64_t seed_ = kernels::TestSeed();
};

TEST_P(DeviceResidentsTest, InASteadyStateOnlyParametersComeBack) {
  Job job(GetParam(), {}, seed_);
  ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, job.record_bytes()).ok());
  job.Step();
  const auto before = job.executor().counters();
  job.Step();
  const auto after = job.executor().counters();
  uint64_t to_host = before.devices[0].bytes_to_host;
  for (const auto& run : job.runs()) {
    to_host += (run.tested->parameter().size() + 15) / 16 * 16;
  }
  EXPECT_EQ(after.devices[0].bytes_to_host, to_host);
  EXPECT_EQ(after.devices[0].resident_bytes, job.record_bytes());
  EXPECT_EQ(after.devices[0].resident_elements, before.device_elements);
  EXPECT_EQ(after.log_bytes, job.log().size());
}

TEST_P(DeviceResidentsTest, NothingStaysWithoutABudgetNorBehindRelease) {
  Job job(GetParam(), {}, seed_);
  for (const uint64_t budget : {uint64_t{0}, job.record_bytes() / 48 * 16}) {
    ASSERT_TRUE(job.Share(/*cpu_fraction=*/0, budget).ok());
    for (int i = 0; i < 3; ++i) job.Step();
    const auto counters = job.executor().counters();
    EXPECT_EQ(counters.devices[0].resident_elements > 0, budget > 0);
    EXPECT_LE(counters.devices[0].resident_bytes, budget);
    job.executor().Release();
    job.CheckSettled();
    job.Step();
    job.CheckSettled();
    const auto released = job.executor().counters();
    EXPECT_EQ(released.devices[0].resident_bytes, 0u);
    EXPECT_EQ(released.log_bytes, 0u);
    EXPECT_EQ(released.cpu_elements, 0u);
  }
}

TEST_P(DeviceResidentsTest, WhatALostDeviceHadIsNotLost) {
  if (GetParam().is_cuda) GTEST_SKIP() << "no GPU is lost on purpose";
  for (const double cpu_fraction : {0.0, 0.5}) {
    Job job(GetParam(), {.devices = 2}, seed_);
    ASSERT_TRUE(job.Share(cpu_fraction, job.record_bytes()).ok());
    for (int i = 0; i < 4; ++i) job.Step();
    job.faults().LoseAfter(7);
    for (int i = 0; i < 4; ++i) job.Step(/*visited_percent=*/50);
    EXPECT_TRUE(absl::IsInternal(job.executor().counters().failure));
    job.executor().Settle();
    job.CheckSettled();
  }
}

template <typename T, size_t kCount>
T OneOf(const T (&choices)[kCount], std::mt19937_64* random) {
  return choices[(*random)() % kCount];
}

void ShareAnew(Job* job, std::mt19937_64* random) {
  const double fraction = OneOf({0.0, 0.3, 0.7, 1.0}, random);
  const uint64_t eighths = OneOf<uint64_t>({0, 1, 4, 8}, random);
  const size_t log_tiles = OneOf({kRuns, kRuns, kRuns / 4}, random);
  const absl::Status shared =
      job->Share(fraction, job->record_bytes() * eighths / 8, log_tiles);
  // A device that is lost has nothing to share.
  EXPECT_TRUE(shared.ok() || (fraction < 1 && absl::IsInternal(shared)))
      << shared;
  job->CheckSettled();
}

// Lets something happen between two steps, or in the next one, or nothing.
void LetHappen(Job* job, std::mt19937_64* random) {
  const uint64_t begin = (*random)() % kRuns * kTileElements;
  const uint64_t end = begin + (*random)() % kRuns * kTileElements;
  switch ((*random)() % 12) {
    case 0:
      return job->MakeCurrent(begin, end, /*is_written=*/false);
    case 1:
      job->MakeCurrent(begin, end, /*is_written=*/true);
      return job->Overwrite(begin, end);
    case 2:
      job->executor().Settle();
      return job->CheckSettled();
    case 3:
      return ShareAnew(job, random);
    case 4:
      job->Restart();
      return ShareAnew(job, random);
    case 5:
      return job->faults().FailLaunchAfter(OneOf({0, 1, 4}, random));
    case 6:
      return job->faults().LoseAfter(OneOf({0, 10, 30}, random));
    case 7:
      job->executor().WorkAhead();
  }
}

TEST_P(DeviceResidentsTest, WhateverHappensNoBitDiffers) {
  const bool is_cuda = GetParam().is_cuda;
  for (uint64_t i = 0; i < (is_cuda ? 4 : 12) && !HasFailure(); ++i) {
    SCOPED_TRACE(absl::StrCat("seed ", seed_, " + ", i));
    std::mt19937_64 random(seed_ + i);
    const Job::Setup setup = {
        .devices = is_cuda ? 1 : OneOf<size_t>({1, 2}, &random),
        .records_max = OneOf<size_t>({2, kSlots}, &random),
        .batch_bytes = OneOf<uint64_t>({20000, 90000, 400000}, &random)};
    Job job(GetParam(), setup, random());
    ShareAnew(&job, &random);
    for (int step = 0; step < 25 && !HasFailure(); ++step) {
      job.Step(OneOf<uint32_t>({100, 80, 30}, &random));
      LetHappen(&job, &random);
    }
    job.executor().Settle();
    job.CheckSettled();
  }
}

kernels::UpdateKernelKey KeyOf(OptimizerKind kind, DType dtype,
                               StateFormat state, uint32_t options = 0) {
  kernels::UpdateKernelKey key = {kind, options, dtype, dtype, state};
  if (dtype == DType::kFloat32) key.master = MasterFormat::kParameter;
  return key;
}

std::vector<Param> Formats(bool is_cuda) {
  using enum OptimizerKind;
  using enum StateFormat;
  constexpr DType kOwn = DType::kFloat32, kHalf = DType::kBFloat16;
  std::vector<Param> formats = {
      {"OwnMaster", {KeyOf(kAdamW, kOwn, kFloat32)}},
      {"BFloat16", {KeyOf(kAdamW, kHalf, kFloat32)}},
      {"BFloat16States", {KeyOf(kAdamW, kHalf, kBFloat16)}},
      {"Dynamic8", {KeyOf(kAdamW, kHalf, kDynamic8)}},
      {"OneState", {KeyOf(kSgd, kOwn, kFloat32, sgd::kHasMomentum)}},
      {"StatesWithAGap",
       {KeyOf(kRmsprop, kHalf, kDynamic8, rmsprop::kCentered)}},
      {"Mixed",
       {KeyOf(kAdam, kOwn, kDynamic8), KeyOf(kAdam, kHalf, kDynamic8),
        KeyOf(kAdam, kOwn, kDynamic8, adam::kAmsgrad)}}};
  for (Param& format : formats) format.is_cuda = is_cuda;
  return formats;
}

INSTANTIATE_TEST_SUITE_P(Emulated, DeviceResidentsTest,
                         testing::ValuesIn(Formats(/*is_cuda=*/false)),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceResidentsTest,
                         testing::ValuesIn(Formats(/*is_cuda=*/true)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace optstate::scheduler
