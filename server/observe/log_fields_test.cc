#include "server/observe/log_fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace optstate::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

std::vector<std::pair<std::string, std::string>> Pairs(absl::string_view line) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const LogField& field : FieldsOf(line)) {
    pairs.emplace_back(field.key, field.value);
  }
  return pairs;
}

TEST(LogFieldsTest, PairsOfALine) {
  EXPECT_THAT(Pairs("engine ends between two steps: job=a step=56"),
              ElementsAre(Pair("job", "a"), Pair("step", "56")));
  EXPECT_THAT(Pairs("pid=7"), ElementsAre(Pair("pid", "7")));
  EXPECT_THAT(Pairs("x_2=1, y=; z=3"),
              ElementsAre(Pair("x_2", "1"), Pair("y", ""), Pair("z", "3")));
  EXPECT_THAT(Pairs("no pair here"), IsEmpty());
  EXPECT_THAT(Pairs(""), IsEmpty());
}

TEST(LogFieldsTest, QuotedValues) {
  EXPECT_THAT(Pairs(R"(audit: actor="uid 7" method=SetJob job="a")"),
              ElementsAre(Pair("actor", "uid 7"), Pair("method", "SetJob"),
                          Pair("job", "a")));
  // Quotes inside, as statuses have them.
  EXPECT_THAT(Pairs(R"(failed: error="NOT_FOUND: job "b" is gone" rank=3)"),
              ElementsAre(Pair("error", R"(NOT_FOUND: job "b" is gone)"),
                          Pair("rank", "3")));
  EXPECT_THAT(Pairs(R"(reason="a \" b=1" code=2)"),
              ElementsAre(Pair("reason", R"(a \" b=1)"), Pair("code", "2")));
  EXPECT_THAT(Pairs(R"(reason="cut short)"),
              ElementsAre(Pair("reason", "cut short")));
  EXPECT_THAT(Pairs(R"(reason="\)"), ElementsAre(Pair("reason", "\\")));
}

TEST(LogFieldsTest, WordsThatAreNoPairs) {
  EXPECT_THAT(Pairs("Key=1 9k=2 =3 (k=4) on_rank_loss: wait a==b"),
              ElementsAre(Pair("a", "=b")));
}

TEST(LogFieldsTest, EventsOfLines) {
  const auto event = [](absl::string_view line) {
    return std::string(EventOf(line, FieldsOf(line)));
  };
  EXPECT_EQ(event("job registered: job=a groups=2"), "job registered");
  EXPECT_EQ(event("verified x=1, y=; z=\"a b\""), "verified");
  EXPECT_EQ(event("job \"a\" fails: error=\"b \"c\" d\""), "job \"a\" fails");
  EXPECT_EQ(event("audit: reason=\"cut short"), "audit");
  EXPECT_EQ(event("ends: x="), "ends");
  for (const char* const line :
       {"", "no pair here", "x=1", "log: run=1 lacks a step", "a x=1 b y=2",
        "a: x=1 (why)", "said \"a x=1\""}) {
    EXPECT_EQ(event(line), "") << line;
  }
}

TEST(LogFieldsTest, JobsOfLines) {
  for (const char* const line :
       {"job gpt-2.xl: created by uid 7", "upgrade: job gpt-2.xl: not between",
        "the engine of job \"gpt-2.xl\" gave no answer",
        "audit: actor=\"uid 7\" method=DeleteJob job=\"gpt-2.xl\"",
        "workers: job=gpt-2.xl count=8", "drain: job=gpt-2.xl",
        "session for job gpt-2.xl of uid 7 pid 8 refused: job \"b\" has ranks",
        "job is over: job=gpt-2.xl"}) {
    EXPECT_EQ(JobOf(line), "gpt-2.xl") << line;
  }
}

TEST(LogFieldsTest, LinesOfNoJob) {
  for (const char* const line :
       {"", "optstated 0.1.0 starts", "jobs share the cores by weight",
        "job is over", "my-job a: x", "job \"a b\" is no name", "job",
        "job -a: x", "job=", "job \"", "no job: x y"}) {
    EXPECT_EQ(JobOf(line), "") << line;
  }
  const std::string long_name(129, 'a');
  EXPECT_EQ(JobOf("job=" + long_name), "");
}

}  // namespace
}  // namespace optstate::observe
