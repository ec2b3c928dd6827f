// Runs the compiled device code without a device: the PTX that nvcc has made is
// interpreted, and compared with the CPU's kernels, bit by bit.

#include <gtest/gtest.h>

#ifndef OPTSTATE_HAS_CUDA

TEST(PtxKernelsTest, NeedsDeviceCode) {
  GTEST_SKIP() << "built without device code: there is no CUDA Toolkit in "
                  "$CUDA_HOME or /usr/local/cuda, or --//:cuda=off";
}

#else

#include <cxxabi.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <typeinfo>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cpu/targets.h"
#include "kernels/cuda/block_kernels.h"
#include "kernels/cuda/test_reductions.h"
#include "kernels/cuda/test_tiles.h"
#include "kernels/cuda/tile_task.h"
#include "kernels/ops/scalar_ops.h"
// This include comes after scalar_ops.h.
#include "kernels/rules/all_rules-inl.h"
#include "kernels/test_seed.h"
#include "kernels/testing/ptx_module.h"
#include "kernels/update_kernel.h"

namespace optstate::kernels::cuda {
namespace {

using kernels::testing::PtxKernel;
using kernels::testing::PtxModule;

constexpr char kPtx[] = "kernels/cuda/_nvcc/launch/launch.ptx";

std::string Demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  // Spaces between brackets differ.
  return absl::StrReplaceAll(status == 0 ? text.get() : name, {{" ", ""}});
}

// The compiled kernels, which live as long as the process.
const PtxModule& Module() {
  static const PtxModule* const module = [] {
    std::ifstream file(kPtx);
    std::stringstream text;
    text << file.rdbuf();
    auto parsed = PtxModule::Parse(text.str());
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    return parsed.ok() ? parsed->release() : new PtxModule();
  }();
  return *module;
}

// Returns the kernel whose name has a part; null: there is none.
const PtxKernel* Find(const std::string& part) {
  for (const auto& [name, kernel] : Module().kernels()) {
    if (absl::StrContains(Demangled(name.c_str()), part)) return &kernel;
  }
  ADD_FAILURE() << "there is no kernel " << part;
  return nullptr;
}

const PtxKernel* FindUpdate(OptimizerKind kind, uint32_t options) {
  const auto find = [&]<class Rule>() {
    return Find(
        absl::StrCat("UpdateTiles<", Demangled(typeid(Rule).name()), ">"));
  };
  switch (kind) {
#define OPTSTATE_FIND_CASE(KIND, NAME) \
  case OptimizerKind::KIND:            \
    return scalar::Visit##NAME(kind, options, find);
    OPTSTATE_RULES(OPTSTATE_FIND_CASE)
#undef OPTSTATE_FIND_CASE
    default:
      return nullptr;
  }
}

uint64_t Argument(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

// Updates a view as tiles of 512 in one launch. Its arrays are not aligned, so
// that each element is loaded alone.
bool ApplyByPtx(const UpdateKernelKey& key, const UpdateFactors& factors,
                const TileView& view) {
  constexpr size_t kTileElements = 512;
  const PtxKernel* const kernel = FindUpdate(key.optimizer, key.options);
  if (kernel == nullptr) return false;
  const std::vector<TileTask> tasks =
      TilesOf(key, factors, view, kTileElements);
  const UpdateFactors all[] = {{}, factors};
  const std::array<uint64_t, 2> arguments = {Argument(tasks.data()),
                                             Argument(all)};
  const absl::Status ran = PtxModule::Run(
      *kernel, static_cast<uint32_t>(tasks.size()), kBlockThreads, arguments);
  EXPECT_TRUE(ran.ok()) << ran;
  return ran.ok();
}

// Does the same with arrays that are aligned as a device's are, whose whole
// vectors are loaded at once, but for those that are left as they are: then
// each element is loaded alone.
template <ViewArray kLeft>
bool ApplyVectorsByPtx(const UpdateKernelKey& key, const UpdateFactors& factors,
                       const TileView& view) {
  return UpdateCopies<AlignedMemory>(
      key, view,
      [&](const TileView& moved, Copies<AlignedMemory>*) {
        return ApplyByPtx(key, factors, moved);
      },
      kLeft);
}

class PtxUpdateTest : public ::testing::TestWithParam<UpdateKernelKey> {
 protected:
  static constexpr uint64_t kFlatBegin = (uint64_t{1} << 32) - 256;

  static cpu::Result Apply(bool (*apply)(const UpdateKernelKey& key,
                                         const UpdateFactors& factors,
                                         const TileView& view),
                           const std::vector<cpu::Element>& elements) {
    return cpu::Apply({.target = cpu::PlainTarget(),
                       .flat_begin = kFlatBegin,
                       .apply = apply},
                      GetParam(), cpu::FirstFactors(GetParam()), elements);
  }
};

TEST_P(PtxUpdateTest, IsWhatTheCpuDoes) {
  const UpdateKernelKey& key = GetParam();
  std::mt19937 random(TestSeed());
  const UpdateFactors factors = cpu::FirstFactors(key);
  for (const size_t numel : {1, 257, 700}) {
    const auto elements = cpu::RandomElements(numel, &random);
    const auto expected =
        cpu::Apply({.target = cpu::PlainTarget(), .flat_begin = kFlatBegin},
                   key, factors, elements);
    for (auto* apply : {&ApplyByPtx, &ApplyVectorsByPtx<ViewArray::kNone>}) {
      ASSERT_EQ(Apply(apply, elements), expected) << numel;
    }
  }
}

TEST_P(PtxUpdateTest, ArraysThatAreNotAlignedAreNotLoadedAsVectors) {
  std::mt19937 random(TestSeed());
  const auto elements = cpu::RandomElements(257, &random);
  const auto expected = Apply(&ApplyVectorsByPtx<ViewArray::kNone>, elements);
  for (auto* apply : {&ApplyVectorsByPtx<ViewArray::kGradients>,
                      &ApplyVectorsByPtx<ViewArray::kParameter>,
                      &ApplyVectorsByPtx<ViewArray::kMaster>,
                      &ApplyVectorsByPtx<ViewArray::kState>}) {
    ASSERT_EQ(Apply(apply, elements), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Keys, PtxUpdateTest,
                         ::testing::ValuesIn(cpu::AllKeys()),
                         [](const auto& key) {
                           return cpu::NameOfKey(key.param);
                         });

TEST(PtxReduceTest, IsWhatTheCpuDoes) {
  std::mt19937 random(TestSeed());
  const PtxKernel* const add = Find("AddTilesOfParameters");
  ASSERT_NE(add, nullptr);
  for (const TestReduction& test : TestReductions(&random)) {
    const PtxKernel* const reduce =
        Find(absl::StrCat("ReduceTiles<(optstate::kernels::Reduction)",
                          static_cast<int>(test.reduction), ">"));
    ASSERT_NE(reduce, nullptr);
    const void* const addresses[] = {test.values.data()};
    const std::vector<ReduceTask> tasks = test.TasksOf(addresses);
    const auto count = static_cast<uint32_t>(tasks.size());
    std::vector<double> results(count);
    uint32_t found_inf = 0;
    const std::array<uint64_t, 4> arguments = {Argument(tasks.data()), count,
                                               Argument(results.data()),
                                               Argument(&found_inf)};
    const absl::Status ran =
        PtxModule::Run(*reduce, (count + kBlockArrays - 1) / kBlockArrays,
                       kBlockThreads, arguments);
    ASSERT_TRUE(ran.ok()) << ran;
    EXPECT_EQ(std::memcmp(results.data(), test.expected.data(),
                          count * sizeof(double)),
              0);
    EXPECT_EQ(found_inf != 0, test.has_infinity);

    const ParameterTasks parameter = {0, count};
    double sum = 0;
    const std::array<uint64_t, 4> addends = {
        Argument(&parameter), 1, Argument(results.data()), Argument(&sum)};
    const absl::Status added = PtxModule::Run(*add, 1, kBlockThreads, addends);
    ASSERT_TRUE(added.ok()) << added;
    EXPECT_EQ(std::memcmp(&sum, &test.expected_sum, sizeof(double)), 0);
  }
}

}  // namespace
}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_HAS_CUDA
