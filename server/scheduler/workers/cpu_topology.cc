#include "server/scheduler/workers/cpu_topology.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace optstate::scheduler {
namespace {

constexpr int kCpusMax = 1 << 16;

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<int> FirstCpus(int count) {
  std::vector<int> cpus(static_cast<size_t>(std::max(count, 1)));
  for (size_t i = 0; i < cpus.size(); ++i) cpus[i] = static_cast<int>(i);
  return cpus;
}

}  // namespace

std::vector<int> ParseCpuList(absl::string_view text) {
  std::vector<int> cpus;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::pair<absl::string_view, absl::string_view> ends =
        absl::StrSplit(part, absl::MaxSplits('-', 1));
    int first = 0;
    if (!absl::SimpleAtoi(ends.first, &first)) continue;
    int last = first;
    if (!ends.second.empty() && !absl::SimpleAtoi(ends.second, &last)) continue;
    for (int cpu = first; cpu <= last && cpu < kCpusMax; ++cpu) {
      cpus.push_back(cpu);
    }
  }
  return cpus;
}

std::vector<int> AllowedCpus() {
  // The kernel refuses a set that is smaller than its own.
  for (int size = CPU_SETSIZE; size <= kCpusMax; size *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(
        CPU_ALLOC(static_cast<size_t>(size)),
        [](cpu_set_t* p) { CPU_FREE(p); });
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(size));
    if (::sched_getaffinity(0, bytes, set.get()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    std::vector<int> cpus;
    for (int cpu = 0; cpu < size; ++cpu) {
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set.get())) {
        cpus.push_back(cpu);
      }
    }
    return cpus;
  }
  return FirstCpus(static_cast<int>(std::thread::hardware_concurrency()));
}

std::vector<CpuNode> NodesBelow(const std::string& root,
                                absl::Span<const int> cpus) {
  const std::string folder = root + "/sys/devices/system/node";
  std::vector<CpuNode> nodes;
  for (const int node : ParseCpuList(FirstLine(folder + "/online"))) {
    const std::vector<int> all = ParseCpuList(
        FirstLine(absl::StrCat(folder, "/node", node, "/cpulist")));
    CpuNode here{node, {}};
    for (const int cpu : cpus) {
      if (std::binary_search(all.begin(), all.end(), cpu)) {
        here.cpus.push_back(cpu);
      }
    }
    if (!here.cpus.empty()) nodes.push_back(std::move(here));
  }
  size_t placed = 0;
  for (const CpuNode& node : nodes) placed += node.cpus.size();
  if (placed == cpus.size()) return nodes;
  return {CpuNode{0, {cpus.begin(), cpus.end()}}};
}

int OnlineCpusBelow(const std::string& root) {
  return static_cast<int>(
      ParseCpuList(FirstLine(root + "/sys/devices/system/cpu/online")).size());
}

}  // namespace optstate::scheduler
