#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_APPLIER_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_APPLIER_H_

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/types/load_end.h"
#include "server/session/durability/job_durability.h"
#include "server/session/job_context.h"
#include "server/session/transfer/load_log_room.h"
#include "server/session/transfer/load_rounds.h"
#include "server/session/transfer/load_state.h"
#include "storage/format/load_log.h"

namespace optstate::session {

// Makes a load that all ranks have finished the job's state, whole or not at
// all, whatever instruction the engine dies at.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while the
// state is written.
class LoadApplier {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    LoadState* load;
    LoadLogRoom* log;
    LoadRounds* rounds;
    JobDurability* durability;
  };
  explicit LoadApplier(const Rooms& rooms)
      : job_(*rooms.job),
        load_(*rooms.load),
        log_(*rooms.log),
        rounds_(*rooms.rounds),
        durability_(*rooms.durability) {}

  // Seals and applies the log. DATA_LOSS: the load leaves out a part of a
  // damaged record; the job is FAILED then. ABORTED: a part of one was left out
  // because the record had it; the job is unchanged, and the log empty. An
  // engine that dies before the seal leaves the job unchanged; after the seal,
  // the next engine applies all of it again.
  // begin_at: where the job, which has taken no step, is with the record of the
  // load. Nothing must be staged then, so that the record is all of the load.
  absl::Status CommitLoad(const std::optional<BeginAt>& begin_at);
  // Adopts a former engine's load when the job is opened.
  absl::Status AdoptLoad();
  // Adopts the load in which an engine of a former build died; such a build
  // overwrote masters of a READY job in place, a few at a time.
  absl::Status AdoptLoadedMasters();

 private:
  absl::Status ApplyLoad(absl::Span<const storage::LoadLogRecord> records);
  absl::Status WriteLoad(absl::Span<const storage::LoadLogRecord> records);
  void RecordLoad(const std::optional<BeginAt>& begin_at);
  absl::StatusOr<std::vector<storage::LoadLogRecord>> OpenSealedLoad();
  absl::Status CheckLoadRecords(
      absl::Span<const storage::LoadLogRecord> records) const;

  JobContext& job_;
  LoadState& load_;
  LoadLogRoom& log_;
  LoadRounds& rounds_;
  JobDurability& durability_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_APPLIER_H_
