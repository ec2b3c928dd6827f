#ifndef OPTSTATE_SERVER_TRANSPORT_TEST_LAYOUT_H_
#define OPTSTATE_SERVER_TRANSPORT_TEST_LAYOUT_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <utility>

#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"

namespace optstate::transport {

// A layout of two groups; parameters of 5,000, 1 and 0 elements, in all dtypes.
inline Layout TestLayout() {
  LayoutSpec spec;
  spec.groups = {{}, {.options = adam::kAmsgrad}};
  spec.parameters = {
      {.name = "a", .shape = {50, 100}, .numel = 5000, .group = 0},
      {.name = "b",
       .shape = {},
       .numel = 1,
       .dtype = DType::kBFloat16,
       .gradient_dtype = DType::kBFloat16,
       .group = 1},
      {.name = "c",
       .shape = {0, 3},
       .numel = 0,
       .dtype = DType::kFloat16,
       .gradient_dtype = DType::kFloat32,
       .group = 1},
  };
  return Layout::Make(std::move(spec)).value();
}

// A connection that has said Hello.
struct SocketPair {
  UniqueFd engine;
  UniqueFd client;
};

inline SocketPair MakeSocketPair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// Makes such a pair over TCP.
inline SocketPair MakeTcpPair() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), any, size), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), any, &size), 0);
  UniqueFd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(client.get(), any, size), 0);
  UniqueFd engine(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return {std::move(engine), std::move(client)};
}

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_TEST_LAYOUT_H_
