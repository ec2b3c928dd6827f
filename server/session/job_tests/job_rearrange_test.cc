// Jobs whose records are written anew on disk: split over directories in
// another way, or with parameters that are added.

#include <cstdint>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/captured_log.h"
#include "server/session/testing/held_read.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/rearrange_fixture.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;

using JobRearrangeTest = RearrangeFixture;

TEST_P(JobRearrangeTest, RecordsAreSplitAnewBetweenStepsAndTheBitsStay) {
  StartBoth();
  uint32_t changes = 0;
  const std::pair<Weights, uint32_t> all[] = {{{3, 1, 1}, 3},
                                              {{1, 0, 0}, 1},
                                              {{2, 4, 0}, 2},
                                              {{0, 1, 5}, 3},
                                              {{1, 1, 1}, 3}};
  for (const auto& [weights, directories] : all) {
    const auto reply = SetWeights(&on_disk_, weights);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_GT(reply->moved_bytes(), 0u);
    EXPECT_EQ(reply->storage().directories(), directories);
    EXPECT_EQ(reply->storage().arrangement(), ++changes);
    EXPECT_EQ(CountFolders(on_disk_), directories);
    ExpectSameBits();
    TrainBoth();
    ExpectSameBits();
    // Nothing is to do.
    const auto again = SetWeights(&on_disk_, weights);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->moved_bytes(), 0u);
    Reopen(GetParam().durability == v1::DURABILITY_KIND_STEP &&
           changes % 2 == 0);
    EXPECT_EQ(CountFolders(on_disk_), directories);
    ExpectSameBits();
    TrainBoth();
  }
  ExpectSameBits();
}

// Their look waits for no read of the copy: else this test does not end.
TEST_P(JobRearrangeTest, OperatorsSeeHowFarItIsAndTheLogItsBeginningAndItsEnd) {
  on_disk_.Close();
  on_disk_.setup().io_engine = v1::IO_ENGINE_KIND_BLOCKING;  // can be held
  ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
  StartBoth();
  for (const bool adds : {false, true}) {
    EXPECT_EQ(on_disk_.job().Describe().open_load(), "");
    const CapturedLog log;
    absl::StatusOr<v1::SetJobReply> set = v1::SetJobReply();
    absl::Status extended;
    HeldRead held;
    std::thread act([&] {
      if (adds) {
        extended = Extend(&on_disk_);
      } else {
        set = SetWeights(&on_disk_, {3, 1, 1});
      }
    });
    held.Await();
    const v1::Job described = on_disk_.job().Describe();
    if (adds) {
      EXPECT_THAT(described.open_load(),
                  MatchesRegex("records are written anew: 0 of [0-9]+ MiB "
                               "\\(0%\\)"));
      EXPECT_EQ(described.record_rewrite().bytes(), 0u);
    } else {
      // Other copies than the one that is held come on.
      EXPECT_THAT(described.open_load(),
                  MatchesRegex("records are written anew, training goes on: "
                               "[0-9]+ of [0-9]+ MiB \\([0-9]+%\\).*"));
      EXPECT_LT(described.record_rewrite().bytes(),
                described.record_rewrite().bytes_total());
    }
    EXPECT_GT(described.record_rewrite().bytes_total(), 0u);
    held.Release();
    act.join();
    ASSERT_TRUE(set.ok()) << set.status();
    ASSERT_EQ(extended, absl::OkStatus());
    const std::string what = absl::StrCat(
        "job=test why=\"", adds ? "parameters are added" : "directory_weights",
        "\" directories=3 weights=[^\n]*");
    EXPECT_THAT(log.Text(),
                AllOf(ContainsRegex(absl::StrCat(
                          "info records are written anew, training ",
                          adds ? "waits: " : "goes on: ", what, "\n")),
                      ContainsRegex("info records were written anew: " + what +
                                    " bytes=[1-9][0-9]* ms=")));
    EXPECT_THAT(on_disk_.job().Describe().open_load(),
                Not(HasSubstr("written anew")));
    EXPECT_FALSE(on_disk_.job().Describe().has_record_rewrite());
  }
}

