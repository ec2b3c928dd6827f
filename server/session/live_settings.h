#ifndef OPTSTATE_SERVER_SESSION_LIVE_SETTINGS_H_
#define OPTSTATE_SERVER_SESSION_LIVE_SETTINGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/types.pb.h"
#include "server/session/durability/job_durability.h"
#include "server/session/durability/record_moves.h"
#include "server/session/job_context.h"
#include "server/session/job_registrar.h"
#include "server/session/state_lock.h"

namespace optstate::session {

// Changes settings of a job while it trains, between two passes: its host
// budget, how often it is durable, how its records are split over directories,
// and what devices update and keep. Records move to other directories beside
// the steps (RecordMoves), and other settings may be changed meanwhile.
//
// The description of the job says what is in force, and is replaced as a whole.
// Frames are there before it names them, and go after it no longer does. A
// process that is killed in between leaves more frames than are described; the
// next engine gives them up (JobDurability::FitFrames).
//
// Threads: not thread-safe; the job's lock guards it, and is given up while
// frames are changed and records move.
class LiveSettings {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    JobDurability* durability;
    JobRegistrar* registrar;
    StateLock* state_lock;
  };
  explicit LiveSettings(const Rooms& rooms)
      : job_(*rooms.job),
        durability_(*rooms.durability),
        registrar_(*rooms.registrar),
        state_lock_(*rooms.state_lock),
        moves_(rooms.job) {}

  // See Job::Set.
  absl::StatusOr<v1::SetJobReply> Set(const v1::SetJobRequest& request);

 private:
  absl::StatusOr<v1::SetJobReply> Split(const v1::SetJobRequest& request);
  absl::StatusOr<std::vector<uint32_t>> WeightsOf(
      const v1::SetJobRequest& request);
  absl::Status Use(const v1::StorageSettings& storage);
  absl::Status Describe(const v1::StorageSettings& storage,
                        const std::string& description);
  absl::Status Grow(const v1::StorageSettings& storage,
                    const std::string& description);
  absl::Status WriteDescription(const v1::StorageSettings& storage,
                                const std::string& description);
  v1::SetJobReply Reply() const;

  JobContext& job_;
  JobDurability& durability_;
  JobRegistrar& registrar_;
  StateLock& state_lock_;
  RecordMoves moves_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_LIVE_SETTINGS_H_
