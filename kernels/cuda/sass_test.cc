// Reads the machine code of the device code, as cuobjdump shows it: that ptxas
// has kept what the PTX asks for (ptx_test). Skips where there is no cuobjdump.

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace optstate::kernels::cuda {
namespace {

// The updates of tiles and reductions, and those of whole parameters, which
// divide doubles and integers too.
constexpr char kTiles[] = "kernels/cuda/_nvcc/launch/launch.pic.o";
constexpr char kWhole[] = "kernels/cuda/_nvcc/launch/whole_launch.pic.o";

// Returns the path of cuobjdump: $OPTSTATE_CUOBJDUMP, or in a toolkit, or on
// PATH; empty: there is none.
std::string FindCuobjdump() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  std::vector<std::string> places = {
      variable("OPTSTATE_CUOBJDUMP"),
      variable("CUDA_HOME") + "/bin/cuobjdump",
      "/usr/local/cuda/bin/cuobjdump",
  };
  for (const absl::string_view folder :
       absl::StrSplit(variable("PATH"), ':', absl::SkipEmpty())) {
    places.push_back(absl::StrCat(folder, "/cuobjdump"));
  }
  for (const std::string& place : places) {
    std::error_code error;
    if (std::filesystem::is_regular_file(place, error)) return place;
  }
  return "";
}

// The instructions' names of one kernel for one architecture, with counts.
using Counts = std::map<std::string, int>;

// Reads the instruction of a line such as
//   /*0090*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
// and returns its name with all modifiers; empty: there is none.
std::string InstructionOf(absl::string_view line) {
  line = absl::StripAsciiWhitespace(line);
  if (!absl::ConsumePrefix(&line, "/*")) return "";
  const size_t end = line.find("*/");
  if (end == absl::string_view::npos || absl::StartsWith(line, "0x")) return "";
  line = absl::StripAsciiWhitespace(line.substr(end + 2));
  if (absl::StartsWith(line, "@")) {
    line.remove_prefix(std::min(line.find(' '), line.size()));
    line = absl::StripAsciiWhitespace(line);
  }
  if (line.empty() || !std::isupper(static_cast<unsigned char>(line[0]))) {
    return "";
  }
  return std::string(line.substr(0, line.find_first_of(" ;")));
}

// Returns kernels by "sm_90 NAME".
std::map<std::string, Counts> ReadKernels(std::FILE* from) {
  std::map<std::string, Counts> kernels;
  std::string architecture, kernel;
  std::array<char, 4096> buffer;
  while (std::fgets(buffer.data(), buffer.size(), from) != nullptr) {
    const absl::string_view line =
        absl::StripAsciiWhitespace(absl::string_view(buffer.data()));
    absl::string_view rest = line;
    if (absl::ConsumePrefix(&rest, "arch = ")) {
      architecture = std::string(rest);
    } else if (absl::ConsumePrefix(&rest, "Function : ")) {
      kernel = absl::StrCat(architecture, " ", rest);
      kernels[kernel];
    } else if (!kernel.empty()) {
      const std::string instruction = InstructionOf(line);
      if (!instruction.empty()) ++kernels[kernel][instruction];
    }
  }
  return kernels;
}

// Returns how many instructions have a name that is `name`, or begins with it
// and goes on with a modifier.
int Count(const Counts& counts, absl::string_view name) {
  int sum = 0;
  for (const auto& [instruction, count] : counts) {
    if (instruction == name ||
        absl::StartsWith(instruction, absl::StrCat(name, "."))) {
      sum += count;
    }
  }
  return sum;
}

std::map<std::string, Counts> KernelsOf(const char* object) {
  const std::string tool = FindCuobjdump();
  if (tool.empty()) return {};
  const std::string command = absl::StrCat(tool, " --dump-sass ", object);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(
      ::popen(command.c_str(), "r"), &::pclose);
  if (pipe == nullptr) return {};
  return ReadKernels(pipe.get());
}

// Returns the fused multiply-adds of floats.
int Fused(const Counts& counts) {
  return Count(counts, "FFMA") + Count(counts, "FFMA2");
}

class SassTest : public testing::Test {
 protected:
  // The dumps take seconds, so that they are made once.
  static void SetUpTestSuite() {
    tiles_ = KernelsOf(kTiles);
    whole_ = KernelsOf(kWhole);
  }

  void SetUp() override {
#ifndef OPTSTATE_HAS_CUDA
    GTEST_SKIP() << "built without device code: there is no CUDA Toolkit in "
                    "$CUDA_HOME or /usr/local/cuda, or --//:cuda=off";
#endif
    if (FindCuobjdump().empty()) {
      GTEST_SKIP() << "there is no cuobjdump in $OPTSTATE_CUOBJDUMP, "
                      "$CUDA_HOME/bin, /usr/local/cuda/bin or on PATH";
    }
    ASSERT_FALSE(tiles_.empty()) << FindCuobjdump() << " of " << kTiles;
    ASSERT_FALSE(whole_.empty()) << FindCuobjdump() << " of " << kWhole;
  }

  static inline std::map<std::string, Counts> tiles_, whole_;
};

TEST_F(SassTest, HasEveryArchitecture) {
  for (const char* architecture : {"sm_80 ", "sm_90 ", "sm_100 "}) {
    for (const auto* kernels : {&tiles_, &whole_}) {
      EXPECT_TRUE(std::any_of(kernels->begin(), kernels->end(),
                              [&](const auto& kernel) {
                                return absl::StartsWith(kernel.first,
                                                        architecture) &&
                                       Count(kernel.second, "EXIT") > 0;
                              }))
          << architecture;
    }
  }
}

// Divisions and roots begin with an approximation (MUFU), which a few fused
// multiply-adds refine to the IEEE result; what that cannot do is called. There
// is no other use of them: kernels without either have none.
TEST_F(SassTest, NothingIsFusedButWhatRefinesDivisionsAndRoots) {
  int with_division = 0;
  int without = 0;
  for (const auto& [kernel, counts] : tiles_) {
    EXPECT_EQ(Count(counts, "DFMA"), 0) << kernel;
    const int approximations =
        Count(counts, "MUFU.RCP") + Count(counts, "MUFU.RSQ");
    EXPECT_EQ(Count(counts, "MUFU"), approximations) << kernel;
    const int fused = Fused(counts);
    if (approximations == 0) {
      EXPECT_EQ(fused, 0) << kernel;
      ++without;
      continue;
    }
    ++with_division;
    EXPECT_GE(fused, 2 * approximations) << kernel;
    EXPECT_LE(fused, 4 * approximations) << kernel;
    EXPECT_GT(Count(counts, "CALL"), 0) << kernel;
  }
  EXPECT_GT(with_division, 0);
  EXPECT_GT(without, 0);
}

// A division of integers takes an approximation too, which nothing refines, and
// one of doubles a check in float.
TEST_F(SassTest, WholeParametersFuseNothingElseEither) {
  int with_double = 0;
  int without = 0;
  for (const auto& [kernel, counts] : whole_) {
    const int doubles =
        Count(counts, "MUFU.RCP64H") + Count(counts, "MUFU.RSQ64H");
    const int floats = Count(counts, "MUFU.RCP") + Count(counts, "MUFU.RSQ");
    EXPECT_EQ(Count(counts, "MUFU"), floats + doubles) << kernel;
    EXPECT_LE(Fused(counts), 6 * floats + doubles) << kernel;
    EXPECT_LE(Count(counts, "DFMA"), 9 * doubles) << kernel;
    with_double += doubles > 0 ? 1 : 0;
    without += floats + doubles == 0 ? 1 : 0;
  }
  EXPECT_GT(with_double, 0);
  EXPECT_GT(without, 0);
}

TEST_F(SassTest, LoadsAndStoresVectors) {
  for (const auto& [kernel, counts] : tiles_) {
    if (!absl::StrContains(kernel, "UpdateTiles")) continue;
    EXPECT_GE(Count(counts, "LDG.E.128"), 2) << kernel;
    EXPECT_GE(Count(counts, "STG.E.128"), 1) << kernel;
    EXPECT_GE(Count(counts, "STG.E.64"), 4) << kernel;
  }
}

TEST(InstructionOfTest, ReadsNamesBehindPredicates) {
  EXPECT_EQ(InstructionOf("/*0090*/   @!P0 LDG.E.128 R4, [R2.64] ;"),
            "LDG.E.128");
  EXPECT_EQ(InstructionOf("/*00a0*/   EXIT ;      /* 0x0000000000007941 */"),
            "EXIT");
  EXPECT_EQ(InstructionOf("/* 0x000fea0003800000 */"), "");
  EXPECT_EQ(InstructionOf("..........."), "");
  EXPECT_EQ(Count({{"FFMA", 1}, {"FFMA.RM", 2}, {"FFMA2", 4}}, "FFMA"), 3);
}

}  // namespace
}  // namespace optstate::kernels::cuda
