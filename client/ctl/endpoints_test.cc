#include "client/ctl/endpoints.h"

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

class EndpointsTest : public testing::Test {
 protected:
  ~EndpointsTest() override { std::remove(path_.c_str()); }

  void Write(const std::string& text) { std::ofstream(path_) << text; }

  const std::string path_ =
      testing::TempDir() + "/" +
      testing::UnitTest::GetInstance()->current_test_info()->name();
};

using Endpoints = std::vector<std::string>;

TEST_F(EndpointsTest, ThoseOfTheFileComeLast) {
  Write("# the nodes\n\n  grpcs:a:7070 \nunix:/run/b.sock\r\ngrpc:unix:/c#d");
  const auto named = NamedEndpoints({"grpc:localhost:1"}, path_);
  ASSERT_TRUE(named.ok()) << named.status();
  EXPECT_EQ(*named, (Endpoints{"grpc:localhost:1", "grpcs:a:7070",
                               "unix:/run/b.sock", "grpc:unix:/c#d"}));
  EXPECT_EQ(*NamedEndpoints({}, ""), Endpoints());
}

TEST_F(EndpointsTest, WhatIsWrongIsNamedWithItsPlace) {
  Write("grpcs:a:7070\nnonsense\n");
  const auto wrong = NamedEndpoints({}, path_);
  EXPECT_TRUE(absl::IsInvalidArgument(wrong.status())) << wrong.status();
  EXPECT_TRUE(absl::StrContains(wrong.status().message(), path_ + ":2: "))
      << wrong.status();
  Write("unix:/run/b.sock\n");
  const auto twice = NamedEndpoints({"unix:/run/b.sock"}, path_);
  EXPECT_TRUE(absl::IsInvalidArgument(twice.status())) << twice.status();
  EXPECT_TRUE(absl::StrContains(twice.status().message(), "named twice"))
      << twice.status();
  const auto absent = NamedEndpoints({}, path_ + "-absent");
  EXPECT_TRUE(absl::IsNotFound(absent.status())) << absent.status();
  EXPECT_FALSE(NamedEndpoints({}, testing::TempDir()).ok());
}

}  // namespace
}  // namespace optstate::ctl
