#include "client/ctl/set_progress.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {
namespace {

constexpr uint64_t kMiB = 1 << 20;

v1::SetJobRequest Request(uint64_t host_budget_bytes) {
  v1::SetJobRequest request;
  request.set_name("gpt");
  request.set_host_budget_bytes(host_budget_bytes);
  return request;
}

// Returns a job with 40 records of 1 MiB, of which 10 have a frame.
v1::Job JobWith(uint64_t records_to_write, uint64_t bytes_written) {
  v1::Job job;
  v1::DiskState& disk = *job.mutable_disk();
  disk.set_records(40);
  disk.set_frames(10);
  disk.set_frame_bytes(kMiB);
  disk.set_records_to_write(records_to_write);
  disk.set_bytes_written(bytes_written);
  return job;
}

absl::Time At(int s) { return absl::UnixEpoch() + absl::Seconds(s); }

TEST(SetProgressTest, RecordsThatAreWrittenHaveARateAndATimeLeft) {
  SetProgress progress(Request(0));
  const absl::Duration left = absl::Seconds(9);
  EXPECT_EQ(progress.Look(JobWith(0, 7 * kMiB), 0, At(0), left),
            "setting job gpt: waits for its engine, 9 s more at the most");
  EXPECT_EQ(progress.Look(JobWith(8, 7 * kMiB), 0, At(1), left),
            "setting job gpt: 0%, 0 of 8 records written");
  EXPECT_EQ(progress.Look(JobWith(6, 9 * kMiB), 0, At(2), left),
            "setting job gpt: 25%, 2 of 8 records written at 2.0 MiB/s, 3 s "
            "left");
  // Another commit, whose rate is its own.
  EXPECT_EQ(progress.Look(JobWith(10, 15 * kMiB), 0, At(3), left),
            "setting job gpt: 0%, 0 of 10 records written");
  EXPECT_EQ(progress.Look(JobWith(0, 25 * kMiB), 0, At(4), absl::Seconds(-1)),
            "setting job gpt: waits for its engine, 0 s more at the most");
}

TEST(SetProgressTest, MemoryForMoreRecordsHasARateAndATimeLeft) {
  // More than all records need.
  SetProgress progress(Request(100 * kMiB));
  EXPECT_TRUE(progress.needs_memory());
  const absl::Duration left = absl::Seconds(9);
  EXPECT_EQ(progress.Look(JobWith(0, 0), 12 * kMiB, At(0), left),
            progress.Waiting(left));
  EXPECT_EQ(progress.Look(JobWith(0, 0), 22 * kMiB, At(5), left),
            "setting job gpt: 33%, 10.0 MiB of 30.0 MiB of memory reserved at "
            "2.0 MiB/s, 10 s left");
}

TEST(SetProgressTest, LessMemoryIsGivenUpAfterRecordsAreWritten) {
  SetProgress progress(Request(5 * kMiB));
  const absl::Duration left = absl::Seconds(9);
  EXPECT_EQ(progress.Look(JobWith(4, 0), 12 * kMiB, At(0), left),
            "setting job gpt: 0%, 0 of 4 records written");
  EXPECT_EQ(progress.Look(JobWith(0, 4 * kMiB), 20 * kMiB, At(1), left),
            progress.Waiting(left));
}

TEST(SetProgressTest, ADurabilityNeedsNoMemory) {
  EXPECT_FALSE(SetProgress(Request(0)).needs_memory());
}

}  // namespace
}  // namespace optstate::ctl
