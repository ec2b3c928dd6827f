#ifndef OPTSTATE_CLIENT_ENDPOINT_EMBEDDED_DIRECTORY_H_
#define OPTSTATE_CLIENT_ENDPOINT_EMBEDDED_DIRECTORY_H_

#include <string>

#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// The directory in which an embedded daemon keeps state, socket and log. The
// daemon removes the directory when it ends. When the daemon and its trainer
// were killed, the next embedded daemon of the same user removes it.
//
//   DIRECTORY/owner.lock   flock of the trainer, for as long as it lives
//   DIRECTORY/lock         flock of the daemon
//   DIRECTORY/jobs/*/lock  flock of each job's engine
struct EmbeddedDirectory {
  std::string path;
  UniqueFd owner_lock;
};

// Makes a new directory, on tmpfs where there is one, else below $TMPDIR.
absl::StatusOr<EmbeddedDirectory> MakeEmbeddedDirectory();

// Removes the directories of this user whose locks no process holds. A
// directory that is being made has no owner.lock yet and is left alone.
void RemoveAbandonedDirectories();

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ENDPOINT_EMBEDDED_DIRECTORY_H_
