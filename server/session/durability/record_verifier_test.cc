#include "server/session/durability/record_verifier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "server/session/testing/verifiable_store.h"

namespace optstate::session {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kIncarnation = 9;

bool GoOn(const v1::VerifyJobProgress& /*progress*/) { return true; }

class RecordVerifierTest : public testing::Test {
 protected:
  RecordVerifierTest() {
    std::string name = testing::TempDir() + "/record-verifier-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~RecordVerifierTest() override { std::filesystem::remove_all(folder_); }

  // Begins one that ends only when it is cancelled.
  std::shared_ptr<Verification> BeginEndlessScrub() {
    auto begun = verifier_.BeginScrub(&store_, /*bytes_per_s=*/1);
    EXPECT_TRUE(begun.ok()) << begun.status();
    return *begun;
  }
  absl::Status Verify() {
    auto begun = verifier_.Begin(&store_);
    return begun.ok() ? (*begun)->Await(GoOn) : begun.status();
  }
  v1::DiskState Describe() const {
    v1::DiskState disk;
    verifier_.Describe(&disk);
    return disk;
  }
  VerifyNote Note() const {
    const auto note = ReadVerifyNote(folder_);
    EXPECT_TRUE(note.ok() && note->has_value()) << note.status();
    return note.ok() ? note->value_or(VerifyNote()) : VerifyNote();
  }

  std::string folder_;
  // The two clocks have nothing to do with each other.
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(1);
  absl::Time wall_now_ = absl::UnixEpoch() + absl::Hours(1000);
  const Layout layout_ = OneParameterLayout();
  VerifiableStore store_{&layout_};
  RecordVerifier verifier_{"gpt", [this] { return now_; },
                           [this] { return wall_now_; }};
};

TEST_F(RecordVerifierTest, ThereIsOneAtATime) {
  const auto scrub = BeginEndlessScrub();
  EXPECT_TRUE(absl::IsFailedPrecondition(Verify()));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      verifier_.BeginScrub(&store_, /*bytes_per_s=*/0).status()));
  verifier_.Cancel("the engine ends");
  const absl::Status ended = scrub->Await(GoOn);
  EXPECT_TRUE(absl::IsAborted(ended)) << ended;
  EXPECT_THAT(ended.message(), HasSubstr("the engine ends"));
  EXPECT_TRUE(Verify().ok());
}

TEST_F(RecordVerifierTest, NoScrubIsBesideAnOperator) {
  const auto scrub = BeginEndlessScrub();
  {
    const RecordVerifier::OperatorTurn turn(&verifier_);
    EXPECT_THAT(scrub->Await(GoOn).message(), HasSubstr("an operator"));
    EXPECT_TRUE(absl::IsFailedPrecondition(
        verifier_.BeginScrub(&store_, /*bytes_per_s=*/0).status()));
    EXPECT_TRUE(Verify().ok());
  }
  verifier_.Cancel("not under way");
  const auto next = BeginEndlessScrub();
  verifier_.CancelScrub("over");
  EXPECT_THAT(next->Await(GoOn).message(), HasSubstr("over"));
}

TEST_F(RecordVerifierTest, TheEndOfAScrubIsNoneOfAnOperatorsVerification) {
  auto begun = verifier_.Begin(&store_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  verifier_.CancelScrub("there is none");
  EXPECT_TRUE((*begun)->Await(GoOn).ok());
}

TEST_F(RecordVerifierTest, EachDamageIsReportedOnce) {
  for (const int tile : {3, -1}) {
    storage::RecordDamage damage;
    damage.file = "/disk/records";
    damage.tile = tile;
    damage.first_parameter = "a";
    store_.Damage(damage);
  }
  auto begun = verifier_.Begin(&store_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  std::vector<v1::DamageKind> kinds;
  v1::VerifyJobProgress last;
  EXPECT_TRUE((*begun)
                  ->Await([&](const v1::VerifyJobProgress& progress) {
                    for (const v1::RecordDamage& one : progress.damages()) {
                      kinds.push_back(one.kind());
                    }
                    last = progress;
                    return true;
                  })
                  .ok());
  EXPECT_THAT(kinds,
              ElementsAre(v1::DAMAGE_KIND_STATE, v1::DAMAGE_KIND_UNREADABLE));
  EXPECT_TRUE(last.done());
  EXPECT_EQ(last.records(), VerifiableStore::kRecords);
  EXPECT_EQ(Describe().damaged_records(), 2u);
}

TEST_F(RecordVerifierTest, WhoAsksForItMayCancelIt) {
  verifier_.UseNote(folder_, kIncarnation);
  const auto scrub = BeginEndlessScrub();
  EXPECT_TRUE(
      absl::IsCancelled(scrub->Await([](const v1::VerifyJobProgress& progress) {
        EXPECT_FALSE(progress.done());
        EXPECT_THAT(progress.damages(), IsEmpty());
        return false;
      })));
  EXPECT_FALSE(Describe().has_last_verified_at()) << "it was not whole";
  EXPECT_FALSE(Note().is_verified);
}

TEST_F(RecordVerifierTest, AWholeVerificationIsNoted) {
  EXPECT_FALSE(verifier_.counted_from().has_value());
  verifier_.UseNote(folder_, kIncarnation);
  EXPECT_EQ(verifier_.counted_from(), now_);
  EXPECT_EQ(Note(), (VerifyNote{.incarnation = kIncarnation,
                                .counted_from = wall_now_}));
  store_.Damage({});
  now_ += absl::Hours(2);
  wall_now_ += absl::Hours(3);
  ASSERT_TRUE(Verify().ok());
  EXPECT_EQ(verifier_.counted_from(), now_);
  EXPECT_EQ(Note(), (VerifyNote{.incarnation = kIncarnation,
                                .counted_from = wall_now_,
                                .is_verified = true,
                                .damaged_records = 1}));
  EXPECT_EQ(Describe().last_verified_at().seconds(),
            absl::ToUnixSeconds(wall_now_));
  EXPECT_EQ(Describe().scrubs(), 0u) << "an operator asked for it";
}

TEST_F(RecordVerifierTest, TheNextEngineGoesOnFromTheNote) {
  ASSERT_TRUE(
      WriteVerifyNote(folder_, {.incarnation = kIncarnation,
                                .counted_from = wall_now_ - absl::Hours(5),
                                .is_verified = true,
                                .damaged_records = 4})
          .ok());
  verifier_.UseNote(folder_, kIncarnation);
  EXPECT_EQ(verifier_.counted_from(), now_ - absl::Hours(5));
  EXPECT_EQ(Describe().damaged_records(), 4u);
  // Another job of the same name knows nothing of it.
  verifier_.UseNote(folder_, kIncarnation + 1);
  EXPECT_EQ(verifier_.counted_from(), now_);
  EXPECT_FALSE(Describe().has_last_verified_at());
  EXPECT_EQ(Note().incarnation, kIncarnation + 1);
}

TEST_F(RecordVerifierTest, AWallClockThatWasSetBackSaysNothing) {
  ASSERT_TRUE(
      WriteVerifyNote(folder_, {.incarnation = kIncarnation,
                                .counted_from = wall_now_ + absl::Hours(5),
                                .is_verified = true})
          .ok());
  verifier_.UseNote(folder_, kIncarnation);
  EXPECT_EQ(verifier_.counted_from(), now_);
}

}  // namespace
}  // namespace optstate::session
