#include "kernels/testing/ptx_module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace optstate::kernels::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kHead[] =
    ".version 9.0\n.target sm_80\n.address_size 64\n"
    ".global .align 4 .b8 table[8] = {1, 0, 0, 0, 2};\n"
    ".entry k(\n\t.param .u64 k_param_0,\n\t.param .u64 k_param_1\n)\n{\n"
    "\t.reg .b32 %r<9>;\n\t.shared .align 4 .b8 box[16];\n"
    "\tld.param.u64 %rd1, [k_param_0];\n\tld.param.u64 %rd2, [k_param_1];\n";

// Runs a body with addresses of two arrays in %rd1 and %rd2.
absl::Status RunBody(const std::string& body, uint32_t blocks, uint32_t threads,
                     void* first, void* second) {
  const auto module =
      PtxModule::Parse(absl::StrCat(kHead, body, "\tret;\n}\n"));
  if (!module.ok()) return module.status();
  const std::array<uint64_t, 2> arguments = {
      reinterpret_cast<uint64_t>(first), reinterpret_cast<uint64_t>(second)};
  return PtxModule::Run((*module)->kernels().at("k"), blocks, threads,
                        arguments);
}

// Returns what "NAME %f3, %f1, %f2" of two floats is.
uint32_t BitsOf(const std::string& name, float a, float b) {
  std::array<float, 2> in = {a, b};
  uint32_t out = 0;
  const absl::Status status = RunBody(
      absl::StrCat("ld.global.f32 %f1, [%rd1];\nld.f32 %f2, [%rd1+4];\n", name,
                   " %f3, %f1, %f2;\nst.f32 [%rd2], %f3;\n"),
      1, 1, in.data(), &out);
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

TEST(PtxModuleTest, FloatsAreRoundedOnce) {
  EXPECT_EQ(BitsOf("add.rn.f32", 1.0f, 0x1p-24f),
            std::bit_cast<uint32_t>(1.0f));
  EXPECT_EQ(BitsOf("mul.rn.f32", 0x1p-140f, 0x1p-5f),
            std::bit_cast<uint32_t>(0x1p-145f))
      << "no flush to zero";
  EXPECT_EQ(BitsOf("div.rn.f32", 1.0f, 3.0f),
            std::bit_cast<uint32_t>(1.0f / 3.0f));
  EXPECT_EQ(BitsOf("copysign.f32", -1.0f, 3.0f),
            std::bit_cast<uint32_t>(-3.0f));
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(BitsOf("sub.rn.f32", infinity, infinity), 0x7fffffffu);
}

TEST(PtxModuleTest, ComparisonsKnowNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [name, with_nan, equal] :
       {std::tuple("eq", false, true), std::tuple("neu", true, false),
        std::tuple("ne", false, false), std::tuple("leu", true, true),
        std::tuple("num", false, true), std::tuple("lt", false, false)}) {
    for (const float value : {nan, 2.0f}) {
      std::array<float, 2> in = {2.0f, value};
      uint32_t out = 7;
      ASSERT_TRUE(
          RunBody(
              absl::StrCat("ld.f32 %f1, [%rd1];\nld.f32 %f2, [%rd1+4];\nsetp.",
                           name, ".f32 %p1, %f1, %f2;\n",
                           "selp.b32 %r1, 1, 0, %p1;\nst.global.u32 [%rd2], "
                           "%r1;\n"),
              1, 1, in.data(), &out)
              .ok());
      EXPECT_EQ(out != 0, value == value ? equal : with_nan) << name << value;
    }
  }
}

TEST(PtxModuleTest, PredicatesAreNegated) {
  uint32_t out = 0;
  ASSERT_TRUE(RunBody("mov.u32 %r1, 1;\nsetp.eq.s32 %p1, %r1, 1;\n"
                      "not.pred %p2, %p1;\nselp.b32 %r2, 7, 9, %p2;\n"
                      "st.global.u32 [%rd2], %r2;\n",
                      1, 1, nullptr, &out)
                  .ok());
  EXPECT_EQ(out, 9u);
}

