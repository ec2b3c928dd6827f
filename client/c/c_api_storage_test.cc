// Tests where a job's state is to lie, as a caller of the C API says it: each
// value reaches the job, and others are refused with those that there are.

#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/c_api.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/types.pb.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

// The daemon has a directory on a disk.
class CApiStorageTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const char* const given = ::getenv("TEST_TMPDIR");
    disk_ = absl::StrCat(given == nullptr ? "/tmp" : given, "/disk-XXXXXX");
    ASSERT_NE(::mkdtemp(disk_.data()), nullptr);
    TestDaemon::Options options;
    options.flags = {"--nvme-dir", disk_};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = daemon->release();
  }
  static void TearDownTestSuite() {
    delete daemon_;
    daemon_ = nullptr;
    std::error_code ignored;
    std::filesystem::remove_all(disk_, ignored);
  }

  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    endpoint_ = daemon_->shm_endpoint();
    parameter_.struct_size = sizeof(parameter_);
    parameter_.name = "w";
    parameter_.shape = &shape_;
    parameter_.ndim = 1;
    parameter_.numel = shape_;
    parameter_.dtype = OPTSTATE_FLOAT32;
    parameter_.gradient_dtype = OPTSTATE_FLOAT32;
    group_.struct_size = sizeof(group_);
    options_.struct_size = sizeof(options_);
    options_.endpoint = endpoint_.c_str();
    options_.optimizer = OPTSTATE_ADAM;
    options_.world_size = 1;
    options_.groups = &group_;
    options_.group_count = 1;
    options_.parameters = &parameter_;
    options_.parameter_count = 1;
  }

  // Opens a session of a new job; returns what the daemon says of the job's
  // storage then, or nothing after an error, which is the test's.
  std::optional<v1::StorageSettings> StorageOfNewJob() {
    const std::string job = absl::StrCat("c-api-storage-", next_job_++);
    options_.job = job.c_str();
    optstate_session* session = nullptr;
    const int code = optstate_session_open(&options_, &session);
    EXPECT_EQ(code, 0) << optstate_last_error();
    if (code != 0) return std::nullopt;
    const auto described = daemon_->GetJob(job);
    optstate_session_close(session);
    EXPECT_TRUE(described.ok()) << described.status();
    if (!described.ok()) return std::nullopt;
    return described->storage();
  }
  // Expects INVALID_ARGUMENT with a text.
  void ExpectRefused(const testing::Matcher<const char*>& text) {
    options_.job = "c-api-storage-refused";
    optstate_session* session = nullptr;
    EXPECT_EQ(optstate_session_open(&options_, &session),
              static_cast<int>(absl::StatusCode::kInvalidArgument));
    EXPECT_EQ(session, nullptr);
    EXPECT_THAT(optstate_last_error(), text);
  }

  static TestDaemon* daemon_;
  static std::string disk_;
  static int next_job_;
  std::string endpoint_;
  int64_t shape_ = 10;
  optstate_parameter parameter_ = {};
  optstate_group group_ = {};
  optstate_session_options options_ = {};
};

TestDaemon* CApiStorageTest::daemon_ = nullptr;
std::string CApiStorageTest::disk_;
int CApiStorageTest::next_job_ = 0;

TEST_F(CApiStorageTest, EachPlacementReachesTheJob) {
  struct Case {
    int32_t given;
    v1::Placement placement;
    const char* reason;  // how the daemon's begins; "": it chose nothing
  };
  // A job that fits into memory is not put on a disk by "auto".
  for (const Case& each :
       {Case{0, v1::PLACEMENT_HOST, ""},
        Case{OPTSTATE_PLACEMENT_HOST, v1::PLACEMENT_HOST, ""},
        Case{OPTSTATE_PLACEMENT_NVME, v1::PLACEMENT_NVME, ""},
        Case{OPTSTATE_PLACEMENT_AUTO, v1::PLACEMENT_HOST, "auto: "}}) {
    SCOPED_TRACE(each.given);
    options_.placement = each.given;
    const auto storage = StorageOfNewJob();
    ASSERT_TRUE(storage.has_value());
    EXPECT_EQ(storage->placement(), each.placement);
    EXPECT_EQ(storage->durability(), v1::DURABILITY_KIND_NONE);
    EXPECT_THAT(storage->placement_reason(), StartsWith(each.reason));
    EXPECT_EQ(storage->placement_reason().empty(), *each.reason == 0);
  }
}

