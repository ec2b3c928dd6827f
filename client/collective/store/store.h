#ifndef OPTSTATE_CLIENT_COLLECTIVE_STORE_STORE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_STORE_STORE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace optstate::client {

// The longest key and value, in bytes, that a collective gives a store.
inline constexpr size_t kStoreKeyBytesMax = 80;
inline constexpr size_t kStoreValueBytesMax = size_t{4} << 10;

// The place where ranks of one run find each other. The caller brings it: a
// folder that all see (FileStore), etcd, MPI, torch's TCPStore, whatever starts
// the ranks. There is no rendezvous server here.
//
// A key is set once in the life of a run. Values name addresses and secrets of
// ranks, so only the ranks of the run may read or set them.
//
// Threads: thread-safe.
class Store {
 public:
  virtual ~Store() = default;

  // Sets a key, as a whole or not at all. ALREADY_EXISTS: it was set before,
  // which is how ranks notice that they share a run's name with another run.
  virtual absl::Status Set(absl::string_view key, absl::string_view value) = 0;
  // Returns the value of a key once it is set. DEADLINE_EXCEEDED: nobody has
  // set it by then.
  virtual absl::StatusOr<std::string> Get(absl::string_view key,
                                          absl::Time deadline) = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_STORE_STORE_H_
