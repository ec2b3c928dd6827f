#include "client/ctl/log_line.h"

#include <string>

#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

constexpr char kPrefix[] = "2026-01-31T12:00:00+0000 node1 optstated[7]: ";

std::string Line(const std::string& rest) {
  return R"({"time":"2026-01-31T12:00:00.000000Z","level":"info",)" + rest;
}

TEST(LogLineTest, AnEnginesLine) {
  const std::string json =
      Line(R"("process":"engine","pid":7,"job":"gpt","message":)"
           R"("drained: job=gpt result=\"OK\"","fields":{"result":"OK"}})");
  EXPECT_EQ(
      TextOfLogLine(kPrefix + json),
      std::string(kPrefix) + "engine gpt: drained: job=gpt result=\"OK\"");
  EXPECT_EQ(TextOfLogLine(json), "engine gpt: drained: job=gpt result=\"OK\"");
}

TEST(LogLineTest, TheSupervisorsLines) {
  EXPECT_EQ(TextOfLogLine(kPrefix +
                          Line(R"("process":"supervisor","pid":7,"job":"a",)"
                               R"("message":"job a: created by uid 7"})")),
            std::string(kPrefix) + "job a: created by uid 7");
  EXPECT_EQ(TextOfLogLine(
                kPrefix +
                Line(R"("process":"supervisor","pid":7,"message":"ended"})")),
            std::string(kPrefix) + "ended");
}

TEST(LogLineTest, EscapesThatMoveACursorStay) {
  EXPECT_EQ(TextOfLogLine(Line(
                R"("process":"supervisor","message":"\u001b[2J\n\\ \"x\""})")),
            R"(\u001b[2J\n\ "x")");
}

TEST(LogLineTest, OtherLinesStayAsTheyAre) {
  const std::string whole =
      Line(R"("process":"supervisor","pid":7,"message":"x"})");
  for (const std::string& line :
       {std::string("-- Boot 0a1b --"), std::string(),
        std::string(kPrefix) + "job a: created",
        // Quoted in another line's text.
        std::string(kPrefix) + "client said: " + whole,
        // Cut, or of another program.
        std::string(kPrefix) + whole.substr(0, whole.size() - 3),
        std::string(kPrefix) + Line(R"("other":{"x":1}})"),
        std::string(kPrefix) + R"({"time":"x"})"}) {
    EXPECT_EQ(TextOfLogLine(line), line);
  }
}

}  // namespace
}  // namespace optstate::ctl
