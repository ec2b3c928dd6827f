#include "client/ctl/daemon_absence.h"

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

TEST(DaemonAbsenceTest, AnAbsenceIsBorneForAWhile) {
  DaemonAbsence absence(absl::Seconds(10));
  const absl::Time start = absl::FromUnixSeconds(1000);
  const absl::Status away = absl::UnavailableError("away");
  const absl::Status late = absl::DeadlineExceededError("late");
  EXPECT_TRUE(absence.Judge(absl::OkStatus(), start).ok());
  EXPECT_TRUE(absence.Judge(away, start + absl::Seconds(100)).ok());
  EXPECT_TRUE(absence.Judge(late, start + absl::Seconds(109)).ok());
  EXPECT_EQ(absence.Judge(away, start + absl::Seconds(110)), away);
}

TEST(DaemonAbsenceTest, AnAnswerEndsIt) {
  DaemonAbsence absence(absl::Seconds(10));
  const absl::Time start = absl::FromUnixSeconds(1000);
  const absl::Status away = absl::UnavailableError("away");
  EXPECT_TRUE(absence.Judge(away, start).ok());
  EXPECT_TRUE(absence.Judge(absl::OkStatus(), start + absl::Seconds(9)).ok());
  EXPECT_TRUE(absence.Judge(away, start + absl::Seconds(11)).ok());
  EXPECT_FALSE(absence.Judge(away, start + absl::Seconds(21)).ok());
}

TEST(DaemonAbsenceTest, OtherErrorsAreNone) {
  DaemonAbsence absence(absl::Seconds(10));
  EXPECT_TRUE(absl::IsNotFound(
      absence.Judge(absl::NotFoundError("x"), absl::UnixEpoch())));
}

}  // namespace
}  // namespace optstate::ctl
