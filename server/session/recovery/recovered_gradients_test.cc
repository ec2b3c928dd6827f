#include "server/session/recovery/recovered_gradients.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/sealed_segment.h"
#include "server/session/recovery/staging_file.h"
#include "server/session/testing/upper_rooms.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::Key;

constexpr uint64_t kBytes = 12;      // of the gradients of each rank
constexpr uint64_t kAreaBytes = 64;  // of the memory that they lie in

// An engine has died in step 1, which updates both parameters.
class RecoveredGradientsTest : public UpperRoomFixture {
 protected:
  explicit RecoveredGradientsTest(const RegisterSpec& spec = TwoRankSpec())
      : UpperRoomFixture(spec) {
    ForgetSessions();
    EXPECT_EQ(job_.shape->partitions[0].gradient_area_bytes % kAreaBytes, 0u);
    RecoveredStep& recovery = job_.recovery.emplace();
    recovery.record = job_.record();
    recovery.record.committed_step = 1;
    recovery.groups.resize(2);
    recovery.updated = {1, 1};
    recovery.gradient_limit = 0;
  }
  ~RecoveredGradientsTest() override { job_.recovery.reset(); }

  // Returns a segment that a supervisor keeps: `offset_bytes`, then gradients
  // of this value.
  static KeptGradients KeptOf(uint32_t rank, uint64_t client_instance,
                              uint64_t offset_bytes, float value,
                              uint64_t bytes = 4096) {
    auto segment = shm::SealedSegment::Create("kept", bytes);
    EXPECT_TRUE(segment.ok()) << segment.status();
    for (uint64_t at = offset_bytes; at + kBytes <= bytes;
         at += sizeof(value)) {
      std::memcpy(segment->data() + at, &value, sizeof(value));
    }
    KeptGradients kept;
    kept.rank = rank;
    kept.client_instance = client_instance;
    kept.gradient_offset_bytes = offset_bytes;
    kept.segment.reset(::dup(segment->fd()));
    return kept;
  }
  void MakeStaging(uint32_t rank, uint64_t client_instance, float value) {
    bool present = false;
    auto file = MakeStagingFile(job_.StagingPath(rank, client_instance),
                                kAreaBytes, &present);
    ASSERT_TRUE(file.ok()) << file.status();
    std::memcpy(file->data(), &value, sizeof(value));
  }
  float GradientOf(uint32_t rank) {
    return *reinterpret_cast<const float*>(ranks_.gradient_area(rank));
  }
};

TEST_F(RecoveredGradientsTest, FindsWhatTheSupervisorKept) {
  job_.options.kept.push_back(KeptOf(0, kInstance, 64, 5));
  gradients_.FindGradients();
  ASSERT_FALSE(gradients_.LacksGradients(0));
  EXPECT_EQ(GradientOf(0), 5);
  EXPECT_TRUE(gradients_.LacksGradients(1));
}

TEST_F(RecoveredGradientsTest, OnlyTheSessionThatCommittedHasThem) {
  job_.options.kept.push_back(KeptOf(0, kInstance + 9, 0, 5));
  job_.options.kept.push_back(KeptOf(2, kInstance + 2, 0, 5));  // no rank
  job_.rank_mark(1).client_instance = 0;  // it had no identity
  job_.options.kept.push_back(KeptOf(1, 0, 0, 5));
  ASSERT_NO_FATAL_FAILURE(MakeStaging(0, kInstance + 9, 6));
  gradients_.FindGradients();
  EXPECT_TRUE(gradients_.LacksGradients(0));
  EXPECT_TRUE(gradients_.LacksGradients(1));
}

TEST_F(RecoveredGradientsTest, ASegmentThatIsTooSmallIsRefused) {
  job_.options.kept.push_back(KeptOf(0, kInstance, 4096 - 56, 5));
  job_.options.kept.push_back(KeptOf(1, kInstance + 1, 4096 - 64, 6));
  gradients_.FindGradients();
  EXPECT_TRUE(gradients_.LacksGradients(0));
  ASSERT_FALSE(gradients_.LacksGradients(1));
  EXPECT_EQ(GradientOf(1), 6);
}

TEST_F(RecoveredGradientsTest, FindsStagingFilesOfWhoHasNoMemoryOfItsOwn) {
  ASSERT_NO_FATAL_FAILURE(MakeStaging(0, kInstance, 5));
  ASSERT_NO_FATAL_FAILURE(MakeStaging(1, kInstance + 1, 6));
  job_.options.kept.push_back(KeptOf(1, kInstance + 1, 0, 7));
  gradients_.FindGradients();
  EXPECT_EQ(GradientOf(0), 5);
  EXPECT_EQ(GradientOf(1), 7);
}

