// The rules of the C++ client, which the simulation uses, answer what
// resolution.py of the Python package answers, case by case.

#include "client/collective/nodes/resolution.h"

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "proto/types/step_verdict.h"

namespace optstate::simulation {
namespace {

using client::NodePosition;
using client::NodesNorm;
using client::NodeStep;

constexpr char kCasesFile[] = "tests/simulation/resolution_cases.txt";
// All norms in the cases have this one.
constexpr double kClipCoefficient = 0.5;

uint64_t Number(absl::string_view text) {
  uint64_t number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << text;
  return number;
}

// The text has three parts where no norm can be noted.
std::optional<NodeStep> StepFrom(absl::string_view text) {
  if (text == "-") return std::nullopt;
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  EXPECT_TRUE(parts.size() == 3 || parts.size() == 4) << text;
  if (parts.size() < 3) return std::nullopt;
  NodeStep step = {.step = Number(parts[0]),
                   .digest = Number(parts[1]),
                   .found_inf = parts[2] == "1"};
  if (parts.size() == 4 && parts[3] != "-") {
    step.norm =
        NodesNorm{.gradient_norm = static_cast<double>(Number(parts[3])),
                  .clip_coefficient = kClipCoefficient};
  }
  return step;
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

std::string TextOf(const absl::StatusOr<std::map<size_t, Verdict>>& verdicts) {
  if (!verdicts.ok()) return "unresolvable";
  std::string answer;
  for (const auto& [node, verdict] : *verdicts) {
    absl::StrAppend(&answer, answer.empty() ? "" : " ", node, ":",
                    static_cast<int>(verdict));
  }
  return answer.empty() ? "-" : answer;
}

// Removes the kinds that stand before the words behind the first one.
std::vector<uint32_t> TakeKinds(std::vector<std::string>* words) {
  std::vector<uint32_t> kinds;
  for (size_t i = 1; i < words->size(); ++i) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit((*words)[i], absl::MaxSplits(':', 1));
    kinds.push_back(static_cast<uint32_t>(Number(parts.first)));
    (*words)[i] = parts.second;
  }
  return kinds;
}

std::string AnswerTo(std::vector<std::string> words) {
  const bool has_kinds = absl::EndsWith(words[0], "_kinds");
  std::vector<uint32_t> kinds;
  if (has_kinds) kinds = TakeKinds(&words);
  if (absl::StartsWith(words[0], "decide")) {
    std::vector<std::optional<NodeStep>> votes;
    for (size_t i = 1; i < words.size(); ++i) {
      votes.push_back(StepFrom(words[i]));
    }
    return absl::StrCat(static_cast<int>(client::DecideVotes(votes, kinds)));
  }
  std::vector<std::optional<NodePosition>> positions;
  std::vector<std::string> names;
  for (size_t i = 1; i < words.size(); ++i) {
    positions.push_back(PositionFrom(words[i]));
    names.push_back(absl::StrCat("node", i));
  }
  std::string answer = TextOf(client::Resolve(positions, names, kinds));
  if (!has_kinds) return answer;
  const std::optional<NodesNorm> norm = client::NotedNorm(positions);
  absl::StrAppend(&answer, " norm ");
  if (!norm.has_value()) return answer + "-";
  EXPECT_EQ(norm->clip_coefficient, kClipCoefficient);
  return absl::StrCat(answer, norm->gradient_norm);
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
  EXPECT_GE(cases, 1200u);
}

}  // namespace
}  // namespace optstate::simulation
