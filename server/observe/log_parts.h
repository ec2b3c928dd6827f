#ifndef OPTSTATE_SERVER_OBSERVE_LOG_PARTS_H_
#define OPTSTATE_SERVER_OBSERVE_LOG_PARTS_H_

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/observe/log_fields.h"

namespace optstate::observe {

// Limit of a key's length and of a value's; the rest is cut.
inline constexpr size_t kFieldBytesMax = 512;

// A line of the log, to be written as JSON or as logfmt.
struct LogLine {
  absl::Time time;
  absl::string_view level;    // "info"
  absl::string_view process;  // "supervisor" or "engine"
  pid_t pid = 0;
  absl::string_view job;  // an engine's; empty: the one that the message names
  absl::string_view message;
};

// The parts of a line that both forms have. They refer to the line's texts.
struct LogParts {
  std::string time;              // "2026-01-31T12:00:00.000000Z"
  absl::string_view job;         // empty: the line concerns none
  std::vector<LogField> fields;  // the first pair of each key, without `job`
  // The text before the pairs, see EventOf(). Empty also where `job` and
  // `fields` do not have all pairs of the message.
  absl::string_view event;
};

// Returns the parts of a line. Pairs are looked for in the first kLineBytesMax
// of the message.
LogParts PartsOf(const LogLine& line);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOG_PARTS_H_
