#ifndef OPTSTATE_SERVER_OBSERVE_LOG_LOGFMT_H_
#define OPTSTATE_SERVER_OBSERVE_LOG_LOGFMT_H_

#include <string>

#include "server/observe/log_parts.h"

namespace optstate::observe {

// Returns the line as logfmt, without an end of line:
//
//   ts=2026-01-31T12:00:00.000000Z level=info event="job registered" job=a
//   world_size=2 pid=7 process=engine
//
// "event" is the text before the pairs `key=value` of the message. It is the
// whole message where that has no pairs, has text among them or behind them, or
// has more than are shown: nothing is left out then but what is cut. "job" and
// the pairs are as in ToJson(). A pair whose key is one of the line's own
// (ts, level, event, job, pid, process) is shown as `fields.KEY`, so that no
// text of a peer can stand for them.
//
// A value stands in quotes, with the escapes of JSON, unless it is of visible
// ASCII without quotes, backslashes and '='. The event is cut at kLineBytesMax,
// and the pairs at as much.
std::string ToLogfmt(const LogLine& line);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOG_LOGFMT_H_
