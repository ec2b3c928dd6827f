#include "server/accept/hello_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/shm/frame.h"

namespace optstate::accept {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const PeerCredentials kUnixPeer = {.caller = access::UnixCaller(1000)};
const PeerCredentials kTcpPeer = {.caller = access::InsecureTcpCaller()};

v1::Hello GoodHello() {
  v1::Hello hello;
  hello.set_protocol_version_min(shm::kProtocolVersion);
  hello.set_protocol_version_max(shm::kProtocolVersion + 3);
  hello.set_wire(v1::WIRE_SHM);
  hello.set_job("gpt-2.small_1");
  hello.set_client_version("0.1.0");
  return hello;
}

TEST(HelloCheckTest, AgreesOnTheHighestCommonVersion) {
  const auto version = CheckHello(GoodHello(), kUnixPeer);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ(*version, shm::kProtocolVersion);
}

TEST(HelloCheckTest, VersionErrorNamesBothRanges) {
  v1::Hello hello = GoodHello();
  hello.set_protocol_version_min(7);
  hello.set_protocol_version_max(9);
  hello.set_job("!");  // not checked yet
  const absl::Status status = CheckHello(hello, kUnixPeer).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("7 to 9"), HasSubstr("this daemon 3 to 5")));
  hello.set_protocol_version_min(0);
  hello.set_protocol_version_max(0);
  EXPECT_FALSE(CheckHello(hello, kUnixPeer).ok());
  hello.set_protocol_version_min(2);
  hello.set_protocol_version_max(1);
  EXPECT_FALSE(CheckHello(hello, kUnixPeer).ok());
}

TEST(HelloCheckTest, Wires) {
  v1::Hello hello = GoodHello();
  EXPECT_TRUE(absl::IsInvalidArgument(CheckHello(hello, kTcpPeer).status()));
  hello.set_wire(v1::WIRE_GRPC);
  EXPECT_TRUE(CheckHello(hello, kTcpPeer).ok());
  EXPECT_TRUE(CheckHello(hello, kUnixPeer).ok());
  hello.set_wire(v1::WIRE_UNSPECIFIED);
  EXPECT_FALSE(CheckHello(hello, kUnixPeer).ok());
  hello.set_wire(static_cast<v1::Wire>(77));
  EXPECT_FALSE(CheckHello(hello, kUnixPeer).ok());
}

TEST(HelloCheckTest, JobNames) {
  for (const char* good : {"a", "A9", "0", "a.b_c-d", "a..b"}) {
    EXPECT_TRUE(CheckJobName(good).ok()) << good;
  }
  EXPECT_TRUE(CheckJobName(std::string(128, 'a')).ok());
  EXPECT_FALSE(CheckJobName(std::string(129, 'a')).ok());
  for (const char* bad :
       {"", ".", "..", ".a", "-a", "_a", "a/b", "a b", "ä", "a\n", "../a"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CheckJobName(bad))) << bad;
  }
  EXPECT_FALSE(CheckJobName(absl::string_view("a\0b", 3)).ok());
}

// Strangers' texts are logged: one event stays one line.
TEST(HelloCheckTest, ErrorsQuoteWhatStrangersSend) {
  const absl::Status status = CheckJobName("a\nb" + std::string(100, 'x'));
  EXPECT_THAT(std::string(status.message()),
              AllOf(Not(HasSubstr("\n")), HasSubstr("a\\nb")));
  v1::Hello hello = GoodHello();
  hello.set_client_version(std::string(5000, 'x'));
  EXPECT_FALSE(CheckHello(hello, kUnixPeer).ok());
}

}  // namespace
}  // namespace optstate::accept
