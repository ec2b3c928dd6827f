#ifndef OPTSTATE_CLIENT_COLLECTIVE_TESTING_ENDING_COLLECTIVE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TESTING_ENDING_COLLECTIVE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/collective/collective.h"
#include "client/collective/element_type.h"

namespace optstate::client {

// A collective of a rank that is killed as it begins a chosen operation: the
// operation fails, and the other ranks notice. Otherwise it is the collective
// that it is made of.
class EndingCollective final : public Collective {
 public:
  // `inner` outlives the object.
  explicit EndingCollective(Collective* inner) : inner_(*inner) {}

  // Kills the rank at the operation of this number, counted from 1 and from
  // now on; 0: never.
  void EndAt(uint64_t operation) { left_ = operation; }
  bool has_ended() const { return has_ended_; }

  absl::string_view name() const override { return inner_.name(); }
  uint32_t rank() const override { return inner_.rank(); }
  uint32_t world_size() const override { return inner_.world_size(); }
  MemoryKind memory() const override { return inner_.memory(); }
  absl::Status failure() const override { return inner_.failure(); }

  absl::Status AllReduce(ElementType type, absl::Span<const std::byte> in,
                         absl::Span<std::byte> out) override {
    Count();
    return inner_.AllReduce(type, in, out);
  }
  absl::Status AllReduceEach(ElementType type,
                             absl::Span<const SumBuffers> buffers) override {
    Count();
    return inner_.AllReduceEach(type, buffers);
  }
  absl::Status ReduceScatter(ElementType type, absl::Span<const std::byte> in,
                             absl::Span<std::byte> out) override {
    Count();
    return inner_.ReduceScatter(type, in, out);
  }
  absl::Status Reduce(ElementType type, uint32_t root,
                      absl::Span<const std::byte> in,
                      absl::Span<std::byte> out) override {
    Count();
    return inner_.Reduce(type, root, in, out);
  }
  absl::Status AllGather(absl::Span<const std::byte> in,
                         absl::Span<std::byte> out) override {
    Count();
    return inner_.AllGather(in, out);
  }
  absl::Status Broadcast(uint32_t root, absl::Span<std::byte> buffer) override {
    Count();
    return inner_.Broadcast(root, buffer);
  }
  absl::Status Barrier() override {
    Count();
    return inner_.Barrier();
  }
  void Abort(absl::string_view why) override { inner_.Abort(why); }

 private:
  void Count() {
    if (left_ == 0 || --left_ != 0) return;
    has_ended_ = true;
    inner_.Abort("this rank is killed");
  }

  Collective& inner_;
  uint64_t left_ = 0;
  bool has_ended_ = false;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TESTING_ENDING_COLLECTIVE_H_
