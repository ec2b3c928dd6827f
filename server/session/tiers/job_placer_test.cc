#include "server/session/tiers/job_placer.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "optstate/v1/rates.pb.h"
#include "server/session/durability/store_maker.h"
#include "server/session/testing/room_fixture.h"
#include "server/session/tiers/disk_rates.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr uint64_t kRecords = 10;

// A job of ten records, and a daemon whose directories are in the state
// directory. Nothing is registered.
class JobPlacerTest : public ::testing::Test, protected RoomGround {
 protected:
  JobPlacerTest() { nvme().set_job_host_budget_bytes(5 * Frame()); }

  v1::NvmeSettings& nvme() { return *job_.options.config.mutable_nvme(); }
  void AddDirectories(int count) {
    for (int i = 0; i < count; ++i) {
      const std::string path = directory_ + "/disk" + std::to_string(i);
      std::filesystem::create_directory(path);
      nvme().add_directories(path);
    }
  }
  static JobDescription Describe(const v1::StorageSettings& storage) {
    LayoutSpec layout;
    layout.groups.resize(1);
    const int64_t numel = kRecords * kTileElements;
    layout.parameters.push_back(
        {.name = "a", .shape = {numel}, .numel = numel});
    JobDescription description;
    description.layout = *Layout::Make(std::move(layout));
    description.storage = storage;
    return description;
  }
  static v1::StorageSettings Asked(v1::Placement placement) {
    v1::StorageSettings storage;
    storage.set_placement(placement);
    storage.set_sub_group_elements(kTileElements);
    return storage;
  }
  // Returns the bytes of a record.
  uint64_t Frame() const {
    return SwapSizesOf(job_, Describe(Asked(v1::PLACEMENT_NVME))).frame;
  }
  // Returns the settings of the job that is placed, which has memory for all
  // records or for so many frames.
  absl::StatusOr<v1::StorageSettings> Place(const v1::StorageSettings& asked) {
    JobDescription description = Describe(asked);
    tried_.clear();
    const absl::Status placed = PlaceJob(
        job_, rates_,
        [this](const JobDescription& what) -> absl::Status {
          tried_.push_back(what.storage);
          if (!refused_.ok()) return refused_;
          const bool fits = what.storage.placement() == v1::PLACEMENT_HOST
                                ? host_fits_
                                : what.storage.host_budget_bytes() <=
                                      frames_that_fit_ * Frame();
          return fits ? absl::OkStatus()
                      : absl::ResourceExhaustedError("too large");
        },
        &description);
    if (!placed.ok()) return placed;
    return description.storage;
  }
  DiskRates RatesOf(const v1::StorageSettings& asked) {
    JobCall lock(&job_.lock);
    return RatesFor(asked, &job_);
  }

  JobContext job_{JobOptions()};
  DiskRates rates_;
  bool host_fits_ = true;
  uint64_t frames_that_fit_ = 1000;
  absl::Status refused_;
  std::vector<v1::StorageSettings> tried_;
};

TEST_F(JobPlacerTest, InMemoryNothingOfADiskIsKept) {
  AddDirectories(1);
  v1::StorageSettings asked = Asked(v1::PLACEMENT_HOST);
  asked.set_host_budget_bytes(1);
  asked.set_placement_reason("of a peer");
  const auto placed = Place(asked);
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->placement(), v1::PLACEMENT_HOST);
  EXPECT_EQ(placed->host_budget_bytes(), 0u);
  EXPECT_EQ(placed->placement_reason(), "");
  EXPECT_THAT(placed->directory_weights(), IsEmpty());
  ASSERT_THAT(tried_, SizeIs(1));
  EXPECT_EQ(tried_[0].SerializeAsString(), placed->SerializeAsString());
}

TEST_F(JobPlacerTest, WhatIsNotAskedForIsTheNodes) {
  job_.options.config.mutable_engine()->set_subgroup_elements(2 *
                                                              kTileElements);
  auto placed = Place({});
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->placement(), v1::PLACEMENT_HOST);
  EXPECT_EQ(placed->sub_group_elements(), 2 * kTileElements);
  EXPECT_EQ(placed->durability(), v1::DURABILITY_KIND_NONE);
  placed = Place(Asked(v1::PLACEMENT_HOST));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->sub_group_elements(), kTileElements);
}

