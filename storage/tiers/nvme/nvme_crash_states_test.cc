// Tests a job after a power cut, or the engine's death, at every write and sync
// of a run.
//
// At each event of the simulated disk, power cuts are taken: all states that
// the unsynced sectors of 512 bytes may be in where these are few, else some at
// random. From each of them the job must go on with a step that was requested
// and is not older than the last one acknowledged, bit for bit.
//
// OPTSTATE_CRASH_STATES in the environment is how many states to visit at
// least.

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/persist_in_order.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

constexpr uint64_t kStatesDefault = 20'000;
// Fewer states than this are all visited.
constexpr uint64_t kAllStatesMax = 256;
constexpr uint64_t kRandomStates = 12;
constexpr int kSteps = 6;  // and those that are taken while records move

uint64_t StatesWanted() {
  const char* given = std::getenv("OPTSTATE_CRASH_STATES");
  return given != nullptr ? std::strtoull(given, nullptr, 0) : kStatesDefault;
}

ParameterSpec Parameter(const std::string& name, int64_t numel, DType dtype) {
  ParameterSpec spec;
  spec.name = name;
  spec.shape = {numel};
  spec.numel = numel;
  spec.dtype = dtype;
  return spec;
}

// Records with and without parameters of their own on disk.
Layout SmallLayout() {
  LayoutSpec spec;
  spec.optimizer = OptimizerKind::kSgd;
  spec.state_format = StateFormat::kBFloat16;
  spec.master_format = MasterFormat::kSplit;
  spec.groups.resize(2);
  spec.parameters = {Parameter("a", 9000, DType::kBFloat16),
                     Parameter("b", 5, DType::kFloat32),
                     Parameter("c", 5000, DType::kFloat32)};
  spec.parameters[2].group = 1;
  return *Layout::Make(std::move(spec));
}

class NvmeCrashStatesTest : public testing::Test {
 protected:
  NvmeCrashStatesTest() : random_(layouts_.Uniform(0, UINT64_MAX)) {}

  NvmeTestJob::Setup SetupOn(io::SimulatedDisk* disk, uint64_t frames) {
    NvmeTestJob::Setup setup;
    setup.layout = SmallLayout();
    setup.sub_group_elements = kTileElements;
    setup.frames = frames;
    setup.directories = {"/disk", "/disk2"};
    setup.make_engine = [disk] { return io::MakeSimulatedIoEngine(disk); };
    setup.device = device_;
    return setup;
  }

  // Makes a job with records in two files, or on a device, in turn.
  void MakeJob() {
    job_ = nullptr;
    device_ = jobs_++ % 2 == 0 ? "" : "/disk/device";
    disk_ = std::make_unique<io::SimulatedDisk>(
        io::SimulatedDiskOptions{.seed = layouts_.Uniform(0, UINT64_MAX),
                                 .latency_us_max = 500,
                                 .short_one_in = 20,
                                 .folders = {"/disk", "/disk2"}});
    job_ = std::make_unique<NvmeTestJob>(
        SetupOn(disk_.get(), NvmeStore::kFramesMin));
    if (!device_.empty()) {
      ASSERT_EQ(job_->MakeDevice(), absl::OkStatus());
    }
    requested_ = acknowledged_ = 0;
    is_faulty_ = false;
  }

  // Steps with commits. In some the sync of a file fails, so that the engine is
  // started again, its memory being there.
  void Run() {
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    for (int i = 1; i <= kSteps && !HasFailure(); ++i) {
      if (layouts_.Uniform(0, 3) == 0) Reopen(/*fails=*/true);
      Update();
      if (layouts_.Uniform(0, 1) == 0) ChangeFrames();
      if (layouts_.Uniform(0, 1) == 0 && !is_faulty_) Rearrange();
      ASSERT_NO_FATAL_FAILURE(Commit());
    }
    EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
    job_->Close();
  }

  // Makes the next step durable, and goes on meanwhile.
  void Commit() {
    ++requested_;
    ASSERT_EQ(job_->RequestCommit(requested_), absl::OkStatus());
    if (layouts_.Uniform(0, 1) == 0 && !is_faulty_) Update();
    const absl::Status durable = job_->store().AwaitCommit();
    if (durable.ok()) {
      acknowledged_ = requested_.load();
    } else {
      ASSERT_TRUE(is_faulty_) << durable;
      Reopen(/*fails=*/false);
    }
  }

