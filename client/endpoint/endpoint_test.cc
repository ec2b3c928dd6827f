#include "client/endpoint/endpoint.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/endpoint/dial.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

using Kind = Endpoint::Kind;
using testing::HasSubstr;

absl::StatusOr<Endpoint> Resolve(absl::string_view text,
                                 AwayDaemon away = AwayDaemon::kIsNone) {
  return ResolveEndpoint(text, away);
}

TEST(EndpointTest, ParsesEveryForm) {
  const auto shm = ParseEndpoint("unix:/run/x.sock");
  ASSERT_TRUE(shm.ok()) << shm.status();
  EXPECT_EQ(shm->kind, Kind::kShm);
  EXPECT_EQ(shm->path, "/run/x.sock");
  const auto grpc_unix = ParseEndpoint("grpc:unix:relative");
  ASSERT_TRUE(grpc_unix.ok()) << grpc_unix.status();
  EXPECT_EQ(grpc_unix->kind, Kind::kGrpcUnix);
  const auto tcp = ParseEndpoint("grpc:node7:50051");
  ASSERT_TRUE(tcp.ok()) << tcp.status();
  EXPECT_EQ(tcp->kind, Kind::kGrpcTcp);
  EXPECT_EQ(tcp->host, "node7");
  EXPECT_EQ(tcp->port, "50051");
  const auto tls = ParseEndpoint("grpcs:node7:50051");
  ASSERT_TRUE(tls.ok()) << tls.status();
  EXPECT_EQ(tls->kind, Kind::kGrpcTls);
  EXPECT_EQ(tls->host, "node7");
  EXPECT_EQ(tls->port, "50051");
  const auto ipv6 = ParseEndpoint("grpc:[::1]:1");
  ASSERT_TRUE(ipv6.ok()) << ipv6.status();
  EXPECT_EQ(ipv6->host, "::1");
  EXPECT_TRUE(ParseEndpoint("embedded").ok());
}

TEST(EndpointTest, PrintsWhatItParses) {
  for (const char* text :
       {"unix:/a", "grpc:unix:/a", "grpc:h:1", "grpc:[::1]:2", "grpcs:h:1",
        "grpcs:[::1]:2", "embedded"}) {
    const auto endpoint = ParseEndpoint(text);
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    EXPECT_EQ(endpoint->ToString(), text);
  }
}

TEST(EndpointTest, UnknownFormsAreNamedWithTheKnownOnes) {
  for (const char* text : {"tcp:host:1", "http://host", "/run/x", "Embedded"}) {
    const auto status = ParseEndpoint(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr(text));
    EXPECT_THAT(status.message(), HasSubstr("grpc:HOST:PORT"));
  }
}

TEST(EndpointTest, BadPartsAreRefused) {
  for (const std::string& text :
       {std::string("unix:"), "unix:/" + std::string(200, 'x'),
        std::string("grpc:host"), std::string("grpc:host:"),
        std::string("grpc:host:0"), std::string("grpc:host:65536"),
        std::string("grpc:host:http"), std::string("grpc::1"),
        std::string("grpc:::1:50051"), std::string("grpcs:host"),
        std::string("grpcs:unix:/a")}) {
    EXPECT_EQ(ParseEndpoint(text).status().code(),
              absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST(EndpointTest, VariableIsUsedWhenNothingIsSaid) {
  setenv("OPTSTATE_ENDPOINT", "grpc:h:7", 1);
  const auto endpoint = Resolve("");
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  EXPECT_EQ(endpoint->ToString(), "grpc:h:7");
  EXPECT_EQ(Resolve("embedded")->ToString(), "embedded");
  setenv("OPTSTATE_ENDPOINT", "nonsense", 1);
  EXPECT_THAT(Resolve("").status().message(), HasSubstr("$OPTSTATE_ENDPOINT"));
  unsetenv("OPTSTATE_ENDPOINT");
}

// Opens a listening unix socket at `path`.
UniqueFd Listen(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  EXPECT_EQ(
      bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
      0);
  EXPECT_EQ(listen(fd.get(), 4), 0);
  return fd;
}

TEST(EndpointTest, NodesSocketIsUsedWhenItAccepts) {
  unsetenv("OPTSTATE_ENDPOINT");
  if (access("/run/optstate/optstated.sock", F_OK) == 0) {
    GTEST_SKIP() << "this machine runs a daemon of its own";
  }
  std::string directory = "/tmp/optstate-endpoint-XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  setenv("XDG_RUNTIME_DIR", directory.c_str(), 1);
  EXPECT_EQ(Resolve("")->ToString(), "embedded");
  ASSERT_EQ(mkdir((directory + "/optstate").c_str(), 0700), 0);
  const std::string path = directory + "/optstate/optstated.sock";
  {
    const UniqueFd listener = Listen(path);
    EXPECT_EQ(Resolve("")->ToString(), "unix:" + path);
  }
  // The owner of the socket is dead.
  EXPECT_EQ(Resolve("")->ToString(), "embedded");
  EXPECT_EQ(Resolve("", AwayDaemon::kCounts)->ToString(), "unix:" + path);
  unlink(path.c_str());
  rmdir((directory + "/optstate").c_str());
  rmdir(directory.c_str());
}

TEST(DialTest, SaysWhatIsNotThere) {
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  auto status =
      Dial(*ParseEndpoint("unix:/nonexistent/sock"), deadline).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("/nonexistent/sock"));
}

TEST(DialTest, RefusedPort) {
  // This port was free a moment ago.
  UniqueFd fd(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size),
            0);
  const std::string text =
      absl::StrCat("grpc:127.0.0.1:", ntohs(address.sin_port));
  const auto status =
      Dial(*ParseEndpoint(text), absl::Now() + absl::Seconds(10)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

// A listener in a directory that a stranger made receives no data.
TEST(EndpointTest, StrangersSocketIsNotDialled) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to give a directory away";
  std::string directory = "/tmp/dial-XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const std::string path = directory + "/optstated.sock";
  const UniqueFd listener = Listen(path);
  const auto endpoint = ParseEndpoint("unix:" + path);
  EXPECT_TRUE(Dial(*endpoint, absl::Now() + absl::Minutes(1)).ok());
  ASSERT_EQ(chown(directory.c_str(), 4711, 4711), 0);
  const absl::Status status =
      Dial(*endpoint, absl::Now() + absl::Minutes(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("belongs to uid 4711"));
  unlink(path.c_str());
  rmdir(directory.c_str());
}

}  // namespace
}  // namespace optstate::client
