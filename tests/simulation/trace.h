#ifndef OPTSTATE_TESTS_SIMULATION_TRACE_H_
#define OPTSTATE_TESTS_SIMULATION_TRACE_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace optstate::simulation {

// A hash of all that has happened, in order: equal runs have equal ones. It is
// FNV-1a of 64 bits.
class Trace {
 public:
  void Add(uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      AddByte(static_cast<uint8_t>(value >> shift));
    }
  }
  void Add(absl::Span<const std::byte> bytes) {
    for (const std::byte byte : bytes) AddByte(static_cast<uint8_t>(byte));
  }
  uint64_t hash() const { return hash_; }

 private:
  void AddByte(uint8_t byte) {
    hash_ = (hash_ ^ byte) * uint64_t{0x100000001b3};
  }

  uint64_t hash_ = 0xcbf29ce484222325;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_TRACE_H_