TEST_F(CApiStorageTest, EachDurabilityReachesTheJob) {
  struct Case {
    int32_t given;
    v1::DurabilityKind durability;
  };
  options_.durability_steps = 3;
  options_.durability_interval_ms = 250;
  for (const int32_t placement :
       {OPTSTATE_PLACEMENT_HOST, OPTSTATE_PLACEMENT_NVME}) {
    options_.placement = placement;
    for (const Case& each :
         {Case{0, v1::DURABILITY_KIND_NONE},
          Case{OPTSTATE_DURABILITY_NONE, v1::DURABILITY_KIND_NONE},
          Case{OPTSTATE_DURABILITY_STEP, v1::DURABILITY_KIND_STEP},
          Case{OPTSTATE_DURABILITY_EVERY, v1::DURABILITY_KIND_EVERY},
          Case{OPTSTATE_DURABILITY_INTERVAL, v1::DURABILITY_KIND_INTERVAL}}) {
      SCOPED_TRACE(absl::StrCat(placement, ", ", each.given));
      options_.durability = each.given;
      const auto storage = StorageOfNewJob();
      ASSERT_TRUE(storage.has_value());
      EXPECT_EQ(storage->placement(), static_cast<v1::Placement>(placement));
      EXPECT_EQ(storage->durability(), each.durability);
      if (each.durability == v1::DURABILITY_KIND_EVERY) {
        EXPECT_EQ(storage->every_steps(), 3u);
      }
      if (each.durability == v1::DURABILITY_KIND_INTERVAL) {
        EXPECT_EQ(storage->interval_ms(), 250u);
      }
    }
  }
}

TEST_F(CApiStorageTest, TheBudgetAndTheSubGroupReachTheJob) {
  options_.placement = OPTSTATE_PLACEMENT_NVME;
  options_.host_budget_bytes = (uint64_t{1} << 22) + 4096;
  options_.sub_group_elements = 8192;
  const auto storage = StorageOfNewJob();
  ASSERT_TRUE(storage.has_value());
  EXPECT_EQ(storage->host_budget_bytes(), options_.host_budget_bytes);
  EXPECT_EQ(storage->sub_group_elements(), options_.sub_group_elements);
}

TEST_F(CApiStorageTest, OtherValuesAreRefusedWithThoseThatThereAre) {
  for (const int32_t wrong : {-1, 4}) {
    options_.placement = wrong;
    ExpectRefused(AllOf(HasSubstr(absl::StrCat("placement ", wrong)),
                        HasSubstr("1 (host)"), HasSubstr("2 (nvme)"),
                        HasSubstr("3 (auto)")));
  }
  options_.placement = OPTSTATE_PLACEMENT_NVME;
  for (const int32_t wrong : {-1, 5}) {
    options_.durability = wrong;
    ExpectRefused(AllOf(HasSubstr(absl::StrCat("durability ", wrong)),
                        HasSubstr("1 (none)"), HasSubstr("2 (step)"),
                        HasSubstr("3 (every)"), HasSubstr("4 (interval)")));
  }
}

TEST_F(CApiStorageTest, ADurabilityWithoutItsNumberIsRefused) {
  options_.durability = OPTSTATE_DURABILITY_EVERY;
  ExpectRefused(HasSubstr("N must be at least 1"));
  options_.durability = OPTSTATE_DURABILITY_INTERVAL;
  ExpectRefused(HasSubstr("the interval must be positive"));
}

TEST_F(CApiStorageTest, ABudgetThatHoldsTooLittleIsRefusedWithTheLeast) {
  options_.placement = OPTSTATE_PLACEMENT_NVME;
  options_.host_budget_bytes = 1;
  ExpectRefused(
      AllOf(HasSubstr("a host_budget of 1 bytes"), HasSubstr("set at least ")));
  options_.placement = OPTSTATE_PLACEMENT_HOST;
  ExpectRefused(HasSubstr("host_budget is for placement \"nvme\""));
}

}  // namespace
}  // namespace optstate
