#include "server/scheduler/workers/worker_placement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/scheduler/workers/available_cores.h"

namespace optstate::scheduler {
namespace {

enum class Binding { kNone, kNode, kCpu };

// A processor and the node that it is on.
struct Place {
  const CpuNode* node;
  int cpu;
};

std::vector<Place> PlacesOf(const std::vector<CpuNode>& nodes) {
  std::vector<Place> places;
  for (const CpuNode& node : nodes) {
    for (const int cpu : node.cpus) places.push_back({&node, cpu});
  }
  return places;
}

Binding BindingOf(const PlacementRequest& request, int cpus,
                  std::string* description) {
  if (request.pinning == Pinning::kNever) {
    *description = "not bound, as the configuration says";
    return Binding::kNone;
  }
  if (request.quota_cores < cpus) {
    *description = absl::StrCat("not bound, because a quota gives them ",
                                request.quota_cores, " of ", cpus, " cores");
    return Binding::kNone;
  }
  if (request.workers > cpus) {
    *description =
        absl::StrCat("not bound, because they share ", cpus, " cores");
    return Binding::kNone;
  }
  if (request.workers == cpus &&
      (request.pinning == Pinning::kAlways || cpus < request.online_cpus)) {
    *description = "bound to a core each";
    return Binding::kCpu;
  }
  if (request.nodes.size() > 1) {
    *description =
        absl::StrCat("bound to their NUMA node, of ", request.nodes.size());
    return Binding::kNode;
  }
  *description = "not bound: one NUMA node, and its cores are not ours alone";
  return Binding::kNone;
}

}  // namespace

WorkerPlacement PlaceWorkers(const PlacementRequest& request) {
  const std::vector<Place> places = PlacesOf(request.nodes);
  WorkerPlacement placement;
  const Binding binding = BindingOf(request, static_cast<int>(places.size()),
                                    &placement.description);
  const auto workers = static_cast<size_t>(std::max(request.workers, 1));
  placement.seats.resize(workers);
  // An unbound worker is near no memory in particular.
  if (binding == Binding::kNone) return placement;
  for (size_t i = 0; i < workers; ++i) {
    const Place& place = places[i * places.size() / workers];
    WorkerPlacement::Seat& seat = placement.seats[i];
    seat.node = place.node->node;
    if (i == 0) continue;
    seat.cpus = binding == Binding::kCpu ? std::vector<int>{place.cpu}
                                         : place.node->cpus;
  }
  return placement;
}

WorkerPlacement PlaceWorkersHere(int workers, Pinning pinning) {
  const std::vector<int> cpus = AllowedCpus();
  PlacementRequest request;
  request.workers = workers;
  request.nodes = NodesBelow("", cpus);
  request.online_cpus = OnlineCpusBelow("");
  request.quota_cores = CgroupCoresBelow("", static_cast<int>(cpus.size()));
  request.pinning = pinning;
  return PlaceWorkers(request);
}

}  // namespace optstate::scheduler
