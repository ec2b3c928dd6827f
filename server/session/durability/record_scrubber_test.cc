#include "server/session/durability/record_scrubber.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/session/testing/captured_log.h"
#include "server/session/testing/verifiable_store.h"

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kInterval = absl::Hours(24 * 7);
constexpr uint64_t kRecords = VerifiableStore::kRecords;
constexpr uint64_t kRecordBytes = VerifiableStore::kRecordBytes;

// A clock that only the test moves, and that counts how often it is looked at.
class TestClock {
 public:
  absl::Time Look() {
    const absl::MutexLock lock(&mu_);
    ++looks_;
    return now_;
  }
  void Advance(absl::Duration by) {
    const absl::MutexLock lock(&mu_);
    now_ += by;
  }
  int looks() {
    const absl::MutexLock lock(&mu_);
    return looks_;
  }
  void AwaitLooks(int count) {
    const absl::MutexLock lock(&mu_);
    const auto reached = [&] { return looks_ >= count; };
    mu_.Await(absl::Condition(&reached));
  }

 private:
  absl::Mutex mu_;
  absl::Time now_ ABSL_GUARDED_BY(mu_) = absl::UnixEpoch() + absl::Hours(1);
  int looks_ ABSL_GUARDED_BY(mu_) = 0;
};

class RecordScrubberTest : public testing::Test {
 protected:
  void Start(uint64_t bytes_per_s = 0) {
    bytes_per_s_ = bytes_per_s;
    ASSERT_TRUE(scrubber_.Start().ok());
  }
  // Moves the clock, and returns when the scrubber has seen it and acted.
  void Leap(absl::Duration by) {
    clock_.Advance(by);
    for (int i = 0; i < 2; ++i) {
      const int looks = clock_.looks();
      scrubber_.Wake();
      clock_.AwaitLooks(looks + 1);
    }
  }
  absl::Status VerifyAsOperator() {
    const RecordVerifier::OperatorTurn turn(&verifier_);
    auto begun = verifier_.Begin(&store_);
    if (!begun.ok()) return begun.status();
    return (*begun)->Await([](const v1::VerifyJobProgress&) { return true; });
  }
  v1::DiskState Describe() const {
    v1::DiskState disk;
    verifier_.Describe(&disk);
    return disk;
  }
  // A scrub looks at the clock as it ends.
  void AwaitScrubs(uint64_t count) {
    while (true) {
      const int looks = clock_.looks();
      if (Describe().scrubs() >= count) return;
      clock_.AwaitLooks(looks + 1);
    }
  }
  // Sets the job's answer to a request for a scrub; OK: it begins.
  void Refuse(const absl::Status& why) {
    const absl::MutexLock lock(&mu_);
    refusal_ = why;
  }
  int refusals() {
    const absl::MutexLock lock(&mu_);
    return refusals_;
  }

  const Layout layout_ = OneParameterLayout();
  TestClock clock_;
  VerifiableStore store_{&layout_};
  RecordVerifier verifier_{"gpt", [this] { return clock_.Look(); },
                           [this] { return clock_.Look(); }};
  uint64_t bytes_per_s_ = 0;
  absl::Mutex mu_;
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);
  int refusals_ ABSL_GUARDED_BY(mu_) = 0;
  RecordScrubber scrubber_{
      {.interval = kInterval,
       .clock = [this] { return clock_.Look(); },
       .begin = [this]() -> absl::StatusOr<std::shared_ptr<Verification>> {
         {
           const absl::MutexLock lock(&mu_);
           if (!refusal_.ok()) {
             ++refusals_;
             return refusal_;
           }
         }
         return verifier_.BeginScrub(&store_, bytes_per_s_);
       }},
      &verifier_};
};

TEST_F(RecordScrubberTest, BeginsAfterTheIntervalAndNotBefore) {
  Start();
  Leap(kInterval - absl::Nanoseconds(1));
  EXPECT_EQ(store_.verifications(), 0);
  EXPECT_FALSE(Describe().has_last_verified_at());
  Leap(absl::Nanoseconds(1));
  AwaitScrubs(1);
  const v1::DiskState disk = Describe();
  EXPECT_EQ(disk.last_verified_at().seconds(),
            absl::ToUnixSeconds(clock_.Look()));
  EXPECT_EQ(disk.damaged_records(), 0u);
  Leap(kInterval - absl::Nanoseconds(1));
  EXPECT_EQ(store_.verifications(), 1);
  Leap(absl::Nanoseconds(1));
  AwaitScrubs(2);
}