// The disk does not let go of a file; nothing else is in its way.
TEST_P(JobRearrangeTest, WhatCannotBeRemovedIsSaidAndTheJobGoesOn) {
  StartBoth();
  const std::string left = FolderOf(on_disk_, 1) + "/records.1";
  fs::create_directories(left + "/busy");
  on_disk_.Close();
  {
    const CapturedLog log;
    ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
    EXPECT_THAT(log.Text(), AllOf(HasSubstr("error " + left),
                                  Not(HasSubstr("removed what was left"))));
  }
  on_disk_.AttachAll();
  EXPECT_FALSE(SetWeights(&on_disk_, {3, 1, 1}).ok());
  TrainBoth();
  ExpectSameBits();
  fs::remove_all(left + "/busy");
  fs::remove(left);
  ASSERT_TRUE(SetWeights(&on_disk_, {3, 1, 1}).ok());
  TrainBoth();
  ExpectSameBits();
}

// The first folder cannot be told that the job has no others any more. After a
// loss of power it is asked how many there are.
TEST_P(JobRearrangeTest, FoldersStayUntilTheFirstOneSaysThatTheyAreNotTheJobs) {
  StartBoth();
  const std::string in_the_way = FolderOf(on_disk_, 0) + "/identity.new";
  fs::create_directory(in_the_way);
  {
    const CapturedLog log;
    const auto reply = SetWeights(&on_disk_, {1, 0, 0});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_GT(reply->moved_bytes(), 0u);
    EXPECT_THAT(log.Text(), ContainsRegex("error [^\n]*identity\\.new"));
  }
  EXPECT_TRUE(fs::exists(FolderOf(on_disk_, 1)));
  EXPECT_TRUE(fs::exists(FolderOf(on_disk_, 2)));
  TrainBoth();
  ExpectSameBits();
  fs::remove(in_the_way);
  Reopen(GetParam().durability == v1::DURABILITY_KIND_STEP);
  EXPECT_EQ(CountFolders(on_disk_), 1u);
  ExpectSameBits();
  TrainBoth();
  ExpectSameBits();
}

TEST_P(JobRearrangeTest, AutoSplitsAsANewJobWouldBe) {
  StartBoth();
  ASSERT_TRUE(SetWeights(&on_disk_, {1, 0, 0}).ok());
  v1::SetJobRequest request;
  request.set_directory_weights_auto(true);
  const auto reply = on_disk_.job().Set(request);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->storage().directories(), kDisks);
  EXPECT_TRUE(reply->storage().directory_weights().empty());
  TrainBoth();
  ExpectSameBits();
}

// The disk has the last durable step, whatever memory has.
TEST_P(JobRearrangeTest, APowerCutRightAfterItLeavesTheDurableStep) {
  if (!GetParam().is_durable()) GTEST_SKIP();
  StartBoth();
  TrainBoth();  // step 3, which "every 4" does not make durable
  ASSERT_TRUE(SetWeights(&on_disk_, {1, 4, 0}).ok());
  // The files as a power cut leaves them: an orderly end would commit.
  const std::string aside = on_disk_.disk() + "-aside";
  fs::copy(on_disk_.disk(), aside, fs::copy_options::recursive);
  on_disk_.Close();
  fs::remove_all(on_disk_.disk());
  fs::rename(aside, on_disk_.disk());
  on_disk_.DropMemory();
  ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
  on_disk_.AttachAll();
  const v1::Job job = on_disk_.job().Describe();
  EXPECT_EQ(job.committed_step(),
            GetParam().durability == v1::DURABILITY_KIND_EVERY ? 2u : 3u);
  EXPECT_THAT(job.storage().directory_weights(), ElementsAre(1, 4));
  Train(&on_disk_, job.committed_step() + 1, 4);
  Train(&in_memory_, 4, 4);
  ExpectSameBits();
}

