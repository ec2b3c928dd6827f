#include "kernels/cpu/targets.h"

#include <array>
#include <cstddef>

#include "kernels/cpu/highway_config.h"
// This include comes after highway_config.h.
#include "hwy/highway.h"

#if HWY_ARCH_ARM_A64
#include <sys/auxv.h>
#endif

namespace optstate::kernels::cpu {
namespace {

// The best target comes first.
constexpr Target kAllTargets[] = {HWY_AVX3, HWY_AVX2,   HWY_SSE4,  HWY_SVE,
                                  HWY_NEON, HWY_EMU128, HWY_SCALAR};

bool CpuHas(Target target) {
  switch (target) {
#if HWY_ARCH_X86
    // These ask the operating system too (XCR0), not only the CPU.
    case HWY_AVX3:
      return __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512bw");
    case HWY_AVX2:
      return __builtin_cpu_supports("avx2");
    case HWY_SSE4:
      return __builtin_cpu_supports("sse4.2");
#elif HWY_ARCH_ARM_A64
    case HWY_SVE: {
      constexpr unsigned long kHwcapSve = 1ul << 22;
      return (getauxval(AT_HWCAP) & kHwcapSve) != 0;
    }
    case HWY_NEON:
      return true;  // part of AArch64
#endif
    case HWY_EMU128:
    case HWY_SCALAR:
      return true;
  }
  return false;
}

struct TargetList {
  std::array<Target, std::size(kAllTargets)> targets = {};
  size_t size = 0;
};

TargetList Detect() {
  TargetList list;
  for (Target target : kAllTargets) {
    const bool is_compiled = (HWY_TARGETS & target) != 0;
    if (is_compiled && CpuHas(target)) list.targets[list.size++] = target;
  }
  return list;
}

}  // namespace

absl::Span<const Target> SupportedTargets() {
  static const TargetList list = Detect();
  return absl::MakeConstSpan(list.targets.data(), list.size);
}

const char* TargetName(Target target) { return hwy::TargetName(target); }

}  // namespace optstate::kernels::cpu
