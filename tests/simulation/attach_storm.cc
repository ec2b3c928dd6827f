#include <memory>
#include <vector>

#include "proto/types/status_macros.h"
#include "tests/simulation/measured_run.h"
#include "tests/simulation/scenarios.h"

namespace optstate::simulation {
namespace {

// Steps of each of the two generations of ranks.
constexpr uint64_t kSteps = 3;
// Scripts begin within this time, as far apart as a launcher starts them.
constexpr absl::Duration kSpread = absl::Milliseconds(10);
constexpr absl::Duration kFloodTime = absl::Seconds(1);

}  // namespace

absl::StatusOr<Report> RunAttachStorm(const ScenarioOptions& options) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<MeasuredRun> run,
                            MeasuredRun::Begin("attach_storm", options));
  Cluster& cluster = run->cluster();
  const std::vector<uint32_t> nodes = cluster.LiveNodes();
  OPTSTATE_RETURN_IF_ERROR(run->RunRanks(nodes, kSpread, kSteps));
  run->report().attach_ms = cluster.TakeAttachTimesMs();

  cluster.BeginFlood(nodes, options.knocks, kFloodTime);
  OPTSTATE_RETURN_IF_ERROR(run->RunRanks(nodes, kSpread, 2 * kSteps));
  OPTSTATE_RETURN_IF_ERROR(cluster.world().queue.RunFor(2 * kFloodTime));
  run->report().attach_again_ms = cluster.TakeAttachTimesMs();

  run->ExpectTold(1, 2 * kSteps, nodes.size());
  const uint64_t ranks = nodes.size() * options.ranks;
  run->Expect(run->report().attach_ms.size() == ranks &&
                  run->report().attach_again_ms.size() == ranks,
              "not every rank has attached once in each storm");
  uint64_t refused = 0;
  uint64_t looks = 0;
  for (const uint32_t node : nodes) {
    const SimulatedDaemon::Counts& counts = cluster.daemon(node).counts();
    refused += counts.refused;
    looks += counts.looks;
    // A single rank does not fill the places.
    run->Expect(options.ranks == 1 || counts.looks >= 1,
                "a daemon never looked for the sessions of the first storm, "
                "and yet had room for the second");
    run->Expect(counts.sessions_max <= options.ranks + 2,
                "a daemon had more sessions than user_sessions_max");
    run->Expect(counts.engines == 1, "a daemon started more than one engine");
  }
  // The first generation's first ranks ask for a job that is not there.
  run->Expect(
      refused == nodes.size() * (uint64_t{options.knocks} + 1),
      "other Hellos were refused than those of the other user, and one of each "
      "node that asked for a job before there was one");
  run->Count("refused", refused);
  run->Count("looks", looks);
  return run->End(nodes, 2 * kSteps);
}

}  // namespace optstate::simulation
