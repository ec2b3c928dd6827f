#ifndef OPTSTATE_CLIENT_CTL_NODES_COMPARE_H_
#define OPTSTATE_CLIENT_CTL_NODES_COMPARE_H_

#include <map>
#include <string>

#include "absl/types/span.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::ctl {

// The jobs of one node, as it was asked for them twice: the second time when
// all nodes had answered the first question.
struct NodeJobs {
  v1::ListJobsReply first;
  v1::ListJobsReply second;
};

// Returns, by job, in what the nodes that have a job of this name differ:
// "steps 7 and 9, phases ready and failed". Nodes that take a step together are
// one step apart for a moment, which does not count while ranks are attached.
// Values that an engine did not say are compared with nothing.
std::map<std::string, std::string> FindDifferences(
    absl::Span<const NodeJobs> nodes);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_NODES_COMPARE_H_
