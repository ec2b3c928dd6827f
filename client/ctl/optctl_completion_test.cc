// Tests optctl's completion in a shell.

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "client/ctl/optctl_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using OptctlCompletionTest = OptctlTest;

TEST_F(OptctlCompletionTest, CompletionScriptsParse) {
  EXPECT_EQ(RunBinary("completion bash | bash -n").exit_code, 0);
  const Ran completed = RunBinary(
      "completion bash > $TEST_TMPDIR/c && bash -c '. $TEST_TMPDIR/c; "
      "COMP_WORDS=(optctl get p) COMP_CWORD=2; _optctl; "
      "echo \"${COMPREPLY[@]}\"'");
  EXPECT_EQ(completed.output, "params\n");
}

// zsh knows the script by its first line, as a file of $fpath.
TEST_F(OptctlCompletionTest, ZshCompletesByTheSameScript) {
  EXPECT_THAT(RunBinary("completion zsh").output,
              testing::StartsWith("#compdef optctl\n"));
  if (RunCommand("command -v zsh").exit_code != 0) {
    GTEST_SKIP() << "no zsh here; deploy/package --check installs it";
  }
  const Ran completed = RunBinary(
      "completion zsh > $TEST_TMPDIR/_optctl && zsh -fec '"
      "fpath=($TEST_TMPDIR $fpath); autoload -U compinit; compinit -u -D; "
      "echo $_comps[optctl]; source $TEST_TMPDIR/_optctl; "
      "words=(optctl get p) CURRENT=3 COMP_WORDS=(optctl get p) COMP_CWORD=2; "
      "compgen -F _optctl | grep params'");
  EXPECT_EQ(completed.output, "_optctl\nparams\n");
}

TEST_F(OptctlCompletionTest, CompletionKnowsShellsAndTheEndpointThatWasTyped) {
  const auto session = Train("gpt");
  const std::string path = daemon_->socket();
  const struct {
    std::string words;  // as readline splits them
    const char* offers;
  } typed[] = {
      {"completion ''", "--help bash zsh fish\n"},
      {absl::StrCat("--endpoint unix : ", path, " describe job g"), "gpt\n"},
      {absl::StrCat("--endpoint = unix : ", path, " describe job g"), "gpt\n"},
      {absl::StrCat("--endpoint=unix:", path, " describe job g"), "gpt\n"},
      {absl::StrCat("describe job --endpoint grpc : unix : ", path, " g"),
       "gpt\n"},
      {"describe job g", "\n"},
      {"get jobs -o j", "json\n"},
      {"trace --st", "--steps\n"},
      // A trace has one format; this is where it goes.
      {"trace gpt -o /dev/nul", "/dev/null\n"},
  };
  for (const auto& [words, offers] : typed) {
    const Ran completed = RunBinary(absl::StrCat(
        "completion bash > $TEST_TMPDIR/c && bash -c '. $TEST_TMPDIR/c; "
        "optctl() { client/ctl/optctl \"$@\"; }; "
        "export OPTSTATE_ENDPOINT=unix:/nonexistent; COMP_WORDS=(optctl ",
        absl::StrReplaceAll(words, {{"'", "\""}}),
        "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _optctl; "
        "echo \"${COMPREPLY[@]}\"'"));
    EXPECT_EQ(completed.output, offers) << words;
  }
}

}  // namespace
}  // namespace optstate::ctl
