// Tests what happens when /dev/shm is tidied up.

#include <csignal>
#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/faults/fault_fixture.h"

namespace optstate::faults {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class RemovedStateTest : public WireFaultTest {
 protected:
  void SetUp() override {
    WireFaultTest::SetUp();
    StartDaemon();
  }
};

// The rank steps on, on files that have no names any more, until the engine
// dies. Then no process says that something is kept.
TEST_P(RemovedStateTest, IsNotSaidToBeKept) {
  const auto session = Open(Options());
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(Script().Load(*session).ok());
  std::filesystem::remove_all(JobDirectory());
  RunSteps(*session, 1, 2);
  ASSERT_TRUE(daemon_->KillEngine("job").ok());
  const absl::Status stepped = Script().Run(*session, 3).status();
  EXPECT_EQ(stepped.code(), absl::StatusCode::kFailedPrecondition) << stepped;
  EXPECT_THAT(std::string(stepped.message()),
              AllOf(HasSubstr("nothing is left to recover"),
                    HasSubstr("optctl delete job job"),
                    Not(HasSubstr("state is kept"))));
}

INSTANTIATE_TEST_SUITE_P(Wires, RemovedStateTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
