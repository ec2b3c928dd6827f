#ifndef OPTSTATE_CLIENT_EMBEDDED_DIRECTORY_H_
#define OPTSTATE_CLIENT_EMBEDDED_DIRECTORY_H_

#include <string>

#include "absl/status/statusor.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// Where an embedded daemon keeps state, socket and log. The daemon removes it
// when it ends; of one that was killed, as its trainer was, the next embedded
// daemon of the same user does.
//
//   DIRECTORY/owner.lock   flock of the trainer, for as long as it lives
//   DIRECTORY/lock         of the daemon
//   DIRECTORY/jobs/*/lock  of each job's engine
struct EmbeddedDirectory {
  std::string path;
  UniqueFd owner_lock;
};

// A new one, on tmpfs where there is one, else below $TMPDIR.
absl::StatusOr<EmbeddedDirectory> MakeEmbeddedDirectory();

// Removes the directories of this user whose locks nobody holds. One that is
// being made has no owner.lock yet, and is left alone.
void RemoveAbandonedDirectories();

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_EMBEDDED_DIRECTORY_H_
