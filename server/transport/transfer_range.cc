#include "server/transport/transfer_range.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "optstate/v1/types.pb.h"

namespace optstate::transport {

absl::Status CheckArray(uint32_t array) {
  if (array >= v1::STATE_ARRAY_MASTER &&
      array <= v1::STATE_ARRAY_PREPARED_SUM) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "state array ", array, " is not known; 1 master, 2 to 4 the ",
      "optimizer's arrays in their order, 5 step_count, 6 scalar, 7 "
      "gradient_norm, 8 parameter, 9 prepared_sum"));
}

bool IsPerParameter(uint32_t array) {
  return array == v1::STATE_ARRAY_STEP_COUNT ||
         array == v1::STATE_ARRAY_SCALAR ||
         array == v1::STATE_ARRAY_GRADIENT_NORM ||
         array == v1::STATE_ARRAY_PREPARED_SUM;
}

uint64_t BytesOf(uint64_t numel, uint64_t element_bytes) {
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  return numel > most / element_bytes ? most : numel * element_bytes;
}

}  // namespace optstate::transport
