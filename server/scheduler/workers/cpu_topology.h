#ifndef OPTSTATE_SERVER_SCHEDULER_WORKERS_CPU_TOPOLOGY_H_
#define OPTSTATE_SERVER_SCHEDULER_WORKERS_CPU_TOPOLOGY_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace optstate::scheduler {

// Describes processors, by the kernel's numbers and from its files.
//
// hwloc is not used, because its archive also opens every installed hwloc
// plugin: the engine would load CUDA, OpenCL and X11 for a question that three
// files answer.

// The processors of a set that are on one NUMA node, ascending.
struct CpuNode {
  int node = 0;
  std::vector<int> cpus;
};

// Parses a set as the kernel writes it, "0-3,8". Text that is no number is left
// out.
std::vector<int> ParseCpuList(absl::string_view text);

// Returns the processors on which this thread may run: its affinity mask, which
// the cpuset bounds. Never empty.
std::vector<int> AllowedCpus();

// Returns `cpus` by node, nodes ascending; `root` is "" or a test's folder of
// files. Returns one node 0 where the kernel does not report nodes.
std::vector<CpuNode> NodesBelow(const std::string& root,
                                absl::Span<const int> cpus);

// Returns the number of online processors; 0: the kernel does not report it.
int OnlineCpusBelow(const std::string& root);

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_WORKERS_CPU_TOPOLOGY_H_
