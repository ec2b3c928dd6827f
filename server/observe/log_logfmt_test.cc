#include "server/observe/log_logfmt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "proto/types/utf8.h"
#include "server/observe/log_parts.h"
#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::Pair;

constexpr char kReplacement[] = "\xef\xbf\xbd";

LogLine Line(absl::string_view message, absl::string_view job = "") {
  return {.time = absl::FromUnixMicros(1'700'000'000'000'012),
          .level = "info",
          .process = job.empty() ? "supervisor" : "engine",
          .pid = 7,
          .job = job,
          .message = message};
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

// Reads a line as programs that collect logs do: pairs with one space between
// them, and JSON's escapes in quoted values. It shares no code with the writer.
class Parser {
 public:
  explicit Parser(std::string line) : line_(std::move(line)) {}

  // Returns the pairs in their order; nullopt: the line is malformed.
  std::optional<Pairs> Parse() {
    Pairs pairs;
    while (true) {
      std::string key;
      while (at_ < line_.size() && IsOfWord(line_[at_])) key += line_[at_++];
      if (key.empty() || !Take('=')) return std::nullopt;
      const std::optional<std::string> value =
          Take('"') ? Quoted() : std::optional<std::string>(Bare());
      if (!value.has_value()) return std::nullopt;
      pairs.emplace_back(key, *value);
      if (at_ == line_.size()) return pairs;
      if (!Take(' ')) return std::nullopt;
    }
  }

 private:
  static bool IsOfWord(char byte) {
    return static_cast<unsigned char>(byte) > ' ' && byte != '=' &&
           byte != '"' && byte != '\x7f';
  }

  bool Take(char byte) {
    if (at_ == line_.size() || line_[at_] != byte) return false;
    ++at_;
    return true;
  }

  std::string Bare() {
    std::string value;
    while (at_ < line_.size() && IsOfWord(line_[at_])) value += line_[at_++];
    return value;
  }

  std::optional<std::string> Quoted() {
    std::string value;
    while (!Take('"')) {
      if (at_ == line_.size()) return std::nullopt;
      const char byte = line_[at_++];
      if (static_cast<unsigned char>(byte) < ' ') return std::nullopt;
      if (byte != '\\') {
        value += byte;
      } else if (!Escape(&value)) {
        return std::nullopt;
      }
    }
    return value;
  }

  bool Escape(std::string* value) {
    static const std::map<char, char> kShort = {
        {'n', '\n'}, {'r', '\r'}, {'t', '\t'}, {'"', '"'}, {'\\', '\\'}};
    if (at_ == line_.size()) return false;
    const char byte = line_[at_++];
    if (kShort.contains(byte)) {
      *value += kShort.at(byte);
      return true;
    }
    const std::string digits = line_.substr(at_, 4);
    if (byte != 'u' || digits.size() != 4 ||
        digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
      return false;
    }
    at_ += 4;
    const auto code = static_cast<uint32_t>(std::stoul(digits, nullptr, 16));
    if (code < 0x80) {
      *value += static_cast<char>(code);
    } else if (code < 0x800) {
      *value += static_cast<char>(0xc0 | code >> 6);
      *value += static_cast<char>(0x80 | (code & 0x3f));
    } else {
      *value += static_cast<char>(0xe0 | code >> 12);
      *value += static_cast<char>(0x80 | (code >> 6 & 0x3f));
      *value += static_cast<char>(0x80 | (code & 0x3f));
    }
    return true;
  }

  const std::string line_;
  size_t at_ = 0;
};

// Returns the pairs by key; a key that is there twice is a failure.
std::map<std::string, std::string> Parsed(const std::string& line) {
  std::map<std::string, std::string> values;
  const std::optional<Pairs> pairs = Parser(line).Parse();
  EXPECT_TRUE(pairs.has_value()) << line;
  for (const auto& [key, value] : pairs.value_or(Pairs())) {
    EXPECT_TRUE(values.emplace(key, value).second) << key << " in " << line;
  }
  return values;
}

TEST(LogLogfmtTest, ALine) {
  EXPECT_EQ(ToLogfmt(Line("job registered: job=a world_size=2 wire=shm", "a")),
            "ts=2023-11-14T22:13:20.000012Z level=info "
            "event=\"job registered\" job=a world_size=2 wire=shm pid=7 "
            "process=engine");
  EXPECT_EQ(ToLogfmt(Line("drain: job=a")),
            "ts=2023-11-14T22:13:20.000012Z level=info event=drain job=a "
            "pid=7 process=supervisor");
}

TEST(LogLogfmtTest, ASentenceIsTheEvent) {
  EXPECT_EQ(ToLogfmt(Line("job a: created by uid 7")),
            "ts=2023-11-14T22:13:20.000012Z level=info "
            "event=\"job a: created by uid 7\" job=a pid=7 process=supervisor");
  EXPECT_EQ(ToLogfmt(Line("listening on 2 addresses")),
            "ts=2023-11-14T22:13:20.000012Z level=info "
            "event=\"listening on 2 addresses\" pid=7 process=supervisor");
  EXPECT_EQ(ToLogfmt(Line("")),
            "ts=2023-11-14T22:13:20.000012Z level=info event=\"\" pid=7 "
            "process=supervisor");
}

TEST(LogLogfmtTest, PairsInTheirOrder) {
  const auto pairs =
      Parser(ToLogfmt(Line("audit: actor=\"uid 7\" job=\"a\" x= y=\"b=c\"")))
          .Parse();
  ASSERT_TRUE(pairs.has_value());
  EXPECT_THAT(*pairs,
              ElementsAre(Pair("ts", "2023-11-14T22:13:20.000012Z"),
                          Pair("level", "info"), Pair("event", "audit"),
                          Pair("job", "a"), Pair("actor", "uid 7"),
                          Pair("x", ""), Pair("y", "b=c"), Pair("pid", "7"),
                          Pair("process", "supervisor")));
}

// The event is the whole message where the pairs alone would lose something.
TEST(LogLogfmtTest, NothingIsLeftOut) {
  for (const std::string message :
       {"log: run=1 lacks a step between 2 and 3", "a: x=1 is bad: y=2",
        "a: step=1 step=2", "x=1 y=2"}) {
    EXPECT_EQ(Parsed(ToLogfmt(Line(message))).at("event"), message);
  }
  EXPECT_EQ(Parsed(ToLogfmt(Line("log: run=1 lacks a step"))).at("run"), "1");
  EXPECT_EQ(Parsed(ToLogfmt(Line("a: step=1 step=2"))).at("step"), "1");
}

TEST(LogLogfmtTest, AnEngineKnowsItsJob) {
  const auto parsed = Parsed(ToLogfmt(Line("refused: job=\"b\" x=1", "a")));
  EXPECT_EQ(parsed.at("job"), "a");
  EXPECT_EQ(parsed.at("fields.job"), "b");
  EXPECT_EQ(parsed.at("event"), "refused");
}

TEST(LogLogfmtTest, HostileValues) {
  const std::pair<std::string, std::string> values[] = {
      {"a b", "a b"},
      {"a=b", "a=b"},
      {"a \"b\" c", "a \"b\" c"},
      {"C:\\dir", "C:\\dir"},
      {"1\n2\r\n\t3", "1\n2\r\n\t3"},
      {std::string("a\0b", 3), std::string("a\0b", 3)},
      {"\x1b[2J\x7f", "\x1b[2J\x7f"},
      // These are a C1 control, a line separator, and a letter.
      {"\xc2\x9b\xe2\x80\xa8\xc3\xb6", "\xc2\x9b\xe2\x80\xa8\xc3\xb6"},
      {"a\xff", std::string("a") + kReplacement},
      {"\xe2\x80", std::string(kReplacement) + kReplacement},
  };
  for (const auto& [value, read] : values) {
    const std::string line =
        ToLogfmt(Line(absl::StrCat("said: text=\"", value, "\" y=1")));
    for (const char byte : line) {
      ASSERT_TRUE(static_cast<unsigned char>(byte) >= ' ' && byte != '\x7f')
          << line;
    }
    ASSERT_TRUE(IsUtf8(line)) << line;
    const auto parsed = Parsed(line);
    EXPECT_EQ(parsed.at("text"), read) << line;
    EXPECT_EQ(parsed.at("y"), "1") << line;
    EXPECT_EQ(parsed.at("event"), "said") << line;
  }
}

TEST(LogLogfmtTest, NobodyForgesALineOrAKey) {
  const std::string line = ToLogfmt(
      Line("client=\"x\" level=error process=supervisor pid=1 event=forged "
           "ts=0 job=b y=1\nts=1 level=error",
           "a"));
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto parsed = Parsed(line);
  EXPECT_EQ(parsed.at("ts"), "2023-11-14T22:13:20.000012Z");
  EXPECT_EQ(parsed.at("level"), "info");
  EXPECT_EQ(parsed.at("job"), "a");
  EXPECT_EQ(parsed.at("pid"), "7");
  EXPECT_EQ(parsed.at("process"), "engine");
  EXPECT_EQ(parsed.at("fields.level"), "error");
  EXPECT_EQ(parsed.at("fields.event"), "forged");
  EXPECT_EQ(parsed.at("fields.job"), "b");
  EXPECT_EQ(parsed.at("y"), "1\nts=1");
}

TEST(LogLogfmtTest, LongLinesAreCut) {
  auto parsed = Parsed(ToLogfmt(Line(std::string(1 << 20, 'x'))));
  EXPECT_EQ(parsed.at("event"),
            std::string(kLineBytesMax, 'x') + "... (1046528 bytes more)");
  // A value that is cut is whole in the event.
  const std::string message =
      absl::StrCat("bad: error=\"", std::string(600, 'x'), "\" rank=3");
  parsed = Parsed(ToLogfmt(Line(message)));
  EXPECT_EQ(parsed.at("error"), std::string(512, 'x') + "... (88 bytes more)");
  EXPECT_EQ(parsed.at("rank"), "3");
  EXPECT_EQ(parsed.at("event"), message);
  // Pairs behind the cut are counted, not shown.
  parsed = Parsed(ToLogfmt(
      Line(absl::StrCat("bad: a=1 b=\"", std::string(4000, 'x'), "\" c=3"))));
  EXPECT_EQ(parsed.at("a"), "1");
  EXPECT_FALSE(parsed.contains("c"));
  EXPECT_THAT(parsed.at("event"), EndsWith("... (1970 bytes more)"));
}

TEST(LogLogfmtTest, NoLineIsLongerThanItsParts) {
  std::string pairs;
  for (char key = 'a'; key <= 'z'; ++key) {
    pairs += std::string(1, key) + "=" + std::string(1 << 16, '\x01') + " ";
  }
  EXPECT_LT(ToLogfmt(Line(pairs)).size(), 3 * kLineBytesMax);
  std::string many = "many: ";
  for (int key = 0; key < 10000; ++key) absl::StrAppend(&many, "k", key, "= ");
  EXPECT_LT(ToLogfmt(Line(many)).size(), 3 * kLineBytesMax);
  std::string keys = "keys: ";
  for (int i = 0; i < 4; ++i) {
    absl::StrAppend(&keys, std::string(600, 'k'), i, "=1 ");
  }
  // The keys are the same where they are cut.
  const auto parsed = Parsed(ToLogfmt(Line(keys)));
  EXPECT_EQ(parsed.at(std::string(kFieldBytesMax, 'k')), "1");
}

// The line is logfmt, of UTF-8, and one line, whatever the bytes are.
TEST(LogLogfmtTest, AnyBytes) {
  std::mt19937 random(17);
  for (int round = 0; round < 2000; ++round) {
    std::string message;
    const size_t size = random() % 300;
    for (size_t i = 0; i < size; ++i) {
      // Half of the bytes mean something in pairs, in escapes or in UTF-8.
      static constexpr char kSpecial[] = "job=\" \\\n:pid\xc3\xe2\x80\xf0u";
      message += random() % 2 == 0 ? kSpecial[random() % (sizeof(kSpecial) - 1)]
                                   : static_cast<char>(random() % 256);
    }
    const std::string line = ToLogfmt(Line(message));
    ASSERT_TRUE(IsUtf8(line)) << line;
    ASSERT_EQ(line.find('\n'), std::string::npos) << line;
    ASSERT_LT(line.size(), 3 * kLineBytesMax);
    const auto parsed = Parsed(line);
    if (HasFailure()) return;
    EXPECT_EQ(parsed.at("ts"), "2023-11-14T22:13:20.000012Z");
    EXPECT_EQ(parsed.at("level"), "info");
    EXPECT_EQ(parsed.at("pid"), "7");
    EXPECT_EQ(parsed.at("process"), "supervisor");
    EXPECT_TRUE(parsed.contains("event"));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace optstate::observe
