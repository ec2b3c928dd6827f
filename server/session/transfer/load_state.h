#ifndef OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_STATE_H_
#define OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_STATE_H_

#include "server/session/transfer/load_round.h"
#include "server/session/transfer/staged_load.h"

namespace optstate::session {

// Holds the load that is under way: its participants, and their values.
//
// Threads: not thread-safe; the job's lock guards it.
struct LoadState {
  LoadRound round;
  StagedLoad staged;  // of that round
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TRANSFER_LOAD_STATE_H_
