#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_JOB_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_JOB_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/cast.h"
#include "kernels/master_format.h"
#include "kernels/test_keys.h"
#include "kernels/update_kernel.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "proto/types/partition.h"
#include "proto/types/status_macros.h"
#include "proto/types/sub_groups.h"
#include "server/scheduler/executors/device_kernels.h"
#include "server/scheduler/executors/device_update_executor.h"
#include "server/scheduler/executors/resident_records.h"
#include "server/scheduler/executors/residents_test_record.h"
#include "server/scheduler/executors/residents_test_runs.h"
#include "server/scheduler/executors/shared_gradients.h"
#include "server/scheduler/executors/shared_gradients_writer.h"
#include "server/scheduler/executors/shared_parameters.h"
#include "server/scheduler/executors/shared_parameters_reader.h"
#include "server/scheduler/executors/update_executor.h"
#include "server/scheduler/gradient_log.h"
#include "server/scheduler/worker_undo.h"
#include "server/scheduler/workers/worker_pool.h"
#include "storage/accelerator/cuda_runtime.h"
#include "storage/accelerator/device_runtime.h"
#include "storage/accelerator/emulated_faults.h"
#include "storage/accelerator/emulated_runtime.h"
#include "storage/record_lag.h"
#include "storage/record_view.h"

// A job whose records stay on devices, beside a copy that the CPU's kernels
// alone update, for tests.
namespace optstate::scheduler::residents {

// The memory of a job, its updates in one step, and a process that does them.
class Job final : public UpdateTasks {
 public:
  struct Setup {
    size_t devices = 1;
    size_t records_max = kSlots;
    uint64_t batch_bytes = 256 << 10;  // without its tables
    // Devices copy parameters to their places themselves.
    uint64_t direct_bytes_min = 1;
    size_t ranks = 1;
    // Records are open that are not needed, as those in memory are.
    bool opens_all = false;
  };

  Job(const Param& param, const Setup& setup, uint64_t seed)
      : param_(param),
        setup_(setup),
        random_(seed),
        numels_(DrawNumels()),
        layout_(LayoutOf(param, numels_)),
        area_(setup.ranks * kRuns * kTileElements),
        runs_(kRuns),
        position_of_slot_(kSlots, kPositions),
        pool_(kWorkers, /*spin=*/false),
        undo_(std::make_unique<WorkerUndo[]>(kWorkers)),
        runtime_(param.is_cuda ? accelerator::MakeCudaRuntime()
                               : accelerator::MakeEmulatedRuntime(
                                     {.devices = 2, .faults = &faults_})),
        ranks_runtime_(param.is_cuda
                           ? accelerator::MakeCudaRuntime()
                           : accelerator::MakeEmulatedRuntime({.devices = 2})) {
    lines_.reserve(kRuns * Record::kLinesMax);
    wanted_lines_.reserve(kRuns * Record::kLinesMax);
    for (size_t place = 0; place < kRuns; ++place) MakeRun(RunAt(place));
    Overwrite(0, kFlatEnd);
    log_.resize(LinesOf(GradientLog::BytesNeeded(room_)));
    StartProcess();
  }

  std::vector<Run>& runs() { return runs_; }
  accelerator::EmulatedFaults& faults() { return faults_; }
  DeviceUpdateExecutor& executor() { return *executor_; }
  absl::Span<std::byte> log() { return BytesOf(&log_); }
  uint64_t step() const { return step_; }  // the last one
  // Returns the bytes of all records on a device.
  uint64_t record_bytes() const { return record_bytes_; }

