#ifndef OPTSTATE_CLIENT_COLLECTIVE_COLLECTIVE_BASE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_COLLECTIVE_BASE_H_

#include <cstddef>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/collective/collective.h"

namespace optstate::client {

// The part of a collective that is the same for each implementation, so that
// they cannot differ in it: arguments are checked, the first error ends the
// collective, and an abort waits for the operation that it ends.
//
// An implementation provides the operations, with arguments that are checked.
// They are called one at a time, and never after a failure.
class CollectiveBase : public Collective {
 public:
  CollectiveBase(uint32_t rank, uint32_t world_size)
      : rank_(rank), world_size_(world_size) {}

  uint32_t rank() const final { return rank_; }
  uint32_t world_size() const final { return world_size_; }
  absl::Status failure() const final;

  absl::Status AllReduce(ElementType type, absl::Span<const std::byte> in,
                         absl::Span<std::byte> out) final;
  absl::Status AllReduceEach(ElementType type,
                             absl::Span<const SumBuffers> buffers) final;
  absl::Status ReduceScatter(ElementType type, absl::Span<const std::byte> in,
                             absl::Span<std::byte> out) final;
  absl::Status Reduce(ElementType type, uint32_t root,
                      absl::Span<const std::byte> in,
                      absl::Span<std::byte> out) final;
  absl::Status AllGather(absl::Span<const std::byte> in,
                         absl::Span<std::byte> out) final;
  absl::Status Broadcast(uint32_t root, absl::Span<std::byte> buffer) final;
  absl::Status Barrier() final;
  void Abort(absl::string_view why) final;

 protected:
  // `buffers`: at least one.
  virtual absl::Status RunAllReduce(ElementType type,
                                    absl::Span<const SumBuffers> buffers) = 0;
  virtual absl::Status RunReduceScatter(ElementType type,
                                        absl::Span<const std::byte> in,
                                        absl::Span<std::byte> out) = 0;
  virtual absl::Status RunReduce(ElementType type, uint32_t root,
                                 absl::Span<const std::byte> in,
                                 absl::Span<std::byte> out) = 0;
  virtual absl::Status RunAllGather(absl::Span<const std::byte> in,
                                    absl::Span<std::byte> out) = 0;
  virtual absl::Status RunBroadcast(uint32_t root,
                                    absl::Span<std::byte> buffer) = 0;
  virtual absl::Status RunBarrier() = 0;
  // INVALID_ARGUMENT: the implementation does not reach this memory, which is
  // not empty.
  virtual absl::Status CheckMemory(absl::Span<const std::byte> /*buffer*/) {
    return absl::OkStatus();
  }
  // Makes the operation that is under way return soon. Any thread calls this.
  virtual void Wake() = 0;
  // Leaves the other ranks, and tells them why where that is possible. Is
  // called once, with no operation under way.
  virtual void Leave(const absl::Status& why) = 0;

 private:
  absl::Status Run(absl::FunctionRef<absl::Status()> operation)
      ABSL_LOCKS_EXCLUDED(operation_mutex_, failure_mutex_);
  // Notes the error unless there is one; returns the first.
  absl::Status NoteFailure(const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(failure_mutex_);
  void LeaveOnce(const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(operation_mutex_);
  absl::Status CheckRoot(uint32_t root) const;
  absl::Status CheckReached(absl::Span<const std::byte> a,
                            absl::Span<const std::byte> b);

  const uint32_t rank_;
  const uint32_t world_size_;
  // Held while an operation runs. Taken before failure_mutex_.
  absl::Mutex operation_mutex_;
  bool has_left_ ABSL_GUARDED_BY(operation_mutex_) = false;
  mutable absl::Mutex failure_mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(failure_mutex_);
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_COLLECTIVE_BASE_H_
