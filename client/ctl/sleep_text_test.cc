#include "client/ctl/sleep_text.h"

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

v1::SleepProgress Halfway() {
  v1::SleepProgress progress;
  progress.set_bytes(uint64_t{1} << 30);
  progress.set_bytes_total(uint64_t{4} << 30);
  progress.set_directory("/disk/asleep/jobs/gpt");
  return progress;
}

TEST(SleepTextTest, ProgressHasRateAndTimeLeft) {
  EXPECT_EQ(
      SleepProgressText(SleepVerb::kSleep, "gpt", Halfway(), absl::Seconds(2)),
      "putting job gpt to sleep: 25%, 1.0 GiB of 4.0 GiB at 512.0 MiB/s, "
      "6 s left");
  EXPECT_EQ(SleepProgressText(SleepVerb::kWake, "gpt", {}, absl::Seconds(2)),
            "waking job gpt");
}

TEST(SleepTextTest, TheResultSaysWhereTheJobIs) {
  v1::SleepProgress progress = Halfway();
  progress.set_memory_bytes(uint64_t{8} << 30);
  EXPECT_EQ(
      SleepResultText(SleepVerb::kSleep, "gpt", progress, absl::Seconds(2)),
      "job gpt is asleep in /disk/asleep/jobs/gpt: 1.0 GiB copied at 512.0 "
      "MiB/s, 8.0 GiB of memory given back. `optctl wake gpt` wakes it");
  EXPECT_EQ(
      SleepResultText(SleepVerb::kWake, "gpt", progress, absl::Seconds(2)),
      "job gpt is awake: 1.0 GiB copied at 512.0 MiB/s, it takes 8.0 GiB of "
      "memory");
}

TEST(SleepTextTest, TheStateSaysHowFarAJobOnItsWayIs) {
  v1::SleepState sleep;
  sleep.set_progress("job \"gpt\" is being put to sleep");
  EXPECT_EQ(SleepStateText(sleep), "job \"gpt\" is being put to sleep");
  sleep.set_directory("/disk/asleep/jobs/gpt");
  sleep.set_disk_bytes(uint64_t{1} << 30);
  sleep.set_memory_bytes(uint64_t{2} << 30);
  sleep.set_progress("job \"gpt\" is being woken");
  EXPECT_EQ(SleepStateText(sleep),
            "/disk/asleep/jobs/gpt, 1.0 GiB there, 2.0 GiB of memory when it "
            "wakes; job \"gpt\" is being woken");
}

}  // namespace
}  // namespace optstate::ctl
