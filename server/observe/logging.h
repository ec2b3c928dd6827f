#ifndef OPTSTATE_SERVER_OBSERVE_LOGGING_H_
#define OPTSTATE_SERVER_OBSERVE_LOGGING_H_

#include <string>

#include "absl/strings/string_view.h"

namespace optstate::observe {

// How a line is written.
enum class LogFormat {
  kText,    // for people
  kJson,    // an object a line, see ToJson()
  kLogfmt,  // pairs of key and value, see ToLogfmt()
};

// Makes spdlog write one line per event to stderr:
//
//   2026-01-31T12:00:00.000Z info  optstated[123] job a: created for uid 1000
//
// `process` is "optstated", or "engine JOB". When stderr is the systemd journal
// ($JOURNAL_STREAM), time and program are left to it: the line starts with its
// priority ("<6>"), and an engine's with "engine JOB: " after that, by which
// `optctl logs JOB` finds it. A line of JSON or logfmt is whole there too,
// after its priority, which the journal takes off.
void SetUpLogging(absl::string_view process, absl::string_view level,
                  LogFormat format = LogFormat::kText);

// Returns the format of the last SetUpLogging(); before it, kText.
LogFormat CurrentLogFormat();

// Sets the level: trace, debug, info, warn or error; anything else is taken as
// info (the configuration was checked before).
void SetLogLevel(absl::string_view level);

// Returns whether stderr is the journal's stream named in `journal_stream`, the
// value of $JOURNAL_STREAM ("DEVICE:INODE").
bool IsJournal(const char* journal_stream, int fd);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOGGING_H_