TEST_P(JobRearrangeTest, ParametersAreAddedAndTheRestStaysAsItWas) {
  StartBoth();
  TrainBoth();
  for (JobHarness* job : {&in_memory_, &on_disk_}) {
    ASSERT_EQ(Extend(job), absl::OkStatus());
    EXPECT_EQ(job->job().Describe().phase(), v1::JOB_PHASE_LOADING);
    EXPECT_EQ(job->job().Describe().committed_step(), 3u);
  }
  EXPECT_EQ(CountFolders(on_disk_), kDisks);
  on_disk_.Close();
  // An engine that comes then asks for what was added.
  if (GetParam().durability == v1::DURABILITY_KIND_STEP) {
    on_disk_.DropMemory();
  }
  ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
  EXPECT_EQ(on_disk_.job().Describe().phase(), v1::JOB_PHASE_LOADING);
  EXPECT_EQ(on_disk_.job().Describe().committed_step(), 3u);
  for (JobHarness* job : {&in_memory_, &on_disk_}) LoadAdded(job);
  ExpectSameBits();
  TrainBoth();
  ExpectSameBits();
  Reopen(GetParam().durability == v1::DURABILITY_KIND_STEP);
  ExpectSameBits();
  TrainBoth();
  ASSERT_TRUE(SetWeights(&on_disk_, {1, 0, 2}).ok());
  ExpectSameBits();
  TrainBoth();
  ExpectSameBits();
  const auto shown = on_disk_.job().Describe();
  EXPECT_EQ(shown.storage().arrangement(), 2u);
}

// The description cannot be replaced, at the end of either.
TEST_P(JobRearrangeTest, ASwitchThatFailsLeavesTheJobAsItWas) {
  StartBoth();
  const std::string in_the_way = on_disk_.directory() + "/state/job.binpb.tmp";
  fs::create_directory(in_the_way);
  EXPECT_FALSE(SetWeights(&on_disk_, {1, 0, 0}).ok());
  EXPECT_EQ(CountFolders(on_disk_), kDisks);
  TrainBoth();
  ExpectSameBits();
  EXPECT_FALSE(Extend(&on_disk_).ok());
  on_disk_.SetLayout(LayoutOf(GetParam(), /*extended=*/false));
  EXPECT_EQ(CountFolders(on_disk_), kDisks);
  fs::remove(in_the_way);
  on_disk_.AttachAll();
  ExpectSameBits();
  TrainBoth();
  ExpectSameBits();
  Reopen(GetParam().durability == v1::DURABILITY_KIND_STEP);
  ExpectSameBits();
  EXPECT_EQ(on_disk_.job().Describe().storage().arrangement(), 0u);
}

TEST_P(JobRearrangeTest, NoRoomForTwoArrangementsIsRefusedAndChangesNothing) {
  on_disk_.setup().nvme.mutable_directory_bytes_max()->Resize(kDisks, 0);
  on_disk_.Close();
  ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
  StartBoth();
  on_disk_.Close();
  // Room for half of the records once more.
  on_disk_.setup().nvme.set_directory_bytes_max(
      0, 3 * fs::file_size(FolderOf(on_disk_, 0) + "/records") / 2);
  ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
  on_disk_.AttachAll();
  const absl::Status refused = SetWeights(&on_disk_, {1, 1, 0}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("nvme.directory_bytes_max"),
                    HasSubstr("the job is as it was")));
  const absl::Status extended = Extend(&on_disk_);
  EXPECT_TRUE(absl::IsResourceExhausted(extended)) << extended;
  on_disk_.SetLayout(LayoutOf(GetParam(), /*extended=*/false));
  on_disk_.AttachAll();
  EXPECT_EQ(CountFolders(on_disk_), kDisks);
  TrainBoth();
  ExpectSameBits();
}

