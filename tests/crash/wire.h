#ifndef OPTSTATE_TESTS_CRASH_WIRE_H_
#define OPTSTATE_TESTS_CRASH_WIRE_H_

#include "absl/strings/string_view.h"

namespace optstate::crash {

enum class Wire { kShm, kGrpc };

inline absl::string_view Name(Wire wire) {
  return wire == Wire::kShm ? "shm" : "grpc";
}

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_WIRE_H_
