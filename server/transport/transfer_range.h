#ifndef OPTSTATE_SERVER_TRANSPORT_TRANSFER_RANGE_H_
#define OPTSTATE_SERVER_TRANSPORT_TRANSFER_RANGE_H_

#include <cstdint>

#include "absl/status/status.h"

namespace optstate::transport {

// Returns INVALID_ARGUMENT unless the number is a v1::StateArray that can be
// loaded or fetched.
absl::Status CheckArray(uint32_t array);

// Returns whether the array holds one number of 8 bytes per parameter, not one
// per element.
bool IsPerParameter(uint32_t array);

// Returns the bytes of `numel` elements; a product that overflows is the
// largest number.
uint64_t BytesOf(uint64_t numel, uint64_t element_bytes);

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_TRANSFER_RANGE_H_
