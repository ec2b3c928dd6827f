#include "tests/simulation/cluster.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/frame.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/access/caller.h"
#include "tests/simulation/process_memory.h"

namespace optstate::simulation {
namespace {

// Files and mappings of a job, rounded up: the arrays, the step's files and the
// control file.
constexpr uint64_t kFilesOfJob = 11;
// A rank's gradients: once as its session has them, and once as its engine does
// while a step is prepared without the session.
constexpr uint64_t kMappingsOfRank = 2;
constexpr uint64_t kFilesOfRank = 1;
// The process's own.
constexpr uint64_t kOtherFiles = 128;
constexpr uint64_t kOtherMappings = 4096;

// Users of the nodes: not those of this process, who would be operators.
constexpr uid_t kFirstOwner = 1'000'000;
constexpr uid_t kStranger = 2'000'000;

// How often a launcher looks whether a process has failed.
constexpr absl::Duration kMonitorInterval = absl::Seconds(1);

absl::Status CheckOptions(const Cluster::Options& options) {
  if (options.nodes < 1 || options.nodes > 100'000) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a simulation of ", options.nodes, " nodes: give 1 to 100000"));
  }
  if (options.ranks < 1 || options.ranks > TinyJob::kParameters) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a simulation of ", options.ranks, " ranks a node: give 1 to ",
        TinyJob::kParameters, ", one for each parameter at most"));
  }
  return absl::OkStatus();
}

}  // namespace

Cluster::Cluster(const Options& options, ScratchDirectory scratch)
    : options_(options),
      heap_before_(AnonymousBytes()),
      log_(options.nodes + options.spares),
      world_(options.seed, options.model),
      scratch_(std::move(scratch)),
      tiny_(options.ranks),
      network_(&world_, options.nodes + options.spares),
      book_(&world_.trace),
      is_lost_(options.nodes + options.spares, false),
      member_of_(options.nodes + options.spares, 0) {
  around_.world = &world_;
  around_.tiny = &tiny_;
  around_.book = &book_;
  around_.next_socket = &next_socket_;
  around_.mutation = options_.mutation;
  around_.on_attached = [this](absl::Duration time) { OnAttached(time); };
  around_.on_ended = [this](uint32_t node) { OnEnded(node); };
}

Cluster::~Cluster() = default;

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Make(const Options& options) {
  OPTSTATE_RETURN_IF_ERROR(CheckOptions(options));
  const uint64_t nodes = uint64_t{options.nodes} + options.spares;
  OPTSTATE_RETURN_IF_ERROR(ReserveFilesAndMappings(
      kOtherFiles + nodes * (kFilesOfJob + kFilesOfRank * options.ranks),
      kOtherMappings +
          nodes * (kFilesOfJob + kMappingsOfRank * options.ranks)));
  OPTSTATE_ASSIGN_OR_RETURN(ScratchDirectory scratch, ScratchDirectory::Make());
  std::unique_ptr<Cluster> cluster(new Cluster(options, std::move(scratch)));
  OPTSTATE_RETURN_IF_ERROR(cluster->StartDaemons());
  return cluster;
}

absl::Status Cluster::StartDaemons() {
  for (uint32_t node = 0; node < options_.nodes + options_.spares; ++node) {
    const std::string state_dir = absl::StrCat(scratch_.path(), "/", node);
    if (::mkdir(state_dir.c_str(), 0700) != 0) {
      return OsError(errno, absl::StrCat("mkdir ", state_dir));
    }
    OPTSTATE_ASSIGN_OR_RETURN(
        std::unique_ptr<SimulatedDaemon> daemon,
        SimulatedDaemon::Start(&world_, &tiny_, &log_,
                               {.node = node,
                                .state_dir = state_dir,
                                .owner = kFirstOwner + node,
                                .mutation = options_.mutation}));
    std::vector<std::unique_ptr<SimulatedRank>> ranks;
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
      ranks.push_back(
          std::make_unique<SimulatedRank>(&around_, daemon.get(), node, rank));
    }
    ranks_.push_back(std::move(ranks));
    daemons_.push_back(std::move(daemon));
  }
  return absl::OkStatus();
}

std::vector<uint32_t> Cluster::LiveNodes() const {
  std::vector<uint32_t> live;
  for (uint32_t node = 0; node < options_.nodes; ++node) {
    if (!is_lost_[node]) live.push_back(node);
  }
  return live;
}

void Cluster::StartRanks(const std::vector<uint32_t>& nodes,
                         absl::Duration spread, uint64_t last_step) {
  started_nodes_ = nodes;
  attached_ = 0;
  running_ = nodes.size() * options_.ranks;
  // The group is known by its index: the callback comes after the assignment.
  const size_t index = groups_.size();
  groups_.push_back(
      std::make_unique<Collective>(&world_, &network_, nodes, options_.ranks,
                                   [this, index](uint32_t member) {
                                     EndNode(groups_[index].get(), member);
                                   }));
  Collective* const group = groups_.back().get();
  for (uint32_t member = 0; member < nodes.size(); ++member) {
    const uint32_t node = nodes[member];
    member_of_[node] = member;
    for (uint32_t rank = 0; rank < options_.ranks; ++rank) {
      world_.queue.After(
          world_.draw.Between(absl::ZeroDuration(), spread),
          {.kind = EventKind::kLauncher, .node = node, .rank = rank},
          [this, group, member, node, rank, last_step] {
            if (is_lost_[node] || group->has_ended(member)) {
              --running_;
              return;
            }
            const NodeLog::Scope scope = daemons_[node]->LogHere();
            ranks_[node][rank]->Start(group, member, last_step);
          });
    }
  }
}

void Cluster::SetLastStep(uint64_t last_step) {
  for (const uint32_t node : started_nodes_) {
    for (const auto& rank : ranks_[node]) rank->set_last_step(last_step);
  }
}