TEST(PtxModuleTest, IntegersWrapAndShiftOut) {
  std::array<uint32_t, 4> out = {};
  ASSERT_TRUE(
      RunBody("mov.u32 %r1, -1;\nadd.s32 %r2, %r1, 2;\n"
              "st.global.u32 [%rd2], %r2;\nshl.b32 %r3, %r1, 32;\n"
              "st.global.u32 [%rd2+4], %r3;\nshr.s32 %r4, %r1, 99;\n"
              "st.global.u32 [%rd2+8], %r4;\nmul.wide.u32 %rd3, %r1, %r1;\n"
              "shr.u64 %rd4, %rd3, 32;\ncvt.u32.u64 %r5, %rd4;\n"
              "st.global.u32 [%rd2+12], %r5;\n",
              1, 1, nullptr, out.data())
          .ok());
  EXPECT_EQ(out, (std::array<uint32_t, 4>{1, 0, 0xffffffff, 0xfffffffe}));
}

TEST(PtxModuleTest, ThreadsMeetAtBarriersAndShareMemory) {
  std::array<uint32_t, 8> out = {};
  // Thread i writes its number; after the barrier it reads that of 3 - i.
  ASSERT_TRUE(RunBody("mov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\n"
                      "mov.u32 %r3, box;\nshl.b32 %r4, %r1, 2;\n"
                      "add.s32 %r5, %r3, %r4;\nst.shared.u32 [%r5], %r1;\n"
                      "bar.sync 0;\nsub.s32 %r6, %r3, %r4;\n"
                      "ld.shared.u32 %r7, [%r6+12];\nshl.b32 %r8, %r2, 4;\n"
                      "add.s32 %r8, %r8, %r4;\ncvt.u64.u32 %rd3, %r8;\n"
                      "add.s64 %rd4, %rd2, %rd3;\nst.global.u32 [%rd4], %r7;\n",
                      2, 4, nullptr, out.data())
                  .ok());
  EXPECT_EQ(out, (std::array<uint32_t, 8>{3, 2, 1, 0, 3, 2, 1, 0}));
}

// Four threads of a block, of which one, number 2, takes another way.
absl::Status RunWithout2(const std::string& body) {
  return RunBody(absl::StrCat("mov.u32 %r1, %tid.x;\nsetp.eq.s32 %p1, %r1, 2;\n"
                              "@%p1 bra $L1;\n",
                              body),
                 1, 4, nullptr, nullptr);
}

TEST(PtxModuleTest, ABarrierThatAThreadMissesIsNamed) {
  const absl::Status met =
      RunWithout2("mov.u32 %r2, 5;\n$L1:\nbar.sync 0;\nbar.sync 0;\n");
  EXPECT_TRUE(met.ok()) << met;
  const absl::Status ended = RunWithout2("bar.sync 0;\n$L1:\n");
  EXPECT_TRUE(absl::IsInternal(ended)) << ended;
  EXPECT_THAT(
      std::string(ended.message()),
      AllOf(HasSubstr("line 17: bar.sync 0; (thread 2)"), HasSubstr("ended")));
  // A device would let them meet.
  const absl::Status elsewhere = RunWithout2(
      "bar.sync 0;\nbra.uni $L2;\n$L1:\nbar.sync 0;\n$L2:\nbar.sync 0;\n");
  EXPECT_TRUE(absl::IsInternal(elsewhere)) << elsewhere;
  EXPECT_THAT(std::string(elsewhere.message()),
              AllOf(HasSubstr("line 17: bar.sync 0; (thread 2)"),
                    HasSubstr("waits at line 20: bar.sync 0;")));
  // One round more than the others.
  const absl::Status again = RunWithout2("bar.sync 0;\n$L1:\nbar.sync 0;\n");
  EXPECT_TRUE(absl::IsInternal(again)) << again;
  const absl::Status some = RunWithout2("$L1:\nbar.sync 0, 2;\n");
  EXPECT_TRUE(absl::IsInvalidArgument(some)) << some;
}

