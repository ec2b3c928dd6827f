#include "client/ctl/verify_text.h"

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

v1::VerifyJobProgress Halfway() {
  v1::VerifyJobProgress progress;
  progress.set_records(50);
  progress.set_records_total(200);
  progress.set_bytes_read(uint64_t{3} << 30);
  progress.set_damaged(1);
  return progress;
}

TEST(VerifyTextTest, ProgressHasRateAndTimeLeft) {
  EXPECT_EQ(VerifyProgressText("gpt", Halfway(), absl::Seconds(6)),
            "verifying job gpt: 25%, 50 of 200 records, 3.0 GiB read at 512.0 "
            "MiB/s, 1 damaged, 18 s left");
}

TEST(VerifyTextTest, NothingIsKnownAtTheBeginning) {
  v1::VerifyJobProgress progress;
  EXPECT_EQ(VerifyProgressText("gpt", progress, absl::ZeroDuration()),
            "verifying job gpt");
  progress.set_records_total(200);
  EXPECT_EQ(VerifyProgressText("gpt", progress, absl::Seconds(1)),
            "verifying job gpt: 0%, 0 of 200 records, 0 B read, 0 damaged");
}

TEST(VerifyTextTest, ADamageIsNamedByItsPlace) {
  v1::RecordDamage damage;
  damage.set_file("/disk/jobs/gpt/records");
  damage.set_offset_bytes(4096);
  damage.set_bytes(12288);
  damage.set_first_parameter("a");
  damage.set_last_parameter("b");
  damage.set_kind(v1::DAMAGE_KIND_STATE);
  damage.set_tile(0);
  const std::string place =
      "damaged: /disk/jobs/gpt/records, record of 12288 bytes at byte 4096, "
      "parameters \"a\" to \"b\": ";
  EXPECT_EQ(DamageText(damage), place + "tile 0 differs");
  damage.set_kind(v1::DAMAGE_KIND_PARAMETERS);
  EXPECT_EQ(DamageText(damage), place + "its parameters differ");
  damage.set_kind(v1::DAMAGE_KIND_UNREADABLE);
  damage.set_reason("read: EIO");
  EXPECT_EQ(DamageText(damage), place + "it was not read (read: EIO)");
}

TEST(VerifyTextTest, TheResultSaysWhatIsNotNamed) {
  v1::VerifyJobProgress progress = Halfway();
  progress.set_damaged(0);
  progress.set_skipped(2);
  EXPECT_EQ(VerifyResultText("gpt", progress, absl::Seconds(6)),
            "job gpt: 50 records, 3.0 GiB read at 512.0 MiB/s, 2 with nothing "
            "on disk that is to survive, no damage");
  progress.set_damaged(3);
  progress.add_damages();
  EXPECT_EQ(VerifyResultText("gpt", progress, absl::Seconds(6)),
            "job gpt: 50 records, 3.0 GiB read at 512.0 MiB/s, 2 with nothing "
            "on disk that is to survive, 3 DAMAGED, of which the first 1 are "
            "named");
}

}  // namespace
}  // namespace optstate::ctl