absl::Status Cluster::RunUntilEnded(absl::Duration within) {
  absl::Status status = world_.queue.RunUntil(world_.queue.now() + within,
                                              [this] { return running_ == 0; });
  if (status.ok()) return status;
  std::string why = absl::StrCat(running_, " ranks have not ended");
  for (const auto& daemon : daemons_) {
    if (daemon->failure().ok()) continue;
    absl::StrAppend(&why, "; ", daemon->failure().ToString());
    break;
  }
  if (!log_.first_error().empty()) {
    absl::StrAppend(&why,
                    "; the first error in the log is: ", log_.first_error());
  }
  return Annotate(status, why);
}

void Cluster::OnAttached(absl::Duration time) {
  attach_times_ms_.push_back(absl::ToDoubleMilliseconds(time));
  if (++attached_ < started_nodes_.size() * options_.ranks) return;
  const uint64_t now = AnonymousBytes();
  if (now > heap_before_) {
    heap_bytes_ = std::max(heap_bytes_, now - heap_before_);
  }
}

void Cluster::OnEnded(uint32_t node) {
  --running_;
  const bool has_failed = std::any_of(
      ranks_[node].begin(), ranks_[node].end(), [](const auto& rank) {
        return rank->state() == SimulatedRank::State::kFailed;
      });
  if (!has_failed) return;
  world_.queue.After(kMonitorInterval,
                     {.kind = EventKind::kLauncher, .node = node},
                     [this, group = groups_.back().get(),
                      member = member_of_[node]] { EndNode(group, member); });
}

void Cluster::EndNode(Collective* group, uint32_t member) {
  // A process group that is over has been replaced.
  if (group != groups_.back().get() || group->has_ended(member)) return;
  const uint32_t node = group->node(member);
  for (const auto& rank : ranks_[node]) rank->Kill(/*is_lost=*/false);
  group->End(member, world_.model.network);
}

void Cluster::LoseNode(uint32_t node) {
  is_lost_[node] = true;
  network_.Fail(node);
  for (const auto& rank : ranks_[node]) rank->Kill(/*is_lost=*/true);
  group().End(member_of_[node], world_.model.loss_notice);
  const NodeLog::Scope scope = daemons_[node]->LogHere();
  daemons_[node]->Lose();
}

void Cluster::BeginFlood(const std::vector<uint32_t>& nodes, uint32_t knocks,
                         absl::Duration time) {
  const accept::PeerCredentials stranger = {.caller =
                                                access::UnixCaller(kStranger)};
  v1::Hello hello;
  hello.set_protocol_version_min(accept::kProtocolVersionMin);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_wire(v1::WIRE_GRPC);
  hello.set_job(TinyJob::kName);
  for (const uint32_t node : nodes) {
    for (uint32_t knock = 0; knock < knocks; ++knock) {
      world_.queue.After(world_.draw.Between(absl::ZeroDuration(), time),
                         {.kind = EventKind::kStranger, .node = node},
                         [this, node, stranger, hello] {
                           if (is_lost_[node]) return;
                           const uint64_t socket = ++next_socket_;
                           daemons_[node]->Connect(
                               stranger, hello, socket,
                               [](const absl::Status& /*refused*/) {});
                         });
    }
  }
}

uint64_t Cluster::vote_rounds() const {
  uint64_t rounds = 0;
  for (const auto& each : groups_) rounds += each->vote_rounds();
  return rounds;
}

std::vector<double> Cluster::TakeAttachTimesMs() {
  return std::exchange(attach_times_ms_, {});
}

uint64_t Cluster::CountOf(SimulatedRank::State state) const {
  uint64_t count = 0;
  for (const uint32_t node : started_nodes_) {
    for (const auto& rank : ranks_[node]) count += rank->state() == state;
  }
  return count;
}

absl::Status Cluster::FirstError() const {
  for (const uint32_t node : started_nodes_) {
    for (const auto& rank : ranks_[node]) {
      if (!rank->status().ok()) return rank->status();
    }
  }
  return absl::OkStatus();
}

absl::Status Cluster::CheckStates(const std::vector<uint32_t>& nodes,
                                  uint64_t step) {
  const std::string reference = absl::StrCat(scratch_.path(), "/undisturbed");
  if (::mkdir(reference.c_str(), 0700) != 0) {
    return OsError(errno, absl::StrCat("mkdir ", reference));
  }
  OPTSTATE_ASSIGN_OR_RETURN(const uint64_t expected,
                            tiny_.UndisturbedDigest(reference, step));
  world_.trace.Add(expected);
  for (const uint32_t node : nodes) {
    SimulatedDaemon& daemon = *daemons_[node];
    const NodeLog::Scope scope = daemon.LogHere();
    OPTSTATE_RETURN_IF_ERROR(daemon.failure());
    if (daemon.job() == nullptr) {
      return absl::InternalError(absl::StrCat("node ", node, " has no engine"));
    }
    const absl::StatusOr<uint64_t> digest = tiny_.DigestOf(daemon.job(), step);
    if (!digest.ok()) {
      return Annotate(digest.status(), absl::StrCat("node ", node));
    }
    if (*digest != expected) {
      return absl::InternalError(
          absl::StrCat("node ", node, " has other bits at step ", step, " (",
                       absl::Hex(*digest), ") than an undisturbed job (",
                       absl::Hex(expected), ")"));
    }
    for (const auto& rank : ranks_[node]) {
      OPTSTATE_RETURN_IF_ERROR(rank->status());
      if (rank->committed_step() != step) {
        return absl::InternalError(
            absl::StrCat("a rank of node ", node, " ended at step ",
                         rank->committed_step(), ", not ", step));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace optstate::simulation