  // A pass over most records.
  void Update() {
    std::vector<uint8_t> wanted(job_->records());
    for (uint8_t& value : wanted) value = layouts_.Uniform(0, 4) != 0;
    const auto positions = job_->store().BeginPass(wanted);
    ASSERT_TRUE(positions.ok()) << positions.status();
    for (size_t i = 0; i < *positions; ++i) {
      const auto pin = job_->store().PinOfPass(i);
      ASSERT_TRUE(pin.ok()) << pin.status();
      job_->WriteTo(*pin, &random_);
    }
  }

  // Gives the job more or fewer frames, and lets the engine be killed within.
  void ChangeFrames() {
    changing_ = this;
    storage::persist_hook.store(
        [](storage::PersistPoint) { changing_.load()->OnPlaceChanged(); });
    const absl::Status changed = job_->ChangeFrames(
        layouts_.Uniform(NvmeStore::kFramesMin, job_->records()), [this] {
          OnPlaceChanged();
          return absl::OkStatus();
        });
    storage::persist_hook.store(nullptr);
    ASSERT_EQ(changed, absl::OkStatus());
  }
  // Splits the records anew over one directory or two, while steps go on. Some
  // of these moves are given up.
  void Rearrange() {
    std::vector<std::string> directories = {"/disk", "/disk2"};
    std::vector<uint32_t> weights = {
        static_cast<uint32_t>(layouts_.Uniform(0, 3)),
        static_cast<uint32_t>(layouts_.Uniform(0, 3))};
    if (weights[0] + weights[1] == 0) weights.clear();
    if (layouts_.Uniform(0, 3) == 0) {
      directories.pop_back();
      weights.clear();
    }
    // A commit may be under way as the move begins.
    const bool is_committing = layouts_.Uniform(0, 1) == 0;
    if (is_committing) {
      ++requested_;
      ASSERT_EQ(job_->RequestCommit(requested_), absl::OkStatus());
    }
    ASSERT_EQ(job_->BeginMove(directories, weights), absl::OkStatus());
    if (layouts_.Uniform(0, 1) == 0) Update();
    if (is_committing) {
      ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
      acknowledged_ = requested_.load();
    }
    if (layouts_.Uniform(0, 1) == 0) Commit();
    absl::Status copied;
    std::thread copier([&] { copied = job_->store().CopyRecords(); });
    if (layouts_.Uniform(0, 1) == 0) Update();
    if (layouts_.Uniform(0, 1) == 0) Commit();
    if (layouts_.Uniform(0, 3) == 0) ChangeFrames();
    const bool gives_up = rearranged_ > 0 && layouts_.Uniform(0, 3) == 0;
    if (gives_up) job_->store().CancelMove(absl::AbortedError("given up"));
    copier.join();
    if (gives_up) {
      // It may have been over by then.
      ASSERT_TRUE(copied.ok() || absl::IsAborted(copied)) << copied;
      return job_->EndMove();
    }
    ASSERT_EQ(copied, absl::OkStatus());
    if (layouts_.Uniform(0, 1) == 0) Update();
    if (layouts_.Uniform(0, 1) == 0) Commit();
    ASSERT_EQ(job_->FinishMove([this] {
      OnPlaceChanged();
      return absl::OkStatus();
    }),
              absl::OkStatus());
    ++rearranged_;
  }
  // Called on the thread of I/O while records are written, then on the one that
  // changes frames. Jobs that are opened meanwhile have places too.
  void OnPlaceChanged() {
    if (!is_killed_within_ || is_looking_ || HasFailure()) return;
    is_looking_ = true;
    ++events_;
    Expect(CheckKilled());
    is_looking_ = false;
  }

