#ifndef OPTSTATE_KERNELS_CPU_HIGHWAY_CONFIG_H_
#define OPTSTATE_KERNELS_CPU_HIGHWAY_CONFIG_H_

// The settings with which we use Highway. Include this before any Highway
// header.
//
// Only Highway's headers are used, never its library: distributions ship the
// library as a shared object alone, and our release binaries link everything
// but libc statically. targets.h does the run-time dispatch instead, and
// Highway's debug assertions, which live in the library, are off.

#ifdef HIGHWAY_HWY_BASE_H_
#error "include kernels/cpu/highway_config.h before any Highway header"
#endif

#define HWY_IS_DEBUG_BUILD 0

// The scalar target is always built, as the one the others are tested against.
#define HWY_COMPILE_ALL_ATTAINABLE

// These instructions are never needed: neither may the compiler use them (fused
// multiply-add changes results, float16 conversions are done in integers) nor
// must the CPU have them.
#define HWY_DISABLE_BMI2_FMA
#define HWY_DISABLE_F16C
#define HWY_DISABLE_PCLMUL_AES

// These targets would gain nothing over SSE4 and SVE here.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

#endif  // OPTSTATE_KERNELS_CPU_HIGHWAY_CONFIG_H_
