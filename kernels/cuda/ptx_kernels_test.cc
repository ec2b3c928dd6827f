// Runs the compiled device code without a device: the PTX that nvcc has made is
// interpreted, and compared with the CPU's kernels, bit by bit.

#include <gtest/gtest.h>

#ifndef OPTSTATE_HAS_CUDA

TEST(PtxKernelsTest, NeedsDeviceCode) {
  GTEST_SKIP() << "built without device code: there is no CUDA Toolkit in "
                  "$CUDA_HOME or /usr/local/cuda, or --//:cuda=off";
}

#else

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <typeinfo>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/rule_calls.h"
#include "kernels/cpu/targets.h"
#include "kernels/cuda/block_kernels.h"
#include "kernels/cuda/test_ptx.h"
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

// Returns the kernel whose name has a part; null: there is none.
const PtxKernel* Find(const std::string& part) {
  static const TestPtx* const ptx =
      new TestPtx("kernels/cuda/_nvcc/launch/launch.ptx");
  return ptx->Find(part);
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

// Updates a view as tiles of 512 in one launch. Its arrays are not aligned, so
// that each element is loaded alone.
bool ApplyByPtx(const UpdateKernelKey& key, const UpdateFactors& factors,
                const TileView& view) {
  constexpr size_t kTileElements = 512;
  const PtxKernel* const kernel = FindUpdate(key.optimizer, key.options);
  const std::vector<TileTask> tasks =
      TilesOf(key, factors, view, kTileElements);
  const UpdateFactors all[] = {{}, factors};
  return RunPtx(kernel, tasks.size(), {Argument(tasks.data()), Argument(all)});
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
  for (const TestReduction& test : TestReductions(&random)) {
    const PtxKernel* const reduce =
        Find(absl::StrCat("ReduceTiles<(optstate::kernels::Reduction)",
                          static_cast<int>(test.reduction), ">"));
    const void* const addresses[] = {test.values.data()};
    const std::vector<ReduceTask> tasks = test.TasksOf(addresses);
    const auto count = static_cast<uint32_t>(tasks.size());
    std::vector<double> results(count);
    uint32_t found_inf = 0;
    ASSERT_TRUE(RunPtx(reduce, (count + kBlockArrays - 1) / kBlockArrays,
                       {Argument(tasks.data()), count, Argument(results.data()),
                        Argument(&found_inf)}));
    EXPECT_EQ(std::memcmp(results.data(), test.expected.data(),
                          count * sizeof(double)),
              0);
    EXPECT_EQ(found_inf != 0, test.has_infinity);

    const ParameterTasks parameter = {0, count};
    double sum = 0;
    ASSERT_TRUE(RunPtx(
        add, 1,
        {Argument(&parameter), 1, Argument(results.data()), Argument(&sum)}));
    EXPECT_EQ(std::memcmp(&sum, &test.expected_sum, sizeof(double)), 0);
  }
}

}  // namespace
}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_HAS_CUDA
