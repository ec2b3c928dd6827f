#ifndef OPTSTATE_PROTO_SHM_RING_H_
#define OPTSTATE_PROTO_SHM_RING_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/shm/segment_layout.h"

namespace optstate::shm {

// The producing end of a ring. `mine` lies in the segment that this process
// created, `peer` in the segment that it maps read-only, `entries` in `mine`'s
// segment.
//
// Threads: one producer thread at a time.
template <typename Entry>
class RingProducer {
 public:
  RingProducer(RingSide* mine, const RingSide* peer, Entry* entries)
      : mine_(mine), peer_(peer), entries_(entries) {}

  // Publishes one entry and rings the doorbell when the consumer sleeps.
  // RESOURCE_EXHAUSTED: the ring is full. DATA_LOSS: the consumer's head, which
  // the peer writes, is impossible (beyond tail, or more than a ring behind).
  absl::Status Push(const Entry& entry);

  // The number of entries published so far, which is the index of the next one.
  uint64_t tail() const { return tail_; }

 private:
  RingSide* mine_;
  const RingSide* peer_;
  Entry* entries_;
  uint64_t tail_ = 0;
};

// The result of a look at the ring.
enum class Poll { kEmpty, kEntry };

// The consuming end, which copies each entry once. Threads: one consumer at a
// time.
template <typename Entry>
class RingConsumer {
 public:
  RingConsumer(RingSide* mine, const RingSide* peer, const Entry* entries)
      : mine_(mine), peer_(peer), entries_(entries) {}

  // Copies the next entry to *entry. The slot returns to the producer only at
  // Release(), so memory that belongs to the slot (a text slot, a window) may
  // be copied in between. DATA_LOSS: the producer's tail is impossible.
  absl::StatusOr<Poll> Take(Entry* entry);
  void Release();

  // Returns once there may be an entry, or `spin` plus `sleep` have passed:
  // spins, then waits on the producer's doorbell. May return early. Another
  // thread of this process can end the wait with Interrupt().
  void Wait(absl::Duration spin, absl::Duration sleep);
  void Interrupt();

  uint64_t head() const { return head_; }

 private:
  bool Ready() const;

  RingSide* mine_;
  const RingSide* peer_;
  const Entry* entries_;
  uint64_t head_ = 0;
};

// Returns how many entries of a ring are published and not released, by what
// its two sides say at this moment: no more than it has, whatever a peer has
// written. Threads: any.
uint64_t EntriesInUse(const RingSide& producer, const RingSide& consumer);

extern template class RingProducer<Submission>;
extern template class RingProducer<Completion>;
extern template class RingConsumer<Submission>;
extern template class RingConsumer<Completion>;

}  // namespace optstate::shm

#endif  // OPTSTATE_PROTO_SHM_RING_H_
