#ifndef OPTSTATE_CLIENT_COLLECTIVE_NODES_SETTLING_H_
#define OPTSTATE_CLIENT_COLLECTIVE_NODES_SETTLING_H_

#include "absl/status/status.h"
#include "client/collective/collective.h"
#include "client/collective/nodes/places.h"
#include "client/collective/nodes/resolution.h"
#include "client/session_types.h"

namespace optstate::client {

// Brings the nodes of a job to one step, before any rank attaches: asks each
// node's daemon how far its job is, resolves what is found (Resolve), brings
// the verdicts, and asks again until nothing is prepared. Collective.
//
// `options`: of the session that this rank is going to open. `kinds`: of the
// nodes, see Resolve(); empty: all nodes hold all parameters. Of one node alone
// with a kind, a prepared step whose norm is not noted is dropped.
//
// FAILED_PRECONDITION: the nodes cannot be brought to one step, or ranks of one
// node name different jobs. ABORTED: other ranks still take steps of the job.
// UNIMPLEMENTED: the nodes hold all parameters, and a step is prepared that is
// clipped by the norm of nodes which hold different ones.
absl::Status SettleNodes(Collective& collective, const Places& places,
                         const SessionOptions& options, Kinds kinds = {});

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_NODES_SETTLING_H_