TEST(PtxModuleTest, EveryBlockHasMemoryOfItsOwn) {
  std::array<uint32_t, 2> out = {};
  // A block reads what is there, then writes 7.
  ASSERT_TRUE(RunBody("ld.shared.u32 %r1, [box];\nmov.u32 %r2, 7;\n"
                      "st.shared.u32 [box], %r2;\nmov.u32 %r3, %ctaid.x;\n"
                      "shl.b32 %r3, %r3, 2;\ncvt.u64.u32 %rd3, %r3;\n"
                      "add.s64 %rd4, %rd2, %rd3;\nst.global.u32 [%rd4], %r1;\n",
                      2, 1, nullptr, out.data())
                  .ok());
  EXPECT_EQ(out, (std::array<uint32_t, 2>{0xa5a5a5a5, 0xa5a5a5a5}));
}

TEST(PtxModuleTest, VectorsAreLoadedFromSharedMemory) {
  std::array<float, 2> in = {3, -4};
  std::array<float, 2> out = {};
  const auto load = [&](const std::string& from) {
    return RunBody(
        absl::StrCat(
            "ld.f32 %f1, [%rd1];\nld.f32 %f2, [%rd1+4];\n"
            "mov.u32 %r1, box;\nst.shared.f32 [%r1+8], %f1;\n"
            "st.shared.f32 [box+12], %f2;\nld.shared.v2.f32 {%f3, %f4}, ",
            from, ";\nst.f32 [%rd2], %f4;\nst.f32 [%rd2+4], %f3;\n"),
        1, 1, in.data(), out.data());
  };
  ASSERT_TRUE(load("[%r1+8]").ok());
  EXPECT_EQ(out, (std::array<float, 2>{-4, 3}));
  EXPECT_TRUE(absl::IsInvalidArgument(load("[%r1+4]"))) << "not aligned";
  EXPECT_TRUE(absl::IsInvalidArgument(load("[%r1+16]"))) << "behind the end";
}

