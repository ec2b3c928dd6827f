// Tests tensors of other libraries, in structs as DLPack documents them and as
// a caller would declare them.

#include "client/dlpack/foreign_tensor.h"

#include <array>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/fake/fake_channel.h"
#include "client/fake/fake_daemon.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/step_script.h"

namespace optstate::client {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 };
struct DLDevice {
  DLDeviceType device_type;
  int32_t device_id;
};
struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};
struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};
struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
};

constexpr DLDataType kFloat32 = {2, 32, 1};
constexpr DLDataType kFloat16 = {2, 16, 1};
constexpr DLDataType kBfloat16 = {4, 16, 1};

// A matrix of 2 x 3 floats for parameter 0 of LayoutOfTest().
struct Matrix {
  std::array<float, 8> values = {0, 1, 2, 3, 4, 5, 6, 7};
  std::array<int64_t, 2> shape = {2, 3};
  std::array<int64_t, 2> strides = {3, 1};
  DLTensor tensor = {values.data(), {kDLCPU, 0},    2, kFloat32,
                     shape.data(),  strides.data(), 0};
};

// A matrix, a bfloat16 vector with float32 gradients, and nothing.
LayoutSpec SpecOfTest() {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {
      {.name = "w", .shape = {2, 3}, .numel = 6},
      {.name = "h", .shape = {4}, .numel = 4, .dtype = DType::kBFloat16},
      {.name = "none", .shape = {0, 3}, .numel = 0},
  };
  return spec;
}

class ForeignTensorTest : public testing::Test {
 protected:
  ForeignTensorTest() : layout_(*Layout::Make(SpecOfTest())) {}

  void ExpectRefused(const DLTensor& tensor, StatusCode code,
                     const char* text) {
    const ForeignTensor foreign = DescribeTensor(tensor);
    for (const absl::Status& status :
         {GradientOf(layout_, 0, foreign).status(),
          PlaceFor(layout_, 0, foreign).status()}) {
      EXPECT_EQ(status.code(), code) << status;
      EXPECT_THAT(status.ToString(), HasSubstr(text));
      EXPECT_THAT(status.ToString(), HasSubstr("\"w\""));
    }
  }

  const Layout layout_;
  Matrix matrix_;
};

TEST_F(ForeignTensorTest, NothingIsCopied) {
  const ForeignTensor foreign = DescribeTensor(matrix_.tensor);
  EXPECT_EQ(*GradientOf(layout_, 0, foreign), matrix_.values.data());
  EXPECT_EQ(*PlaceFor(layout_, 0, foreign), matrix_.values.data());
  const auto values = ValuesOf(layout_, 0, foreign);
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_EQ(values->dtype, DType::kFloat32);
  EXPECT_EQ(static_cast<const void*>(values->data.data()),
            matrix_.values.data());
  EXPECT_EQ(values->data.size(), 6 * sizeof(float));
}

TEST_F(ForeignTensorTest, OffsetsAndMissingStrides) {
  matrix_.tensor.byte_offset = 8;
  matrix_.tensor.strides = nullptr;
  matrix_.tensor.device.device_type = kDLCUDAHost;
  EXPECT_EQ(*GradientOf(layout_, 0, DescribeTensor(matrix_.tensor)),
            matrix_.values.data() + 2);
}

TEST_F(ForeignTensorTest, ManagedTensors) {
  const DLManagedTensor managed = {matrix_.tensor, nullptr, nullptr};
  EXPECT_EQ(*PlaceFor(layout_, 0, DescribeTensor(managed)),
            matrix_.values.data());
  DLManagedTensorVersioned versioned = {
      {1, 1}, nullptr, nullptr, 0, matrix_.tensor};
  EXPECT_EQ(*PlaceFor(layout_, 0, DescribeTensor(versioned)),
            matrix_.values.data());
  versioned.flags = 1;
  EXPECT_TRUE(GradientOf(layout_, 0, DescribeTensor(versioned)).ok());
  EXPECT_THAT(
      PlaceFor(layout_, 0, DescribeTensor(versioned)).status().ToString(),
      HasSubstr("read-only"));
  versioned.flags = 2;
  EXPECT_TRUE(GradientOf(layout_, 0, DescribeTensor(versioned)).ok());
  EXPECT_THAT(
      PlaceFor(layout_, 0, DescribeTensor(versioned)).status().ToString(),
      HasSubstr("copy"));
  versioned.flags = 0;
  versioned.version.major = 2;
  EXPECT_EQ(GradientOf(layout_, 0, DescribeTensor(versioned)).status().code(),
            StatusCode::kUnimplemented);
}

