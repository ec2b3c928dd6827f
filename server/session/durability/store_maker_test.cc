#include "server/session/durability/store_maker.h"

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

class StoreMakerTest : public RoomTest<LowerRooms> {
 protected:
  StoreMakerTest() : RoomTest(std::nullopt) {
    std::filesystem::create_directory(disk());
    job_.options.config.mutable_nvme()->add_directories(disk());
    job_.options.config.mutable_nvme()->set_io_engine(
        v1::IO_ENGINE_KIND_BLOCKING);
  }

  std::string disk() const { return directory_ + "/disk"; }
  void Make(v1::Placement placement, v1::DurabilityKind durability) {
    RegisterSpec spec = TwoRanks();
    spec.storage.set_placement(placement);
    spec.storage.set_durability(durability);
    const absl::Status made = Register(spec).status();
    ASSERT_TRUE(made.ok()) << made;
    job_.scheduler = nullptr;  // it uses the store
    job_.DropStore();
  }
};

TEST_F(StoreMakerTest, RecordsInMemoryAreResident) {
  ASSERT_NO_FATAL_FAILURE(
      Make(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED));
  const auto store = MakeStore(&job_, /*restored=*/nullptr);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_TRUE((*store)->is_resident());
  EXPECT_FALSE((*store)->has_disk());
  EXPECT_FALSE(job_.tier->is_load_log_on_disk());
}

TEST_F(StoreMakerTest, ATestMayBringItsOwnStoreForRecordsInMemory) {
  ASSERT_NO_FATAL_FAILURE(
      Make(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_UNSPECIFIED));
  uint64_t incarnation = 0;
  job_.options.make_host_store =
      [&](const Layout* /*layout*/, uint64_t /*sub_group_elements*/,
          const storage::StateMemory& /*memory*/,
          uint64_t of) -> absl::StatusOr<std::unique_ptr<storage::StateStore>> {
    incarnation = of;
    return absl::UnimplementedError("a store of a test");
  };
  EXPECT_TRUE(absl::IsUnimplemented(MakeStore(&job_, nullptr).status()));
  EXPECT_EQ(incarnation, job_.tier->control()->incarnation);
}

// A load of such a job fits into memory as the job does.
TEST_F(StoreMakerTest, DurableRecordsAreInFramesOfMemory) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_HOST, v1::DURABILITY_KIND_STEP));
  const auto store = MakeStore(&job_, nullptr);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_TRUE((*store)->has_disk());
  EXPECT_TRUE((*store)->is_durable());
  EXPECT_FALSE(job_.tier->is_load_log_on_disk());
}

TEST_F(StoreMakerTest, ALoadIntoRecordsOnDiskWaitsOnDisk) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_NONE));
  const auto store = MakeStore(&job_, nullptr);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_TRUE((*store)->has_disk());
  EXPECT_FALSE((*store)->is_durable());
  EXPECT_FALSE((*store)->is_resident());
  EXPECT_TRUE(job_.tier->is_load_log_on_disk());
}

TEST_F(StoreMakerTest, RecordsNeedTheDirectoriesThatTheyHad) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_NONE));
  job_.options.config.mutable_nvme()->clear_directories();
  const absl::Status refused = MakeStore(&job_, nullptr).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("--nvme-dir"));
}

TEST_F(StoreMakerTest, SizesAreThoseOfTheJobsOwnSubGroups) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_NONE));
  JobDescription what = job_.shape->description;
  const storage::SwapSizes sizes = SwapSizesOf(job_, what);
  EXPECT_EQ(sizes.records, 2u) << "one for each group";
  // The node's setting is for new jobs.
  job_.options.config.mutable_engine()->set_subgroup_elements(1 << 20);
  EXPECT_EQ(SwapSizesOf(job_, what).frame, sizes.frame);
  EXPECT_EQ(*ParameterCacheBytesOf(job_, what), 0u);
  what.storage.set_parameters_on_disk(true);
  EXPECT_GT(*ParameterCacheBytesOf(job_, what), 0u);
}

TEST_F(StoreMakerTest, ADurableCommitIsOfAJobThatWasDurable) {
  ASSERT_NO_FATAL_FAILURE(Make(v1::PLACEMENT_NVME, v1::DURABILITY_KIND_STEP));
  const std::vector<std::string> folders = {disk() + "/jobs/test"};
  EXPECT_TRUE(absl::IsNotFound(ReadDurableCommit(job_, folders).status()));
  auto store = MakeStore(&job_, nullptr);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE((*store)->RequestCommit(3, "the job").ok());
  ASSERT_TRUE((*store)->AwaitCommit().ok());
  *store = nullptr;
  const auto commit = ReadDurableCommit(job_, folders);
  ASSERT_TRUE(commit.ok()) << commit.status();
  EXPECT_EQ(commit->step, 3u);
}

}  // namespace
}  // namespace optstate::session
