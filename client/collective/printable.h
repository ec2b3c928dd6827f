#ifndef OPTSTATE_CLIENT_COLLECTIVE_PRINTABLE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_PRINTABLE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace optstate::client {

// Returns a text that a peer has sent as it may stand in an error: control
// characters, which could forge lines of a log, become '?'.
inline std::string Printable(absl::string_view text) {
  std::string printable(text);
  for (char& each : printable) {
    const auto byte = static_cast<unsigned char>(each);
    if (byte < 0x20 || byte == 0x7F) each = '?';
  }
  return printable;
}

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_PRINTABLE_H_