TEST_F(ForeignTensorTest, DTypesAreThoseOfParameterAndGradient) {
  std::array<uint16_t, 4> half = {};
  std::array<float, 4> single = {};
  int64_t shape = 4;
  DLTensor tensor = {half.data(), {kDLCPU, 0}, 1, kBfloat16,
                     &shape,      nullptr,     0};
  EXPECT_EQ(*PlaceFor(layout_, 1, DescribeTensor(tensor)), half.data());
  EXPECT_THAT(
      GradientOf(layout_, 1, DescribeTensor(tensor)).status().ToString(),
      HasSubstr("is bfloat16, not float32"));
  EXPECT_EQ(ValuesOf(layout_, 1, DescribeTensor(tensor))->dtype,
            DType::kBFloat16);
  tensor.dtype = kFloat16;
  EXPECT_EQ(ValuesOf(layout_, 1, DescribeTensor(tensor))->dtype,
            DType::kFloat16);
  tensor.dtype = kFloat32;
  tensor.data = single.data();
  EXPECT_EQ(*GradientOf(layout_, 1, DescribeTensor(tensor)), single.data());
}

TEST_F(ForeignTensorTest, NoElementsNeedNoMemory) {
  std::array<int64_t, 2> shape = {0, 3};
  const DLTensor tensor = {nullptr,      {kDLCPU, 0}, 2, kFloat32,
                           shape.data(), nullptr,     0};
  EXPECT_EQ(*GradientOf(layout_, 2, DescribeTensor(tensor)), nullptr);
  EXPECT_EQ(ValuesOf(layout_, 2, DescribeTensor(tensor))->data.size(), 0);
}

TEST_F(ForeignTensorTest, WhatDoesNotFitIsRefused) {
  DLTensor wrong = matrix_.tensor;
  wrong.device.device_type = kDLCUDA;
  ExpectRefused(wrong, StatusCode::kUnimplemented, "type 2");
  wrong = matrix_.tensor;
  wrong.dtype = {2, 64, 1};
  ExpectRefused(wrong, StatusCode::kInvalidArgument, "64 bits");
  wrong.dtype = {2, 32, 4};
  ExpectRefused(wrong, StatusCode::kInvalidArgument, "4 lanes");
  wrong = matrix_.tensor;
  wrong.ndim = 1;
  ExpectRefused(wrong, StatusCode::kInvalidArgument, "(2), not (2, 3)");
  wrong.ndim = -1;
  ExpectRefused(wrong, StatusCode::kInvalidArgument, "-1 dimensions");
  wrong = matrix_.tensor;
  wrong.data = nullptr;
  ExpectRefused(wrong, StatusCode::kInvalidArgument, "no memory");
  wrong = matrix_.tensor;
  wrong.byte_offset = 2;
  ExpectRefused(wrong, StatusCode::kInvalidArgument, "aligned");
  std::array<int64_t, 2> transposed = {1, 2};
  wrong = matrix_.tensor;
  wrong.strides = transposed.data();
  ExpectRefused(wrong, StatusCode::kInvalidArgument, "strides (1, 2)");
  EXPECT_EQ(
      GradientOf(layout_, 3, DescribeTensor(matrix_.tensor)).status().code(),
      StatusCode::kOutOfRange);
}

TEST_F(ForeignTensorTest, ASessionStepsWithThem) {
  FakeDaemon daemon;
  auto opened = Session::OpenOver(
      [&](ChannelSetup setup) {
        return MakeFakeChannel(&daemon, std::move(setup));
      },
      NewJob(UniformLayout(1, 6)));
  ASSERT_TRUE(opened.ok()) << opened.status();
  Session& session = **opened;
  int64_t shape = 6;
  matrix_.tensor.ndim = 1;
  matrix_.tensor.shape = &shape;
  matrix_.tensor.strides = nullptr;
  const ForeignTensor foreign = DescribeTensor(matrix_.tensor);
  const auto values = ValuesOf(session.layout(), 0, foreign);
  ASSERT_TRUE(values.ok()) << values.status();
  ASSERT_TRUE(session.BeginLoad().ok());
  ASSERT_TRUE(
      session.Load(StateArray::kMaster, 0, values->dtype, values->data).ok());
  ASSERT_TRUE(session.FinishLoad().ok());
  const uint32_t parameter = 0;
  const absl::Span<const uint32_t> parameters(&parameter, 1);
  const void* const gradient = *GradientOf(session.layout(), 0, foreign);
  ASSERT_TRUE(
      session.PushGradients(1, 0, parameters, absl::MakeConstSpan(&gradient, 1))
          .ok());
  void* const place = *PlaceFor(session.layout(), 0, foreign);
  const auto outcome = session.Commit(
      CommitOf(session, 1), {.parameters = parameters,
                             .destinations = absl::MakeConstSpan(&place, 1)});
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(std::memcmp(matrix_.values.data(), session.parameter(0).data(),
                        6 * sizeof(float)),
            0);
  EXPECT_NE(matrix_.values[5], 5) << "the step changes it";
}

}  // namespace
}  // namespace optstate::client
