// The store against a model of every byte, over a simulated disk and a real
// one.

#include "storage/tiers/nvme/nvme_store.h"

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/make_io_engine.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/nvme_test_job.h"

namespace optstate::nvme {
namespace {

using Access = storage::StateStore::Access;

constexpr int kThreads = 5;

// Makes engines on a simulated disk that is slow by turns and interrupts calls,
// or on the folder of temporary files.
class Disk {
 public:
  Disk(bool is_simulated, uint64_t seed) {
    if (is_simulated) {
      simulated_ = std::make_unique<io::SimulatedDisk>(
          io::SimulatedDiskOptions{.seed = seed,
                                   .latency_us_max = 500,
                                   .short_one_in = 10,
                                   .interrupted_one_in = 20,
                                   .folders = {"/disk", "/disk2"}});
      return;
    }
    folder_ = testing::TempDir() + "/nvme_store_XXXXXX";
    EXPECT_NE(::mkdtemp(folder_.data()), nullptr);
    for (const std::string& directory : directories()) {
      std::filesystem::create_directory(directory);
    }
  }
  ~Disk() {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  std::vector<std::string> directories() const {
    return {folder_ + "/disk", folder_ + "/disk2"};
  }
  std::unique_ptr<io::IoEngine> MakeEngine() const {
    if (simulated_ != nullptr) {
      return io::MakeSimulatedIoEngine(simulated_.get());
    }
    auto engine = io::MakeIoEngine(io::IoEngineKind::kBlocking, {});
    EXPECT_TRUE(engine.ok()) << engine.status();
    return std::move(engine->engine);
  }

 private:
  std::unique_ptr<io::SimulatedDisk> simulated_;
  std::string folder_;
};

class NvmeStoreTest : public testing::TestWithParam<bool> {
 protected:
  Layout NextLayout() {
    LayoutSpec spec = layouts_.Next(12);
    spec.optimizer = static_cast<OptimizerKind>(layouts_.Uniform(1, 11));
    const size_t options = InfoOf(spec.optimizer).options.size();
    for (GroupSpec& group : spec.groups) group.options &= (1u << options) - 1;
    spec.state_format = static_cast<StateFormat>(layouts_.Uniform(1, 3));
    spec.master_format = static_cast<MasterFormat>(layouts_.Uniform(1, 2));
    for (ParameterSpec& parameter : spec.parameters) {
      if (parameter.dtype == DType::kFloat16 &&
          spec.master_format == MasterFormat::kSplit) {
        parameter.dtype = DType::kBFloat16;
      }
    }
    absl::StatusOr<Layout> layout = Layout::Make(std::move(spec));
    EXPECT_TRUE(layout.ok()) << layout.status();
    return *std::move(layout);
  }

  void MakeJob(bool is_durable) {
    job_ = nullptr;
    disk_ = std::make_unique<Disk>(GetParam(), layouts_.Uniform(0, 1u << 30));
    NvmeTestJob::Setup setup;
    setup.layout = NextLayout();
    setup.sub_group_elements = layouts_.Uniform(1, 4) * kTileElements;
    setup.is_durable = is_durable;
    setup.holds_parameters = layouts_.Uniform(0, 1) == 0;
    setup.cache_sections = layouts_.Uniform(storage::kSwapCacheSectionsMin, 6);
    setup.directories = disk_->directories();
    if (layouts_.Uniform(0, 1) == 0) setup.directories.pop_back();
    setup.make_engine = [this] { return disk_->MakeEngine(); };
    const bool is_on_device = layouts_.Uniform(0, 1) == 0;
    if (is_on_device) setup.device = setup.directories[0] + "/device";
    const SubGroupTable sub_groups(&setup.layout, setup.sub_group_elements,
                                   SubGroupTable::CutOf(setup.layout));
    setup.frames =
        layouts_.Uniform(NvmeStore::kFramesMin,
                         std::max(NvmeStore::kFramesMin, sub_groups.size()));
    job_ = std::make_unique<NvmeTestJob>(std::move(setup));
    if (is_on_device) {
      ASSERT_EQ(job_->MakeDevice(), absl::OkStatus());
    }
  }

