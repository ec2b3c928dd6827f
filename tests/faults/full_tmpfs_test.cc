// Tests a state directory in which not one block, or not one inode, is left.

#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/faults/fault_fixture.h"
#include "tests/faults/process_state.h"
#include "tests/faults/small_tmpfs.h"

namespace optstate::faults {
namespace {

using client::Session;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class FullTmpfsTest : public WireFaultTest {
 protected:
  void SetUp() override {
    WireFaultTest::SetUp();
    layout_ = LargeLayout();
    auto tmpfs = SmallTmpfs::Mount(uint64_t{24} << 20, /*inodes=*/200);
    if (absl::IsFailedPrecondition(tmpfs.status())) {
      GTEST_SKIP() << tmpfs.status();
    }
    ASSERT_TRUE(tmpfs.ok()) << tmpfs.status();
    tmpfs_ = *std::move(tmpfs);
    StartDaemon({.tcp = false,
                 .flags = {},
                 .config = OneWorker(),
                 .state_dir = tmpfs_->path() + "/state"});
  }

  void TearDown() override {
    WireFaultTest::TearDown();
    daemon_.reset();
  }

  std::unique_ptr<Session> OpenAndLoad() {
    auto session = Open(Options());
    if (session == nullptr) return nullptr;
    EXPECT_TRUE(Script().Load(*session).ok());
    return session;
  }

  std::unique_ptr<SmallTmpfs> tmpfs_;
};

TEST_P(FullTmpfsTest, JobThatDoesNotFitIsRefused) {
  client::SessionOptions large = Options();
  large.job = "large";
  large.layout = UniformLayout(1, 4 << 20);
  const absl::Status refused = Session::Open(large).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("tmpfs on " + tmpfs_->path()),
                    HasSubstr("the job needs"), HasSubstr("are left")));
  const auto session = OpenAndLoad();
  ASSERT_NE(session, nullptr);
  RunSteps(*session, 1, 2);
  ExpectUndisturbed(*session, 2);
}

TEST_P(FullTmpfsTest, JobStepsOnAndItsEngineIsReplaced) {
  const auto session = OpenAndLoad();
  ASSERT_NE(session, nullptr);
  tmpfs_->Fill();
  RunSteps(*session, 1, 2);
  uint64_t last = 0;
  KillEngineInsideStep(*session, 3, &last);
  RunSteps(*session, last + 1, last + 1);
  ASSERT_TRUE(daemon_->KillEngine("job").ok());
  RunSteps(*session, last + 2, last + 2);
  ExpectUndisturbed(*session, last + 2);
}

TEST_P(FullTmpfsTest, DaemonStartsAgain) {
  const auto session = OpenAndLoad();
  ASSERT_NE(session, nullptr);
  tmpfs_->Fill();
  RunSteps(*session, 1, 1);
  ASSERT_TRUE(daemon_->Kill().ok());
  const absl::Status started = daemon_->Restart();
  ASSERT_TRUE(started.ok()) << started;
  RunSteps(*session, 2, 2);
  ExpectUndisturbed(*session, 2);
}

TEST_P(FullTmpfsTest, NewSessionThatNeedsBlocksIsRefused) {
  auto session = OpenAndLoad();
  ASSERT_NE(session, nullptr);
  RunSteps(*session, 1, 2);
  session.reset();
  tmpfs_->Fill();

  client::SessionOptions another = Options();
  another.job = "another";
  EXPECT_EQ(Session::Open(another).status().code(),
            absl::StatusCode::kResourceExhausted);

  // Gradients over shared memory lie in memory of the rank's own.
  auto again = Session::Open(Options());
  if (wire_ == Wire::kShm) {
    ASSERT_TRUE(again.ok()) << again.status();
  } else {
    EXPECT_EQ(again.status().code(), absl::StatusCode::kResourceExhausted)
        << again.status();
    EXPECT_EQ(CountFiles(JobDirectory(), "gradients."), 0);
    ASSERT_TRUE(tmpfs_->Empty().ok());
    again = Session::Open(Options());
    ASSERT_TRUE(again.ok()) << again.status();
  }
  RunSteps(**again, 3, 4);
  ExpectUndisturbed(**again, 4);
}

// The result is the same however many bytes there are.
TEST_P(FullTmpfsTest, WithoutInodesTheJobStepsOnAndANewOneIsRefused) {
  const auto session = OpenAndLoad();
  ASSERT_NE(session, nullptr);
  tmpfs_->FillInodes();
  RunSteps(*session, 1, 2);
  client::SessionOptions another = Options();
  another.job = "another";
  const absl::Status refused = Session::Open(another).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("tmpfs on " + tmpfs_->path()), HasSubstr("out of inodes"),
            HasSubstr("nr_inodes="), Not(HasSubstr("state is kept"))));
  // The next engine needs no inode but that of its predecessor's socket.
  ASSERT_TRUE(daemon_->KillEngine("job").ok());
  RunSteps(*session, 3, 3);
  ASSERT_TRUE(tmpfs_->Empty().ok());
  auto made = Session::Open(another);
  ASSERT_TRUE(made.ok()) << made.status();
  ExpectUndisturbed(*session, 3);
}

INSTANTIATE_TEST_SUITE_P(Wires, FullTmpfsTest,
                         testing::Values(Wire::kShm, Wire::kGrpc), WireName);

}  // namespace
}  // namespace optstate::faults
