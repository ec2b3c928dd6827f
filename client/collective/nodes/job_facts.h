#ifndef OPTSTATE_CLIENT_COLLECTIVE_NODES_JOB_FACTS_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NODES_JOB_FACTS_H_

#include <string>

#include "client/session_types.h"

namespace optstate::client {

// Returns, as text, a line for each thing that changes what a step of this job
// does, in an order that is the same on all ranks: what parts nodes would
// otherwise show at the first step, as another digest, which does not say why.
std::string JobFacts(const SessionOptions& options);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NODES_JOB_FACTS_H_
