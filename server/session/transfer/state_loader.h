#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_STATE_LOADER_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_STATE_LOADER_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "optstate/v1/types.pb.h"
#include "proto/types/dtype.h"
#include "proto/types/load_end.h"
#include "server/session/drain_gate.h"
#include "server/session/job_context.h"
#include "server/session/ranks/rank_roster.h"
#include "server/session/steps/agreement.h"
#include "server/session/steps/step_stager.h"
#include "server/session/steps/step_state.h"
#include "server/session/transfer/element_access.h"
#include "server/session/transfer/load_applier.h"
#include "server/session/transfer/load_log_room.h"
#include "server/session/transfer/load_rounds.h"
#include "server/session/transfer/load_state.h"

namespace optstate::session {

// Loads state, such as a checkpoint's, into a job. Parameters that have a valid
// state are loaded beside it (StagedLoad) and get all new values at once
// (LoadApplier). Parameters without one, in a new job or an extended layout,
// are loaded in place.
//
// Threads: not thread-safe; the job's lock guards it, and is given up while a
// call waits for the end of a pause, or records are read or written.
class StateLoader {
 public:
  // The rooms below this one; they must outlive it.
  struct Rooms {
    JobContext* job;
    RankRoster* ranks;
    StepState* step;
    StepStager* stager;
    Agreement* agreement;
    LoadState* load;
    LoadLogRoom* log;
    LoadRounds* rounds;
    LoadApplier* applier;
    DrainGate* gate;
  };
  explicit StateLoader(const Rooms& rooms)
      : job_(*rooms.job),
        ranks_(*rooms.ranks),
        step_(*rooms.step),
        stager_(*rooms.stager),
        agreement_(*rooms.agreement),
        load_(*rooms.load),
        log_(*rooms.log),
        rounds_(*rooms.rounds),
        applier_(*rooms.applier),
        gate_(*rooms.gate) {}

  absl::Status BeginLoad(uint32_t rank);
  absl::Status Load(uint32_t rank, v1::StateArray array, uint32_t parameter,
                    uint64_t begin, uint64_t numel, DType dtype,
                    absl::Span<const std::byte> data);
  void FinishLoad(uint32_t rank, uint64_t request_id, const LoadEnd& end);

 private:
  absl::Status CheckLoading(uint32_t rank) const;
  absl::Status CheckBegin(const LoadEnd& end) const;
  absl::Status CheckFinished() const;
  void NoteTouched(uint32_t parameter);
  absl::Status LoadNumbers(const ElementRange& range,
                           absl::Span<const std::byte> data);
  absl::Status LoadElements(uint32_t rank, const ElementRange& range,
                            DType dtype, absl::Span<const std::byte> data);
  absl::Status LoadInPlace(const ElementRange& block, const float* values);
  absl::Status StageBlock(const ElementRange& block, const float* values);

  JobContext& job_;
  RankRoster& ranks_;
  StepState& step_;
  StepStager& stager_;
  Agreement& agreement_;
  LoadState& load_;
  LoadLogRoom& log_;
  LoadRounds& rounds_;
  LoadApplier& applier_;
  DrainGate& gate_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_STATE_LOADER_H_
