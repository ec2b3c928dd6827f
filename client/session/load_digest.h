#ifndef OPTSTATE_CLIENT_SESSION_LOAD_DIGEST_H_
#define OPTSTATE_CLIENT_SESSION_LOAD_DIGEST_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "client/session_types.h"
#include "proto/types/dtype.h"

namespace optstate::client {

// Identifies the content of a rank's load, independent of order: equal loads
// have equal digests; different loads have equal ones with probability 2^-64.
//
// Threads: not thread-safe.
class LoadDigest {
 public:
  // Adds a whole array of a parameter.
  void Add(StateArray array, uint32_t parameter, DType dtype,
           absl::Span<const std::byte> data);
  // The digest; never 0.
  uint64_t value() const { return sum_ == 0 ? 1 : sum_; }

 private:
  uint64_t sum_ = 1;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_SESSION_LOAD_DIGEST_H_
