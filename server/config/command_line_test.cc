#include "server/config/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace optstate::config {
namespace {

using ::testing::ElementsAre;

std::optional<int> Parse(std::vector<std::string> arguments,
                         CommandLine* line) {
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return ParseCommandLine(static_cast<int>(arguments.size()), argv.data(),
                          line);
}

TEST(CommandLineTest, OfADaemon) {
  CommandLine line;
  ASSERT_EQ(Parse({"optstated",    "--config",    "c.yaml",     "--state-dir",
                   "/s",           "--socket",    "/x",         "--listen",
                   "a:1",          "--listen",    "b:2",        "--nvme-dir",
                   "/d",           "--log-level", "debug",      "--lock-memory",
                   "always",       "--devices",   "emulated:2", "--sleep-dir",
                   "/z",           "--metrics",   "m:3",        "--insecure",
                   "--log-format", "json"},
                  &line),
            std::nullopt);
  EXPECT_EQ(line.config_file, "c.yaml");
  EXPECT_EQ(line.config.state_dir, "/s");
  EXPECT_EQ(line.config.socket, "/x");
  EXPECT_THAT(line.config.listen, ElementsAre("a:1", "b:2"));
  EXPECT_THAT(line.config.nvme_directories, ElementsAre("/d"));
  EXPECT_EQ(line.config.log_level, "debug");
  EXPECT_EQ(line.config.log_format, "json");
  EXPECT_EQ(line.config.lock_memory, "always");
  EXPECT_EQ(line.config.devices, "emulated:2");
  EXPECT_EQ(line.config.sleep_directory, "/z");
  EXPECT_EQ(line.config.metrics, "m:3");
  EXPECT_TRUE(line.config.insecure_tcp);
  EXPECT_EQ(line.lifeline_fd, -1);
  EXPECT_TRUE(line.engine_job.empty());
  EXPECT_FALSE(line.format_versions);
}

TEST(CommandLineTest, ADirectoryWithAnotherSettingThanADeviceIsRefused) {
  CommandLine line;
  EXPECT_EQ(Parse({"optstated", "--nvme-dir", "/d,devise=/x"}, &line),
            kExitUsage);
  EXPECT_EQ(Parse({"optstated", "--nvme-dir", "/d,device=/x"}, &line),
            std::nullopt);
  EXPECT_THAT(line.config.nvme_directories, ElementsAre("/d,device=/x"));
}

TEST(CommandLineTest, FormattingADevice) {
  CommandLine line;
  ASSERT_EQ(
      Parse({"optstated", "--format-device", "/d,device=/x", "--force"}, &line),
      std::nullopt);
  EXPECT_EQ(line.format_device, "/d,device=/x");
  EXPECT_TRUE(line.force);
  EXPECT_NE(Parse({"optstated", "--force"}, &line), std::nullopt);
}

TEST(CommandLineTest, OfAnEngine) {
  CommandLine line;
  ASSERT_EQ(Parse({"optstated", "--engine", "gpt", "--engine-config-fd", "3",
                   "--engine-socket-fd", "4"},
                  &line),
            std::nullopt);
  EXPECT_EQ(line.engine_job, "gpt");
  EXPECT_EQ(line.engine_config_fd, 3);
  EXPECT_EQ(line.engine_socket_fd, 4);
}

// Each build adds the flag anew.
TEST(CommandLineTest, TheHandoverIsNoArgumentOfTheNextBuild) {
  CommandLine line;
  ASSERT_EQ(Parse({"optstated", "--handover-fd", "9", "--socket", "/x"}, &line),
            std::nullopt);
  EXPECT_EQ(line.handover_fd, 9);
  EXPECT_THAT(line.arguments, ElementsAre("optstated", "--socket", "/x"));
}

TEST(CommandLineTest, MistakesAndHelpEndTheProcess) {
  CommandLine line;
  EXPECT_EQ(Parse({"optstated", "--no-such-flag"}, &line), kExitUsage);
  EXPECT_EQ(Parse({"optstated", "--embedded", "x"}, &line), kExitUsage);
  EXPECT_EQ(Parse({"optstated", "--socket", ""}, &line), kExitUsage);
  EXPECT_EQ(Parse({"optstated", "--help"}, &line), 0);
  EXPECT_EQ(Parse({"optstated", "--version"}, &line), 0);
}

}  // namespace
}  // namespace optstate::config
