#ifndef OPTSTATE_PROTO_TYPES_GRPC_STATUS_H_
#define OPTSTATE_PROTO_TYPES_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace optstate {

// The only conversion between Abseil's statuses and gRPC's. The codes have the
// same numbers; messages are kept, gRPC's binary details are not. A code that
// absl does not know becomes UNKNOWN.
grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_GRPC_STATUS_H_