TEST_F(JobPlacerTest, ErrorsAreThoseOfAdmission) {
  AddDirectories(1);
  refused_ = absl::PermissionDeniedError("not this user");
  for (const auto placement :
       {v1::PLACEMENT_HOST, v1::PLACEMENT_NVME, v1::PLACEMENT_AUTO}) {
    EXPECT_EQ(Place(Asked(placement)).status(), refused_);
    EXPECT_THAT(tried_, SizeIs(1));
  }
}

TEST_F(JobPlacerTest, OnDiskTheBudgetIsTheJobsOrTheDefault) {
  AddDirectories(1);
  v1::StorageSettings asked = Asked(v1::PLACEMENT_NVME);
  auto placed = Place(asked);
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->placement(), v1::PLACEMENT_NVME);
  EXPECT_EQ(placed->host_budget_bytes(), 5 * Frame());
  asked.set_host_budget_bytes(4 * Frame() + 7);
  placed = Place(asked);
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->host_budget_bytes(), 4 * Frame() + 7);
}

TEST_F(JobPlacerTest, ADefaultThatIsTooSmallBecomesTheLeast) {
  AddDirectories(1);
  nvme().set_job_host_budget_bytes(1);
  const auto placed = Place(Asked(v1::PLACEMENT_NVME));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->host_budget_bytes(), 3 * Frame());
  ASSERT_THAT(tried_, SizeIs(1));
  EXPECT_EQ(tried_[0].host_budget_bytes(), 3 * Frame());
}

TEST_F(JobPlacerTest, ABudgetThatIsTooSmallIsRefusedWithTheLeast) {
  AddDirectories(1);
  v1::StorageSettings asked = Asked(v1::PLACEMENT_NVME);
  asked.set_host_budget_bytes(3 * Frame() - 1);
  const absl::Status refused = Place(asked).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr("has room for 2 of the job's records"),
                    HasSubstr("set at least " + std::to_string(3 * Frame()))));
  EXPECT_THAT(tried_, IsEmpty());
}

TEST_F(JobPlacerTest, RecordsAreSplitByTheDirectoriesWeights) {
  AddDirectories(2);
  auto placed = Place(Asked(v1::PLACEMENT_NVME));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_THAT(placed->directory_weights(), IsEmpty()) << "no rate is known";
  nvme().add_directory_weights(3);
  nvme().add_directory_weights(1);
  placed = Place(Asked(v1::PLACEMENT_NVME));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_THAT(placed->directory_weights(), ElementsAre(3, 1));
  // A durable job has files there too.
  v1::StorageSettings durable = Asked(v1::PLACEMENT_HOST);
  durable.set_durability(v1::DURABILITY_KIND_STEP);
  placed = Place(durable);
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_THAT(placed->directory_weights(), ElementsAre(3, 1));
  EXPECT_EQ(placed->host_budget_bytes(), 0u);
}

TEST_F(JobPlacerTest, AutoTakesMemoryWhereItIsAdmitted) {
  AddDirectories(1);
  const auto placed = Place(Asked(v1::PLACEMENT_AUTO));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->placement(), v1::PLACEMENT_HOST);
  EXPECT_EQ(placed->placement_reason(),
            "auto: the state fits in memory; what a step takes is not known");
}

TEST_F(JobPlacerTest, AutoTakesTheDiskOtherwise) {
  AddDirectories(1);
  host_fits_ = false;
  const auto placed = Place(Asked(v1::PLACEMENT_AUTO));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->placement(), v1::PLACEMENT_NVME);
  EXPECT_EQ(placed->host_budget_bytes(), 5 * Frame());
  EXPECT_THAT(placed->placement_reason(),
              AllOf(StartsWith("auto: the state does not fit in memory; 5 of "
                               "10 records"),
                    HasSubstr("by the default of a job; a step moves "),
                    HasSubstr("in a time that is not known")));
}

