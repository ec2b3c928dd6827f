#include "client/ctl/program_output.h"

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(1);

TEST(ProgramOutputTest, StdoutAlone) {
  const auto output =
      OutputOf({"sh", "-c", "echo out; echo err >&2; cat"}, 1000, kPatience);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(*output, "out\n");
}

TEST(ProgramOutputTest, OutputIsBounded) {
  const auto output = OutputOf(
      {"sh", "-c", "head -c 1000000 /dev/zero; echo end"}, 1000, kPatience);
  ASSERT_TRUE(output.ok()) << output.status();
  EXPECT_EQ(output->size(), 1000u);
}

TEST(ProgramOutputTest, Errors) {
  EXPECT_TRUE(absl::IsNotFound(
      OutputOf({"no-such-program-here"}, 1, kPatience).status()));
  EXPECT_TRUE(
      absl::IsAborted(OutputOf({"sh", "-c", "exit 3"}, 1, kPatience).status()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(
      OutputOf({"sleep", "1000"}, 1, absl::Milliseconds(10)).status()));
}

}  // namespace
}  // namespace optstate::ctl
