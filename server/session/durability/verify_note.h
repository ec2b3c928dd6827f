#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_VERIFY_NOTE_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_VERIFY_NOTE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace optstate::session {

// The note in a job's folder on a disk about the last verification of all of
// its records, for the next engine. Bytes: FORMAT.md.
struct VerifyNote {
  uint64_t incarnation = 0;  // of the job
  // The end of that verification; of a job without one, when its records began
  // to be.
  absl::Time counted_from;
  bool is_verified = false;
  uint64_t damaged_records = 0;

  bool operator==(const VerifyNote&) const = default;
};

// Nullopt: there is none. DATA_LOSS: it is not what was written.
absl::StatusOr<std::optional<VerifyNote>> ReadVerifyNote(
    const std::string& folder);
absl::Status WriteVerifyNote(const std::string& folder, const VerifyNote& note);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_VERIFY_NOTE_H_
