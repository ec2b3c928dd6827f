// Loads into a job whose state may be larger than memory: what they bring waits
// on its disk.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "server/session/testing/disk_job_fixture.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;

class JobLoadOnDiskTest : public DiskJobFixture {
 protected:
  std::string LogOnDisk() const { return job_->disk() + "/jobs/test/load"; }
  std::string LogInMemory() const { return job_->directory() + "/state/load"; }
  // Leaves no memory for anything else.
  void LimitMemoryToWhatThereIs() {
    v1::Limits limits;
    limits.set_job_state_bytes_max(job_->job().Describe().state_bytes());
    job_->job().SetLimits(limits);
  }
};

TEST_F(JobLoadOnDiskTest, ALoadOfTheWholeStateTakesNoMemory) {
  Start();
  LimitMemoryToWhatThereIs();
  const Tensors next = job_->RandomTensors(kSeed + 100);
  job_->LoadMasters(next);
  EXPECT_TRUE(fs::exists(LogOnDisk()));
  EXPECT_FALSE(fs::exists(LogInMemory()));
  ASSERT_TRUE(job_->FinishAll().status.ok());
  EXPECT_FALSE(fs::exists(LogOnDisk()));
  for (uint32_t p = 0; p < next.size(); ++p) {
    EXPECT_EQ(job_->Fetch(v1::STATE_ARRAY_MASTER, p), next[p]);
  }
  Train(job_.get(), 3, 3);
}

TEST_F(JobLoadOnDiskTest, AJobThatLiesInMemoryHasItsLogThere) {
  Start(v1::PLACEMENT_HOST);
  LimitMemoryToWhatThereIs();
  ASSERT_TRUE(job_->job().BeginLoad(0).ok());
  const absl::Status refused =
      job_->LoadMaster(0, 0, job_->RandomTensors(kSeed + 100)[0]);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
}

// That of a killed engine, and that of a build which had it in memory.
TEST_F(JobLoadOnDiskTest, AnUnfinishedLogIsRemoved) {
  Start();
  const std::string state = job_->StateBytes();
  for (const std::string& left : {LogOnDisk(), LogInMemory()}) {
    job_->Close();
    std::ofstream(left) << "left";
    ASSERT_TRUE(job_->Open().ok());
    EXPECT_FALSE(fs::exists(left)) << left;
    job_->AttachAll();
    EXPECT_EQ(job_->StateBytes(), state);
  }
}

}  // namespace
}  // namespace optstate::session
