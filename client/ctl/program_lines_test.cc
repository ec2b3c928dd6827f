#include "client/ctl/program_lines.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

struct Passed {
  absl::StatusOr<int> code;
  std::string output;
};

// Runs a script, each line of which comes in brackets.
Passed Pass(const std::string& script, bool follows) {
  testing::internal::CaptureStdout();
  absl::StatusOr<int> code = PassLines(
      {"sh", "-c", script}, follows,
      [](absl::string_view line) { return absl::StrCat("[", line, "]"); });
  return {std::move(code), testing::internal::GetCapturedStdout()};
}

TEST(ProgramLinesTest, EachLineIsChanged) {
  for (const bool follows : {false, true}) {
    const Passed passed = Pass("printf 'a\\n\\nb c'", follows);
    ASSERT_TRUE(passed.code.ok()) << passed.code.status();
    EXPECT_EQ(*passed.code, 0);
    EXPECT_EQ(passed.output, "[a]\n[]\n[b c]\n");
  }
}

TEST(ProgramLinesTest, HowItEnds) {
  EXPECT_EQ(*Pass("echo a; exit 3", false).code, 3);
  EXPECT_EQ(*Pass("kill -TERM $$", false).code, 128 + 15);
  const auto missing =
      PassLines({"no-such-program-of-optctl"}, false,
                [](absl::string_view line) { return std::string(line); });
  EXPECT_TRUE(absl::IsNotFound(missing.status())) << missing.status();
}

}  // namespace
}  // namespace optstate::ctl