TEST_F(RecordScrubberTest, AnOperatorsVerificationCounts) {
  Start();
  Leap(kInterval / 2);
  ASSERT_TRUE(VerifyAsOperator().ok());
  EXPECT_TRUE(Describe().has_last_verified_at());
  EXPECT_EQ(Describe().scrubs(), 0u);
  Leap(kInterval - absl::Nanoseconds(1));
  EXPECT_EQ(store_.verifications(), 1);
  Leap(absl::Nanoseconds(1));
  AwaitScrubs(1);
}

// The scrub reads a byte a second: only a cancellation ends it.
TEST_F(RecordScrubberTest, AnOperatorTakesOver) {
  Start(/*bytes_per_s=*/1);
  clock_.Advance(kInterval);
  scrubber_.Wake();
  store_.AwaitVerifications(1);
  const absl::Status verified = VerifyAsOperator();
  EXPECT_TRUE(verified.ok()) << verified;
  EXPECT_EQ(store_.verifications(), 2);
  EXPECT_TRUE(Describe().has_last_verified_at());
  EXPECT_EQ(Describe().scrubs(), 0u);
}

class VerifyNoteTest : public testing::Test {
 protected:
  VerifyNoteTest() : folder_(testing::TempDir() + "/verify-note-XXXXXX") {
    EXPECT_NE(::mkdtemp(folder_.data()), nullptr);
  }
  ~VerifyNoteTest() override { std::filesystem::remove_all(folder_); }
  // Returns how long ago the interval began, for an engine that starts now.
  absl::Duration AgeOf(uint64_t incarnation) {
    RecordVerifier verifier(
        "gpt", [this] { return monotonic_; }, [this] { return wall_; });
    verifier.UseNote(folder_, incarnation);
    return monotonic_ - *verifier.counted_from();
  }