  // Runs work(random) on several threads.
  template <typename Work>
  void OnThreads(const Work& work) {
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&work, seed = layouts_.Uniform(0, UINT32_MAX)] {
        std::mt19937_64 random(seed);
        work(&random);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  absl::Status UseRecord(size_t record, std::mt19937_64* random) {
    const auto parameters =
        static_cast<uint32_t>(job_->layout().parameters().size());
    const auto first = static_cast<uint32_t>((*random)() % parameters);
    const auto count =
        static_cast<uint32_t>((*random)() % (parameters - first) + 1);
    switch ((*random)() % 8) {
      case 0:
        job_->store().PrefetchParameters(first, count);
        return absl::OkStatus();
      case 1:
        job_->store().ReleaseParameters(first, count);
        return absl::OkStatus();
      case 2:
      case 3:
        // Parameters of a job with an area equal the model's in parts alone.
        if (job_->setup().holds_parameters) {
          return job_->CompareParameters(record);
        }
        [[fallthrough]];
      case 4:
      case 5:
        return job_->Compare(record);
      default:
        return job_->Write(record, random);
    }
  }

  void UseRecords() {
    OnThreads([this](std::mt19937_64* random) {
      for (int i = 0; i < 20; ++i) {
        const size_t record = (*random)() % job_->records();
        const absl::Status used = UseRecord(record, random);
        EXPECT_TRUE(used.ok()) << used;
      }
    });
  }

  // Updates the records of a pass, or some and leaves it.
  void Pass() {
    std::vector<uint8_t> wanted(job_->records());
    for (uint8_t& value : wanted) value = layouts_.Uniform(0, 3) != 0;
    const absl::StatusOr<size_t> positions = job_->store().BeginPass(wanted);
    ASSERT_TRUE(positions.ok()) << positions.status();
    const size_t end = layouts_.Uniform(0, 3) == 0
                           ? layouts_.Uniform(0, *positions)
                           : *positions;
    std::atomic<size_t> next = 0;
    std::vector<std::atomic<int>> visits(job_->records());
    OnThreads([&](std::mt19937_64* random) {
      for (size_t i = next++; i < end; i = next++) {
        const auto pin = job_->store().PinOfPass(i);
        ASSERT_TRUE(pin.ok()) << pin.status();
        ++visits[static_cast<size_t>(&pin->record().sub_group() -
                                     job_->store().sub_groups().all().data())];
        job_->WriteTo(*pin, random);
      }
    });
    if (end < *positions) return;
    for (size_t i = 0; i < visits.size(); ++i) {
      EXPECT_LE(visits[i], 1);
      EXPECT_GE(visits[i], wanted[i]);
    }
  }

  // Some of what can happen to a job, in a random order.
  void RunRandomly(int operations) {
    bool has_commit = false;
    uint64_t step = 0;
    for (int i = 0; i < operations && !HasFailure(); ++i) {
      switch (layouts_.Uniform(0, 7)) {
        case 0:
        case 1:
          Pass();
          break;
        case 2:
          UseRecords();
          break;
        case 3:
        case 4:
          if (!job_->setup().is_durable) break;
          ASSERT_TRUE(job_->RequestCommit(++step).ok());
          if (layouts_.Uniform(0, 1) == 0) UseRecords();
          ASSERT_TRUE(job_->store().AwaitCommit().ok());
          EXPECT_EQ(job_->store().durable_step(), step);
          has_commit = true;
          break;
        case 5:
          job_->Close();
          ASSERT_EQ(job_->Open(), absl::OkStatus());
          break;
        case 6:
          if (!has_commit) break;
          ASSERT_EQ(job_->Restore(), absl::OkStatus());
          break;
        case 7:
          if (job_->setup().is_durable && layouts_.Uniform(0, 1) == 0) {
            ASSERT_TRUE(job_->RequestCommit(++step).ok());
            has_commit = true;
          }
          ASSERT_EQ(
              job_->ChangeFrames(layouts_.Uniform(
                  NvmeStore::kFramesMin,
                  std::max<uint64_t>(NvmeStore::kFramesMin, job_->records()))),
              absl::OkStatus());
          break;
      }
    }
    EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
  }

  RandomLayouts layouts_;
  std::unique_ptr<Disk> disk_;
  std::unique_ptr<NvmeTestJob> job_;
};

TEST_P(NvmeStoreTest, HoldsEveryByte) {
  for (int round = 0; round < (GetParam() ? 40 : 6) && !HasFailure(); ++round) {
    MakeJob(/*is_durable=*/layouts_.Uniform(0, 3) != 0);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    if (job_->records() > 0) RunRandomly(12);
  }
}

TEST_P(NvmeStoreTest, TooFewFramesAreRefused) {
  for (int round = 0; round < 5; ++round) {
    MakeJob(/*is_durable=*/true);
    NvmeTestJob::Setup setup = job_->setup();
    setup.frames = NvmeStore::kFramesMin - 1;
    NvmeTestJob small(std::move(setup));
    EXPECT_TRUE(absl::IsInvalidArgument(small.Open()));
  }
}

// A layout whose parameters have no element has no record.
TEST_P(NvmeStoreTest, AJobWithoutRecordsIsDurable) {
  MakeJob(/*is_durable=*/true);
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {{.name = "a", .shape = {0}}};
  NvmeTestJob::Setup setup = job_->setup();
  setup.layout = *Layout::Make(std::move(spec));
  setup.frames = NvmeStore::kFramesMin;
  NvmeTestJob job(std::move(setup));
  ASSERT_EQ(job.records(), 0u);
  ASSERT_EQ(job.Open(), absl::OkStatus());
  ASSERT_EQ(job.RequestCommit(1), absl::OkStatus());
  ASSERT_EQ(job.store().AwaitCommit(), absl::OkStatus());
  EXPECT_EQ(job.Restore(), absl::OkStatus());
}

// A pass that was begun, and of which no record is taken, must not keep
// frames from those who want others.
TEST_P(NvmeStoreTest, AnAbandonedPassKeepsNobodyWaiting) {
  for (int round = 0; round < 10; ++round) {
    MakeJob(/*is_durable=*/layouts_.Uniform(0, 1) == 0);
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    const std::vector<uint8_t> all(job_->records(), 1);
    std::mt19937_64 random(layouts_.Uniform(0, UINT32_MAX));
    for (int pass = 0; pass < 3; ++pass) {
      for (size_t i = 0; i < job_->records(); ++i) {
        ASSERT_EQ(job_->Write(i, &random), absl::OkStatus());
      }
      ASSERT_TRUE(job_->store().BeginPass(all).ok());
      // The last positions first: what lies before them is read ahead.
      for (size_t i = job_->records(); i > job_->records() / 2; --i) {
        const auto pin = job_->store().PinOfPass(i - 1);
        ASSERT_TRUE(pin.ok());
        job_->WriteTo(*pin, &random);
      }
      EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
    }
  }
}

// Another job's step is durable there, and stays.
TEST_P(NvmeStoreTest, ANewJobIsNotMadeOverADurableOne) {
  MakeJob(/*is_durable=*/true);
  if (job_->records() == 0) return;
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  std::mt19937_64 random(1);
  ASSERT_EQ(job_->Write(0, &random), absl::OkStatus());
  ASSERT_EQ(job_->RequestCommit(1), absl::OkStatus());
  ASSERT_EQ(job_->store().AwaitCommit(), absl::OkStatus());
  job_->Close();
  NvmeTestJob job(job_->setup());
  const absl::Status opened = job.Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(opened)) << opened;
  const auto engine = disk_->MakeEngine();
  const auto commit =
      NvmeStore::ReadCommit(engine.get(), job.setup().directories);
  ASSERT_TRUE(commit.ok()) << commit.status();
  EXPECT_EQ(commit->step, 1u);
}

INSTANTIATE_TEST_SUITE_P(Disks, NvmeStoreTest, testing::Values(true, false),
                         [](const testing::TestParamInfo<bool>& tested) {
                           return tested.param ? "Simulated" : "Blocking";
                         });

}  // namespace
}  // namespace optstate::nvme
