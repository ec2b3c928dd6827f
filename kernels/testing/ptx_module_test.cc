#include "kernels/testing/ptx_module.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace optstate::kernels::testing {
namespace {

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
}

}  // namespace
}  // namespace optstate::kernels::testing
