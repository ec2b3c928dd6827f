#include "server/metrics/http_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/metrics/testing_client.h"

namespace optstate::metrics {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

config::ListenAddress Loopback(uint16_t port = 0) {
  return {.unix_path = "", .host = "127.0.0.1", .port = port};
}

HttpReply Echo(absl::string_view path) {
  if (path == "/missing") return {404, "text/plain", "not here\n"};
  return {200, "text/plain", absl::StrCat("path ", path, "\n")};
}

class HttpServerTest : public testing::Test {
 protected:
  void Start(HttpServer::Handler handler = Echo,
             const HttpServer::Limits& limits = {}) {
    auto started = HttpServer::Start(Loopback(), std::move(handler), limits);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }
  const std::string& name() const { return server_->name(); }

  std::unique_ptr<HttpServer> server_;
};

TEST_F(HttpServerTest, AnswersWithTheHandlersReply) {
  Start();
  const std::string answer = Get(name(), "/metrics?x=1");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, AllOf(HasSubstr("\r\nContent-Type: text/plain\r\n"),
                            HasSubstr("\r\nContent-Length: 14\r\n"),
                            HasSubstr("\r\nConnection: close\r\n"),
                            HasSubstr("\r\nDate: ")));
  EXPECT_EQ(BodyOf(answer), "path /metrics\n");
  EXPECT_THAT(Get(name(), "/missing"),
              AllOf(StartsWith("HTTP/1.1 404 Not Found\r\n"),
                    HasSubstr("\r\n\r\nnot here\n")));
}

TEST_F(HttpServerTest, HeadHasNoBody) {
  Start();
  const std::string answer = Get(name(), "/", "HEAD");
  EXPECT_THAT(answer, AllOf(StartsWith("HTTP/1.1 200 OK\r\n"),
                            HasSubstr("\r\nContent-Length: 7\r\n")));
  EXPECT_EQ(BodyOf(answer), "");
}

TEST_F(HttpServerTest, OtherMethodsAreRefused) {
  Start([](absl::string_view) -> HttpReply {
    ADD_FAILURE() << "the handler was called";
    return {};
  });
  for (const char* method :
       {"POST", "PUT", "DELETE", "OPTIONS", "PATCH", "PROPFIND"}) {
    EXPECT_THAT(Get(name(), "/", method),
                AllOf(StartsWith("HTTP/1.1 405 Method Not Allowed\r\n"),
                      HasSubstr("\r\nAllow: GET, HEAD\r\n")))
        << method;
  }
  // A preflight of another site, which CivetWeb would answer by itself.
  EXPECT_THAT(
      Exchange(name(),
               "OPTIONS / HTTP/1.1\r\nHost: x\r\nOrigin: http://other\r\n"
               "Access-Control-Request-Method: GET\r\n\r\n"),
      AllOf(StartsWith("HTTP/1.1 405 "),
            Not(HasSubstr("Access-Control-Allow"))));
}

TEST_F(HttpServerTest, EveryAnswerHasTheSecurityHeaders) {
  Start();
  for (const std::string& answer :
       {Get(name(), "/"), Get(name(), "/missing"), Get(name(), "/", "POST"),
        Exchange(name(), "nonsense\r\n\r\n")}) {
    EXPECT_THAT(answer,
                AllOf(HasSubstr("\r\nContent-Security-Policy: default-src "
                                "'none';"),
                      HasSubstr("\r\nX-Content-Type-Options: nosniff\r\n"),
                      HasSubstr("\r\nCache-Control: no-store\r\n"),
                      Not(HasSubstr("Access-Control-Allow"))));
  }
}

TEST_F(HttpServerTest, NoFileIsServed) {
  Start();
  for (const char* path : {"/../../../../etc/passwd", "/etc/passwd", "//etc",
                           "/%2e%2e/%2e%2e/etc/passwd"}) {
    EXPECT_EQ(BodyOf(Get(name(), path)), absl::StrCat("path ", path, "\n"));
  }
}

