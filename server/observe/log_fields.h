#ifndef OPTSTATE_SERVER_OBSERVE_LOG_FIELDS_H_
#define OPTSTATE_SERVER_OBSERVE_LOG_FIELDS_H_

#include <vector>

#include "absl/strings/string_view.h"

namespace optstate::observe {

// A pair `key=value` or `key="value"` of a line, without the quotes.
struct LogField {
  absl::string_view key;
  absl::string_view value;
};

// Returns the pairs of a line in their order. A key is of small letters, digits
// and underscores. A value without quotes ends at a space. A quoted one ends at
// the quote before the next pair or the end of the line, so that it may hold
// quotes itself. The result refers to `line`.
std::vector<LogField> FieldsOf(absl::string_view line);

// Returns the text of a line before its pairs, which are `fields`, without the
// colon at its end. Empty: the line has no such text, it has other text among
// the pairs or behind them, or the first pair is inside quotes.
absl::string_view EventOf(absl::string_view line,
                          const std::vector<LogField>& fields);

// Returns the job that a line names first, as the daemon's lines do: `job
// NAME:`, `for job NAME`, `job "NAME"`, `job=NAME` or `job="NAME"`. Empty:
// none.
absl::string_view JobOf(absl::string_view line);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOG_FIELDS_H_
