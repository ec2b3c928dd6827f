#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_LOG_ROOM_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_LOG_ROOM_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/session/job_context.h"
#include "server/session/transfer/load_state.h"
#include "storage/format/load_log.h"

namespace optstate::session {

// The file that holds a staged load: grows it within the job's limits, and
// drops it.
//
// Threads: not thread-safe; the job's lock guards it.
class LoadLogRoom {
 public:
  // The arguments must outlive this object.
  LoadLogRoom(JobContext* job, LoadState* load) : job_(*job), load_(*load) {}

  // Returns the header of a log that is begun now.
  storage::LoadLogHeader MakeLogHeader() const;
  // Gives the log room for so many bytes; RESOURCE_EXHAUSTED: there is none.
  absl::StatusOr<absl::Span<std::byte>> Grow(uint64_t bytes);
  // Empties the staged load and removes its file.
  void DropLog();

 private:
  absl::Status Reserve(uint64_t bytes, uint64_t bytes_max);

  JobContext& job_;
  LoadState& load_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_LOG_ROOM_H_
