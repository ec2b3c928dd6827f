#include "tests/simulation/collective.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace optstate::simulation {

bool Round::any_failed() const {
  return std::any_of(of_ranks_.begin(), of_ranks_.end(),
                     [](const Contribution& each) { return each.failed; });
}

bool Round::facts_are_equal() const {
  return std::all_of(of_ranks_.begin(), of_ranks_.end(),
                     [this](const Contribution& each) {
                       return each.facts == of_ranks_.front().facts;
                     });
}

Verdict Round::verdict() const {
  if (!verdict_.has_value()) {
    std::vector<std::optional<NodeStep>> votes;
    votes.reserve(of_ranks_.size());
    for (const Contribution& each : of_ranks_) votes.push_back(each.vote);
    verdict_ = client::DecideVotes(votes);
  }
  return *verdict_;
}

const absl::StatusOr<std::map<size_t, Verdict>>& Round::resolution() const {
  if (!resolution_.has_value()) {
    std::vector<std::optional<NodePosition>> positions;
    std::vector<std::string> names;
    positions.reserve(members_);
    names.reserve(members_);
    for (uint32_t member = 0; member < members_; ++member) {
      positions.push_back(position(member));
      names.push_back(absl::StrCat("node ", member));
    }
    resolution_ = client::Resolve(positions, names);
  }
  return *resolution_;
}

Collective::Collective(World* world, SimulatedNetwork* network,
                       std::vector<uint32_t> nodes, uint32_t ranks,
                       std::function<void(uint32_t member)> on_peer_lost)
    : world_(*world),
      network_(*network),
      nodes_(std::move(nodes)),
      ranks_(ranks),
      on_peer_lost_(std::move(on_peer_lost)),
      members_(nodes_.size()),
      subtree_sizes_(nodes_.size(), 1) {
  for (Member& member : members_) member.next_round.assign(ranks_, 0);
  for (size_t member = nodes_.size(); member-- > 1;) {
    subtree_sizes_[(member - 1) / kFanOut] += subtree_sizes_[member];
  }
}

std::vector<uint32_t> Collective::ChildrenOf(uint32_t member) const {
  std::vector<uint32_t> children;
  for (uint32_t i = 1; i <= kFanOut; ++i) {
    const uint64_t child = uint64_t{member} * kFanOut + i;
    if (child < nodes_.size()) children.push_back(static_cast<uint32_t>(child));
  }
  return children;
}

uint32_t Collective::SubtreeSize(uint32_t member) const {
  return subtree_sizes_[member];
}

Collective::OpenRound& Collective::RoundOf(uint64_t number) {
  std::shared_ptr<OpenRound>& round = rounds_[number];
  if (round == nullptr) {
    round = std::make_shared<OpenRound>(
        OpenRound{.round = Round(size(), ranks_), .delivered = 0});
  }
  return *round;
}

void Collective::Gather(uint32_t member, uint32_t rank,
                        Contribution contribution, Done done) {
  Member& of = members_[member];
  if (of.has_ended) return;
  const uint64_t number = of.next_round[rank]++;
  RoundOf(number).round.Bring(member, rank, std::move(contribution));
  Gathering& gathering = of.gathering[number];
  gathering.waiting.resize(ranks_);
  gathering.waiting[rank] = std::move(done);
  // The first rank of the node has its own part at once.
  const absl::Duration delay =
      rank == 0 ? absl::ZeroDuration() : world_.Draw(world_.model.local);
  world_.queue.After(
      delay, {.kind = EventKind::kLocal, .node = nodes_[member], .rank = rank},
      [this, member, number] {
        if (members_[member].has_ended) return;
        ++members_[member].gathering[number].ranks_there;
        SendUpIfComplete(member, number);
      });
}

void Collective::SendUpIfComplete(uint32_t member, uint64_t number) {
  const Gathering& gathering = members_[member].gathering[number];
  if (gathering.ranks_there < ranks_ ||
      gathering.children_there < ChildrenOf(member).size()) {
    return;
  }
  if (member == 0) {
    ++rounds_completed_;
    if (RoundOf(number).round.vote_step() != 0) ++vote_rounds_;
    if (on_result_ != nullptr) on_result_(RoundOf(number).round);
    return Deliver(member, number);
  }
  const uint32_t parent = (member - 1) / kFanOut;
  network_.Send(nodes_[member], nodes_[parent],
                kContributionBytes * ranks_ * SubtreeSize(member),
                [this, parent, number] {
                  if (members_[parent].has_ended) return;
                  ++members_[parent].gathering[number].children_there;
                  SendUpIfComplete(parent, number);
                });
}

void Collective::Deliver(uint32_t member, uint64_t number) {
  if (members_[member].has_ended) return;
  for (const uint32_t child : ChildrenOf(member)) {
    network_.Send(nodes_[member], nodes_[child],
                  kContributionBytes * ranks_ * size(),
                  [this, child, number] { Deliver(child, number); });
  }
  auto gathering = members_[member].gathering.extract(number);
  const std::shared_ptr<OpenRound> round = rounds_.at(number);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    const absl::Duration delay =
        rank == 0 ? absl::ZeroDuration() : world_.Draw(world_.model.local);
    world_.queue.After(
        delay,
        {.kind = EventKind::kLocal, .node = nodes_[member], .rank = rank},
        [this, member, round,
         done = std::move(gathering.mapped().waiting[rank])] {
          if (!members_[member].has_ended) done(round->round);
        });
  }
  if (++round->delivered == size()) rounds_.erase(number);
}

void Collective::End(uint32_t member, const DrawnTime& notice) {
  if (members_[member].has_ended) return;
  members_[member].has_ended = true;
  members_[member].gathering.clear();
  std::vector<uint32_t> neighbours = ChildrenOf(member);
  if (member != 0) neighbours.push_back((member - 1) / kFanOut);
  for (const uint32_t neighbour : neighbours) {
    if (members_[neighbour].has_ended) continue;
    world_.queue.After(world_.Draw(notice),
                       {.kind = EventKind::kMessage, .node = nodes_[neighbour]},
                       [this, neighbour] {
                         if (!members_[neighbour].has_ended)
                           on_peer_lost_(neighbour);
                       });
  }
}

}  // namespace optstate::simulation