// Returns what an instruction makes of %rd3 and %rd4 in %rd5.
uint64_t ResultOf(const std::string& instruction, uint64_t a, uint64_t b = 0) {
  std::array<uint64_t, 2> in = {a, b};
  uint64_t out = 0;
  const absl::Status status = RunBody(
      absl::StrCat(
          "ld.global.u64 %rd3, [%rd1];\nld.global.u64 %rd4, [%rd1+8];\n",
          instruction, "\nst.global.u64 [%rd2], %rd5;\n"),
      1, 1, in.data(), &out);
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

TEST(PtxModuleTest, IntegersAreDividedWithoutASign) {
  constexpr uint64_t kMax = ~uint64_t{0};
  const std::string div32 = "div.u32 %rd5, %rd3, %rd4;";
  const std::string div64 = "div.u64 %rd5, %rd3, %rd4;";
  EXPECT_EQ(ResultOf(div32, 7, 2), 3u);
  EXPECT_EQ(ResultOf(div32, 0xffffffff, 2), 0x7fffffffu);
  EXPECT_EQ(ResultOf(div32, (uint64_t{9} << 32) + 8, 4), 2u)
      << "the lower halves alone";
  EXPECT_EQ(ResultOf(div64, 1, 2), 0u);
  EXPECT_EQ(ResultOf(div64, kMax, 3), 0x5555555555555555u);
  EXPECT_EQ(ResultOf(div64, kMax, kMax), 1u);
  for (const char* name : {"div.u32", "div.u64"}) {
    const absl::Status status = RunBody(
        absl::StrCat("mov.u64 %rd3, 0;\n", name, " %rd4, %rd1, %rd3;\n"), 1, 1,
        nullptr, nullptr);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  }
}

TEST(PtxModuleTest, LongIntegersAreNegatedAndShiftOut) {
  constexpr uint64_t kLeast = uint64_t{1} << 63;
  EXPECT_EQ(ResultOf("neg.s64 %rd5, %rd3;", 5), ~uint64_t{0} - 4);
  EXPECT_EQ(ResultOf("neg.s64 %rd5, %rd3;", 0), 0u);
  EXPECT_EQ(ResultOf("neg.s64 %rd5, %rd3;", kLeast), kLeast);
  EXPECT_EQ(ResultOf("shl.b64 %rd5, %rd3, %rd4;", 3, 63), kLeast);
  for (const uint64_t by : {64u, 65u, 0xffffffffu}) {
    EXPECT_EQ(ResultOf("shl.b64 %rd5, %rd3, %rd4;", kLeast + 1, by), 0u) << by;
    EXPECT_EQ(ResultOf("shr.u64 %rd5, %rd3, %rd4;", kLeast + 1, by), 0u) << by;
  }
}

TEST(PtxModuleTest, BytesAreExtendedByTheirSign) {
  const auto extended = [](uint64_t bits) {
    return static_cast<uint32_t>(ResultOf("cvt.s32.s8 %rd5, %rd3;", bits));
  };
  EXPECT_EQ(extended(0x7f), 127u);
  EXPECT_EQ(extended(0x80), 0xffffff80u);
  EXPECT_EQ(extended(0x12345ff), 0xffffffffu) << "one byte alone";
}

TEST(PtxModuleTest, TheLargerDoubleIsANumber) {
  const auto larger = [](double a, double b) {
    return ResultOf("max.f64 %rd5, %rd3, %rd4;", std::bit_cast<uint64_t>(a),
                    std::bit_cast<uint64_t>(b));
  };
  const auto is = [](double value) { return std::bit_cast<uint64_t>(value); };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(larger(1, 2), is(2));
  EXPECT_EQ(larger(-infinity, -1), is(-1));
  EXPECT_EQ(larger(nan, -infinity), is(-infinity));
  EXPECT_EQ(larger(1, nan), is(1));
  EXPECT_EQ(larger(-0.0, 0.0), is(0.0));
  EXPECT_EQ(larger(0.0, -0.0), is(0.0));
  EXPECT_EQ(larger(-0.0, -0.0), is(-0.0));
  EXPECT_TRUE(std::isnan(std::bit_cast<double>(larger(nan, nan))));
}

TEST(PtxModuleTest, DoublesAreRoundedToTheNearestFloat) {
  const auto rounded = [](double value) {
    return ResultOf("cvt.rn.f32.f64 %rd5, %rd3;",
                    std::bit_cast<uint64_t>(value));
  };
  const auto is = [](float value) { return std::bit_cast<uint32_t>(value); };
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<double, uint32_t>> cases = {
      {1 + 0x1p-24, is(1)},  // a tie, to even
      {1 + 0x1p-24 + 0x1p-50, is(1 + 0x1p-23f)},
      {1 + 0x3p-24, is(1 + 0x1p-22f)},
      {-0.0, is(-0.0f)},
      {0x1.fffffefp127, is(0x1.fffffep127f)},
      {0x1.ffffffp127, is(infinity)},  // a tie
      {-1e300, is(-infinity)},
      {0x1.8p-149, is(0x1p-148f)},
      {0x1p-150, is(0)},
      {-0x1p-151, is(-0.0f)},
      {-std::numeric_limits<double>::quiet_NaN(), 0x7fffffff}};
  for (const auto& [value, expected] : cases) {
    EXPECT_EQ(rounded(value), expected) << value;
  }
}

TEST(PtxModuleTest, LongIntegersAreRoundedToTheNearestDouble) {
  constexpr uint64_t kExact = uint64_t{1} << 53;
  const std::vector<std::pair<uint64_t, double>> cases = {
      {0, 0},
      {kExact - 1, 0x1.fffffffffffffp52},
      {kExact + 1, 0x1p53},  // a tie, to even
      {kExact + 3, 0x1.0000000000002p53},
      {(uint64_t{1} << 63) + 0x400, 0x1p63},  // a tie, with no sign
      {(uint64_t{1} << 63) + 0x401, 0x1.0000000000001p63},
      {~uint64_t{0}, 0x1p64}};
  for (const auto& [value, expected] : cases) {
    EXPECT_EQ(ResultOf("cvt.rn.f64.u64 %rd5, %rd3;", value),
              std::bit_cast<uint64_t>(expected))
        << value;
  }
}

TEST(PtxModuleTest, BranchesAndTables) {
  uint32_t out = 0;
  ASSERT_TRUE(RunBody("mov.u64 %rd3, table;\nmov.u32 %r1, 0;\n$L1:\n"
                      "ld.global.u32 %r2, [%rd3+4];\nadd.s32 %r1, %r1, %r2;\n"
                      "setp.lt.u32 %p1, %r1, 9;\n@%p1 bra $L1;\n"
                      "@!%p1 bra $L2;\nmov.u32 %r1, 0;\n$L2:\n"
                      "st.global.u32 [%rd2], %r1;\n",
                      1, 1, nullptr, &out)
                  .ok());
  EXPECT_EQ(out, 10u);
}

TEST(PtxModuleTest, VectorsAreLoadedAndStoredWhole) {
  alignas(16) std::array<float, 4> in = {1, 2, 3, 4};
  alignas(16) std::array<float, 4> out = {};
  const std::string body =
      "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\n"
      "st.global.v2.f32 [%rd2], {%f4, %f3};\n"
      "st.global.v2.f32 [%rd2+8], {%f2, %f1};\n";
  ASSERT_TRUE(RunBody(body, 1, 1, in.data(), out.data()).ok());
  EXPECT_EQ(out, (std::array<float, 4>{4, 3, 2, 1}));
  // A vector is aligned to its size.
  EXPECT_TRUE(
      absl::IsInvalidArgument(RunBody(body, 1, 1, in.data() + 2, out.data())));
  alignas(8) std::array<uint16_t, 4> halves = {9, 8, 7, 0xffff};
  alignas(8) std::array<uint16_t, 4> moved = {};
  ASSERT_TRUE(RunBody("ld.global.v4.u16 {%rs1, %rs2, %rs3, %rs4}, [%rd1];\n"
                      "st.global.v4.u16 [%rd2], {%rs1, %rs2, %rs3, %rs4};\n",
                      1, 1, halves.data(), moved.data())
                  .ok());
  EXPECT_EQ(moved, halves);
}

TEST(PtxModuleTest, WhatADeviceRefusesIsAnError) {
  alignas(8) std::array<uint8_t, 8> bytes = {};
  const auto error = [&](const std::string& body, void* address) {
    return RunBody(body, 1, 2, address, nullptr);
  };
  const absl::Status null = error("ld.global.u32 %r1, [%rd1];\n", nullptr);
  EXPECT_TRUE(absl::IsInvalidArgument(null)) << null;
  EXPECT_THAT(std::string(null.message()), HasSubstr("ld.global.u32"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      error("ld.global.u32 %r1, [%rd1];\n", bytes.data() + 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      error("mov.u32 %r1, box;\nld.shared.u32 %r2, [%r1+16];\n", nullptr)));
  EXPECT_TRUE(absl::IsInternal(error("$L1:\nbra.uni $L1;\n", nullptr)));
  EXPECT_TRUE(
      absl::IsInternal(error("mov.u32 %r1, %tid.x;\nsetp.eq.s32 %p1, %r1, 0;\n"
                             "@%p1 bra $L1;\nbar.sync 0;\n$L1:\n",
                             nullptr)));
}

TEST(PtxModuleTest, WhatIsNotKnownIsNamed) {
  for (const char* line :
       {"fma.rn.f32 %f1, %f1, %f1, %f1;", "add.ftz.f32 %f1, %f1, %f1;",
        "mov.u32 %r1, %ntid.x;", "bra $Lnowhere;", "mov.u32 %r1, unknown;"}) {
    const absl::Status status =
        RunBody(absl::StrCat(line, "\n"), 1, 1, nullptr, nullptr);
    EXPECT_TRUE(absl::IsUnimplemented(status)) << line << ": " << status;
  }
  for (const char* line :
       {"min.f64 %fd1, %fd2, %fd3;", "ld.local.f32 %f1, [%rd1];",
        "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;"}) {
    const absl::Status status =
        RunBody(absl::StrCat(line, "\n"), 1, 1, nullptr, nullptr);
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(line));
  }
}

}  // namespace
}  // namespace optstate::kernels::testing