  absl::Status Share(double cpu_fraction, uint64_t device_bytes,
                     uint64_t log_tiles = kRuns) {
    std::vector<accelerator::Device*> opened;
    for (const auto& device : devices_) opened.push_back(device.get());
    GradientLog::Room room = room_;
    room.tiles = log_tiles;
    // Fewer tiles than there are, and no divisor of their number.
    constexpr uint64_t kTurn = 5 * kTileElements;
    Settle();
    const absl::Status shared = executor_->Share(
        cpu_fraction, param_.keys[0].optimizer, opened,
        param_.is_cuda ? CudaKernels() : EmulatedKernels(),
        {device_bytes,
         setup_.batch_bytes,
         {BytesOf(&lines_), setup_.direct_bytes_min, log(), room,
          is_sum() ? GradientLog::Content::kSum
                   : GradientLog::Content::kGradient},
         kTurn});
    for (const auto& reader : readers_) {
      EXPECT_TRUE(reader == nullptr || reader->is_over());
    }
    readers_.clear();
    return shared;
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
    CopyGradients();
    do {
      ChooseOpened();
      EXPECT_TRUE(executor_->Update({0, kPositions, kPositions}, this).ok());
      EXPECT_EQ(position_of_slot_, std::vector<size_t>(kSlots, kPositions));
    } while (executor_->HasLeftTasks());
    for (Run& run : runs_) {
      EXPECT_EQ(run.stamp.load(), run.wanted_stamp) << NameOf(run);
      EXPECT_TRUE(run.tested->parameter() == run.wanted->parameter())
          << "the parameter of " << NameOf(run);
    }
    CheckShared();
  }
  // Has a device share the parameters of its records, and reads them from now
  // on, until the next Share().
  absl::Status ShareParameters(size_t device, uint64_t bytes) {
    absl::StatusOr<DeviceParameters> shared =
        executor_->ShareParameters(device, bytes, kRuns);
    if (!shared.ok()) return shared.status();
    EXPECT_EQ(shared->device, device);
    readers_.resize(2);
    readers_[device] = std::make_unique<SharedReader>(
        *ranks_runtime_->Open(device), *std::move(shared), kRuns);
    CheckShared();
    return absl::OkStatus();
  }
  SharedReader* reader(size_t device) {
    return device < readers_.size() ? readers_[device].get() : nullptr;
  }
  // Checks what ranks are offered on devices, and returns how many runs.
  size_t CheckShared() {
    size_t count = 0;
    for (const auto& reader : readers_) {
      if (reader == nullptr) continue;
      for (size_t i = 0; i < kRuns; ++i) {
        if (reader->StepOf(i) == 0) continue;
        ++count;
        Run& run = runs_[i];
        EXPECT_EQ(reader->StepOf(i), run.stamp.load()) << NameOf(run);
        const auto parameter = run.tested->parameter();
        EXPECT_TRUE(reader->Read(i, parameter.size()) == parameter)
            << "on the device, " << NameOf(run);
      }
    }
    return count;
  }
  // The copies that the rank has on its device in steps to come.
  enum class Copies : uint8_t {
    kRight,
    kOfAnotherStep,  // it says so
    kWrong,          // it says that they are right
  };
  void SetCopies(Copies copies) { copies_ = copies; }
  // Has the rank copy its gradients to a device as well from now on, until the
  // process dies.
  absl::Status ShareGradients(size_t device) {
    OPTSTATE_ASSIGN_OR_RETURN(
        writer_, GradientsWriter::Make(*ranks_runtime_->Open(device), kRuns));
    OPTSTATE_ASSIGN_OR_RETURN(SharedGradients::Shared shared, writer_->Share());
    shared.device = devices_[device].get();
    shared.device_index = device;
    shared.area = reinterpret_cast<const std::byte*>(area_.data());
    RankPartition partition;
    for (uint32_t i = 0; i < kRuns; ++i) {
      partition.pieces.push_back(
          {i, 0, runs_[i].numel(), i * kTileElements * sizeof(float)});
    }
    partition.gradient_area_bytes = area_.size() * sizeof(float);
    return executor_->gradients().Map(std::move(shared), partition);
  }
  // Brings a range of the flat space up to date, as passes do that pin
  // sub-groups, and checks it.
  void MakeCurrent(uint64_t begin, uint64_t end, bool is_written) {
    if (storage::RecordLag* const lag = executor_->lag(); lag != nullptr) {
      pool_.ParallelFor(kRuns, [&](size_t i) {
        if (!runs_[i].IsIn(begin, end)) return;
        const SubGroup sub_group = SubGroupOf(i);
        if (!lag->Concerns(sub_group, is_written)) return;
        lag->MakeCurrent(RecordOf(i, &sub_group), is_written);
        EXPECT_FALSE(lag->Concerns(sub_group, is_written));
      });
    }
    CheckRecords(begin, end);
    CheckShared();
  }
  // Brings all records up to date: none is on a device then.
  void Settle() { MakeCurrent(0, kFlatEnd, /*is_written=*/true); }
  void Release() {
    Settle();
    executor_->Release();
  }
  // Brings records up to date that the next step would, as far as it is known.
  void WorkAhead() {
    for (size_t i = 0; i < kRuns; ++i) {
      const SubGroup sub_group = SubGroupOf(i);
      if (!executor_->IsDue(sub_group)) continue;
      executor_->lag()->MakeCurrent(RecordOf(i, &sub_group),
                                    /*is_written=*/false);
      EXPECT_FALSE(executor_->IsDue(sub_group));
    }
  }
  // Gives all records new values, after which no copy counts.
  void Replace() {
    executor_->DropCopies();
    EXPECT_FALSE(GradientLog::HasResidents(log()));
    Overwrite(0, kFlatEnd);
  }
  // Returns how many times an update was made without its record.
  size_t updates_without_record() const { return updates_without_record_; }
  // Gives the records of a range new values.
  void Overwrite(uint64_t begin, uint64_t end) {
    for (Run& run : runs_) {
      if (!run.IsIn(begin, end)) continue;
      const kernels::TileView& view = run.wanted->view();
      kernels::MasterFromFloat(run.key.master, run.key.parameter,
                               RandomFloats(run.numel()).data(), view.parameter,
                               view.master, run.numel());
      // Its states, and the parameter with its master.
      Advance(&run);
      const auto from = run.wanted->all();
      std::copy(from.begin(), from.end(), run.tested->all().begin());
    }
    CheckShared();
  }
  // Checks all bytes, when no record is on a device.
  void CheckSettled() {
    EXPECT_FALSE(GradientLog::HasResidents(log()));
    CheckRecords(0, kFlatEnd);
    for (size_t i = 0; i < kWorkers; ++i) EXPECT_EQ(undo_[i].kind.load(), 0u);
  }
  // Lets the process die, and another one go on, which begins as ReplayLog().
  void Restart() {
    readers_.clear();
    writer_.reset();
    executor_.reset();
    devices_.clear();
    GradientLog log(this->log());
    pool_.ParallelFor(log.tiles(), [&](size_t tile) {
      if (!log.is_resident(tile)) return;
      const Run& run = runs_[log.run(tile)];
      WorkerUndo* const undo = &undo_[WorkerPool::CurrentParticipant()];
      EXPECT_EQ(Replay(log, tile, run.stamp.load(),
                       is_sum() ? *run.sum_kernel : *run.kernel,
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
    std::vector<const void*> gradients;
    for (const size_t i : RunsIn(slot)) {
      Run& run = runs_[i];
      if (!run.is_visited || run.stamp.load() == step_) continue;
      factors = run.factors;
      gradients = run.gradients;
      UpdateTask task;
      task.record = position_of_slot_[slot];
      task.run = i;
      task.parameter = static_cast<uint32_t>(i);
      task.step = step_;
      task.view = run.tested->view();
      task.has_record = is_opened_[task.record];
      if (!task.has_record) {
        ++updates_without_record_;
        if (task.view.master != task.view.parameter) task.view.master = nullptr;
        for (int k = 0; k < kStateArraysMax; ++k) {
          task.view.state[k] = nullptr;
          task.view.scale[k] = nullptr;
        }
      }
      task.view.gradients = gradients;
      task.key = &run.key;
      task.kernel = run.kernel;
      task.sum_key = &run.sum_key;
      task.sum_kernel = run.sum_kernel;
      task.factors = &factors;
      task.stamp = &run.stamp;
      visit(task);
      std::memset(static_cast<void*>(&factors), 0xFF, sizeof(factors));
      gradients.assign(gradients.size(), nullptr);
    }
  }
  void Close(size_t slot) override {
    // The gradients are gone then, but those of tasks that were left.
    for (const size_t i : RunsIn(slot)) {
      Run& run = runs_[i];
      if (run.is_visited && run.stamp.load() != step_) continue;
      for (size_t rank = 0; rank < setup_.ranks; ++rank) {
        std::memset(GradientOf(run, rank), 0xFF, 4 * run.numel());
      }
    }
    position_of_slot_[slot] = kPositions;
  }

 private:
  std::vector<size_t> DrawNumels() {
    std::vector<size_t> numels(kRuns);
    for (size_t& numel : numels) {
      numel = kNumels[random_() % std::size(kNumels)];
    }
    return numels;
  }
  // Returns the run as a record of its own.
  storage::RecordView RecordOf(size_t run, const SubGroup* sub_group) const {
    const kernels::TileView& view = runs_[run].tested->view();
    storage::RecordView::Bases bases;
    bases.parameters = static_cast<std::byte*>(view.parameter);
    bases.parts[storage::kMasterPart] = static_cast<std::byte*>(view.master);
    for (size_t k = 0; k < kStateArraysMax; ++k) {
      bases.parts[storage::kStatePart0 + k] =
          static_cast<std::byte*>(view.state[k]);
      bases.parts[storage::kScalePart0 + k] =
          reinterpret_cast<std::byte*>(view.scale[k]);
    }
    return {&layout_, sub_group, bases};
  }
  // Chooses the positions whose records are open in the next pass: all that are
  // needed, and some of the others.
  void ChooseOpened() {
    for (size_t position = 0; position < kPositions; ++position) {
      is_opened_[position] = setup_.opens_all || random_() % 3 == 0;
      for (size_t k = 0; k < kRunsOfPosition; ++k) {
        const size_t i = RunAt(position * kRunsOfPosition + k);
        if (!runs_[i].is_visited || runs_[i].stamp.load() == step_) continue;
        is_opened_[position] =
            is_opened_[position] || executor_->NeedsRecord(i, step_);
      }
    }
  }
  bool is_sum() const { return setup_.ranks > 1; }
  float* GradientOf(const Run& run, size_t rank) const {
    return run.gradient.data() + rank * kRuns * kTileElements;
  }
  void MakeRun(size_t i) {
    Run& run = runs_[i];
    run.key = param_.keys[i % param_.keys.size()];
    run.kernel = *kernels::FindUpdateKernel(run.key);
    run.sum_key = run.key;
    run.sum_key.gradient = DType::kFloat32;
    run.sum_kernel = *kernels::FindUpdateKernel(run.sum_key);
    const size_t numel = numels_[i];
    const uint64_t flat_begin = layout_.flat_offset(static_cast<uint32_t>(i));
    run.wanted =
        std::make_unique<Record>(run.key, numel, flat_begin, &wanted_lines_);
    run.tested = std::make_unique<Record>(run.key, numel, flat_begin, &lines_);
    run.gradient = absl::MakeSpan(area_).subspan(i * kTileElements, numel);
    ++room_.tiles;
    room_.step_bytes +=
        GradientLog::EntryBytes(run.log_gradient_bytes(is_sum()));
    room_.parameter_bytes += LinesOf(4 * numel) * sizeof(Line);
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
         .flat_elements = kFlatEnd,
         .batch_bytes = DeviceBatch::TableBytes() + setup_.batch_bytes,
         .records_max = setup_.records_max}));
  }
  std::vector<float> RandomFloats(size_t numel) {
    std::normal_distribution<float> normal;
    std::vector<float> floats(numel);
    for (float& each : floats) each = normal(random_);
    return floats;
  }
  // Updates the copy with other gradients, of one or more ranks.
  void Advance(Run* run) {
    run->gradients.clear();
    for (size_t rank = random_() % setup_.ranks; rank < setup_.ranks; ++rank) {
      float* const gradient = GradientOf(*run, rank);
      kernels::CastFromFloat(run->key.gradient,
                             RandomFloats(run->numel()).data(), gradient,
                             run->numel());
      run->gradients.push_back(gradient);
    }
    kernels::UpdateInput input;
    // With weight decay: most states depend on the master then.
    const kernels::Variant variant = {run->key.optimizer, run->key.options};
    input.hyperparams = kernels::SettingsOf(variant)[1].hyperparams;
    input.step_count = ++run->step_count;
    input.gradient_factor = 0.37;
    input.step = step_;
    run->factors = run->kernel->prepare(input);
    kernels::TileView view = run->wanted->view();
    view.gradients = run->gradients;
    run->kernel->apply(run->factors, view);
  }
  void CopyGradients() {
    if (writer_ == nullptr) return;
    for (uint32_t i = 0; i < kRuns; ++i) {
      if (!runs_[i].is_visited) continue;
      const auto* const gradient =
          reinterpret_cast<const std::byte*>(runs_[i].gradient.data());
      writer_->Copy(i, {gradient, runs_[i].gradient_bytes()},
                    copies_ == Copies::kRight);
      writer_->Mark(i, copies_ == Copies::kOfAnotherStep ? step_ - 1 : step_);
    }
  }
  void CheckRecords(uint64_t begin, uint64_t end) {
    for (Run& run : runs_) {
      EXPECT_TRUE(!run.IsIn(begin, end) ||
                  run.tested->all() == run.wanted->all())
          << "the record of " << NameOf(run);
    }
  }
  std::vector<size_t> RunsIn(size_t slot) const {
    std::vector<size_t> runs(kRunsOfPosition);
    for (size_t k = 0; k < kRunsOfPosition; ++k) {
      runs[k] = RunAt(position_of_slot_[slot] * kRunsOfPosition + k);
    }
    return runs;
  }
  std::string NameOf(const Run& run) const {
    return absl::StrCat("run ", &run - runs_.data(), " at step ", step_);
  }

  const Param& param_;
  const Setup setup_;
  std::mt19937_64 random_;
  const std::vector<size_t> numels_;  // of runs
  const Layout layout_;
  std::vector<float> area_;                 // of gradients, a tile for each run
  std::vector<Line> lines_, wanted_lines_;  // of the records
  std::vector<Run> runs_;
  std::vector<size_t> position_of_slot_;  // kPositions: none
  bool is_opened_[kPositions] = {};       // in this pass
  size_t updates_without_record_ = 0;
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
  const std::unique_ptr<accelerator::DeviceRuntime> ranks_runtime_;
  std::vector<std::unique_ptr<SharedReader>> readers_;  // by device
  std::unique_ptr<GradientsWriter> writer_;  // null: nothing is shared
  Copies copies_ = Copies::kRight;
};

}  // namespace optstate::scheduler::residents

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_RESIDENTS_TEST_JOB_H_