  void Reopen(bool fails) {
    job_->Close();
    disk_->ClearFaults();
    is_faulty_ = fails;
    if (fails) {
      static const std::vector<std::string> kFiles = {
          "/disk/records", "/disk2/records", "/disk/commits"};
      const size_t file = layouts_.Uniform(0, 2);
      io::SimulatedFault fault;
      fault.kind = io::IoRequest::Kind::kSync;
      fault.path = file < 2 && !device_.empty() ? device_ : kFiles[file];
      if (fault.path == kFiles[file] && file < 2 &&
          job_->setup().arrangement % 2 == 1) {
        fault.path += ".1";
      }
      // Opening syncs both copies of a commit; the next commit syncs two, and a
      // device once for each directory.
      if (file == 2) fault.skip = kCommitCopies + layouts_.Uniform(0, 1);
      if (file == 1 && !device_.empty()) fault.skip = 1;
      disk_->AddFault(fault);
    }
    ASSERT_EQ(job_->Open(), absl::OkStatus());
  }

  // Restores the job from a disk after a power cut.
  absl::Status CheckRestored(std::unique_ptr<io::SimulatedDisk> disk) {
    ++states_;
    NvmeTestJob job(SetupOn(disk.get(), job_->records()));
    job.CopyCommitsOf(job_.get());
    const uint64_t acknowledged = acknowledged_;
    absl::Status status = job.Restore();
    if (absl::IsNotFound(status) && acknowledged == 0) return absl::OkStatus();
    if (status.ok()) status = job.CompareAll();
    if (status.ok()) status = CheckOneArrangement(job, *disk);
    if (!status.ok()) return status;
    const uint64_t step = job.store().durable_step();
    if (step < acknowledged || step > requested_) {
      return absl::InternalError(absl::StrCat(
          "step ", step, " came back, ", acknowledged, " was acknowledged and ",
          requested_.load(), " requested"));
    }
    return states_ % 16 == 0 ? GoOn(&job, disk.get()) : absl::OkStatus();
  }

  // Says whether a job that was opened has the files of its arrangement alone.
  absl::Status CheckOneArrangement(const NvmeTestJob& job,
                                   const io::SimulatedDisk& disk) const {
    const uint32_t number = job.setup().arrangement;
    const auto expect = [&](const std::string& path, bool is_there) {
      return disk.Exists(path) == is_there
                 ? absl::OkStatus()
                 : absl::InternalError(absl::StrCat(
                       path, is_there ? " is missing" : " was left over"));
    };
    absl::Status status = expect("/disk/commits", true);
    for (uint32_t i = number == 0 ? 0 : number - 1; i <= number + 1; ++i) {
      status.Update(expect(absl::StrCat("/disk/commits.", i), false));
    }
    for (const std::string& directory : job.setup().directories) {
      for (const bool is_odd : {false, true}) {
        status.Update(expect(directory + (is_odd ? "/records.1" : "/records"),
                             device_.empty() && is_odd == (number % 2 == 1)));
      }
    }
    return status;
  }

  // Commits a further step, which the next power cut must leave.
  absl::Status GoOn(NvmeTestJob* job, io::SimulatedDisk* disk) {
    std::mt19937_64 random(states_);
    absl::Status status;
    for (size_t i = 0; i < job->records(); i += 1 + random() % 2) {
      status.Update(job->Write(i, &random));
    }
    status.Update(job->RequestCommit(100));
    status.Update(job->store().AwaitCommit());
    job->Close();
    const auto cut = disk->Crash([](const io::CrashSector&) { return 0; });
    job->SetEngineMaker([&] { return io::MakeSimulatedIoEngine(cut.get()); });
    status.Update(job->Restore());
    if (status.ok() && job->store().durable_step() != 100) {
      status = absl::InternalError("the further step is lost");
    }
    status.Update(job->CompareAll());
    job->Close();
    return status;
  }

  // Visits power cuts of the present moment.
  void CutPower() {
    uint64_t all = 1;
    disk_->Crash([&](const io::CrashSector& sector) {
      all = std::min(all * (sector.writes.size() + 1), kAllStatesMax + 1);
      return 0;
    });
    if (all <= kAllStatesMax) {
      disk_->ForEachCrash(kAllStatesMax,
                          [&](std::unique_ptr<io::SimulatedDisk> disk) {
                            Expect(CheckRestored(std::move(disk)));
                          });
      return;
    }
    for (uint64_t i = 0; i < kRandomStates; ++i) {
      Expect(CheckRestored(disk_->CrashAtRandom(++crash_seed_)));
    }
  }

