#ifndef OPTSTATE_SERVER_SCHEDULER_CPU_TOPOLOGY_H_
#define OPTSTATE_SERVER_SCHEDULER_CPU_TOPOLOGY_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate {

// Processors, by the kernel's numbers and from its files.
//
// Not by hwloc, whose archive also opens every hwloc plugin that is installed:
// the engine would get CUDA, OpenCL and X11 for a question that three files
// answer.

// Those of some set that are on one NUMA node, ascending.
struct CpuNode {
  int node = 0;
  std::vector<int> cpus;
};

// "0-3,8" as the kernel writes sets. What is no number is left out.
std::vector<int> ParseCpuList(absl::string_view text);

// Where this thread may run: its affinity mask, which the cpuset bounds. Never
// empty.
std::vector<int> AllowedCpus();

// `cpus` by node, nodes ascending; `root` is "" or where a test has its files.
// One node 0 where the kernel tells nothing of nodes.
std::vector<CpuNode> NodesBelow(const std::string& root,
                                absl::Span<const int> cpus);

// How many the machine has online; 0: the kernel does not tell.
int OnlineCpusBelow(const std::string& root);

}  // namespace optstate

#endif  // OPTSTATE_SERVER_SCHEDULER_CPU_TOPOLOGY_H_
