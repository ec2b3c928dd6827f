#ifndef OPTSTATE_TESTS_SIMULATION_CLUSTER_H_
#define OPTSTATE_TESTS_SIMULATION_CLUSTER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tests/simulation/collective.h"
#include "tests/simulation/model.h"
#include "tests/simulation/mutation.h"
#include "tests/simulation/node_log.h"
#include "tests/simulation/scratch_directory.h"
#include "tests/simulation/simulated_daemon.h"
#include "tests/simulation/simulated_network.h"
#include "tests/simulation/simulated_rank.h"
#include "tests/simulation/step_book.h"
#include "tests/simulation/tiny_job.h"
#include "tests/simulation/world.h"

namespace optstate::simulation {

// All nodes, their daemons and ranks, and the launcher that starts ranks and
// ends those of a node of which one has failed.
//
// Threads: one at a time.
// Size: one method for each thing that a scenario does.
class Cluster {
 public:
  struct Options {
    uint32_t nodes = 0;
    uint32_t ranks = 0;  // of each node
    // Nodes that are there and run nothing at first.
    uint32_t spares = 0;
    uint64_t seed = 0;
    Mutation mutation = Mutation::kNone;
    Model model;
  };

  // INVALID_ARGUMENT: no node, or a node without ranks or with more than a job
  // may have. RESOURCE_EXHAUSTED: the process may not have as many files or
  // mappings.
  static absl::StatusOr<std::unique_ptr<Cluster>> Make(const Options& options);
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  World& world() { return world_; }
  SimulatedNetwork& network() { return network_; }
  TinyJob& tiny() { return tiny_; }
  const StepBook& book() const { return book_; }
  const NodeLog& log() const { return log_; }
  SimulatedDaemon& daemon(uint32_t node) { return *daemons_[node]; }
  SimulatedRank& rank(uint32_t node, uint32_t rank) {
    return *ranks_[node][rank];
  }
  uint32_t ranks() const { return options_.ranks; }
  // The nodes that are neither lost nor spare.
  std::vector<uint32_t> LiveNodes() const;

  // Has the launcher start a process for each rank of these nodes, each within
  // `spread`, as one process group, of which node 0 of the list is the root.
  void StartRanks(const std::vector<uint32_t>& nodes, absl::Duration spread,
                  uint64_t last_step);
  // Changes the step after which all running ranks end. It is later than the
  // one that any of them is at.
  void SetLastStep(uint64_t last_step);
  // Runs until no rank runs. DEADLINE_EXCEEDED, FAILED_PRECONDITION: they do
  // not come to an end.
  absl::Status RunUntilEnded(absl::Duration within);

  // The machine is gone.
  void LoseNode(uint32_t node);
  // Has a process of another user knock at each of these nodes, `knocks` times
  // within `time`.
  void BeginFlood(const std::vector<uint32_t>& nodes, uint32_t knocks,
                  absl::Duration time);

  // The process group that was started last.
  Collective& group() { return *groups_.back(); }
  // The all-gathers of all process groups in which ranks voted about a step.
  uint64_t vote_rounds() const;
  // How long each rank has taken to attach, since the last call.
  std::vector<double> TakeAttachTimesMs();
  // The number of ranks that ended with this state, of those started last.
  uint64_t CountOf(SimulatedRank::State state) const;
  // The first error of a rank of those started last; OK: there is none.
  absl::Status FirstError() const;

  // The bytes of memory of this process, without what files take, that came
  // since the cluster was made; the most that was seen when all ranks were
  // attached.
  uint64_t heap_bytes() const { return heap_bytes_; }
  // The sizes of all files of the nodes' daemons.
  uint64_t file_bytes() const { return scratch_.FileBytes(); }

  // Returns what is wrong with the nodes: they are to be at `step`, with the
  // state of a job that nothing has happened to, and their ranks to have ended
  // as they should. OK: nothing.
  absl::Status CheckStates(const std::vector<uint32_t>& nodes, uint64_t step);

 private:
  Cluster(const Options& options, ScratchDirectory scratch);

  absl::Status StartDaemons();
  void OnAttached(absl::Duration time);
  void OnEnded(uint32_t node);
  // The launcher ends the processes of a node.
  void EndNode(Collective* group, uint32_t member);

  const Options options_;
  const uint64_t heap_before_;
  NodeLog log_;
  World world_;
  const ScratchDirectory scratch_;
  TinyJob tiny_;
  SimulatedNetwork network_;
  StepBook book_;
  uint64_t next_socket_ = 0;
  SimulatedRank::Surroundings around_;
  std::vector<std::unique_ptr<Collective>> groups_;
  std::vector<std::vector<std::unique_ptr<SimulatedRank>>> ranks_;  // by node
  std::vector<std::unique_ptr<SimulatedDaemon>> daemons_;
  std::vector<bool> is_lost_;

  // The next four are of the ranks that were started last.
  std::vector<uint32_t> started_nodes_;
  std::vector<uint32_t> member_of_;  // by node
  uint64_t running_ = 0;
  uint64_t attached_ = 0;
  std::vector<double> attach_times_ms_;
  uint64_t heap_bytes_ = 0;
};

}  // namespace optstate::simulation

#endif  // OPTSTATE_TESTS_SIMULATION_CLUSTER_H_
