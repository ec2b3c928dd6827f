#include "proto/types/utf8.h"

#include <string>

#include "google/protobuf/stubs/common.h"
#include "gtest/gtest.h"

namespace optstate {
namespace {

// Compares every text of up to four bytes that differs where the rules do with
// protobuf's own check.
TEST(Utf8Test, AgreesWithProtobuf) {
  const std::string bytes(
      "\x00\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xec\xed\xee\xef"
      "\xf0\xf1\xf3\xf4\xf5\xff",
      24);
  size_t well_formed = 0;
  const auto check = [&](const std::string& text) {
    const bool expected = google::protobuf::internal::IsStructurallyValidUTF8(
        text.data(), static_cast<int>(text.size()));
    well_formed += expected ? 1 : 0;
    ASSERT_EQ(IsUtf8(text), expected) << ::testing::PrintToString(text);
  };
  check("");
  for (const char a : bytes) {
    check({a});
    for (const char b : bytes) {
      check({a, b});
      for (const char c : bytes) {
        check({a, b, c});
        for (const char d : bytes) {
          check({a, b, c, d});
          check({'x', a, b, c, d});
          check({a, b, c, d, 'x'});
        }
      }
    }
  }
  EXPECT_GT(well_formed, 1000u);
}

}  // namespace
}  // namespace optstate
