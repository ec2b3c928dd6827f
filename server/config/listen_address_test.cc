#include "server/config/listen_address.h"

#include <gtest/gtest.h>

namespace optstate::config {
namespace {

TEST(ListenAddressTest, Forms) {
  EXPECT_EQ(ParseListenAddress("unix:/a/b")->unix_path, "/a/b");
  const auto name = ParseListenAddress("localhost:7600");
  EXPECT_EQ(name->host, "localhost");
  EXPECT_EQ(name->port, 7600);
  EXPECT_EQ(ParseListenAddress("127.0.0.1:0")->port, 0);
  const auto v6 = ParseListenAddress("[::1]:65535");
  EXPECT_EQ(v6->host, "::1");
  EXPECT_EQ(v6->port, 65535);
}

TEST(ListenAddressTest, Errors) {
  for (const char* bad :
       {"", "host", ":1", "host:", "host:x", "host:65536", "host:-1", "::1:5",
        "[::1:5", "[]:5", "unix:", "unix:relative"}) {
    const absl::Status status = ParseListenAddress(bad).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bad << " " << status;
  }
  EXPECT_FALSE(CheckUnixSocketPath("/" + std::string(107, 'x')).ok());
  EXPECT_TRUE(CheckUnixSocketPath("/" + std::string(106, 'x')).ok());
}

TEST(ListenAddressTest, PathsOfTheHttpServer) {
  EXPECT_TRUE(CheckHttpSocketPath("/run/optstate/a b.sock").ok());
  for (const char* bad : {"/a,b", "/a:1", "/a ", "/a\t"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckHttpSocketPath(bad))) << bad;
  }
}

}  // namespace
}  // namespace optstate::config
