#include "server/upgrade/next_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace optstate::upgrade {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

v1::DaemonConfig Own() {
  v1::DaemonConfig config;
  config.set_state_dir("/state");
  config.set_socket("/socket");
  config.mutable_nvme()->add_directories("/disk");
  config.set_huge_pages(v1::HUGE_PAGES_AUTO);
  return config;
}

// Expects that `next` cannot follow Own(); returns the reason.
std::string Refusal(const v1::DaemonConfig& next) {
  const absl::Status status = CheckSamePlace(Own(), next);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  return std::string(status.message());
}

TEST(NextConfigTest, OtherSettingsMayChange) {
  v1::DaemonConfig next = Own();
  next.add_listen("127.0.0.1:0");
  next.set_log_level("debug");
  EXPECT_TRUE(CheckSamePlace(Own(), next).ok());
}

TEST(NextConfigTest, StateAndSocketStayWhereTheyAre) {
  v1::DaemonConfig next = Own();
  next.set_state_dir("/elsewhere");
  EXPECT_THAT(Refusal(next), AllOf(HasSubstr("/elsewhere"), HasSubstr("/state"),
                                   HasSubstr("start it again")));
  next = Own();
  next.set_socket("/elsewhere");
  EXPECT_THAT(Refusal(next),
              AllOf(HasSubstr("/elsewhere"), HasSubstr("/socket")));
}

TEST(NextConfigTest, DisksStayTheSame) {
  v1::DaemonConfig next = Own();
  next.mutable_nvme()->add_directories("/second");
  EXPECT_THAT(Refusal(next), HasSubstr("/disk /second"));
  next = Own();
  v1::NvmeDirectory& settings = *next.mutable_nvme()->add_directory_settings();
  settings.set_path("/disk");
  settings.set_device("/dev/d");
  EXPECT_THAT(Refusal(next), HasSubstr("/disk,device=/dev/d"));
}

TEST(NextConfigTest, AMountWouldHideTheJobs) {
  v1::DaemonConfig next = Own();
  next.set_huge_pages(v1::HUGE_PAGES_MOUNT);
  EXPECT_THAT(Refusal(next), HasSubstr("huge_pages: mount"));
  // A daemon that has mounted its state directory goes on doing so.
  v1::DaemonConfig mounted = next;
  EXPECT_TRUE(CheckSamePlace(mounted, next).ok());
}

TEST(NextConfigTest, AMistakeInTheConfigurationIsNotTheCallers) {
  EXPECT_TRUE(
      absl::IsFailedPrecondition(AsRefusal(absl::InvalidArgumentError("x"))));
  EXPECT_TRUE(absl::IsFailedPrecondition(AsRefusal(absl::NotFoundError("x"))));
  EXPECT_TRUE(
      absl::IsPermissionDenied(AsRefusal(absl::PermissionDeniedError("x"))));
}

}  // namespace
}  // namespace optstate::upgrade
