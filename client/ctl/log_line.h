#ifndef OPTSTATE_CLIENT_CTL_LOG_LINE_H_
#define OPTSTATE_CLIENT_CTL_LOG_LINE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace optstate::ctl {

// Returns a line of journalctl as a daemon with `log_format: text` would have
// written it: "TIME HOST optstated[7]: {...}" becomes "TIME HOST optstated[7]:
// engine gpt: MESSAGE". A line that has no object of the daemon's is returned
// as it is. (The objects are made by server/observe/log_json.h.)
//
// Quotes and backslashes of the message are shown as they are, and its control
// characters escaped, as the object has them: no text moves a terminal's
// cursor.
std::string TextOfLogLine(absl::string_view line);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_LOG_LINE_H_
