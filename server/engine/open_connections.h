#ifndef OPTSTATE_SERVER_ENGINE_OPEN_CONNECTIONS_H_
#define OPTSTATE_SERVER_ENGINE_OPEN_CONNECTIONS_H_

#include <sys/types.h>

#include <cstddef>
#include <set>

namespace optstate {

// The sockets that the supervisor has handed over and that are open still, by
// inode. Nothing tells when one is closed, so those that were are looked for
// whenever as many again were noted: the size stays that of what is open.
//
// Not thread-safe.
class OpenConnections {
 public:
  void Note(int socket);
  // Those that are open now; when that cannot be found out, all that were
  // noted, which is the safe side.
  const std::set<ino_t>& Find();

  // Of what is kept, those that were closed since among them.
  size_t size() const { return inodes_.size(); }

 private:
  void ForgetClosed();

  std::set<ino_t> inodes_;
  size_t look_at_size_ = 0;
};

}  // namespace optstate

#endif  // OPTSTATE_SERVER_ENGINE_OPEN_CONNECTIONS_H_
