#ifndef OPTSTATE_SERVER_TRANSPORT_SESSION_TABLE_H_
#define OPTSTATE_SERVER_TRANSPORT_SESSION_TABLE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/session/wire_counters.h"
#include "server/transport/peer.h"

namespace optstate::transport {

// Maps each rank to the session that has it, over all wires of one engine.
//
// The Job refuses a second owner of a rank; this table also knows whether the
// first owner's peer is still there. A trainer that was killed and started
// again may come back before the death of its old session has been noticed.
//
// Threads: thread-safe.
class SessionTable {
 public:
  // Functions and counters that sessions report to.
  struct Observers {
    // An attached rank's connection has ended without a detach; called from its
    // session's thread when it is detached. May be null.
    std::function<void(uint32_t rank, absl::string_view reason)> on_lost =
        nullptr;
    // Counts the bytes of all sessions, and asks for the queues of those that
    // have a rank. May be null; outlives the table.
    session::WireCounters* wires = nullptr;
  };

  SessionTable() = default;
  explicit SessionTable(Observers observers)
      : observers_(std::move(observers)) {}

  const Observers& observers() const { return observers_; }

  struct Owner {
    const PeerLink* link = nullptr;  // valid as long as the claim
    // Makes the session end soon; called from any thread.
    std::function<void()> interrupt = nullptr;
    int64_t pid = 0;
    std::string wire = "";
    uint64_t client_instance = 0;
    // Tells the lengths of the session's queues, for Observers::wires; valid as
    // long as the claim. Null, or a null function: nobody is told.
    const session::WireCounters::Queues* queues = nullptr;
  };

  // Makes `owner` the owner of `rank`. When another has the rank:
  // ALREADY_EXISTS if its peer is there and is not the same client (only a
  // client itself knows that its connection is lost); else the old owner is
  // interrupted and awaited, for `patience` at most (it may be waiting for a
  // step that is being applied), then UNAVAILABLE.
  absl::Status Claim(uint32_t rank, const Owner& owner,
                     absl::Duration patience);
  void Release(uint32_t rank);

  // Held while a request that takes much memory is parsed and answered: there
  // is one such request at a time.
  absl::Mutex& large_request() ABSL_LOCK_RETURNED(large_request_) {
    return large_request_;
  }

  // Held while a layout is registered or read: pointers into a job's layout are
  // valid until it is extended, which only a registration does.
  absl::Mutex& registration() ABSL_LOCK_RETURNED(registration_) {
    return registration_;
  }

 private:
  bool HasOwner(uint32_t rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return owners_.contains(rank);
  }

  const Observers observers_;
  absl::Mutex large_request_;
  absl::Mutex registration_;
  absl::Mutex mutex_;
  absl::flat_hash_map<uint32_t, Owner> owners_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_SESSION_TABLE_H_
