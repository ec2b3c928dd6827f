// Runs the compiled kernel of digests without a device: the PTX that nvcc has
// made is interpreted, and compared with the host's digests.

#include <gtest/gtest.h>

#ifndef OPTSTATE_HAS_CUDA

TEST(PtxDigestTest, NeedsDeviceCode) {
  GTEST_SKIP() << "built without device code: there is no CUDA Toolkit in "
                  "$CUDA_HOME or /usr/local/cuda, or --//:cuda=off";
}

#else

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cpu/digest.h"
#include "kernels/cuda/digest.h"
#include "kernels/cuda/test_ptx.h"
#include "kernels/test_seed.h"

namespace optstate::kernels::cuda {
namespace {

// Compares the digests that one launch computes of all arrays, each of so many
// of its bytes as its task says, with the host's.
void Compare(const std::vector<DigestTask>& tasks) {
  static const TestPtx* const ptx =
      new TestPtx("kernels/cuda/_nvcc/digest_launch/digest_launch.ptx");
  constexpr uint64_t kGuard = 0xA5A5A5A5A5A5A5A5;
  std::vector<uint64_t> digests(tasks.size() + 1, kGuard);
  ASSERT_TRUE(RunPtx(ptx->Find("DigestArrays"), tasks.size(),
                     {Argument(tasks.data()), Argument(digests.data())}));
  for (size_t i = 0; i < tasks.size(); ++i) {
    EXPECT_EQ(digests[i], cpu::DigestOf(tasks[i].data, tasks[i].bytes))
        << tasks[i].bytes << " bytes";
  }
  EXPECT_EQ(digests.back(), kGuard);
}

TEST(PtxDigestTest, IsWhatTheHostComputes) {
  constexpr size_t kWords = 20'000;
  std::mt19937 random(TestSeed());
  std::vector<uint32_t> words(kWords);
  for (uint32_t& word : words) word = static_cast<uint32_t>(random());
  // The lengths end on either side of a word and of a round of all threads. The
  // bytes behind an end do not count.
  std::vector<DigestTask> tasks;
  for (const uint64_t begin : {0, 1, 77}) {
    for (const uint64_t bytes :
         {0,    1,    2,    3,    4,     5,     6,    7,
          1019, 1020, 1021, 1022, 1023,  1024,  1025, 1026,
          1027, 1028, 2047, 4099, 16384, 70'001}) {
      tasks.push_back({words.data() + begin, bytes});
    }
  }
  ASSERT_NO_FATAL_FAILURE(Compare(tasks));
}

// The words have all bits set: sums pass 32 bits, and the digest wraps.
TEST(PtxDigestTest, SumsAreExact) {
  constexpr size_t kWords = 4096;
  const std::vector<uint32_t> words(kWords, ~uint32_t{0});
  std::vector<DigestTask> tasks;
  for (const uint64_t missing : {0, 1, 2, 3, 1024}) {
    tasks.push_back({words.data(), kWords * sizeof(uint32_t) - missing});
  }
  ASSERT_NO_FATAL_FAILURE(Compare(tasks));
}

}  // namespace
}  // namespace optstate::kernels::cuda

#endif  // OPTSTATE_HAS_CUDA
