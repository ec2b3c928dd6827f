#ifndef OPTSTATE_SERVER_OBSERVE_LOG_JSON_H_
#define OPTSTATE_SERVER_OBSERVE_LOG_JSON_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"
#include "server/observe/log_parts.h"

namespace optstate::observe {

// Returns the line as one object, without an end of line:
//
//   {"time":"2026-01-31T12:00:00.000000Z","level":"info","process":"engine",
//    "pid":7,"job":"a","message":"drained: job=a result=\"OK\"",
//    "fields":{"result":"OK"}}
//
// "job" is there when the line concerns one, and "fields" has the pairs
// `key=value` of the message, if there are any: all as strings, the first one
// of a key, and not the job again. `optctl logs` reads what stands before
// "fields" (client/ctl/log_line.h).
//
// The message is cut at kLineBytesMax, and the fields at as much.
std::string ToJson(const LogLine& line);

// Escapes text for a JSON string: it stays on one line and cannot move a
// terminal's cursor. What is no UTF-8 becomes U+FFFD. Text beyond `bytes_max`
// of the result is cut and counted.
std::string JsonText(absl::string_view text, size_t bytes_max);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOG_JSON_H_
