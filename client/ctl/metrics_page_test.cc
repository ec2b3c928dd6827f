#include "client/ctl/metrics_page.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/types/unique_fd.h"

namespace optstate::ctl {
namespace {

constexpr size_t kBytesMax = 1 << 20;
constexpr absl::Duration kPatience = absl::Minutes(1);

std::string Line(std::string text) {
  for (char& c : text) {
    if (c == ' ') c = '\0';
  }
  return text;
}

TEST(MetricsPageTest, TheAddressOfACommandLine) {
  EXPECT_EQ(MetricsAddressIn(Line("optstated --metrics 127.0.0.1:9464 "), ""),
            "127.0.0.1:9464");
  EXPECT_EQ(MetricsAddressIn(Line("optstated --metrics=unix:/a "), ""),
            "unix:/a");
  EXPECT_EQ(MetricsAddressIn(Line("--metrics x"), ""), "");
  EXPECT_EQ(MetricsAddressIn("", ""), "");
}

TEST(MetricsPageTest, TheAddressOfAConfiguration) {
  for (const char* config :
       {"metrics:\n  address: \"127.0.0.1:9464\"\n",
        "metrics:\n  # address: no\n\n  address: 127.0.0.1:9464 # it\n",
        "metrics: {address: '127.0.0.1:9464'}\n",
        "tls:\n  address: no\nmetrics: {address: 127.0.0.1:9464}\nx: 1\n",
        "#metrics:\nmetrics:\n    address:   127.0.0.1:9464"}) {
    EXPECT_EQ(MetricsAddressIn(Line("optstated "), config), "127.0.0.1:9464")
        << config;
  }
  for (const char* config :
       {"", "metrics:\n  address: \"\"\n", "metrics:\n\nother:\n  address: x\n",
        "# metrics:\n  address: x\n", "other_metrics:\n  address: x\n"}) {
    EXPECT_EQ(MetricsAddressIn(Line("optstated "), config), "") << config;
  }
}

TEST(MetricsPageTest, TheCommandLineGoesOverTheConfiguration) {
  EXPECT_EQ(MetricsAddressIn(Line("optstated --metrics a:1 "),
                             "metrics: {address: b:2}"),
            "a:1");
}

// A server that gives one answer, and closes.
class OneAnswer {
 public:
  explicit OneAnswer(std::string answer) : answer_(std::move(answer)) {
    folder_ = "/tmp/metrics_page-XXXXXX";  // the path of a socket is short
    EXPECT_NE(::mkdtemp(folder_.data()), nullptr);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string path = folder_ + "/s";
    std::memcpy(address.sun_path, path.data(), path.size());
    Listen(AF_UNIX, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    address_ = "unix:" + path;
  }
  OneAnswer(std::string answer, bool /*tcp*/) : answer_(std::move(answer)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Listen(AF_INET, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    socklen_t size = sizeof(address);
    EXPECT_EQ(::getsockname(listener_.get(),
                            reinterpret_cast<sockaddr*>(&address), &size),
              0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  }
  ~OneAnswer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    if (thread_.joinable()) thread_.join();
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }
  const std::string& address() const { return address_; }
  void Start() {
    thread_ = std::thread([this] { Answer(); });
  }

 private:
  void Listen(int family, const sockaddr* address, socklen_t size) {
    listener_.reset(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::bind(listener_.get(), address, size), 0);
    ASSERT_EQ(::listen(listener_.get(), 1), 0);
  }
  void Answer() {
    const UniqueFd peer(::accept(listener_.get(), nullptr, nullptr));
    if (!peer.ok()) return;
    std::string request;
    while (!absl::StrContains(request, "\r\n\r\n")) {
      char buffer[4096];
      const ssize_t count = ::recv(peer.get(), buffer, sizeof(buffer), 0);
      if (count <= 0) return;
      request.append(buffer, static_cast<size_t>(count));
    }
    EXPECT_TRUE(absl::StartsWith(request, "GET /metrics HTTP/1.1\r\n"))
        << request;
    absl::string_view left = answer_;
    while (!left.empty()) {
      const ssize_t count =
          ::send(peer.get(), left.data(), left.size(), MSG_NOSIGNAL);
      if (count <= 0) return;
      left.remove_prefix(static_cast<size_t>(count));
    }
  }

  const std::string answer_;
  std::string folder_;
  std::string address_;
  UniqueFd listener_;
  std::thread thread_;
};

constexpr char kHead[] = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n";

TEST(MetricsPageTest, ThePageIsRead) {
  const std::string page(300'000, 'x');
  OneAnswer unix_server(kHead + page);
  unix_server.Start();
  const auto over_unix =
      ReadMetrics(unix_server.address(), kBytesMax, kPatience);
  ASSERT_TRUE(over_unix.ok()) << over_unix.status();
  EXPECT_EQ(*over_unix, page);
  OneAnswer tcp_server(kHead + page, /*tcp=*/true);
  tcp_server.Start();
  const auto over_tcp = ReadMetrics(tcp_server.address(), kBytesMax, kPatience);
  ASSERT_TRUE(over_tcp.ok()) << over_tcp.status();
  EXPECT_EQ(*over_tcp, page);
}

TEST(MetricsPageTest, ALargePageIsCut) {
  OneAnswer server(kHead + std::string(300'000, 'x'));
  server.Start();
  const auto page = ReadMetrics(server.address(), 1000, kPatience);
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(*page, std::string(1000, 'x'));
}

TEST(MetricsPageTest, AnotherAnswerIsSaid) {
  for (const char* answer : {"HTTP/1.1 404 Not Found\r\n\r\nno",
                             "SSH-2.0-x\r\n", "", "HTTP/1.1 200 OK\r\n"}) {
    OneAnswer server(answer);
    server.Start();
    const auto page = ReadMetrics(server.address(), kBytesMax, kPatience);
    EXPECT_TRUE(absl::IsUnavailable(page.status())) << page.status();
    EXPECT_TRUE(absl::StrContains(page.status().message(), server.address()))
        << page.status();
  }
}

TEST(MetricsPageTest, NobodyThere) {
  std::string address;
  {
    const OneAnswer gone("", /*tcp=*/true);
    address = gone.address();
  }
  EXPECT_FALSE(ReadMetrics(address, kBytesMax, kPatience).ok());
  EXPECT_TRUE(absl::IsNotFound(
      ReadMetrics("unix:/nonexistent/s", kBytesMax, kPatience).status()));
  for (const char* wrong : {"", "x", "unix:", "127.0.0.1:x"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(
        ReadMetrics(wrong, kBytesMax, kPatience).status()))
        << wrong;
  }
}

TEST(MetricsPageTest, AServerThatSaysNothing) {
  const OneAnswer silent("");  // accepts nothing
  const auto page =
      ReadMetrics(silent.address(), kBytesMax, absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsDeadlineExceeded(page.status())) << page.status();
}

}  // namespace
}  // namespace optstate::ctl
