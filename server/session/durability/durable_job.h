#ifndef OPTSTATE_SERVER_SESSION_DURABILITY_DURABLE_JOB_H_
#define OPTSTATE_SERVER_SESSION_DURABILITY_DURABLE_JOB_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/types/layout.h"
#include "storage/format/control_file.h"
#include "storage/state_store.h"

namespace optstate::session {

// The part of a durable commit that describes a job beside its records, kept in
// DurableCommit::job.
struct DurableJob {
  std::string description;  // see SerializeDescription()
  storage::StepRecord record;
  std::vector<int64_t> step_counts;  // by parameter
  std::vector<double> scalars;       // by parameter, or empty
};

// Returns the size of the text of a job with this layout and description.
uint64_t DurableJobBytes(const Layout& layout, absl::string_view description);

// Writes the text to `bytes`, in place of what is there; takes the counts and
// scalars of the store.
void SerializeDurableJob(absl::string_view description,
                         const storage::StepRecord& record,
                         const storage::StateStore& store, std::string* bytes);
// Returns the text of a job whose counts and scalars are given.
std::string SerializeDurableJob(const DurableJob& job);
// Returns DATA_LOSS when the bytes are none that SerializeDurableJob made.
absl::StatusOr<DurableJob> ParseDurableJob(absl::string_view bytes);

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_DURABILITY_DURABLE_JOB_H_
