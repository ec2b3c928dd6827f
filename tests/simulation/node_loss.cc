#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/types/status_macros.h"
#include "tests/simulation/measured_run.h"
#include "tests/simulation/scenarios.h"

namespace optstate::simulation {
namespace {

constexpr absl::Duration kSpread = absl::Milliseconds(100);
constexpr absl::Duration kPatience = absl::Hours(4);
// The step whose decision is on its way when nodes are lost. It is none that
// all skip.
constexpr uint64_t kLossStep = 4;
constexpr uint64_t kSteps = 12;
constexpr uint64_t kStepsAfterwards = 2;

// Draws `count` of the nodes.
std::vector<uint32_t> DrawNodes(std::vector<uint32_t> nodes, uint32_t count,
                                SeededDraw* draw) {
  for (uint32_t i = 0; i < count; ++i) {
    std::swap(nodes[i], nodes[i + draw->Below(nodes.size() - i)]);
  }
  nodes.resize(count);
  return nodes;
}

// Returns about how long the result of an all-gather takes down the tree.
absl::Duration TimeDownTheTree(const Model& model, uint64_t nodes,
                               uint64_t ranks) {
  constexpr double kContributionBytes = 48;
  const absl::Duration hop =
      model.network.most +
      absl::Seconds(kContributionBytes * static_cast<double>(nodes * ranks) /
                    model.network_bytes_per_s);
  int depth = 1;
  while ((uint64_t{1} << depth) < nodes) ++depth;
  return depth * hop;
}

// States in which ranks that have ended left their nodes, by number of nodes.
struct LeftBehind {
  uint64_t ahead = 0;          // have taken the step
  uint64_t prepared_next = 0;  // and have the one after it prepared
  uint64_t prepared = 0;       // have it prepared
  uint64_t neither = 0;
};

LeftBehind LookAt(Cluster* cluster, const std::vector<uint32_t>& nodes) {
  LeftBehind left;
  for (const uint32_t node : nodes) {
    const NodeLog::Scope scope = cluster->daemon(node).LogHere();
    session::Job* const job = cluster->daemon(node).job();
    absl::StatusOr<session::JobPosition> position =
        absl::UnavailableError("no engine");
    if (job != nullptr) position = job->Position();
    if (position.ok() && position->committed_step == kLossStep) {
      ++left.ahead;
      if (position->prepared.has_value()) ++left.prepared_next;
    } else if (position.ok() && position->prepared.has_value() &&
               position->prepared->step == kLossStep) {
      ++left.prepared;
    } else {
      ++left.neither;
    }
  }
  return left;
}

// Has a node without the job join the others: all ranks must be refused alike.
absl::Status JoinInVain(MeasuredRun* run, std::vector<uint32_t> nodes,
                        uint32_t newcomer) {
  nodes.push_back(newcomer);
  Cluster& cluster = run->cluster();
  cluster.StartRanks(nodes, kSpread, kSteps + kStepsAfterwards);
  OPTSTATE_RETURN_IF_ERROR(cluster.RunUntilEnded(kPatience));
  OPTSTATE_RETURN_IF_ERROR(
      cluster.world().queue.RunFor(cluster.world().model.rendezvous));
  run->Expect(cluster.CountOf(SimulatedRank::State::kFailed) ==
                  nodes.size() * cluster.ranks(),
              "not all ranks were refused when a node without the job joined");
  const absl::Status why = cluster.FirstError();
  run->Expect(
      absl::IsFailedPrecondition(why) &&
          absl::StrContains(
              why.message(),
              absl::StrCat("node ", nodes.size() - 1, ": no such job")),
      absl::StrCat("a node without the job was not named: ", why.ToString()));
  run->Expect(cluster.TakeAttachTimesMs().empty(),
              "a rank attached beside a node without the job");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Report> RunNodeLoss(const ScenarioOptions& options) {
  if (options.nodes < 4 || options.lost_nodes < 1 ||
      options.lost_nodes > options.nodes / 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "node_loss loses ", options.lost_nodes, " of ", options.nodes,
        " nodes: give 4 nodes or more (--nodes), and lose 1 to half of them "
        "(--lost-nodes)"));
  }
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<MeasuredRun> run,
      MeasuredRun::Begin("node_loss", options, /*spares=*/1));
  Cluster& cluster = run->cluster();
  World& world = cluster.world();
  const std::vector<uint32_t> nodes = cluster.LiveNodes();
  const std::vector<uint32_t> lost =
      DrawNodes(nodes, options.lost_nodes, &world.draw);
  // Early enough that some nodes are lost before they have passed the result
  // on.
  const absl::Duration window =
      TimeDownTheTree(options.model, options.nodes, options.ranks) / 2;

  cluster.StartRanks(nodes, kSpread, kSteps);
  cluster.group().set_on_result([&](const Round& round) {
    if (round.vote_step() != kLossStep) return;
    for (const uint32_t node : lost) {
      world.queue.After(world.draw.Between(absl::ZeroDuration(), window),
                        {.kind = EventKind::kOperator, .node = node},
                        [&cluster, node] { cluster.LoseNode(node); });
    }
  });
  OPTSTATE_RETURN_IF_ERROR(cluster.RunUntilEnded(kPatience));
  OPTSTATE_RETURN_IF_ERROR(cluster.FirstError());
  run->report().attach_ms = cluster.TakeAttachTimesMs();
  OPTSTATE_RETURN_IF_ERROR(world.queue.RunFor(world.model.rendezvous));

  const std::vector<uint32_t> survivors = cluster.LiveNodes();
  run->Expect(survivors.size() == nodes.size() - lost.size(),
              "other nodes live than those that were not lost");
  const LeftBehind left = LookAt(&cluster, survivors);
  run->Expect(left.neither == 0,
              "a node that had prepared the step has neither taken it nor kept "
              "it");
  OPTSTATE_RETURN_IF_ERROR(run->RunRanks(survivors, kSpread, kSteps));
  run->report().attach_again_ms = cluster.TakeAttachTimesMs();
  OPTSTATE_RETURN_IF_ERROR(world.queue.RunFor(world.model.rendezvous));
  OPTSTATE_RETURN_IF_ERROR(JoinInVain(run.get(), survivors, options.nodes));
  OPTSTATE_RETURN_IF_ERROR(
      run->RunRanks(survivors, kSpread, kSteps + kStepsAfterwards));
  OPTSTATE_RETURN_IF_ERROR(world.queue.RunFor(world.model.rendezvous));
  cluster.TakeAttachTimesMs();

  run->ExpectTold(1, kLossStep - 1, nodes.size());
  // A step that all survivors had prepared is taken before their ranks attach.
  const bool is_next_taken = left.prepared_next == survivors.size();
  run->ExpectTold(kLossStep + 1, kLossStep + 1,
                  is_next_taken ? 0 : survivors.size());
  run->ExpectTold(kLossStep + 2, kSteps + kStepsAfterwards, survivors.size());
  run->Expect(cluster.book().told(kLossStep) < nodes.size() * options.ranks,
              "no rank was lost before it was told of the step");
  run->Count("nodes lost", lost.size());
  run->Count("survivors that had taken the step", left.ahead);
  run->Count("survivors that had it prepared", left.prepared);
  run->Count("survivors that had the next prepared", left.prepared_next);
  run->Count("ranks told of the step", cluster.book().told(kLossStep));
  return run->End(survivors, kSteps + kStepsAfterwards);
}

}  // namespace optstate::simulation
