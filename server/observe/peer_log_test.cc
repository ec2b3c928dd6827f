#include "server/observe/peer_log.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "optstate/v1/session.pb.h"
#include "server/observe/logging.h"

namespace optstate::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int kBurst = static_cast<int>(LineLimiter::kBurst);

class LineLimiterTest : public testing::Test {
 protected:
  int CountWritten(const std::string& kind, const std::string& peer,
                   int lines) {
    int written = 0;
    for (int i = 0; i < lines; ++i) {
      written += limiter_.Judge(kind, peer).write ? 1 : 0;
    }
    return written;
  }

  absl::Time now_ = absl::UnixEpoch();
  LineLimiter limiter_{[this] { return now_; }};
};

TEST_F(LineLimiterTest, AFloodIsCutAndCounted) {
  EXPECT_EQ(CountWritten("session refused", "uid 1", 1000), kBurst);
  EXPECT_THAT(limiter_.TakeLeftOut(),
              ElementsAre(absl::StrCat(1000 - kBurst,
                                       " lines left out: session "
                                       "refused of uid 1")));
  EXPECT_THAT(limiter_.TakeLeftOut(), IsEmpty());
}

TEST_F(LineLimiterTest, OneFloodSilencesNobodyElse) {
  CountWritten("session refused", "uid 1", 1000);
  EXPECT_EQ(CountWritten("session refused", "uid 2", 1), 1);
  EXPECT_EQ(CountWritten("delete", "uid 1", 1), 1);
}

TEST_F(LineLimiterTest, ComesBackWithTime) {
  CountWritten("k", "p", 1000);
  now_ += absl::Seconds(3);
  EXPECT_EQ(CountWritten("k", "p", 1000), 3);
  now_ += absl::Hours(1);
  EXPECT_EQ(CountWritten("k", "p", 1000), kBurst);
}

// The next line of any kind brings the count along.
TEST_F(LineLimiterTest, WhatWasLeftOutIsSaid) {
  CountWritten("k", "p", kBurst + 5);
  EXPECT_THAT(limiter_.Judge("other", "q").left_out, IsEmpty());
  now_ += absl::Seconds(10);
  EXPECT_THAT(limiter_.Judge("other", "q").left_out,
              ElementsAre("5 lines left out: k of p"));
}

TEST_F(LineLimiterTest, ManyPeersTakeNoMoreThanTheirShare) {
  int written = 0;
  for (int i = 0; i < 10000; ++i) {
    written += CountWritten("k", absl::StrCat("address ", i), 1);
  }
  EXPECT_LE(written, static_cast<int>(LineLimiter::kKeysMax) + kBurst);
}

TEST_F(LineLimiterTest, ALimiterHasARateOfItsOwn) {
  LineLimiter limiter({.burst = 3, .lines_per_s = 0.1},
                      [this] { return now_; });
  const auto written = [&limiter](int lines) {
    int count = 0;
    for (int i = 0; i < lines; ++i) count += limiter.Judge("k", "s").write;
    return count;
  };
  EXPECT_EQ(written(10), 3);
  now_ += absl::Seconds(9);
  EXPECT_EQ(written(10), 0);
  now_ += absl::Seconds(1);
  EXPECT_THAT(limiter.TakeLeftOut(), ElementsAre("17 lines left out: k of s"));
  EXPECT_EQ(written(10), 1);
}

TEST(PeerLogTest, LinesThatComeAgainAreLimitedByKindAndSubject) {
  ::unsetenv("JOURNAL_STREAM");
  LineLimiter limiter({.burst = 2, .lines_per_s = 0}, absl::UnixEpoch);
  const ScopedRepeatedLines scope(&limiter);
  testing::internal::CaptureStderr();
  SetUpLogging("x", "info");
  for (int i = 0; i < 5; ++i) {
    LogRepeated(spdlog::level::warn, "step skipped", "job a", "skip {}", i);
    LogRepeated(spdlog::level::debug, "step skipped", "job a", "unasked {}", i);
  }
  LogRepeated(spdlog::level::warn, "step skipped", "job b", "another's");
  LogRepeated(spdlog::level::warn, "disagreement", "job a", "another kind");
  LogLeftOut();
  LogLeftOut();
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("skip 1"));
  EXPECT_THAT(text, Not(HasSubstr("skip 2")));
  EXPECT_THAT(text, Not(HasSubstr("unasked")));
  EXPECT_THAT(text, HasSubstr("another's"));
  EXPECT_THAT(text, HasSubstr("another kind"));
  const std::string left_out = "3 lines left out: step skipped of job a";
  const size_t at = text.find(left_out);
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_EQ(text.find(left_out, at + 1), std::string::npos) << text;
}

TEST(PeerLogTest, GrpcWritesIntoOurLog) {
  ::unsetenv("JOURNAL_STREAM");
  testing::internal::CaptureStderr();
  SetUpLogging("x", "info");
  gpr_log_verbosity_init();  // as grpc_init does
  RouteGrpcLog();
  gpr_log(GPR_ERROR, "bad metadata: '%s'", "a\nb");
  gpr_log(GPR_INFO, "not asked for");
  for (int i = 0; i < 1000; ++i) gpr_log(GPR_ERROR, "flood");
  LogLeftOut();
  gpr_set_log_function(nullptr);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr(R"(gRPC: bad metadata: 'a\nb')"));
  EXPECT_THAT(text, Not(HasSubstr("not asked for")));
  EXPECT_THAT(text, HasSubstr("801 lines left out: gRPC of anybody"));
  EXPECT_LT(text.size(), 20000u);
}

TEST(PeerLogTest, ProtobufWritesIntoOurLog) {
  ::unsetenv("JOURNAL_STREAM");
  testing::internal::CaptureStderr();
  SetUpLogging("x", "info");
  RouteProtobufLog();
  v1::Hello hello;
  // Field 4, the job's name, of one byte that is no UTF-8.
  for (int i = 0; i < 1000; ++i) {
    EXPECT_FALSE(hello.ParseFromString("\x22\x01\xff"));
  }
  LogLeftOut();
  google::protobuf::SetLogHandler(nullptr);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text,
              HasSubstr("protobuf: String field 'optstate.v1.Hello.job'"));
  EXPECT_THAT(text, Not(HasSubstr("libprotobuf")));
  EXPECT_THAT(text, HasSubstr(" lines left out: protobuf of anybody"));
}

}  // namespace
}  // namespace optstate::observe
