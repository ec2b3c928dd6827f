#include "server/metrics/metrics_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "server/metrics/testing_client.h"
#include "server/metrics/testing_reports.h"

namespace optstate::metrics {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class CountingSource : public NodeSource {
 public:
  v1::NodeReport DescribeNode(absl::Time) override {
    ++calls;
    return FullReport();
  }
  bool IsPublic(const v1::Event&) override { return true; }

  std::atomic<int> calls = 0;
};

class MetricsServerTest : public testing::Test {
 protected:
  void SetUp() override {
    auto started = MetricsServer::Start("127.0.0.1:0", &source_);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }

  CountingSource source_;
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsServerTest, AsksNobodyUntilItIsOpen) {
  for (const char* path : {"/metrics", "/status.json"}) {
    EXPECT_THAT(Get(server_->name(), path),
                AllOf(StartsWith("HTTP/1.1 503 Service Unavailable\r\n"),
                      HasSubstr("the daemon is starting")));
  }
  EXPECT_EQ(source_.calls, 0);
  server_->Open();
  EXPECT_THAT(Get(server_->name(), "/metrics"),
              StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_EQ(source_.calls, 1);
}

TEST_F(MetricsServerTest, Metrics) {
  server_->Open();
  const std::string answer = Get(server_->name(), "/metrics");
  EXPECT_THAT(answer, HasSubstr("\r\nContent-Type: text/plain; version=0.0.4; "
                                "charset=utf-8\r\n"));
  EXPECT_THAT(BodyOf(answer),
              AllOf(StartsWith("# HELP optstate_build_info "),
                    HasSubstr("\noptstate_job_up{job_name=\"host\"} 1\n")));
}

TEST_F(MetricsServerTest, StatusIsJson) {
  server_->Open();
  const std::string answer = Get(server_->name(), "/status.json");
  EXPECT_THAT(answer,
              HasSubstr("\r\nContent-Type: application/json; charset=utf-8"));
  EXPECT_THAT(BodyOf(answer), AllOf(StartsWith("{\"status\":{"),
                                    HasSubstr("\"name\":\"host\"")));
}

TEST_F(MetricsServerTest, ThePageIsOneFileThatAsksForTheStatus) {
  const std::string answer = Get(server_->name(), "/");
  EXPECT_THAT(answer, HasSubstr("\r\nContent-Type: text/html; charset=utf-8"));
  EXPECT_THAT(BodyOf(answer),
              AllOf(StartsWith("<!doctype html>"), HasSubstr("status.json"),
                    HasSubstr("</html>")));
  // It brings all that it needs.
  EXPECT_THAT(BodyOf(answer), Not(HasSubstr("src=\"http")));
}

TEST_F(MetricsServerTest, ThereIsNothingElse) {
  server_->Open();
  for (const char* path :
       {"/index.html", "/metrics/", "/status", "/favicon.ico", "/../metrics"}) {
    EXPECT_THAT(Get(server_->name(), path),
                StartsWith("HTTP/1.1 404 Not Found\r\n"))
        << path;
  }
}

TEST_F(MetricsServerTest, AnAddressThatIsTakenIsNamed) {
  const absl::Status taken =
      MetricsServer::Start(server_->name(), &source_).status();
  EXPECT_THAT(std::string(taken.message()),
              AllOf(StartsWith(absl::StrCat("metrics.address (--metrics) \"",
                                            server_->name(), "\": ")),
                    HasSubstr("Address already in use")));
}

}  // namespace
}  // namespace optstate::metrics
