#include "kernels/cpu/targets.h"

#include <sys/auxv.h>

#include <set>
#include <string>

#include "gtest/gtest.h"
#include "hwy/detect_targets.h"

namespace optstate::kernels::cpu {
namespace {

TEST(TargetsTest, EndsWithPlainCode) {
  ASSERT_FALSE(SupportedTargets().empty());
  const std::string last = TargetName(SupportedTargets().back());
  EXPECT_TRUE(last == "SCALAR" || last == "EMU128") << last;
}

TEST(TargetsTest, EveryTargetIsOneBitAndHasItsOwnName) {
  std::set<std::string> names;
  for (Target target : SupportedTargets()) {
    EXPECT_EQ(target & (target - 1), 0);
    EXPECT_TRUE(names.insert(TargetName(target)).second);
  }
  EXPECT_FALSE(names.contains("Unknown"));
}

#if defined(__x86_64__)
TEST(TargetsTest, FollowsTheCpu) {
  const auto best = std::string(TargetName(BestTarget()));
  // Builds with a sanitizer leave this target out.
  if (__builtin_cpu_supports("avx512bw") &&
      (HWY_BROKEN_TARGETS & HWY_AVX3) == 0) {
    EXPECT_EQ(best, "AVX3");
  } else if (__builtin_cpu_supports("avx2")) {
    EXPECT_EQ(best, "AVX2");
  }
}
#elif defined(__aarch64__)
TEST(TargetsTest, FollowsTheCpu) {
  const bool has_sve = (getauxval(AT_HWCAP) & HWCAP_SVE) != 0;
  EXPECT_EQ(TargetName(BestTarget()), std::string(has_sve ? "SVE" : "NEON"));
}
#endif

}  // namespace
}  // namespace optstate::kernels::cpu