TEST_F(HttpServerTest, LongRequestIsRefused) {
  Start();
  const std::string path = "/" + std::string(2 * 8192, 'x');
  // The answer may be lost: the rest of the request resets the connection.
  const std::string answer = Get(name(), path);
  if (!answer.empty()) {
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 400 "));
  }
  // One that is within the limit.
  const std::string fits =
      absl::StrCat("GET / HTTP/1.1\r\nX: ", std::string(7000, 'x'), "\r\n\r\n");
  EXPECT_THAT(Exchange(name(), fits), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpServerTest, GarbageIsRefusedAndOthersAreServed) {
  Start();
  EXPECT_THAT(Exchange(name(), "nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Exchange(name(), "GET / HTTP/9.9\r\n\r\n"),
              StartsWith("HTTP/1.1 505 "));
  const uint64_t seed = std::random_device()();
  RecordProperty("seed", absl::StrCat(seed));
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 50; ++i) {
    std::string bytes;
    for (uint64_t size = random() % 4000; size > 0; --size) {
      bytes += static_cast<char>(random());
    }
    // Ends the request, so that nothing more is waited for.
    (void)Exchange(name(), bytes + "\r\n\r\n\r\n\r\n");
  }
  EXPECT_THAT(Get(name(), "/"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

TEST_F(HttpServerTest, ABodyIsNotWaitedFor) {
  Start();
  const UniqueFd fd = ConnectTo(name());
  SendTo(fd,
         "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n");
  // The rest never comes.
  EXPECT_THAT(ReceiveAll(fd), StartsWith("HTTP/1.1 405 "));
}

TEST_F(HttpServerTest, SlowClientsKeepOneThreadEach) {
  HttpServer::Limits limits;
  limits.threads = 3;
  limits.patience = absl::Hours(1);
  Start(Echo, limits);
  std::vector<UniqueFd> slow;
  for (int i = 0; i < 2; ++i) {
    slow.push_back(ConnectTo(name()));
    SendTo(slow.back(), "GET / HT");
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_THAT(Get(name(), "/"), StartsWith("HTTP/1.1 200 OK\r\n"));
  }
  SendTo(slow[0], "TP/1.1\r\n\r\n");
  EXPECT_THAT(ReceiveAll(slow[0]), StartsWith("HTTP/1.1 200 OK\r\n"));
  // The end closes the one that is still slow.
  server_.reset();
  (void)ReceiveAll(slow[1]);
}

TEST_F(HttpServerTest, ASlowClientsTimeIsLimited) {
  HttpServer::Limits limits;
  limits.threads = 1;
  limits.patience = absl::Milliseconds(50);
  Start(Echo, limits);
  const UniqueFd slow = ConnectTo(name());
  SendTo(slow, "GET / HT");
  // It has the only thread until its time is over.
  EXPECT_THAT(Get(name(), "/"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(ReceiveAll(slow), Not(HasSubstr("200 OK")));
}

TEST_F(HttpServerTest, AClientThatReadsNothingHasALimitToo) {
  HttpServer::Limits limits;
  limits.threads = 1;
  limits.patience = absl::Milliseconds(50);
  Start(
      [](absl::string_view path) -> HttpReply {
        if (path == "/small") return {200, "text/plain", "small\n"};
        // More than the buffers of both sockets hold.
        return {200, "text/plain", std::string(64 << 20, 'x')};
      },
      limits);
  const UniqueFd deaf = ConnectTo(name());
  SendTo(deaf, "GET / HTTP/1.1\r\n\r\n");
  EXPECT_EQ(BodyOf(Get(name(), "/small")), "small\n");
}

TEST_F(HttpServerTest, LargeAnswerArrivesWhole) {
  std::string large;
  for (int i = 0; i < 400'000; ++i) absl::StrAppend(&large, i, "\n");
  Start([&large](absl::string_view) -> HttpReply {
    return {200, "text/plain", large};
  });
  EXPECT_EQ(BodyOf(Get(name(), "/")), large);
}

TEST_F(HttpServerTest, TheEndWaitsForTheHandler) {
  absl::Notification called;
  absl::Notification goes_on;
  bool returned = false;
  Start([&](absl::string_view) -> HttpReply {
    called.Notify();
    goes_on.WaitForNotification();
    returned = true;
    return {200, "text/plain", "late\n"};
  });
  const UniqueFd fd = ConnectTo(name());
  SendTo(fd, "GET / HTTP/1.1\r\n\r\n");
  called.WaitForNotification();
  goes_on.Notify();
  server_.reset();
  EXPECT_TRUE(returned);
}

TEST_F(HttpServerTest, NoChildInheritsItsSocket) {
  Start();
  int sockets = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 ||
        listens == 0) {
      continue;
    }
    ++sockets;
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_EQ(sockets, 1);
}

TEST_F(HttpServerTest, TakenPortIsAnErrorWithItsReason) {
  Start();
  uint32_t port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(name().substr(name().rfind(':') + 1), &port));
  const absl::Status taken =
      HttpServer::Start(Loopback(static_cast<uint16_t>(port)), Echo, {})
          .status();
  EXPECT_THAT(std::string(taken.message()),
              AllOf(HasSubstr(name()), HasSubstr("Address already in use")));
  // It is free again at once.
  server_.reset();
  const auto again =
      HttpServer::Start(Loopback(static_cast<uint16_t>(port)), Echo, {});
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST_F(HttpServerTest, UnknownHostIsAnError) {
  config::ListenAddress address = Loopback();
  address.host = "no-such-host.invalid";
  EXPECT_FALSE(HttpServer::Start(address, Echo, {}).ok());
}

TEST_F(HttpServerTest, HostNameIsResolved) {
  config::ListenAddress address = Loopback();
  address.host = "localhost";
  const auto started = HttpServer::Start(address, Echo, {});
  ASSERT_TRUE(started.ok()) << started.status();
  EXPECT_THAT((*started)->name(), Not(HasSubstr("localhost")));
}

class HttpUnixTest : public testing::Test {
 protected:
  HttpUnixTest() {
    // Not below TempDir(): a socket's path has 107 bytes at most.
    folder_ = "/tmp/http-XXXXXX";
    if (::mkdtemp(folder_.data()) == nullptr) std::abort();
  }
  ~HttpUnixTest() override { std::filesystem::remove_all(folder_); }

  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const std::string& path) {
    return HttpServer::Start({.unix_path = path, .host = "", .port = 0}, Echo,
                             {});
  }

  std::string folder_;
};

TEST_F(HttpUnixTest, ServesAndRemovesItsSocket) {
  const std::string path = folder_ + "/made/sub folder/s";
  auto server = Start(path);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ((*server)->name(), "unix:" + path);
  EXPECT_EQ(BodyOf(Get((*server)->name(), "/")), "path /\n");
  struct stat info;
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0666u);

  const absl::Status second = Start(path).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr(path));
  EXPECT_EQ(BodyOf(Get((*server)->name(), "/")), "path /\n");

  server->reset();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(HttpUnixTest, TakesOverADeadSocketAndNothingElse) {
  const std::string path = folder_ + "/s";
  {
    const UniqueFd dead(::socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<const sockaddr*>(&address),
                     sizeof(address)),
              0);
  }
  auto server = Start(path);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_EQ(BodyOf(Get((*server)->name(), "/x")), "path /x\n");
  EXPECT_THAT(std::string(Start(folder_).status().message()),
              HasSubstr("is not a socket"));
}

TEST_F(HttpUnixTest, PathsThatItCannotTakeAreRefused) {
  for (const char* name : {"/a,b", "/a:1", "/a "}) {
    const absl::Status refused = Start(folder_ + name).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << name << refused;
    EXPECT_FALSE(std::filesystem::exists(folder_ + name));
  }
}

}  // namespace
}  // namespace optstate::metrics
