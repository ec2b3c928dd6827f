// Tests of a change of a job's shape when some memory is exhausted.

#include <cstddef>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"
#include "server/session/testing/scoped_file_limit.h"

void* RealAlignedAlloc(size_t alignment,
                       size_t bytes) asm("__real_aligned_alloc");
void* WrappedAlignedAlloc(size_t alignment,
                          size_t bytes) asm("__wrap_aligned_alloc");

namespace {

// Workspaces larger than this cannot be allocated; 0: no limit.
size_t workspace_bytes_max = 0;

}  // namespace

void* WrappedAlignedAlloc(size_t alignment, size_t bytes) {
  if (workspace_bytes_max != 0 && bytes > workspace_bytes_max) return nullptr;
  return RealAlignedAlloc(alignment, bytes);
}

namespace optstate::session {
namespace {

using ::testing::HasSubstr;

LayoutSpec SmallLayout() {
  LayoutSpec spec;
  spec.optimizer = OptimizerKind::kLamb;
  spec.groups = {{}};
  spec.parameters = {MakeParameter("a", 6000)};
  return spec;
}

LayoutSpec ExtendedLayout() {
  LayoutSpec spec = SmallLayout();
  spec.groups.push_back({});
  spec.parameters.push_back(MakeParameter("larger", 20000, 1));
  return spec;
}

// The limit is below two workers' new values of the larger parameter, three
// floats each: `redo` is by far the largest file of the job.
constexpr rlim_t kLessThanRedo = 300000;

class JobReshapeTest : public ::testing::Test {
 protected:
  JobReshapeTest() {
    harness_.Start(harness_.RandomTensors(1));
    Step(1);
    state_ = harness_.StateBytes();
    harness_.DetachAll();
  }
  ~JobReshapeTest() override { workspace_bytes_max = 0; }

  void Step(uint64_t step) {
    const std::vector<Hyperparams> groups(harness_.layout().groups().size(),
                                          AdamHyperparams());
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups;
    harness_.Step(step, harness_.RandomTensors(step), spec);
  }
  absl::Status Extend() {
    harness_.SetLayout(ExtendedLayout());
    return harness_.Register(0, /*extend=*/true).status();
  }
  void ExpectItGoesOn() {
    harness_.SetLayout(SmallLayout());
    EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_READY);
    EXPECT_EQ(harness_.job().Describe().parameter_count(), 1);
    harness_.AttachAll();
    EXPECT_TRUE(harness_.StateBytes() == state_);
    Step(2);
    harness_.DetachAll();
  }
  void ExpectExtended() {
    EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_LOADING);
    EXPECT_EQ(harness_.job().Describe().parameter_count(), 2);
    harness_.AttachAll();
    harness_.LoadMasters(harness_.RandomTensors(2));
    EXPECT_TRUE(harness_.FinishAll().status.ok());
  }

  JobHarness harness_{[] {
    JobHarness::Setup setup;
    setup.layout = SmallLayout();
    return setup;
  }()};
  std::string state_;
};

TEST_F(JobReshapeTest, NoRoomForNewValuesOfALargerParameter) {
  const uint64_t bytes = harness_.job().Describe().state_bytes();
  {
    const ScopedFileLimit limit(kLessThanRedo);
    const absl::Status status = Extend();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(status.message(), HasSubstr("/redo"));
  }
  EXPECT_EQ(harness_.job().Describe().state_bytes(), bytes);
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
  const absl::Status extended = Extend();
  ASSERT_TRUE(extended.ok()) << extended;
  ExpectExtended();
}

// The job's files have the new shape by then.
TEST_F(JobReshapeTest, NoRoomForTheWorkspaceOfALargerParameter) {
  workspace_bytes_max = 100000;
  const absl::Status status = Extend();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("no memory for a workspace"));
  const v1::Job job = harness_.job().Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(job.reason(), HasSubstr("no memory for a workspace"));
  EXPECT_FALSE(harness_.job().finished());
  // Every call returns this status.
  EXPECT_EQ(harness_.Register(0).status(), status);
  EXPECT_EQ(harness_.job().Attach({}).status(), status);
  EXPECT_EQ(harness_.job().ListParameters({}).status(), status);
  harness_.job().Detach(0);
  harness_.Close();
  workspace_bytes_max = 0;
  ASSERT_TRUE(harness_.Open().ok());
  ExpectExtended();
}

}  // namespace
}  // namespace optstate::session
