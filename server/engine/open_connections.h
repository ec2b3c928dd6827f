#ifndef OPTSTATE_SERVER_ENGINE_OPEN_CONNECTIONS_H_
#define OPTSTATE_SERVER_ENGINE_OPEN_CONNECTIONS_H_

#include <sys/types.h>

#include <cstddef>
#include <set>

namespace optstate::engine {

// The sockets that the supervisor has handed over and that are still open, by
// inode. Nothing reports when one is closed, so closed ones are looked for
// whenever as many new ones as were kept have been noted: the size stays
// proportional to the number of open ones.
//
// Not thread-safe.
class OpenConnections {
 public:
  void Note(int socket);
  // Returns the sockets that are open now; when that cannot be determined, all
  // noted ones, which is the safe side.
  const std::set<ino_t>& Find();

  // Number of kept sockets, including those closed since the last look.
  size_t size() const { return inodes_.size(); }

 private:
  void ForgetClosed();

  std::set<ino_t> inodes_;
  size_t look_at_size_ = 0;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_OPEN_CONNECTIONS_H_