TEST_P(JobRearrangeTest, WhatCannotBeIsRefusedWithWhatToDo) {
  StartBoth();
  EXPECT_TRUE(absl::IsInvalidArgument(SetWeights(&on_disk_, {1, 2}).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(SetWeights(&on_disk_, {0, 0, 0}).status()));
  v1::SetJobRequest both;
  both.set_host_budget_bytes(1 << 20);
  both.set_directory_weights_auto(true);
  EXPECT_TRUE(absl::IsInvalidArgument(on_disk_.job().Set(both).status()));
  const absl::Status in_memory = SetWeights(&in_memory_, {1, 1, 1}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(in_memory)) << in_memory;
  // A daemon that has fewer directories than the job.
  on_disk_.Close();
  on_disk_.setup().disks = 2;
  on_disk_.setup().nvme.clear_directory_weights();
  const absl::Status fewer = on_disk_.Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(fewer)) << fewer;
  EXPECT_THAT(std::string(fewer.message()), HasSubstr("made with 3"));
}

// A daemon with a further directory has jobs go on without it.
TEST_P(JobRearrangeTest, ADirectoryThatIsAddedLaterIsUsedOnceItHasAWeight) {
  on_disk_.setup().disks = 2;
  on_disk_.setup().nvme.mutable_directory_weights()->Resize(2, 1);
  on_disk_.Close();
  ASSERT_EQ(on_disk_.Open(), absl::OkStatus());
  StartBoth();
  on_disk_.setup().disks = 3;
  on_disk_.setup().nvme.mutable_directory_weights()->Resize(3, 1);
  Reopen(GetParam().durability == v1::DURABILITY_KIND_STEP);
  ExpectSameBits();
  EXPECT_EQ(CountFolders(on_disk_), 2u);
  ASSERT_TRUE(SetWeights(&on_disk_, {1, 1, 2}).ok());
  EXPECT_EQ(CountFolders(on_disk_), 3u);
  TrainBoth();
  ExpectSameBits();
  // One that has no records any more can be taken away.
  ASSERT_TRUE(SetWeights(&on_disk_, {1, 1, 0}).ok());
  TrainBoth();
  on_disk_.setup().disks = 2;
  on_disk_.setup().nvme.mutable_directory_weights()->Resize(2, 1);
  Reopen(GetParam().durability == v1::DURABILITY_KIND_STEP);
  ExpectSameBits();
}

// Records of the added group have an array more.
TEST(JobExtensionTest, ABudgetForLargerRecordsIsAskedForOrTheDefaultGrows) {
  const Kind& kind = kKinds[0];
  constexpr uint64_t kFrameBytes = kSubGroup * 8;
  constexpr uint64_t kLeastBytes = 3 * kSubGroup * 12;
  for (const bool is_default : {false, true}) {
    JobHarness::Setup setup = SetupOf(kind);
    setup.storage.set_host_budget_bytes(is_default ? 0 : 3 * kFrameBytes);
    JobHarness job(setup);
    job.Start(job.RandomTensors(kSeed));
    Train(&job, 1, 1);
    ASSERT_EQ(job.job().Describe().disk().frame_bytes(), kFrameBytes);
    job.DetachAll();
    LayoutSpec extended_layout = LayoutOf(kind, /*extended=*/true);
    extended_layout.groups[1].options = adam::kAmsgrad;
    job.SetLayout(extended_layout);
    absl::Status extended = job.Register(0, /*extend=*/true).status();
    if (!is_default) {
      EXPECT_TRUE(absl::IsFailedPrecondition(extended)) << extended;
      EXPECT_THAT(std::string(extended.message()),
                  AllOf(HasSubstr(absl::StrCat("set at least ", kLeastBytes)),
                        HasSubstr("optctl set job test host_budget=")));
      v1::SetJobRequest request;
      request.set_host_budget_bytes(kLeastBytes);
      ASSERT_TRUE(job.job().Set(request).ok());
      extended = job.Register(0, /*extend=*/true).status();
    }
    ASSERT_EQ(extended, absl::OkStatus());
    EXPECT_EQ(job.job().Describe().storage().host_budget_bytes(), kLeastBytes);
    EXPECT_EQ(job.job().Describe().disk().frames(), 3u);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, JobRearrangeTest, testing::ValuesIn(kKinds),
                         NameOf);

}  // namespace
}  // namespace optstate::session
