#include "tests/simulation/measured_run.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "tests/simulation/process_memory.h"

namespace optstate::simulation {
namespace {

// Ranks that have not ended by then never will.
constexpr absl::Duration kPatience = absl::Hours(4);

}  // namespace

absl::StatusOr<std::unique_ptr<MeasuredRun>> MeasuredRun::Begin(
    absl::string_view scenario, const ScenarioOptions& options,
    uint32_t spares) {
  std::unique_ptr<MeasuredRun> run(new MeasuredRun());
  run->report_.scenario = std::string(scenario);
  run->report_.seed = options.seed;
  run->report_.nodes = options.nodes;
  run->report_.ranks = options.ranks;
  run->cpu_before_ = CpuTime();
  OPTSTATE_ASSIGN_OR_RETURN(run->cluster_,
                            Cluster::Make({.nodes = options.nodes,
                                           .ranks = options.ranks,
                                           .spares = spares,
                                           .seed = options.seed,
                                           .mutation = options.mutation,
                                           .model = options.model}));
  run->began_at_ = run->cluster_->world().queue.now();
  return run;
}

absl::Status MeasuredRun::RunRanks(const std::vector<uint32_t>& nodes,
                                   absl::Duration spread, uint64_t last_step) {
  cluster_->StartRanks(nodes, spread, last_step);
  OPTSTATE_RETURN_IF_ERROR(cluster_->RunUntilEnded(kPatience));
  return cluster_->FirstError();
}

void MeasuredRun::Expect(bool holds, absl::string_view what) {
  if (!holds) report_.violations.emplace_back(what);
}

void MeasuredRun::ExpectTold(uint64_t first, uint64_t last, uint64_t nodes) {
  const uint64_t expected = nodes * report_.ranks;
  for (uint64_t step = first; step <= last; ++step) {
    const uint64_t told = cluster_->book().told(step);
    if (told == expected) continue;
    return Expect(false, absl::StrCat("of step ", step, " ", told,
                                      " ranks were told, not ", expected));
  }
}

void MeasuredRun::Count(absl::string_view name, uint64_t count) {
  report_.counts.emplace_back(std::string(name), count);
}

Report MeasuredRun::End(const std::vector<uint32_t>& nodes, uint64_t step) {
  report_.cpu_ms_per_node =
      absl::ToDoubleMilliseconds(CpuTime() - cpu_before_) / report_.nodes;
  report_.heap_bytes_per_node = cluster_->heap_bytes() / report_.nodes;
  report_.file_bytes_per_node = cluster_->file_bytes() / nodes.size();
  report_.log_lines = cluster_->log().lines();
  report_.log_lines.resize(report_.nodes);  // without the spares
  report_.steps = step;
  report_.rounds_per_step =
      static_cast<double>(cluster_->vote_rounds()) / static_cast<double>(step);
  World& world = cluster_->world();
  report_.simulated_s = absl::ToDoubleSeconds(world.queue.now() - began_at_);
  report_.events = world.queue.events_run();
  const absl::Status states = cluster_->CheckStates(nodes, step);
  Expect(states.ok(), states.ToString());
  const std::string& difference = cluster_->book().first_difference();
  Expect(difference.empty(), difference);
  const SimulatedNetwork::Counts& network = cluster_->network().counts();
  Count("messages", network.messages);
  Count("sent again", network.sent_again);
  Count("held by a partition", network.held);
  report_.trace_hash = world.trace.hash();
  return std::move(report_);
}

}  // namespace optstate::simulation
