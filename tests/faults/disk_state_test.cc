// Tests a state directory on a disk.

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "storage/tmpfs_info.h"
#include "tests/faults/fault_fixture.h"

namespace optstate::faults {
namespace {

class DiskStateTest : public WireFaultTest {
 protected:
  void SetUp() override {
    WireFaultTest::SetUp();
    directory_ = std::string(std::getenv("TEST_TMPDIR")) + "/disk-XXXXXX";
    ASSERT_NE(mkdtemp(directory_.data()), nullptr);
  }

  void TearDown() override {
    WireFaultTest::TearDown();
    daemon_.reset();
    std::filesystem::remove_all(directory_);
  }

  std::string directory_;
};

TEST_P(DiskStateTest, StepIsFinishedAfterACrash) {
  const auto info = storage::InspectDirectory(directory_);
  ASSERT_TRUE(info.ok()) << info.status();
  if (info->is_tmpfs) GTEST_SKIP() << directory_ << " is on a tmpfs";
  layout_ = LargeLayout();
  StartDaemon({.tcp = false,
               .flags = {},
               .config = OneWorker(),
               .state_dir = directory_ + "/state"});
  ASSERT_FALSE(HasFatalFailure());
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  uint64_t last = 0;
  KillEngineInsideStep(*session, 1, &last);
  RunSteps(*session, last + 1, last + 1);
  ExpectUndisturbed(*session, last + 1);
  EXPECT_EQ(TimesLogged("page cache of"), 1);
}

INSTANTIATE_TEST_SUITE_P(Wires, DiskStateTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
