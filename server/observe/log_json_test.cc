#include "server/observe/log_json.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <string>

#include "absl/time/time.h"
#include "proto/types/utf8.h"
#include "server/observe/log_parts.h"
#include "server/observe/log_text.h"

namespace optstate::observe {
namespace {

LogLine Line(absl::string_view message, absl::string_view job = "") {
  return {.time = absl::FromUnixMicros(1'700'000'000'000'012),
          .level = "info",
          .process = job.empty() ? "supervisor" : "engine",
          .pid = 7,
          .job = job,
          .message = message};
}

// Parses it with a parser that is not ours.
google::protobuf::Struct Parsed(const std::string& json) {
  google::protobuf::Struct parsed;
  const auto status =
      google::protobuf::util::JsonStringToMessage(json, &parsed);
  EXPECT_TRUE(status.ok()) << status.ToString() << ": " << json;
  return parsed;
}

std::string Text(const google::protobuf::Struct& object,
                 const std::string& key) {
  const auto found = object.fields().find(key);
  return found == object.fields().end() ? "none" : found->second.string_value();
}

TEST(LogJsonTest, ALine) {
  EXPECT_EQ(ToJson(Line("job a: created by uid 7")),
            "{\"time\":\"2023-11-14T22:13:20.000012Z\",\"level\":\"info\","
            "\"process\":\"supervisor\",\"pid\":7,\"job\":\"a\","
            "\"message\":\"job a: created by uid 7\"}");
  EXPECT_EQ(ToJson(Line("listening on 2 addresses")),
            "{\"time\":\"2023-11-14T22:13:20.000012Z\",\"level\":\"info\","
            "\"process\":\"supervisor\",\"pid\":7,"
            "\"message\":\"listening on 2 addresses\"}");
}

TEST(LogJsonTest, FieldsAreThePairsOfTheMessage) {
  const auto parsed =
      Parsed(ToJson(Line("engine ends: job=a step=56 pid=8 step=57", "a")));
  EXPECT_EQ(Text(parsed, "job"), "a");
  EXPECT_EQ(Text(parsed, "process"), "engine");
  EXPECT_EQ(parsed.fields().at("pid").number_value(), 7);
  const auto& fields = parsed.fields().at("fields").struct_value();
  EXPECT_EQ(Text(fields, "step"), "56");  // the first one
  EXPECT_EQ(Text(fields, "pid"), "8");    // a peer's
  EXPECT_EQ(Text(fields, "job"), "none");
}

// An engine's lines are about its job, whatever they say.
TEST(LogJsonTest, AnEngineKnowsItsJob) {
  const auto parsed = Parsed(ToJson(Line("refused: job=\"b\"", "a")));
  EXPECT_EQ(Text(parsed, "job"), "a");
  EXPECT_EQ(Text(parsed.fields().at("fields").struct_value(), "job"), "b");
}

TEST(LogJsonTest, TextIsEscaped) {
  EXPECT_EQ(JsonText("a \"b\" \\ c/\xc3\xb6", 99),
            "a \\\"b\\\" \\\\ c/\xc3\xb6");
  EXPECT_EQ(JsonText("\n\r\t\x1b[2J\x7f", 99), R"(\n\r\t\u001b[2J\u007f)");
  EXPECT_EQ(JsonText(absl::string_view("a\0b", 3), 99), R"(a\u0000b)");
  // C1 and the line separator.
  EXPECT_EQ(JsonText("\xc2\x9b\xe2\x80\xa8", 99), R"(\u009b\u2028)");
  EXPECT_EQ(JsonText("\xff\xe2\x80", 99),
            "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(LogJsonTest, NobodyForgesALineOrAKey) {
  const std::string json =
      ToJson(Line("client=\"x\"}\n{\"level\":\"error\",\"job\":\"b\"}"));
  EXPECT_EQ(json.find('\n'), std::string::npos);
  const auto parsed = Parsed(json);
  EXPECT_EQ(Text(parsed, "level"), "info");
  EXPECT_EQ(Text(parsed, "message"),
            "client=\"x\"}\n{\"level\":\"error\",\"job\":\"b\"}");
}

TEST(LogJsonTest, LongLinesAreCut) {
  const std::string text = JsonText(std::string(1 << 20, 'x'), 100);
  EXPECT_EQ(text, std::string(100, 'x') + "... (1048476 bytes more)");
  std::string pairs;
  for (char key = 'a'; key <= 'z'; ++key) {
    pairs += std::string(1, key) + "=" + std::string(1 << 16, '\x01') + " ";
  }
  EXPECT_LT(ToJson(Line(pairs)).size(), 3 * kLineBytesMax);
}

// Whatever the bytes are, the line is JSON, of UTF-8, and one line.
TEST(LogJsonTest, AnyBytes) {
  std::mt19937 random(17);
  for (int round = 0; round < 2000; ++round) {
    std::string message;
    const size_t size = random() % 300;
    for (size_t i = 0; i < size; ++i) {
      // Half of the bytes mean something in pairs, in JSON or in UTF-8.
      static constexpr char kSpecial[] = "job=\" \\\n:{}\xc3\xe2\x80\xf0u";
      message += random() % 2 == 0 ? kSpecial[random() % (sizeof(kSpecial) - 1)]
                                   : static_cast<char>(random() % 256);
    }
    const std::string json = ToJson(Line(message));
    ASSERT_TRUE(IsUtf8(json)) << json;
    ASSERT_EQ(json.find('\n'), std::string::npos) << json;
    ASSERT_LT(json.size(), 3 * kLineBytesMax);
    Parsed(json);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace optstate::observe
