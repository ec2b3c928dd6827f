#include "server/session/transfer/element_access.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/array_format.h"
#include "proto/types/random_layout.h"
#include "server/session/testing/damageable_store.h"

namespace optstate::session {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kMaster = v1::STATE_ARRAY_MASTER;
constexpr auto kState0 = v1::STATE_ARRAY_STATE_0;
constexpr auto kState1 = v1::STATE_ARRAY_STATE_1;
constexpr auto kState2 = v1::STATE_ARRAY_STATE_2;
constexpr uint64_t kBlock = ElementAccess::kBlockElements;

ParameterSpec Parameter(const std::string& name, std::vector<int64_t> shape,
                        DType dtype = DType::kFloat32) {
  ParameterSpec parameter;
  parameter.name = name;
  parameter.numel = 1;
  for (const int64_t dimension : shape) parameter.numel *= dimension;
  parameter.shape = std::move(shape);
  parameter.dtype = dtype;
  return parameter;
}

// AdamW with "a", of one tile and a half, and "b".
LayoutSpec TwoParameters() {
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {Parameter("a", {6000}),
                     Parameter("b", {700}, DType::kBFloat16)};
  return spec;
}

// A state of a layout, of records of one tile.
struct State {
  explicit State(LayoutSpec spec) : layout(*Layout::Make(std::move(spec))) {}
  const Layout layout;
  DamageableStore store{&layout};
  const ElementAccess elements{&store};
};

LayoutSpec WithFormat(LayoutSpec spec, StateFormat format) {
  spec.state_format = format;
  return spec;
}

TEST(ElementAccessTest, SomeArraysHaveANumberPerParameter) {
  EXPECT_TRUE(ElementAccess::IsPerParameter(v1::STATE_ARRAY_STEP_COUNT));
  EXPECT_TRUE(ElementAccess::IsPerParameter(v1::STATE_ARRAY_SCALAR));
  EXPECT_FALSE(ElementAccess::IsPerParameter(kMaster));
  EXPECT_FALSE(ElementAccess::IsPerParameter(kState2));
}

TEST(ElementAccessTest, PayloadsHaveTheArraysFormat) {
  for (const auto& [format, bytes] :
       std::vector<std::pair<StateFormat, uint64_t>>{
           {StateFormat::kFloat32, 4 * 300},
           {StateFormat::kBFloat16, 2 * 300},
           {StateFormat::kDynamic8, 300 + 2 * 4}}) {  // two scales
    const State state(WithFormat(TwoParameters(), format));
    EXPECT_EQ(state.elements.PayloadBytes(kState0, 300), bytes);
    EXPECT_EQ(state.elements.PayloadBytes(kMaster, 300), 4 * 300u);
    EXPECT_EQ(state.elements.PayloadBytes(v1::STATE_ARRAY_STEP_COUNT, 3), 24u);
    EXPECT_EQ(state.elements.PayloadBytes(v1::STATE_ARRAY_SCALAR, 3), 24u);
    EXPECT_EQ(state.elements.PayloadBytes(kState0, 0), 0u);
  }
}

// Adafactor: numbers of rows, columns and vectors.
TEST(ElementAccessTest, ArraysHaveTheirOwnExtent) {
  LayoutSpec spec = WithFormat(TwoParameters(), StateFormat::kDynamic8);
  spec.optimizer = OptimizerKind::kAdafactor;
  spec.parameters = {Parameter("matrix", {30, 20}), Parameter("vector", {50})};
  const State state(spec);
  const auto parameters = state.layout.parameters();
  EXPECT_EQ(state.elements.ElementsOf(kMaster, parameters[0]), 600u);
  EXPECT_EQ(state.elements.ElementsOf(kState0, parameters[0]), 30u);
  EXPECT_EQ(state.elements.ElementsOf(kState1, parameters[0]), 20u);
  EXPECT_EQ(state.elements.ElementsOf(kState2, parameters[0]), 0u);
  EXPECT_EQ(state.elements.ElementsOf(kState2, parameters[1]), 50u);
  EXPECT_EQ(state.elements.ElementsOf(v1::STATE_ARRAY_PARAMETER, parameters[0]),
            600u);
  EXPECT_EQ(state.elements.PayloadBytes(kState0, 30), 30 * sizeof(float))
      << "too few for blocks";
  EXPECT_TRUE(state.elements.Check({kState0, 0, 1, 29}).ok());
  EXPECT_TRUE(state.elements.Check({kState2, 1, 0, 50}).ok());
  const absl::Status behind = state.elements.Check({kState1, 0, 0, 21});
  EXPECT_TRUE(absl::IsInvalidArgument(behind)) << behind;
  EXPECT_EQ(behind.message(),
            "21 elements from 0 of parameter 0 \"matrix\", which has 20");
}

TEST(ElementAccessTest, RecordsAreThoseOfTheSubGroups) {
  const State state(TwoParameters());
  EXPECT_EQ(state.elements.RecordOf(0, 0), 0u);
  EXPECT_EQ(state.elements.RecordOf(0, kTileElements - 1), 0u);
  EXPECT_EQ(state.elements.RecordOf(0, kTileElements), 1u);
  EXPECT_EQ(state.elements.RecordOf(1, 0), 1u);
  EXPECT_EQ(state.elements.RecordElementsFrom(0, 4000), 96u);
  EXPECT_EQ(state.elements.RecordElementsFrom(0, 5000), 3192u);
  EXPECT_EQ(state.elements.RecordElementsFrom(1, 10),
            2 * kTileElements - 6000 - 10);
}

TEST(ElementAccessTest, OnlyElementsThatTheJobHas) {
  const State state(TwoParameters());
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  for (const auto array : {kMaster, kState1, v1::STATE_ARRAY_PARAMETER}) {
    EXPECT_TRUE(state.elements.Check({array, 1, 0, 700}).ok());
    EXPECT_TRUE(state.elements.Check({array, 1, 700, 0}).ok());
    for (const ElementRange& range : {ElementRange{array, 1, 0, 701},
                                      {array, 1, 701, 0},
                                      {array, 1, 2, kHuge},
                                      {array, 1, kHuge, 2}}) {
      const absl::Status refused = state.elements.Check(range);
      EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
      EXPECT_THAT(refused.message(),
                  HasSubstr("of parameter 1 \"b\", which has 700"));
    }
  }
}

TEST(ElementAccessTest, OnlyArraysThatTheGroupHas) {
  LayoutSpec spec = TwoParameters();
  spec.groups = {{}, {adam::kAmsgrad}};
  spec.parameters[1].group = 1;
  const State state(spec);
  EXPECT_TRUE(state.elements.Check({kState2, 1, 0, 700}).ok());
  const absl::Status without = state.elements.Check({kState2, 0, 0, 700});
  EXPECT_TRUE(absl::IsInvalidArgument(without)) << without;
  EXPECT_EQ(without.message(),
            "group 0 of parameter \"a\" has no max_exp_avg_sq: it is without "
            "the option that brings it");
  for (const auto array :
       {v1::STATE_ARRAY_UNSPECIFIED, v1::STATE_ARRAY_STEP_COUNT,
        v1::STATE_ARRAY_GRADIENT_NORM, v1::STATE_ARRAY_PREPARED_SUM}) {
    const absl::Status unknown = state.elements.Check({array, 0, 0, 1});
    EXPECT_TRUE(absl::IsInvalidArgument(unknown)) << unknown;
    EXPECT_THAT(unknown.message(), HasSubstr("unknown state array"));
  }
}

TEST(ElementAccessTest, ABlockIsNotCut) {
  const State state(WithFormat(TwoParameters(), StateFormat::kDynamic8));
  EXPECT_TRUE(state.elements.Check({kState0, 1, 0, kBlock}).ok());
  EXPECT_TRUE(state.elements.Check({kState0, 1, kBlock, 700 - kBlock}).ok())
      << "the last is short";
  EXPECT_TRUE(state.elements.Check({kMaster, 1, 1, 2}).ok());
  for (const ElementRange& range :
       {ElementRange{kState0, 1, 0, 100}, {kState0, 1, 1, 699}}) {
    const absl::Status refused = state.elements.Check(range);
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_THAT(refused.message(),
                HasSubstr("of parameter \"b\" cut a block of 256, which has "
                          "one scale: take whole blocks"));
  }
}

TEST(ElementAccessTest, NumbersAreWrittenByParameter) {
  State state(TwoParameters());
  const int64_t count = 77;
  const double scalars[] = {0.5, 0.25};
  ASSERT_TRUE(state.elements
                  .Write({v1::STATE_ARRAY_STEP_COUNT, 0, 1, 1},
                         reinterpret_cast<const std::byte*>(&count))
                  .ok());
  ASSERT_TRUE(state.elements
                  .Write({v1::STATE_ARRAY_SCALAR, 0, 0, 2},
                         reinterpret_cast<const std::byte*>(scalars))
                  .ok());
  EXPECT_THAT(state.store.step_counts(), ElementsAre(0, 77));
  EXPECT_THAT(state.store.scalars(), ElementsAre(0.5, 0.25));
}

TEST(ElementAccessTest, ErrorsAreTheStores) {
  State state(TwoParameters());
  state.store.Damage(0);
  float values[kBlock];
  std::byte payload[ElementAccess::kBlockBytesMax];
  const ElementRange first = {kState0, 0, 0, kBlock};
  const ElementRange last = {kState0, 0, kTileElements, kBlock};
  EXPECT_TRUE(absl::IsDataLoss(state.elements.ReadFloats(first, values)));
  EXPECT_TRUE(state.elements.ReadFloats(last, values).ok());
  EXPECT_TRUE(absl::IsDataLoss(state.elements.ReadPayload(first, payload)));
  EXPECT_TRUE(state.elements.ReadPayload(last, payload).ok());
  for (const auto array : {kMaster, kState0}) {
    const std::vector<float> all(6000, 3.0f);
    const absl::Status written = state.elements.Write(
        {array, 0, 0, 6000}, reinterpret_cast<const std::byte*>(all.data()));
    EXPECT_TRUE(absl::IsDataLoss(written)) << written;
    EXPECT_THAT(written.message(), HasSubstr("a bit is wrong"));
  }
  EXPECT_TRUE(state.elements.ReadFloats(last, values).ok());
  EXPECT_THAT(values, Each(0.0f)) << "nothing is written behind the error";
}

// The float of a bfloat16.
float Widened(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}
uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
// Rounds to bfloat16, ties to even.
float RoundedToEven(float value) {
  const uint32_t bits = BitsOf(value);
  return Widened(
      static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16));
}