TEST_F(JobPlacerTest, AutoTakesWhatTheNodeHasLeft) {
  AddDirectories(1);
  host_fits_ = false;
  nvme().set_host_budget_bytes(7 * Frame());
  auto placed = Place(Asked(v1::PLACEMENT_AUTO));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->host_budget_bytes(), 7 * Frame());
  EXPECT_THAT(placed->placement_reason(), HasSubstr("what the node has left"));
  frames_that_fit_ = 4;
  placed = Place(Asked(v1::PLACEMENT_AUTO));
  ASSERT_TRUE(placed.ok()) << placed.status();
  EXPECT_EQ(placed->host_budget_bytes(), 4 * Frame());
  frames_that_fit_ = 2;
  EXPECT_TRUE(
      absl::IsResourceExhausted(Place(Asked(v1::PLACEMENT_AUTO)).status()));
}

TEST_F(JobPlacerTest, AutoWithoutADirectorySaysWhatIsMissing) {
  host_fits_ = false;
  const absl::Status refused = Place(Asked(v1::PLACEMENT_AUTO)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr("too large"), HasSubstr("--nvme-dir")));
}

// A directory that is not there shows whether one was measured: it could not
// be.
TEST_F(JobPlacerTest, RatesAreMeasuredForJobsThatArePlacedByThem) {
  EXPECT_THAT(RatesOf(Asked(v1::PLACEMENT_AUTO)).directories, IsEmpty());
  nvme().add_directories(directory_ + "/none");
  EXPECT_THAT(RatesOf(Asked(v1::PLACEMENT_HOST)).problems, IsEmpty());
  EXPECT_THAT(RatesOf(Asked(v1::PLACEMENT_NVME)).problems, IsEmpty())
      << "one directory has all";
  const DiskRates measured = RatesOf(Asked(v1::PLACEMENT_AUTO));
  ASSERT_THAT(measured.problems, SizeIs(1));
  EXPECT_FALSE(measured.problems[0].ok());
  nvme().add_directories(directory_ + "/neither");
  EXPECT_THAT(RatesOf(Asked(v1::PLACEMENT_NVME)).problems, SizeIs(2));
  EXPECT_THAT(RatesOf(Asked(v1::PLACEMENT_HOST)).problems, IsEmpty());
  v1::StorageSettings durable = Asked(v1::PLACEMENT_HOST);
  durable.set_durability(v1::DURABILITY_KIND_STEP);
  EXPECT_THAT(RatesOf(durable).problems, SizeIs(2));
  nvme().add_directory_weights(1);
  nvme().add_directory_weights(1);
  EXPECT_THAT(RatesOf(durable).problems, IsEmpty()) << "it is configured";
}

// Rates that are recorded are not measured again.
TEST_F(JobPlacerTest, RecordedRatesWeighTheDirectories) {
  AddDirectories(2);
  double next = 1e9;
  MeasureDiskRates(
      directory_, nvme(), /*anew=*/false,
      [&](const std::string&) -> absl::StatusOr<v1::DirectoryRates> {
        v1::DirectoryRates rates;
        rates.set_read_bytes_per_s(next);
        rates.set_write_bytes_per_s(next);
        rates.set_mixed_bytes_per_s(next);
        next *= 3;
        return rates;
      });
  rates_ = RatesOf(Asked(v1::PLACEMENT_AUTO));
  ASSERT_THAT(rates_.directories, SizeIs(2));
  EXPECT_EQ(rates_.directories[0].mixed_bytes_per_s(), 1e9);
  host_fits_ = false;
  const auto placed = Place(Asked(v1::PLACEMENT_AUTO));
  ASSERT_TRUE(placed.ok()) << placed.status();
  ASSERT_THAT(placed->directory_weights(), SizeIs(2));
  EXPECT_GT(placed->directory_weights(1), placed->directory_weights(0));
  EXPECT_THAT(placed->placement_reason(), HasSubstr(" on disk in 0.0"));
}

}  // namespace
}  // namespace optstate::session
