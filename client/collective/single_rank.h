#ifndef OPTSTATE_CLIENT_COLLECTIVE_SINGLE_RANK_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SINGLE_RANK_H_

#include <memory>

#include "client/collective/collective.h"

namespace optstate::client {

// Makes the collective of a process that trains alone: sums are copies, and
// nothing waits. Host memory.
std::unique_ptr<Collective> MakeSingleRank();

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SINGLE_RANK_H_
