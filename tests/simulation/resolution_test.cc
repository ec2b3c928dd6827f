// The rules of the C++ client, which the simulation uses, answer what
// resolution.py of the Python package answers, case by case.

#include "client/collective/nodes/resolution.h"

#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace optstate::simulation {
namespace {

using client::NodePosition;
using client::NodeStep;

constexpr char kCasesFile[] = "tests/simulation/resolution_cases.txt";

uint64_t Number(absl::string_view text) {
  uint64_t number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << text;
  return number;
}

std::optional<NodeStep> StepFrom(absl::string_view text) {
  if (text == "-") return std::nullopt;
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  EXPECT_EQ(parts.size(), 3u) << text;
  if (parts.size() != 3) return std::nullopt;
  return NodeStep{.step = Number(parts[0]),
                  .digest = Number(parts[1]),
                  .found_inf = parts[2] == "1"};
}

std::optional<NodePosition> PositionFrom(absl::string_view text) {
  if (text == "-") return std::nullopt;
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  EXPECT_EQ(parts.size(), 3u) << text;
  if (parts.size() != 3) return std::nullopt;
  return NodePosition{
      .committed = StepFrom(parts[0]).value_or(NodeStep{}),
      .prepared = StepFrom(parts[1]),
      .loads_finished = static_cast<uint32_t>(Number(parts[2]))};
}

std::string AnswerTo(const std::vector<std::string>& words) {
  if (words[0] == "decide") {
    std::vector<std::optional<NodeStep>> votes;
    for (size_t i = 1; i < words.size(); ++i) {
      votes.push_back(StepFrom(words[i]));
    }
    return absl::StrCat(static_cast<int>(client::DecideVotes(votes)));
  }
  std::vector<std::optional<NodePosition>> positions;
  std::vector<std::string> names;
  for (size_t i = 1; i < words.size(); ++i) {
    positions.push_back(PositionFrom(words[i]));
    names.push_back(absl::StrCat("node", i));
  }
  const auto verdicts = client::Resolve(positions, names);
  if (!verdicts.ok()) return "unresolvable";
  std::string answer;
  for (const auto& [node, verdict] : *verdicts) {
    absl::StrAppend(&answer, answer.empty() ? "" : " ", node, ":",
                    static_cast<int>(verdict));
  }
  return answer.empty() ? "-" : answer;
}

TEST(ResolutionTest, AnswersAsTheRanksDo) {
  std::ifstream file(kCasesFile);
  ASSERT_TRUE(file.is_open()) << kCasesFile;
  std::string line;
  size_t cases = 0;
  while (std::getline(file, line)) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(" = ", 1));
    const std::vector<std::string> words = absl::StrSplit(parts.first, ' ');
    ASSERT_GE(words.size(), 2u) << line;
    EXPECT_EQ(AnswerTo(words), parts.second) << line;
    ++cases;
  }
  EXPECT_GE(cases, 700u);
}

}  // namespace
}  // namespace optstate::simulation
