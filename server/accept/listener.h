#ifndef OPTSTATE_SERVER_ACCEPT_LISTENER_H_
#define OPTSTATE_SERVER_ACCEPT_LISTENER_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"
#include "server/config/listen_address.h"
#include "server/os/file_lock.h"

namespace optstate::accept {

// One listening socket, non-blocking. A unix socket's file is removed with the
// object, if it is still the same file, and unless it is the service manager's.
class Listener {
 public:
  // Unix sockets: `mode` are the socket's permissions; a missing parent
  // directory is created. A socket left behind by a dead process is taken over:
  //   1. the lock file PATH.lock keeps two daemons from doing this at once;
  //   2. an accepted connection at PATH means a live daemon:
  //   FAILED_PRECONDITION;
  //   3. a refused connection means that none listens: PATH is replaced.
  // Anything but a socket at PATH is FAILED_PRECONDITION and left alone.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(
      const config::ListenAddress& address, mode_t mode);
  // Inherits a socket of the process that executed this one in its place, or of
  // the service manager, whose the socket then is: `lock` is -1 for those and
  // for TCP. `mode` as of Open: the configuration may have another one now.
  static absl::StatusOr<std::unique_ptr<Listener>> Inherit(
      const config::ListenAddress& address, UniqueFd fd, UniqueFd lock,
      mode_t mode);
  // Closes an inherited socket that is no longer configured, and removes its
  // file, unless another process listens there by now.
  static void Retire(const config::ListenAddress& address, UniqueFd fd,
                     UniqueFd lock);
  // Returns null while clients reach this listener. For a unix socket whose
  // file was removed or replaced, returns one that listens there in its place,
  // under the same lock (its lock_fd() is -1) unless there is none, or the lock
  // file is gone as well; errors as of Open.
  absl::StatusOr<std::unique_ptr<Listener>> Reopened(mode_t mode) const;
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int fd() const { return fd_.get(); }
  int lock_fd() const { return lock_.has_value() ? lock_->fd() : -1; }
  bool is_unix() const { return !path_.empty(); }
  // The address: "unix:PATH", or "HOST:PORT" with the port that the kernel
  // chose.
  const std::string& name() const { return name_; }

 private:
  Listener() = default;

  static absl::StatusOr<std::unique_ptr<Listener>> OpenUnix(
      const std::string& path, mode_t mode, bool is_locked);
  static absl::StatusOr<std::unique_ptr<Listener>> OpenTcp(
      const config::ListenAddress& address);
  absl::Status NoteFile(const std::string& path);
  bool FileIsInPlace() const;

  std::optional<os::FileLock> lock_;  // released after the file is removed
  UniqueFd fd_;
  std::string name_;
  std::string path_;
  bool owns_file_ = true;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_LISTENER_H_