TEST_F(RecoveredGradientsTest, ARankBringsItsOwn) {
  AttachSpec spec = AttachSpecOf(0);
  gradients_.AdoptGradients(spec);
  EXPECT_TRUE(gradients_.LacksGradients(0)) << "its area has none";
  spec.gradients_present = true;
  gradients_.AdoptGradients(spec);
  EXPECT_EQ(ranks_.gradient_area(0), spec.gradient_area);
}

// The gradients of a rank that owns their memory outlive its session thereby.
TEST_F(RecoveredGradientsTest, MemoryThatARankOwnsIsMappedAnew) {
  const KeptGradients owned = KeptOf(0, kInstance, 64, 8);
  AttachSpec spec = AttachSpecOf(0);
  spec.gradients_present = true;
  spec.gradient_segment = owned.segment.get();
  spec.gradient_offset_bytes = 64;
  gradients_.AdoptGradients(spec);
  EXPECT_NE(ranks_.gradient_area(0), spec.gradient_area);
  EXPECT_EQ(GradientOf(0), 8);
  // The area that was found stays.
  const std::byte* const found = ranks_.gradient_area(0);
  spec.gradient_segment = -1;
  gradients_.AdoptGradients(spec);
  EXPECT_EQ(ranks_.gradient_area(0), found);
}

TEST_F(RecoveredGradientsTest, MemoryThatCannotBeMappedEndsWithItsSession) {
  AttachSpec spec = AttachSpecOf(0);
  spec.gradients_present = true;
  spec.gradient_segment = STDIN_FILENO;
  gradients_.AdoptGradients(spec);
  EXPECT_EQ(ranks_.gradient_area(0), spec.gradient_area);
}

TEST_F(RecoveredGradientsTest, BetweenStepsASessionsAreaIsTheRanks) {
  job_.recovery.reset();
  gradients_.AdoptGradients(AttachSpecOf(0));
  EXPECT_EQ(ranks_.gradient_area(0), AttachSpecOf(0).gradient_area);
}

TEST_F(RecoveredGradientsTest, NothingLacksWhereTheStepIsDone) {
  job_.recovery->updated = {0, 1};
  EXPECT_FALSE(gradients_.LacksGradients(0));
  EXPECT_EQ(gradients_.RecoveryGradientBytes(0), 0u);
  EXPECT_TRUE(gradients_.LacksGradients(1));
  job_.tier->recovery().run_stamps[job_.layout().first_run(1)] = 1;
  EXPECT_FALSE(gradients_.LacksGradients(1));
}

TEST_F(RecoveredGradientsTest, OnlyGradientsOfWhoIsAwayAreDropped) {
  AttachRank(1);
  gradients_.DropGradientsOfAbsent();
  EXPECT_THAT(keeper_.kept(), ElementsAre(Key(1)));
  job_.options.keeper = nullptr;
  gradients_.DropGradientsOfAbsent();
}

TEST_F(RecoveredGradientsTest, StagingFilesOfSessionsThatReturnStay) {
  ranks_.Leave(1);  // rank 0 is awaited
  ASSERT_NO_FATAL_FAILURE(MakeStaging(0, kInstance, 5));
  ASSERT_NO_FATAL_FAILURE(MakeStaging(0, kInstance + 9, 5));
  ASSERT_NO_FATAL_FAILURE(MakeStaging(1, kInstance + 1, 5));
  const std::string other = directory_ + "/other";
  std::ofstream(other) << "x";
  gradients_.RemoveStaleStagingFiles();
  EXPECT_TRUE(std::filesystem::exists(job_.StagingPath(0, kInstance)));
  EXPECT_FALSE(std::filesystem::exists(job_.StagingPath(0, kInstance + 9)));
  EXPECT_FALSE(std::filesystem::exists(job_.StagingPath(1, kInstance + 1)));
  EXPECT_TRUE(std::filesystem::exists(other));
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/state"));
}

// Each rank has an area for both parameters.
class ReplicatedGradientsTest : public RecoveredGradientsTest {
 protected:
  ReplicatedGradientsTest()
      : RecoveredGradientsTest(ReplicatedSpec(2, /*accumulate=*/false)) {}
};

TEST_F(ReplicatedGradientsTest, OnlyWhatARankPushedIsNeededOfIt) {
  job_.recovery->pushed_by = {0b11, 0b10};
  const auto& pieces = job_.shape->partitions[0].pieces;
  EXPECT_EQ(gradients_.RecoveryGradientBytes(0), kBytes);
  EXPECT_EQ(gradients_.RecoveryGradientBytes(1),
            pieces[1].gradient_offset_bytes + kBytes);
  job_.recovery->pushed_by = {0b10, 0b10};
  EXPECT_FALSE(gradients_.LacksGradients(0));
  EXPECT_TRUE(gradients_.LacksGradients(1));
}

}  // namespace
}  // namespace optstate::session
