#include <memory>
#include <utility>
#include <vector>

#include "proto/types/status_macros.h"
#include "tests/simulation/measured_run.h"
#include "tests/simulation/scenarios.h"

namespace optstate::simulation {
namespace {

constexpr absl::Duration kSpread = absl::Milliseconds(100);
constexpr absl::Duration kPatience = absl::Hours(4);
// More steps than are ever taken: the operator says which is the last one.
constexpr uint64_t kNoLastStep = uint64_t{1} << 40;
// Steps that are still taken when every node is upgraded.
constexpr uint64_t kStepsAfterwards = 3;
// One of so many upgrades is followed by the death of some engine.
constexpr size_t kKillEvery = 20;
constexpr size_t kKillAt = 3;
constexpr absl::Duration kKillWithin = absl::Milliseconds(250);
constexpr absl::Duration kPartitionTime = absl::Seconds(2);

// Upgrades one node after another. For half of them it waits for a moment
// without an open step, as `optctl upgrade` does, for the others not. Threads:
// one at a time. Outlives all events that it has added.
class UpgradeOperator {
 public:
  UpgradeOperator(Cluster* cluster, std::vector<uint32_t> nodes)
      : cluster_(*cluster), world_(cluster->world()), nodes_(std::move(nodes)) {
    Later(&UpgradeOperator::AwaitTraining);
  }
  UpgradeOperator(const UpgradeOperator&) = delete;
  UpgradeOperator& operator=(const UpgradeOperator&) = delete;

  uint64_t upgraded() const { return next_; }
  // How many nodes were upgraded between two steps, with a step prepared whose
  // verdict was awaited, and within an open step.
  uint64_t between_steps() const { return between_steps_; }
  uint64_t prepared() const { return prepared_; }
  uint64_t within_step() const { return within_step_; }
  uint64_t killed() const { return killed_; }
  // The step at which the first upgrade began.
  uint64_t first_step() const { return first_step_; }

 private:
  void Later(void (UpgradeOperator::*next)()) {
    world_.queue.After(world_.model.pause_retry, {.kind = EventKind::kOperator},
                       [this, next] { (this->*next)(); });
  }
  SimulatedDaemon& daemon() { return cluster_.daemon(nodes_[next_]); }

  void AwaitTraining() {
    first_step_ = cluster_.book().last_step();
    if (first_step_ == 0) return Later(&UpgradeOperator::AwaitTraining);
    BeginNext();
  }

  void BeginNext() {
    if (next_ == nodes_.size()) {
      return cluster_.SetLastStep(cluster_.book().last_step() +
                                  kStepsAfterwards);
    }
    waits_until_ = world_.queue.now();
    if (world_.draw.Chance(0.5)) waits_until_ += world_.model.pause_patience;
    Upgrade();
  }

  void Upgrade() {
    const NodeLog::Scope scope = daemon().LogHere();
    session::Job* const job = daemon().job();
    if (job == nullptr) return Later(&UpgradeOperator::Upgrade);
    const bool is_paused = daemon().TryPause();
    if (!is_paused && world_.queue.now() < waits_until_) {
      return Later(&UpgradeOperator::Upgrade);
    }
    const absl::StatusOr<session::JobPosition> position = job->Position();
    if (position.ok() && position->prepared.has_value()) {
      ++prepared_;
    } else if (is_paused) {
      ++between_steps_;
    } else {
      ++within_step_;
    }
    daemon().Upgrade();
    AwaitEngine();
  }

  void AwaitEngine() {
    // An engine that cannot open its job ends the scenario, not this loop.
    if (!daemon().failure().ok()) return;
    if (daemon().engine() == 0) return Later(&UpgradeOperator::AwaitEngine);
    if (next_ % kKillEvery == kKillAt) KillSomeEngine();
    if (next_ == nodes_.size() / 2) PartNodes();
    ++next_;
    BeginNext();
  }

  void KillSomeEngine() {
    const uint32_t node = nodes_[world_.draw.Below(nodes_.size())];
    world_.queue.After(world_.draw.Between(absl::ZeroDuration(), kKillWithin),
                       {.kind = EventKind::kOperator, .node = node},
                       [this, node] {
                         SimulatedDaemon& dying = cluster_.daemon(node);
                         if (dying.engine() == 0) return;
                         ++killed_;
                         const NodeLog::Scope scope = dying.LogHere();
                         dying.KillEngine();
                       });
  }

  void PartNodes() {
    const std::vector<uint32_t> side(
        nodes_.begin(),
        nodes_.begin() + static_cast<int64_t>(nodes_.size() / 4));
    cluster_.network().Part(side, kPartitionTime);
  }

  Cluster& cluster_;
  World& world_;
  const std::vector<uint32_t> nodes_;
  size_t next_ = 0;
  absl::Time waits_until_;
  uint64_t first_step_ = 0;
  uint64_t between_steps_ = 0;
  uint64_t prepared_ = 0;
  uint64_t within_step_ = 0;
  uint64_t killed_ = 0;
};

}  // namespace

absl::StatusOr<Report> RunRollingUpgrade(const ScenarioOptions& options) {
  OPTSTATE_ASSIGN_OR_RETURN(const std::unique_ptr<MeasuredRun> run,
                            MeasuredRun::Begin("rolling_upgrade", options));
  Cluster& cluster = run->cluster();
  const std::vector<uint32_t> nodes = cluster.LiveNodes();
  UpgradeOperator upgrades(&cluster, nodes);
  cluster.StartRanks(nodes, kSpread, kNoLastStep);
  OPTSTATE_RETURN_IF_ERROR(cluster.RunUntilEnded(kPatience));
  OPTSTATE_RETURN_IF_ERROR(cluster.FirstError());
  // Engines see that the last ranks have left; one that was killed last of all
  // has a successor.
  OPTSTATE_RETURN_IF_ERROR(cluster.world().queue.RunFor(absl::Seconds(5)));
  run->report().attach_ms = cluster.TakeAttachTimesMs();

  const uint64_t steps = cluster.book().last_step();
  run->Expect(upgrades.upgraded() == nodes.size(),
              "training ended before every node was upgraded");
  run->Expect(steps > upgrades.first_step() + kStepsAfterwards,
              "no step was taken while nodes were upgraded");
  run->ExpectTold(1, steps, nodes.size());
  uint64_t engines = 0;
  uint64_t reconnects = 0;
  for (const uint32_t node : nodes) {
    engines += cluster.daemon(node).counts().engines;
    for (uint32_t rank = 0; rank < options.ranks; ++rank) {
      reconnects += cluster.rank(node, rank).reconnects();
    }
  }
  run->Expect(engines == 2 * nodes.size() + upgrades.killed(),
              "there were other engines than two of each node and one for each "
              "that was killed");
  run->Expect(reconnects >= nodes.size() * options.ranks,
              "a rank never lost its engine, although each was replaced");
  run->Count("upgraded between steps", upgrades.between_steps());
  run->Count("with a step prepared", upgrades.prepared());
  run->Count("within a step", upgrades.within_step());
  run->Count("engines killed", upgrades.killed());
  run->Count("reconnects", reconnects);
  return run->End(nodes, steps);
}

}  // namespace optstate::simulation
