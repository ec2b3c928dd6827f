#ifndef OPTSTATE_SERVER_SESSION_JOB_OPENER_H_
#define OPTSTATE_SERVER_SESSION_JOB_OPENER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/session/durability/job_durability.h"
#include "server/session/job_context.h"
#include "server/session/job_registrar.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/recovery/job_recovery.h"
#include "server/session/recovery/recovered_gradients.h"
#include "server/session/transfer/load_applier.h"
#include "storage/durable_commit.h"

namespace optstate::session {

// Adopts the files of a former engine when a job is opened, or makes them anew
// from the last durable commit on disk.
//
// Threads: not thread-safe; the job's lock guards it.
class JobOpener {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    JobDurability* durability;
    RecoveredGradients* gradients;
    JobRecovery* recovery;
    LoadApplier* applier;
    JobRegistrar* registrar;
  };
  explicit JobOpener(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        durability_(*rooms.durability),
        gradients_(*rooms.gradients),
        recovery_(*rooms.recovery),
        applier_(*rooms.applier),
        registrar_(*rooms.registrar) {}

  // Called once, before other calls. An error is why there can be no job here;
  // a job that has failed is adopted.
  absl::Status Adopt();

 private:
  absl::Status AdoptFiles();
  absl::Status AddWayBack(const absl::Status& status) const;
  absl::Status SettleArrangement(v1::StorageSettings* storage) const;
  void RepairScaler();
  absl::Status GiveUpMemoryOfFormerBoot() const;
  absl::Status GiveUpMemoryIfAsked() const;
  absl::Status RestoreFromDisk();
  absl::StatusOr<storage::DurableCommit> FindDurable() const;
  void DropNeverDurable() const;
  absl::Status CastParametersFromMasters();
  absl::Status DropHalfRestored() const;

  JobContext& job_;
  RankRoster& ranks_;
  JobDurability& durability_;
  RecoveredGradients& gradients_;
  JobRecovery& recovery_;
  LoadApplier& applier_;
  JobRegistrar& registrar_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_JOB_OPENER_H_
