#ifndef OPTSTATE_PROTO_TYPES_VERSION_H_
#define OPTSTATE_PROTO_TYPES_VERSION_H_

#include "absl/strings/string_view.h"

namespace optstate {

// The version of the whole project: daemon, client, wheel and optctl.
inline constexpr absl::string_view kVersion = "0.1.0";

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_VERSION_H_
