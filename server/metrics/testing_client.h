#ifndef OPTSTATE_SERVER_METRICS_TESTING_CLIENT_H_
#define OPTSTATE_SERVER_METRICS_TESTING_CLIENT_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/types/unique_fd.h"

namespace optstate::metrics {

constexpr int kClientPatienceMs = 60'000;

// Connects to the name of a server: "127.0.0.1:PORT" or "unix:PATH".
inline UniqueFd ConnectTo(absl::string_view name) {
  if (absl::ConsumePrefix(&name, "unix:")) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                        sizeof(address)),
              0);
    return fd;
  }
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::pair<std::string, std::string> parts = absl::StrSplit(name, ':');
  uint32_t port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(parts.second, &port)) << name;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  ::inet_pton(AF_INET, parts.first.c_str(), &address.sin_addr);
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                      sizeof(address)),
            0);
  return fd;
}

inline void SendTo(const UniqueFd& fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count =
        ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    // The server may have answered and closed before all was sent.
    if (count <= 0) return;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

// Receives until the server closes.
inline std::string ReceiveAll(const UniqueFd& fd) {
  std::string all;
  while (true) {
    pollfd entry = {fd.get(), POLLIN, 0};
    if (::poll(&entry, 1, kClientPatienceMs) != 1) return all + "[no end]";
    char buffer[65536];
    const ssize_t count = ::recv(fd.get(), buffer, sizeof(buffer), 0);
    if (count <= 0) return all;
    all.append(buffer, static_cast<size_t>(count));
  }
}

// Sends a request of these bytes, and returns all of the answer.
inline std::string Exchange(absl::string_view name, absl::string_view request) {
  const UniqueFd fd = ConnectTo(name);
  SendTo(fd, request);
  return ReceiveAll(fd);
}

inline std::string Get(absl::string_view name, absl::string_view path,
                       absl::string_view method = "GET") {
  return Exchange(name, absl::StrCat(method, " ", path,
                                     " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
}

inline std::string BodyOf(const std::string& answer) {
  const size_t end = answer.find("\r\n\r\n");
  return end == std::string::npos ? "" : answer.substr(end + 4);
}

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_TESTING_CLIENT_H_