  std::string folder_;
  absl::Time monotonic_ = absl::UnixEpoch() + absl::Hours(1);
  absl::Time wall_ = absl::FromUnixSeconds(1'700'000'000);
};

TEST_F(VerifyNoteTest, TheNextEngineGoesOnWhereTheFormerWas) {
  EXPECT_EQ(AgeOf(1), absl::ZeroDuration());
  wall_ += absl::Hours(50);
  monotonic_ = absl::UnixEpoch();  // another boot
  EXPECT_EQ(AgeOf(1), absl::Hours(50));
  EXPECT_EQ(AgeOf(2), absl::ZeroDuration()) << "of another job";
}

TEST_F(VerifyNoteTest, AWallClockThatWasSetBackSaysNothing) {
  EXPECT_EQ(AgeOf(1), absl::ZeroDuration());
  wall_ -= absl::Hours(1);
  EXPECT_EQ(AgeOf(1), absl::ZeroDuration());
}

TEST_F(VerifyNoteTest, IsReadAsItWasWritten) {
  EXPECT_EQ(*ReadVerifyNote(folder_), std::nullopt);
  const VerifyNote note = {0xfedcba9876543210, wall_, true, 3};
  ASSERT_TRUE(WriteVerifyNote(folder_, note).ok());
  EXPECT_EQ(*ReadVerifyNote(folder_), note);
  std::ofstream(folder_ + "/verified") << "yesterday";
  EXPECT_TRUE(absl::IsDataLoss(ReadVerifyNote(folder_).status()));
  EXPECT_EQ(AgeOf(1), absl::ZeroDuration());
  EXPECT_TRUE(ReadVerifyNote(folder_)->has_value()) << "it is written anew";
}

TEST_F(RecordScrubberTest, NoneBeginsInAnOperatorsTurn) {
  {
    const RecordVerifier::OperatorTurn turn(&verifier_);
    EXPECT_TRUE(
        absl::IsFailedPrecondition(verifier_.BeginScrub(&store_, 0).status()));
  }
  auto begun = verifier_.BeginScrub(&store_, 0);
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_TRUE(
      (*begun)->Await([](const v1::VerifyJobProgress&) { return true; }).ok());
}

// An operator is not thrown out by another.
TEST_F(RecordScrubberTest, OperatorsDoNotTakeOverFromEachOther) {
  const RecordVerifier::OperatorTurn turn(&verifier_);
  auto begun = verifier_.Begin(&store_);
  ASSERT_TRUE(begun.ok()) << begun.status();
  { const RecordVerifier::OperatorTurn other(&verifier_); }
  const absl::Status ended =
      (*begun)->Await([](const v1::VerifyJobProgress&) { return true; });
  EXPECT_TRUE(ended.ok()) << ended;
}

TEST_F(RecordScrubberTest, DamageIsCountedAndTold) {
  const CapturedLog log;
  storage::RecordDamage differs;
  differs.tile = 3;
  differs.status = absl::DataLossError("/disk/records: tile 3 is damaged");
  store_.Damage(differs);
  storage::RecordDamage unreadable;
  unreadable.file = "/disk/records";
  unreadable.offset_bytes = 8192;
  unreadable.first_parameter = "a";
  unreadable.last_parameter = "b";
  unreadable.status = absl::DataLossError("a bad disk");
  store_.Damage(unreadable);
  Start();
  Leap(kInterval);
  AwaitScrubs(1);
  EXPECT_EQ(Describe().damaged_records(), 2u);
  store_.Mend();
  ASSERT_TRUE(VerifyAsOperator().ok());
  EXPECT_EQ(Describe().damaged_records(), 0u);
  scrubber_.Stop();
  for (const char* line :
       {"error verification: /disk/records: tile 3 is damaged. `optctl verify "
        "gpt` looks whether it has been written anew since\n",
        "error verification: a bad disk: the record at byte 8192 of "
        "/disk/records (0 bytes, of parameters \"a\" to \"b\") is lost unless "
        "memory has it; load the job anew from a checkpoint. `optctl verify "
        "gpt` looks",
        "info scrub: job=gpt records=5 skipped=0 damaged=2 bytes=20480\n"}) {
    EXPECT_THAT(log.Text(), HasSubstr(line));
  }
}

TEST_F(RecordScrubberTest, OneThatIsRefusedIsTriedAgainLater) {
  const CapturedLog log;
  Refuse(absl::FailedPreconditionError("drains"));
  Start();
  Leap(kInterval);
  EXPECT_EQ(refusals(), 1);
  Leap(RecordScrubber::kRetry - absl::Nanoseconds(1));
  EXPECT_EQ(refusals(), 1);
  Leap(absl::Nanoseconds(1));
  EXPECT_EQ(refusals(), 2);
  Refuse(absl::OkStatus());
  Leap(RecordScrubber::kRetry);
  AwaitScrubs(1);
  scrubber_.Stop();
  EXPECT_THAT(log.Text(), Not(HasSubstr("drains"))) << "it is usual";
}

TEST_F(RecordScrubberTest, AnErrorIsTold) {
  const CapturedLog log;
  Refuse(absl::ResourceExhaustedError("no memory for a record"));
  Start();
  Leap(kInterval);
  scrubber_.Stop();
  EXPECT_THAT(log.Text(), HasSubstr("warning scrub: tried again in 10m: "
                                    "RESOURCE_EXHAUSTED: no memory"));
}

// Else this test does not end.
TEST_F(RecordScrubberTest, StopEndsOneThatIsUnderWay) {
  Start(/*bytes_per_s=*/1);
  clock_.Advance(kInterval);
  scrubber_.Wake();
  store_.AwaitVerifications(1);
  scrubber_.Stop();
  EXPECT_FALSE(Describe().has_last_verified_at());
}

TEST_F(RecordScrubberTest, StopEndsTheWait) {
  Start();
  scrubber_.Stop();
  EXPECT_EQ(store_.verifications(), 0);
}

TEST_F(RecordScrubberTest, ReadsNoMoreThanTheLimit) {
  constexpr uint64_t kBytesPerS = kRecordBytes * 20;
  const absl::Time begin = absl::Now();
  auto begun = verifier_.BeginScrub(&store_, kBytesPerS);
  ASSERT_TRUE(begun.ok()) << begun.status();
  EXPECT_TRUE(
      (*begun)->Await([](const v1::VerifyJobProgress&) { return true; }).ok());
  // Waits end a little early at times.
  EXPECT_GT(absl::Now() - begin, 0.9 * absl::Seconds(kRecords) / 20);
}

}  // namespace
}  // namespace optstate::session
