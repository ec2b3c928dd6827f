#ifndef OPTSTATE_CLIENT_COLLECTIVE_COLLECTIVE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_COLLECTIVE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/collective/element_type.h"

namespace optstate::client {

// The memory that a collective works on.
enum class MemoryKind : uint8_t {
  kHost,
  kDevice,  // what a CUDA device reaches; never read or written by this process
};

// The input and output of one sum: equally many bytes, the same memory or
// disjoint.
struct SumBuffers {
  absl::Span<const std::byte> in;
  absl::Span<std::byte> out;
};

// Ranks that add up, gather and agree: the seam between a trainer on several
// nodes and whatever connects its processes.
//
// An operation is made by all ranks, in the same order, with the same type,
// count and root. It returns when `out` has its result and `in` may be written
// again. Where ranks disagree, the implementation may notice: tcp does, and
// names the first difference and the rank; NCCL hangs until the time-out.
//
// Units: buffers are bytes of whole elements, aligned to the element; `count`
// is a number of elements. Buffers may be empty, on all ranks alike.
//
// Sums: results have the same bits on every rank. tcp and single_rank add in
// the order of the ranks, in the element's type (bfloat16: in float32, rounded
// once to nearest even), so that bits do not depend on timing. NCCL adds in an
// order that depends on its version, the ranks' number and their links.
//
// Errors: INVALID_ARGUMENT is found before anything is sent, and the collective
// stays usable; the other ranks wait for this one. Every other error ends the
// collective: it is aborted, each later call returns the first error again, and
// the other ranks get an error within their time-out.
//   DEADLINE_EXCEEDED    ranks have not come within the time-out; names them
//   UNAVAILABLE          a rank has ended, or the network to it is down
//   ABORTED              a rank has aborted (Abort(), or an error of its own),
//                        with its text
//   FAILED_PRECONDITION  ranks make different calls; names the first difference
//   DATA_LOSS            a rank has sent what no rank of this build sends
// After an error the content of `out` is not defined.
//
// Threads: one operation at a time; Abort() and failure() may be called by any
// thread at any time. Different collectives are independent.
// Size: one method for each operation.
class Collective {
 public:
  virtual ~Collective() = default;

  // The name of the implementation: "single", "tcp" or "nccl".
  virtual absl::string_view name() const = 0;
  virtual uint32_t rank() const = 0;
  virtual uint32_t world_size() const = 0;
  virtual MemoryKind memory() const = 0;
  // The error that has ended the collective; OK: none has.
  virtual absl::Status failure() const = 0;

  // Makes `out` the sum of all ranks' `in`, on every rank.
  virtual absl::Status AllReduce(ElementType type,
                                 absl::Span<const std::byte> in,
                                 absl::Span<std::byte> out) = 0;
  // Makes several sums, in order, with one wait where the implementation can.
  virtual absl::Status AllReduceEach(ElementType type,
                                     absl::Span<const SumBuffers> buffers) = 0;
  // Makes `out` this rank's part of the sum of all ranks' `in`, which has
  // world_size times the bytes of `out`: part r belongs to rank r. `out` may be
  // part rank() of `in`, else the two are disjoint.
  virtual absl::Status ReduceScatter(ElementType type,
                                     absl::Span<const std::byte> in,
                                     absl::Span<std::byte> out) = 0;
  // Makes `out` the sum of all ranks' `in` on rank `root` alone; the other
  // ranks' `out` is left as it is, and may be empty.
  virtual absl::Status Reduce(ElementType type, uint32_t root,
                              absl::Span<const std::byte> in,
                              absl::Span<std::byte> out) = 0;
  // Makes part r of `out` the bytes `in` of rank r, on every rank. `out` has
  // world_size times the bytes of `in`. `in` may be part rank() of `out`, else
  // the two are disjoint.
  virtual absl::Status AllGather(absl::Span<const std::byte> in,
                                 absl::Span<std::byte> out) = 0;
  // Makes `buffer` that of rank `root`, on every rank.
  virtual absl::Status Broadcast(uint32_t root,
                                 absl::Span<std::byte> buffer) = 0;
  // Returns when every rank has called it.
  virtual absl::Status Barrier() = 0;

  // Ends the collective: an operation that another thread has under way returns
  // ABORTED with this text, as do all later ones, and the other ranks are told
  // where the implementation can. Returns when that operation has. Idempotent.
  virtual void Abort(absl::string_view why) = 0;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_COLLECTIVE_H_
