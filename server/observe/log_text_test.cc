#include "server/observe/log_text.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace optstate::observe {
namespace {

TEST(LogTextTest, OrdinaryTextStaysAsItIs) {
  EXPECT_EQ(LogText(""), "");
  EXPECT_EQ(LogText(R"(job "a": \d+ 100%)"), R"(job "a": \d+ 100%)");
  EXPECT_EQ(LogText("größer, 模型, 🙂"), "größer, 模型, 🙂");
}

TEST(LogTextTest, ControlCharactersAreShown) {
  EXPECT_EQ(LogText("1\n2026-01-31T12:00:00.000Z error forged\r\n"),
            R"(1\n2026-01-31T12:00:00.000Z error forged\r\n)");
  EXPECT_EQ(LogText("\x1b[2J\t\x07\x7f"), R"(\x1b[2J\t\x07\x7f)");
  EXPECT_EQ(LogText(absl::string_view("a\0b", 3)), R"(a\x00b)");
}

// The text has C1 controls, and characters that some programs take for the end
// of a line.
TEST(LogTextTest, ControlCharactersOfUnicodeAreShown) {
  EXPECT_EQ(LogText("\xc2\x9b"
                    "2J"),
            R"(\xc2\x9b2J)");
  EXPECT_EQ(LogText("\xc2\x85\xe2\x80\xa8"), R"(\xc2\x85\xe2\x80\xa8)");
}

TEST(LogTextTest, WhatIsNoUtf8IsShownByteByByte) {
  for (const std::string bad : {"\xff", "\xc0", "\x80", "\xf5"}) {
    EXPECT_EQ(LogText(bad + "a").substr(0, 2), R"(\x)");
  }
  EXPECT_EQ(LogText("\xe2\x80"), R"(\xe2\x80)");          // cut
  EXPECT_EQ(LogText("\xc0\x8a"), R"(\xc0\x8a)");          // overlong newline
  EXPECT_EQ(LogText("\xed\xa0\x80"), R"(\xed\xa0\x80)");  // a surrogate
}

TEST(LogTextTest, Characters) {
  uint32_t code = 0;
  EXPECT_EQ(DecodeCharacter("a", &code), 1u);
  EXPECT_EQ(code, uint32_t{'a'});
  EXPECT_EQ(DecodeCharacter("\u00f6!", &code), 2u);
  EXPECT_EQ(code, 0xf6u);
  EXPECT_EQ(DecodeCharacter("\xf0\x9f\x99\x82", &code), 4u);
  EXPECT_EQ(code, 0x1f642u);
  EXPECT_EQ(DecodeCharacter("\xf4\x90\x80\x80", &code), 0u);
  EXPECT_EQ(DecodeCharacter("", &code), 0u);
  EXPECT_TRUE(IsControl(0x9f));
  EXPECT_FALSE(IsControl(0xa0));
}

TEST(LogTextTest, LongTextIsCut) {
  const std::string text = LogText(std::string(1 << 20, 'x'));
  EXPECT_LT(text.size(), kLineBytesMax + 64);
  EXPECT_EQ(text.substr(kLineBytesMax), "... (1046528 bytes more)");
}

}  // namespace
}  // namespace optstate::observe