  // Opens the job with what it has in memory after the engine was killed.
  absl::Status CheckKilled() {
    ++states_;
    const auto disk = disk_->AfterKill(++crash_seed_);
    NvmeTestJob job(SetupOn(disk.get(), job_->setup().frames));
    job.CopyMemoryOf(job_.get());
    absl::Status status = job.Open();
    if (status.ok()) status = job.CompareAll();
    if (status.ok()) status = CheckOneArrangement(job, *disk);
    return status.ok() ? GoOn(&job, disk.get()) : status;
  }

  // A failure is noted once, lest a run of thousands of states prints them all.
  void Expect(const absl::Status& status) {
    if (is_mistaken_) {
      if (!status.ok()) has_found_it_ = true;
      return;
    }
    if (!status.ok() && !HasFailure()) {
      ADD_FAILURE() << "event " << events_ << ", state " << states_ << ": "
                    << status;
    }
  }

  // Runs jobs, one of each kind at least, until so many states have been
  // visited.
  void RunAll(uint64_t states, const std::function<void()>& visit) {
    while ((states_ < states || jobs_ < 2) && !HasFailure()) {
      MakeJob();
      crash_seed_ = layouts_.Uniform(0, UINT32_MAX);
      disk_->SetHook([&](const io::SimulatedEvent&) {
        ++events_;
        if (!HasFailure()) visit();
      });
      Run();
      job_ = nullptr;
    }
    std::cerr << states_ << " states at " << events_ << " events, records were "
              << "arranged anew " << rearranged_ << " times" << std::endl;
    EXPECT_GT(rearranged_, 0u);
  }

  // Takes steps while syncs of a file have no effect, as if the store left them
  // out, or did them too late. Returns whether a power cut shows it.
  bool FindsLostSyncs(const std::string& path, uint64_t times) {
    jobs_ = 0;  // its records are in files
    MakeJob();
    EXPECT_EQ(job_->Open(), absl::OkStatus());
    disk_->AddFault({.effect = io::SimulatedFault::Effect::kLostSync,
                     .kind = io::IoRequest::Kind::kSync,
                     .path = path,
                     .times = times});
    is_mistaken_ = true;
    has_found_it_ = false;
    disk_->SetHook([&](const io::SimulatedEvent&) {
      if (!has_found_it_) CutPower();
    });
    for (int i = 1; i <= kSteps && !has_found_it_ && !HasFailure(); ++i) {
      Update();
      Commit();
    }
    job_->Close();
    job_ = nullptr;
    is_mistaken_ = false;
    return has_found_it_;
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  std::unique_ptr<io::SimulatedDisk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
  std::string device_;
  std::atomic<uint64_t> requested_ = 0, acknowledged_ = 0;
  bool is_faulty_ = false;  // a sync is to fail
  bool is_killed_within_ = false;
  bool is_mistaken_ = false;  // syncs are lost: a wrong state is to be found
  std::atomic<bool> has_found_it_ = false;
  std::atomic<bool> is_looking_ = false;
  // The thread of I/O comes to the hook too, while it looks at restored jobs.
  static inline std::atomic<NvmeCrashStatesTest*> changing_ = nullptr;
  uint64_t jobs_ = 0, states_ = 0, events_ = 0, crash_seed_ = 0;
  uint64_t rearranged_ = 0;
};

TEST_F(NvmeCrashStatesTest, APowerCutLeavesADurableStep) {
  RunAll(StatesWanted(), [this] { CutPower(); });
}

// The states would show a store that forgets a sync, or has it after the next
// write that relies on it.
TEST_F(NvmeCrashStatesTest, AMissingOrLateSyncIsFound) {
  for (const char* path :
       {"/disk/records", "/disk2/records", "/disk/commits"}) {
    for (const uint64_t times : {uint64_t{1}, io::SimulatedFault::kForever}) {
      EXPECT_TRUE(FindsLostSyncs(path, times)) << path << ", " << times;
    }
  }
}

TEST_F(NvmeCrashStatesTest, AKilledEngineLeavesEveryByte) {
  is_killed_within_ = true;
  RunAll(StatesWanted() / 10, [this] { Expect(CheckKilled()); });
}

}  // namespace
}  // namespace optstate::nvme
