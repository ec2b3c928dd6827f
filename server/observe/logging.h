#ifndef OPTSTATE_SERVER_OBSERVE_LOGGING_H_
#define OPTSTATE_SERVER_OBSERVE_LOGGING_H_

#include <string>

#include "absl/strings/string_view.h"

namespace optstate::observe {

// Makes spdlog write one line per event to stderr:
//
//   2026-01-31T12:00:00.000Z info  optstated[123] job a: created for uid 1000
//
// `process` is "optstated", or "engine JOB". When stderr is the systemd journal
// ($JOURNAL_STREAM), time and program are left to it: the line starts with its
// priority ("<6>"), and an engine's with "engine JOB: " after that, by which
// `optctl logs JOB` finds it.
void SetUpLogging(absl::string_view process, absl::string_view level);

// Sets the level: trace, debug, info, warn or error; anything else is taken as
// info (the configuration was checked before).
void SetLogLevel(absl::string_view level);

// Returns whether stderr is the journal's stream named in `journal_stream`, the
// value of $JOURNAL_STREAM ("DEVICE:INODE").
bool IsJournal(const char* journal_stream, int fd);

}  // namespace optstate::observe

#endif  // OPTSTATE_SERVER_OBSERVE_LOGGING_H_
