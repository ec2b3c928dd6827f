#include "server/engine/open_connections.h"

#include <sys/socket.h>

#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "proto/types/unique_fd.h"
#include "server/os/open_sockets.h"

namespace optstate::engine {
namespace {

UniqueFd Socket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

// An engine lives for weeks, and ranks come and go.
TEST(OpenConnectionsTest, ClosedOnesTakeNoMemory) {
  OpenConnections connections;
  for (int i = 0; i < 2000; ++i) {
    const UniqueFd socket = Socket();
    connections.Note(socket.get());
    EXPECT_LE(connections.size(), 65u);
  }
  EXPECT_TRUE(connections.Find().empty());
}

TEST(OpenConnectionsTest, OpenOnesAreKept) {
  OpenConnections connections;
  std::vector<UniqueFd> open;
  std::set<ino_t> inodes;
  for (int i = 0; i < 200; ++i) {
    for (int closed = 0; closed < 5; ++closed) {
      const UniqueFd socket = Socket();
      connections.Note(socket.get());
    }
    open.push_back(Socket());
    connections.Note(open.back().get());
    inodes.insert(*os::SocketInode(open.back().get()));
    EXPECT_LE(connections.size(), 65 + 2 * inodes.size());
  }
  EXPECT_EQ(connections.Find(), inodes);
  EXPECT_EQ(connections.size(), open.size());
}

}  // namespace
}  // namespace optstate::engine
