#ifndef OPTSTATE_PROTO_TYPES_UTF8_H_
#define OPTSTATE_PROTO_TYPES_UTF8_H_

#include "absl/strings/string_view.h"

namespace optstate {

// Returns whether a protobuf `string` can hold the text: well-formed UTF-8
// (Unicode 15.0, table 3-7), without surrogates and overlong forms.
bool IsUtf8(absl::string_view text);

}  // namespace optstate

#endif  // OPTSTATE_PROTO_TYPES_UTF8_H_
