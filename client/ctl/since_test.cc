#include "client/ctl/since.h"

#include <string>

#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

TEST(SinceTest, TimesThatAreLookedBack) {
  EXPECT_EQ(*ParseSince("90s"), absl::Seconds(90));
  EXPECT_EQ(*ParseSince("10m"), absl::Minutes(10));
  EXPECT_EQ(*ParseSince("1h30m"), absl::Minutes(90));
  EXPECT_EQ(*ParseSince("2d"), absl::Hours(48));
  EXPECT_EQ(CheckSince("0.5s"), "");
}

TEST(SinceTest, TextsThatAreNone) {
  for (const char* text : {"", "10", "0s", "-5m", "d", "-1d", "1.5d", "inf",
                           "5000d", "x", "10 m"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseSince(text).status())) << text;
    EXPECT_NE(CheckSince(text).find("10m"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace optstate::ctl