// Returns the values of the dynamic map (kernels/dynamic_map.h), ascending.
std::vector<double> DynamicValues(bool is_signed) {
  std::vector<double> values = {0, 1};
  double parts = is_signed ? 1 : 2;
  for (int k = 7; k >= 1; --k, parts *= 2) {
    for (int q = 0; q < parts; ++q) {
      const double value = std::pow(10.0, -k) * (1 + 9 * (q + 0.5) / parts);
      values.push_back(value);
      if (is_signed) values.push_back(-value);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}
// Expects the nearest value that the format has, beside a largest magnitude.
void ExpectNearest(const std::vector<double>& map, double scale, double value,
                   double read) {
  const auto above =
      std::lower_bound(map.begin(), map.end(), scale == 0 ? 0 : value / scale);
  double error = std::numeric_limits<double>::infinity();
  for (const auto near : {above, above == map.begin() ? above : above - 1}) {
    if (near != map.end())
      error = std::min(error, std::abs(*near * scale - value));
  }
  EXPECT_LE(std::abs(read - value), error * 1.0001 + scale * 1e-6)
      << value << " of " << scale;
}

// Writes random values whole, and reads them block by block.
class ElementAccessRandomTest : public ::testing::Test {
 protected:
  LayoutSpec NextSpec() {
    LayoutSpec spec = random_.Next(6);
    if (random_.Uniform(0, 3) == 0) {
      spec.optimizer = OptimizerKind::kAdafactor;
      for (GroupSpec& group : spec.groups) group.options = 0;
    }
    spec.state_format = static_cast<StateFormat>(random_.Uniform(1, 3));
    spec.master_format = static_cast<MasterFormat>(random_.Uniform(1, 2));
    for (ParameterSpec& parameter : spec.parameters) {
      if (spec.master_format == MasterFormat::kSplit &&
          parameter.dtype == DType::kFloat16) {
        parameter.dtype = DType::kBFloat16;
      }
    }
    return spec;
  }
  std::vector<float> Values(uint64_t numel, bool is_never_negative) {
    std::vector<float> values(numel);
    for (float& value : values) {
      value = static_cast<float>(random_.Uniform(1, 1 << 24)) /
              static_cast<float>(1 << random_.Uniform(1, 30));
      if (!is_never_negative && random_.Uniform(0, 1) == 0) value = -value;
    }
    return values;
  }
  void Write(const State& state, v1::StateArray array, uint32_t parameter,
             const std::vector<float>& values) {
    payload_.assign(state.elements.PayloadBytes(array, values.size()),
                    std::byte{0});
    for (uint64_t i = 0; i < values.size(); i += kBlock) {
      state.elements.MakePayload(
          {array, parameter, i, std::min(kBlock, values.size() - i)},
          values.data() + i,
          payload_.data() + state.elements.PayloadBytes(array, i));
    }
    const absl::Status written = state.elements.Write(
        {array, parameter, 0, values.size()}, payload_.data());
    EXPECT_TRUE(written.ok()) << written;
  }
  // Returns the floats, and expects the payload that was written.
  std::vector<float> Read(const State& state, v1::StateArray array,
                          uint32_t parameter, uint64_t numel) {
    std::vector<float> values(numel);
    std::vector<std::byte> payload(payload_.size());
    for (uint64_t i = 0; i < numel; i += kBlock) {
      const ElementRange block = {array, parameter, i,
                                  std::min(kBlock, numel - i)};
      const absl::Status read =
          state.elements.ReadFloats(block, values.data() + i);
      EXPECT_TRUE(read.ok()) << read;
      const absl::Status payload_read = state.elements.ReadPayload(
          block, payload.data() + state.elements.PayloadBytes(array, i));
      EXPECT_TRUE(payload_read.ok()) << payload_read;
    }
    EXPECT_EQ(payload, payload_);
    return values;
  }

  RandomLayouts random_;
  std::vector<std::byte> payload_;  // written last
};

TEST_F(ElementAccessRandomTest, MastersAreExactAndParametersTheirRounded) {
  for (int round = 0; round < 20; ++round) {
    const State state(NextSpec());
    std::vector<std::vector<float>> values;
    for (uint32_t p = 0; p < state.layout.parameters().size(); ++p) {
      values.push_back(
          Values(static_cast<uint64_t>(state.layout.parameters()[p].numel),
                 /*is_never_negative=*/false));
      Write(state, kMaster, p, values[p]);
    }
    for (uint32_t p = 0; p < values.size(); ++p) {
      payload_.resize(values[p].size() * sizeof(float));
      if (!values[p].empty()) {
        std::memcpy(payload_.data(), values[p].data(), payload_.size());
      }
      EXPECT_EQ(Read(state, kMaster, p, values[p].size()), values[p]);
      if (state.layout.parameters()[p].dtype != DType::kBFloat16) continue;
      const bool is_split =
          state.layout.master_format(p) == MasterFormat::kSplit;
      const std::byte* const at = state.store.parameter_area().data() +
                                  state.layout.parameter_offset_bytes(p);
      for (size_t i = 0; i < values[p].size(); ++i) {
        uint16_t bits;
        std::memcpy(&bits, at + i * sizeof(bits), sizeof(bits));
        const float rounded = is_split
                                  ? Widened(static_cast<uint16_t>(
                                        (BitsOf(values[p][i]) + 0x8000) >> 16))
                                  : RoundedToEven(values[p][i]);
        ASSERT_EQ(Widened(bits), rounded) << "parameter " << p << " at " << i;
      }
    }
  }
}

TEST_F(ElementAccessRandomTest, StatesAreTheNearestOfTheirFormat) {
  const std::array<std::vector<double>, 2> maps = {DynamicValues(true),
                                                   DynamicValues(false)};
  for (int round = 0; round < 20; ++round) {
    const State state(NextSpec());
    const OptimizerInfo& info = state.layout.optimizer_info();
    for (uint32_t p = 0; p < state.layout.parameters().size(); ++p) {
      const ParameterSpec& spec = state.layout.parameters()[p];
      for (size_t k = 0; k < info.state_arrays.size(); ++k) {
        const auto array = static_cast<v1::StateArray>(kState0 + k);
        const uint64_t numel = state.elements.ElementsOf(array, spec);
        if (!state.elements.Check({array, p, 0, numel}).ok()) continue;
        const bool is_never_negative = info.state_arrays[k].is_never_negative;
        const std::vector<float> values = Values(numel, is_never_negative);
        Write(state, array, p, values);
        const std::vector<float> read = Read(state, array, p, numel);
        const StateFormat format =
            ArrayFormat(state.layout, static_cast<int>(k));
        for (uint64_t i = 0; i < numel; ++i) {
          if (format == StateFormat::kFloat32) {
            ASSERT_EQ(read[i], values[i]);
          } else if (format == StateFormat::kBFloat16) {
            ASSERT_EQ(read[i], RoundedToEven(values[i]));
          } else {
            const uint64_t begin = i / kBlock * kBlock;
            double scale = 0;
            for (uint64_t j = begin; j < std::min(begin + kBlock, numel); ++j) {
              scale = std::max<double>(scale, std::abs(values[j]));
            }
            ASSERT_NO_FATAL_FAILURE(ExpectNearest(
                maps[is_never_negative ? 1 : 0], scale, values[i], read[i]));
          }
        }
      }
    }
  }
}

// Elements beside a range stay.
TEST_F(ElementAccessRandomTest, OnlyTheRangeIsWritten) {
  State state(TwoParameters());
  const std::vector<float> ones(3000, 1.0f);
  for (const auto array : {kMaster, kState0}) {
    ASSERT_TRUE(
        state.elements
            .Write({array, 0, 2001, 3000},  // over the border of two records
                   reinterpret_cast<const std::byte*>(ones.data()))
            .ok());
    std::vector<float> read(6000);
    for (uint64_t i = 0; i < 6000; i += 200) {
      ASSERT_TRUE(state.elements.ReadFloats({array, 0, i, 200}, &read[i]).ok());
    }
    const absl::Span<const float> all = read;
    EXPECT_THAT(all.first(2001), Each(0.0f));
    EXPECT_THAT(all.subspan(2001, 3000), Each(1.0f));
    EXPECT_THAT(all.subspan(5001), Each(0.0f));
  }
}

}  // namespace
}  // namespace optstate::session
