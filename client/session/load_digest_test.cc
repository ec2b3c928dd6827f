#include "client/session/load_digest.h"

#include <vector>

#include "gtest/gtest.h"

namespace optstate::client {
namespace {

struct Array {
  StateArray array = StateArray::kMaster;
  uint32_t parameter = 0;
  DType dtype = DType::kFloat32;
  std::vector<float> values = {1, 2, 3};
};

uint64_t DigestOf(const std::vector<Array>& arrays) {
  LoadDigest digest;
  for (const Array& each : arrays) {
    digest.Add(each.array, each.parameter, each.dtype,
               absl::MakeConstSpan(
                   reinterpret_cast<const std::byte*>(each.values.data()),
                   each.values.size() * sizeof(float)));
  }
  return digest.value();
}

TEST(LoadDigestTest, DependsOnAllButTheOrder) {
  const Array array;
  Array of_other_array = array;
  of_other_array.array = StateArray::kState0;
  Array of_other_parameter = array;
  of_other_parameter.parameter = 1;
  Array of_other_dtype = array;
  of_other_dtype.dtype = DType::kFloat16;
  Array of_other_values = array;
  of_other_values.values[1] = -2;
  EXPECT_NE(DigestOf({}), 0u);
  EXPECT_NE(DigestOf({array}), DigestOf({}));
  for (const Array& other :
       {of_other_array, of_other_parameter, of_other_dtype, of_other_values}) {
    EXPECT_NE(DigestOf({array}), DigestOf({other}));
    EXPECT_EQ(DigestOf({array, other}), DigestOf({other, array}));
    EXPECT_NE(DigestOf({array, array}), DigestOf({array, other}));
  }
}

// Two arrays that exchange their values give another digest.
TEST(LoadDigestTest, KnowsWhichValuesAreWhose) {
  Array a, b;
  b.parameter = 1;
  b.values = {4, 5, 6};
  const uint64_t digest = DigestOf({a, b});
  std::swap(a.values, b.values);
  EXPECT_NE(DigestOf({a, b}), digest);
}

}  // namespace
}  // namespace optstate::client
