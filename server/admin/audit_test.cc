#include "server/admin/audit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "server/observe/event_log.h"

namespace optstate::admin {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class AuditTest : public testing::Test {
 protected:
  AuditTest() : former_(spdlog::default_logger()) {
    auto logger = std::make_shared<spdlog::logger>(
        "test", std::make_shared<spdlog::sinks::ostream_sink_mt>(lines_));
    logger->set_pattern("%l %v");
    spdlog::set_default_logger(std::move(logger));
  }
  ~AuditTest() override { spdlog::set_default_logger(former_); }

  // Returns the lines that were written since the last call.
  std::string Lines() {
    std::string lines = lines_.str();
    lines_.str("");
    return lines;
  }

  std::ostringstream lines_;
  std::shared_ptr<spdlog::logger> former_;
};

TEST_F(AuditTest, OneLineAndOneEventAChange) {
  const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
  Audit({.method = "SleepJob", .actor = "uid 7", .job = "gpt", .detail = "k=v"},
        absl::OkStatus());
  EXPECT_EQ(Lines(),
            "info audit: actor=\"uid 7\" method=SleepJob job=\"gpt\" k=v "
            "verdict=done\n");
  const std::vector<v1::Event> events = observe::Events().After(before);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind(), "audit");
  EXPECT_EQ(events[0].job(), "gpt");
  EXPECT_EQ(events[0].actor(), "uid 7");
}

TEST_F(AuditTest, ChangesThatWereMadeAreTheirOwn) {
  const Change refused = {
      .method = "SleepJob", .actor = "uid 8", .job = "gpt", .detail = ""};
  for (int i = 0; i < 300; ++i) Audit(refused, absl::PermissionDeniedError(""));
  Lines();
  for (int i = 0; i < 300; ++i) Audit(refused, absl::OkStatus());
  const std::string lines = Lines();
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 300);
}

// The event "job_deleted" says it.
TEST_F(AuditTest, ADeletionIsALineAndItsRefusalAnEventToo) {
  const uint64_t before = observe::Events().Await(0, absl::InfinitePast());
  const Change change = {.method = "DeleteJob",
                         .actor = "uid 7",
                         .job = "gpt",
                         .detail = "force=true"};
  Audit(change, absl::OkStatus());
  EXPECT_EQ(Lines(),
            "info audit: actor=\"uid 7\" method=DeleteJob job=\"gpt\" "
            "force=true verdict=done\n");
  EXPECT_EQ(observe::Events().After(before).size(), 0u);
  Audit(change, absl::PermissionDeniedError("no"));
  EXPECT_EQ(observe::Events().After(before).size(), 1u);
}

TEST_F(AuditTest, RefusedAndFailedAreDistinguished) {
  const Change drain = {
      .method = "Drain", .actor = "uid 7", .job = "", .detail = ""};
  Audit(drain, absl::PermissionDeniedError("no"));
  EXPECT_EQ(Lines(),
            "warning audit: actor=\"uid 7\" method=Drain verdict=refused "
            "code=PERMISSION_DENIED reason=\"no\"\n");
  Audit(drain, absl::DeadlineExceededError("late"));
  EXPECT_THAT(Lines(), HasSubstr("verdict=failed code=DEADLINE_EXCEEDED"));
}

// Text that a peer wrote cannot pass for another line or key.
TEST_F(AuditTest, ThePeersTextIsQuoted) {
  Audit({.method = "DeleteJob",
         .actor = "uid 7",
         .job = "a\" verdict=done\nb",
         .detail = ""},
        absl::NotFoundError("a\nb"));
  const std::string line = Lines();
  EXPECT_THAT(line, HasSubstr(R"(job="a\" verdict=done\nb")"));
  EXPECT_THAT(line.substr(0, line.size() - 1), Not(HasSubstr("\n")));
}

// A flood of refusals leaves the changes that the same actor may make.
TEST_F(AuditTest, AFloodOfRefusalsHidesNoChange) {
  const Change change = {
      .method = "SetJob", .actor = "uid 8", .job = "a", .detail = ""};
  for (int i = 0; i < 1000; ++i) Audit(change, absl::PermissionDeniedError(""));
  Lines();
  Audit(change, absl::OkStatus());
  EXPECT_THAT(Lines(), HasSubstr("verdict=done"));
}

}  // namespace
}  // namespace optstate::admin
