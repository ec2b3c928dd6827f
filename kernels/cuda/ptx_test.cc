// Reads the PTX of the device code: its arithmetic is that of the CPU's
// kernels, one rounding for each operation. ptxas may not change operations
// that name their rounding.

#include <cstddef>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"

namespace optstate::kernels::cuda {
namespace {

constexpr const char* kPtx[] = {
    "kernels/cuda/_nvcc/launch/launch.ptx",
    "kernels/cuda/_nvcc/launch/whole_launch.ptx",
};

using Instructions = std::vector<std::string>;

// Adds the instructions' names by kernel: "div.rn.f32", ...
void ReadKernels(const std::string& path,
                 std::map<std::string, Instructions>* all) {
  std::map<std::string, Instructions>& kernels = *all;
  std::ifstream file(path);
  std::string kernel;
  for (std::string text; std::getline(file, text);) {
    absl::string_view line = absl::StripAsciiWhitespace(text);
    const auto entry = line.find(".entry ");
    if (entry != absl::string_view::npos) {
      line.remove_prefix(entry + 7);
      kernel = std::string(line.substr(0, line.find('(')));
      kernels[kernel];
      continue;
    }
    if (!absl::EndsWith(line, ";") || absl::StartsWith(line, ".")) continue;
    // A predicate: "@%p1 bra".
    if (absl::StartsWith(line, "@")) line.remove_prefix(line.find(' ') + 1);
    const absl::string_view name = line.substr(0, line.find_first_of(" \t;"));
    if (!kernel.empty()) kernels[kernel].emplace_back(name);
  }
}

bool IsFloat(absl::string_view instruction) {
  return absl::EndsWith(instruction, ".f32") ||
         absl::EndsWith(instruction, ".f64");
}

// Returns what is wrong with an instruction; empty: nothing.
std::string Wrong(absl::string_view instruction) {
  const std::vector<absl::string_view> parts = absl::StrSplit(instruction, '.');
  for (const absl::string_view part : parts) {
    if (part == "approx") return "is approximate";
    if (part == "ftz") return "flushes denormals to zero";
    if (part == "full") return "is approximate";
  }
  if (!IsFloat(instruction)) return "";
  const absl::string_view operation = parts[0];
  for (const absl::string_view fused : {"fma", "mad"}) {
    if (operation == fused) return "rounds two operations once";
  }
  // rcp.rn is 1 / x, rounded once.
  for (const absl::string_view exact :
       {"add", "sub", "mul", "div", "sqrt", "rcp"}) {
    if (operation == exact && parts[1] != "rn") {
      return "does not name its rounding";
    }
  }
  for (const absl::string_view inexact :
       {"rsqrt", "ex2", "lg2", "sin", "cos", "tanh"}) {
    if (operation == inexact) return "has no counterpart on the CPU";
  }
  return "";
}

class PtxTest : public testing::Test {
 protected:
  void SetUp() override {
#ifndef OPTSTATE_HAS_CUDA
    GTEST_SKIP() << "built without device code: there is no CUDA Toolkit in "
                    "$CUDA_HOME or /usr/local/cuda, or --//:cuda=off";
#endif
    for (const char* const path : kPtx) {
      const size_t kernels = kernels_.size();
      ReadKernels(path, &kernels_);
      ASSERT_GT(kernels_.size(), kernels) << path;
    }
  }

  // Returns how often an instruction occurs in kernels whose mangled name
  // contains `name`.
  int Count(absl::string_view name, absl::string_view instruction) const {
    int count = 0;
    for (const auto& [kernel, instructions] : kernels_) {
      if (!absl::StrContains(kernel, name)) continue;
      for (const std::string& each : instructions) {
        if (each == instruction) ++count;
      }
    }
    return count;
  }

  std::map<std::string, Instructions> kernels_;
};

TEST_F(PtxTest, RoundsEachOperationOnce) {
  for (const auto& [kernel, instructions] : kernels_) {
    for (const std::string& instruction : instructions) {
      EXPECT_EQ(Wrong(instruction), "") << instruction << " in " << kernel;
    }
  }
}

// Shows that the text was understood: updates divide and take roots, norms are
// summed in double.
TEST_F(PtxTest, HasTheExpectedArithmetic) {
  EXPECT_GT(Count("UpdateTiles", "div.rn.f32"), 0);
  EXPECT_GT(Count("UpdateTiles", "sqrt.rn.f32"), 0);
  EXPECT_GT(Count("UpdateTiles", "mul.rn.f32"), 0);
  EXPECT_GT(Count("ReduceTiles", "add.rn.f64"), 0);
  EXPECT_GT(Count("AddTilesOfParameters", "add.rn.f64"), 0);
  EXPECT_GT(Count("WholeLamb", "div.rn.f32"), 0);
  EXPECT_GT(Count("WholeLamb", "sqrt.rn.f64"), 0);
  EXPECT_GT(Count("WholeAdafactor", "div.rn.f64"), 0);
  EXPECT_GT(Count("WholeMuon", "mul.rn.f32"), 0);
}

// Without vectors a device's memory is not fully used. What a kernel has for
// aligned tiles: floats for master, gradient and states, and the 16-bit forms.
TEST_F(PtxTest, LoadsAndStoresVectors) {
  int updates = 0;
  for (const auto& [kernel, instructions] : kernels_) {
    if (!absl::StrContains(kernel, "UpdateTiles")) continue;
    ++updates;
    EXPECT_GE(Count(kernel, "ld.global.v4.f32"), 2) << kernel;
    EXPECT_GE(Count(kernel, "ld.global.v4.u16"), 4) << kernel;
    EXPECT_GE(Count(kernel, "st.global.v4.f32"), 1) << kernel;
    // Split masters take two stores; bfloat16 and float16 parameters one each.
    EXPECT_GE(Count(kernel, "st.global.v4.u16"), 4) << kernel;
    // The task stays in registers and read-only memory.
    for (const std::string& instruction : instructions) {
      EXPECT_FALSE(absl::StrContains(instruction, ".local"))
          << instruction << " in " << kernel;
    }
  }
  EXPECT_GT(updates, 10);
}

TEST(WrongTest, KnowsWrongInstructions) {
  for (const absl::string_view wrong :
       {"fma.rn.f32", "mad.rn.f32", "div.approx.f32", "div.full.f32",
        "sqrt.approx.f32", "add.f32", "mul.ftz.f32", "rcp.approx.f32",
        "ex2.approx.ftz.f32"}) {
    EXPECT_NE(Wrong(wrong), "") << wrong;
  }
  for (const absl::string_view right :
       {"mad.lo.s32", "fma.rn.u32", "add.rn.f64", "rcp.rn.f32", "add.s64",
        "mul.wide.u32", "ld.global.f32", "cvt.rn.f32.s32", "max.f64",
        "abs.f32"}) {
    EXPECT_EQ(Wrong(right), "") << right;
  }
}

}  // namespace
}  // namespace optstate::kernels::cuda
