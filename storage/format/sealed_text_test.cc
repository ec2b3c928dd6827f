#include "storage/format/sealed_text.h"

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace optstate::storage {
namespace {

constexpr char kText[] = "device 12ab\nbegin 4096\nbytes 8192\n";

TEST(SealedTextTest, ATextIsReadAsItWasSealed) {
  for (const absl::string_view text : {kText, "1000\n", "0\n"}) {
    const std::string sealed = SealText(text);
    EXPECT_EQ(sealed.size(), text.size() + 32);
    EXPECT_TRUE(IsSealed(sealed));
    const auto unsealed = UnsealText(sealed);
    ASSERT_TRUE(unsealed.ok()) << unsealed.status();
    EXPECT_EQ(*unsealed, text);
  }
}

TEST(SealedTextTest, TheSealIsTheChecksum) {
  // The CRC-32C of "123456789\n", 0xa8dab577, in blanks and lines' ends.
  const std::string sealed = SealText("123456789\n");
  std::string bits;
  for (const char c : sealed.substr(10)) bits += c == '\n' ? '1' : '0';
  EXPECT_EQ(bits, "10101000110110101011010101110111");
}

TEST(SealedTextTest, ATextWithoutASealIsReadAsItIs) {
  for (const absl::string_view text :
       {kText, "1000", "1000\n", "1000\r\n", "1000\n\n", ""}) {
    EXPECT_FALSE(IsSealed(text));
    const auto unsealed = UnsealText(text);
    ASSERT_TRUE(unsealed.ok()) << unsealed.status();
    EXPECT_EQ(*unsealed, text);
  }
}

// Builds that know no seal split texts at blanks and lines' ends.
TEST(SealedTextTest, FormerBuildsReadTheSameWords) {
  const auto words = [](const std::string& text) {
    return std::vector<std::string>(
        absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty()));
  };
  EXPECT_EQ(words(SealText(kText)), words(kText));
  EXPECT_EQ(words(kText).size(), 6u);
}

// Each wrong byte is noticed, or is seen as a word more.
TEST(SealedTextTest, DamageIsNoticed) {
  const std::string sealed = SealText("1000\n");
  for (size_t at = 0; at < sealed.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string damaged = sealed;
      damaged[at] = static_cast<char>(value);
      if (damaged == sealed) continue;
      EXPECT_FALSE(IsSealed(damaged));
      const auto unsealed = UnsealText(damaged);
      if (!unsealed.ok()) {
        EXPECT_TRUE(absl::IsDataLoss(unsealed.status()));
        continue;
      }
      // One of the last three characters is no white space any more.
      EXPECT_GE(at, sealed.size() - 3) << value;
      EXPECT_EQ(*unsealed, damaged);
      EXPECT_EQ(damaged.substr(0, 6), "1000\n" + sealed.substr(5, 1));
    }
  }
}

// A write of it is never cut short; should it be, no part counts as sealed.
TEST(SealedTextTest, APartOfASealIsNone) {
  const std::string sealed = SealText(kText);
  const size_t end = sizeof(kText) - 1;
  for (size_t size = end + 2; size < sealed.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(UnsealText(sealed.substr(0, size)).status()))
        << size;
  }
}

}  // namespace
}  // namespace optstate::storage
