#include "client/ctl/nodes_compare.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/ctl/names.h"

namespace optstate::ctl {
namespace {

// One job on one node.
struct Looks {
  const v1::Job* first = nullptr;
  const v1::Job* second = nullptr;
};

// Between the two questions each node was at one step from `first` to `second`,
// all at the same instant.
std::string StepsText(const std::vector<Looks>& of_nodes) {
  uint64_t behind = std::numeric_limits<uint64_t>::max();
  uint64_t ahead = 0;
  bool has_ranks = false;
  for (const Looks& looks : of_nodes) {
    has_ranks = has_ranks || looks.second->ranks_unknown() ||
                looks.second->session_count() != 0;
    if (looks.first->state_unknown() || looks.second->state_unknown()) continue;
    behind = std::min(behind, looks.second->committed_step());
    ahead = std::max(ahead, looks.first->committed_step());
  }
  if (ahead <= behind || (ahead - behind == 1 && has_ranks)) return "";
  return absl::StrCat("steps ", behind, " and ", ahead);
}

// Returns "WHAT a and b" when there is more than one value.
std::string ValuesText(const char* what, const std::set<std::string>& values) {
  if (values.size() < 2) return "";
  return absl::StrCat(what, " ", absl::StrJoin(values, " and "));
}

std::string PhasesText(const std::vector<Looks>& of_nodes) {
  std::set<std::string> phases;
  for (const Looks& looks : of_nodes) {
    if (looks.first->ranks_unknown() || looks.second->ranks_unknown()) continue;
    // A phase that has just changed may change on the other nodes too.
    if (looks.first->phase() != looks.second->phase()) continue;
    phases.insert(Name(looks.second->phase()));
  }
  return ValuesText("phases", phases);
}

std::string SettingsText(const std::vector<Looks>& of_nodes) {
  std::set<std::string> optimizers, worlds, owners;
  for (const Looks& looks : of_nodes) {
    owners.insert(absl::StrCat(looks.second->uid()));
    if (looks.second->state_unknown()) continue;
    optimizers.insert(Name(looks.second->optimizer()));
    worlds.insert(absl::StrCat(looks.second->world_size()));
  }
  const std::string texts[] = {ValuesText("optimizers", optimizers),
                               ValuesText("numbers of ranks", worlds),
                               ValuesText("owners", owners)};
  std::vector<std::string> said;
  std::copy_if(std::begin(texts), std::end(texts), std::back_inserter(said),
               [](const std::string& text) { return !text.empty(); });
  return absl::StrJoin(said, ", ");
}

}  // namespace

std::map<std::string, std::string> FindDifferences(
    absl::Span<const NodeJobs> nodes) {
  std::map<std::string, std::vector<Looks>> by_name;
  for (const NodeJobs& node : nodes) {
    std::map<std::string, const v1::Job*> before;
    for (const v1::Job& job : node.first.jobs()) before[job.name()] = &job;
    for (const v1::Job& job : node.second.jobs()) {
      const auto found = before.find(job.name());
      if (found == before.end()) continue;
      by_name[job.name()].push_back({found->second, &job});
    }
  }
  std::map<std::string, std::string> differences;
  for (const auto& [name, of_nodes] : by_name) {
    if (of_nodes.size() < 2) continue;
    std::vector<std::string> said;
    for (std::string text :
         {StepsText(of_nodes), PhasesText(of_nodes), SettingsText(of_nodes)}) {
      if (!text.empty()) said.push_back(std::move(text));
    }
    if (!said.empty()) differences[name] = absl::StrJoin(said, ", ");
  }
  return differences;
}

}  // namespace optstate::ctl
