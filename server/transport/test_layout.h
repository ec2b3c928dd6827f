#ifndef OPTSTATE_SERVER_TRANSPORT_TEST_LAYOUT_H_
#define OPTSTATE_SERVER_TRANSPORT_TEST_LAYOUT_H_

#include <sys/socket.h>

#include <utility>

#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"

namespace optstate {

// Two groups; parameters of 5,000, 1 and 0 elements, in all dtypes.
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

}  // namespace optstate

#endif  // OPTSTATE_SERVER_TRANSPORT_TEST_LAYOUT_H_
