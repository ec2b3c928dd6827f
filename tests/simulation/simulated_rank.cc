#include "tests/simulation/simulated_rank.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/frame.h"
#include "proto/types/status_macros.h"
#include "server/accept/hello_check.h"
#include "server/access/caller.h"

namespace optstate::simulation {
namespace {

// As in Session::ConnectWithin.
constexpr absl::Duration kBackoffMin = absl::Milliseconds(2);
constexpr absl::Duration kBackoffMax = absl::Seconds(1);
// That of NodeAgreement.settle.
constexpr int kSettleRoundsMax = 8;

}  // namespace

SimulatedRank::SimulatedRank(const Surroundings* around,
                             SimulatedDaemon* daemon, uint32_t node,
                             uint32_t rank)
    : around_(*around),
      world_(*around->world),
      daemon_(*daemon),
      node_(node),
      rank_(rank) {}

void SimulatedRank::Start(Collective* group, uint32_t member,
                          uint64_t last_step) {
  ++process_;
  state_ = State::kRunning;
  status_ = absl::OkStatus();
  group_ = group;
  member_ = member;
  last_step_ = last_step;
  started_at_ = world_.queue.now();
  backoff_ = kBackoffMin;
  settle_rounds_ = 0;
  position_ = std::nullopt;
  client_instance_ = std::max<uint64_t>(world_.draw.Next(), 1);
  engine_ = 0;
  comes_back_ = false;
  pieces_.clear();
  area_ = nullptr;
  phase_ = v1::JOB_PHASE_EMPTY;
  committed_step_ = 0;
  has_pushed_ = false;
  awaited_ = Awaited::kNothing;
  Settle();
}

void SimulatedRank::Later(absl::Duration delay, Next next) {
  world_.queue.After(delay,
                     {.kind = EventKind::kRank, .node = node_, .rank = rank_},
                     [this, process = process_, next] {
                       if (process != process_) return;
                       const NodeLog::Scope scope = daemon_.LogHere();
                       (this->*next)();
                     });
}

void SimulatedRank::Gather(Contribution contribution,
                           void (SimulatedRank::*next)(const Round&)) {
  group_->Gather(member_, rank_, std::move(contribution),
                 [this, process = process_, next](const Round& round) {
                   if (process != process_) return;
                   const NodeLog::Scope scope = daemon_.LogHere();
                   (this->*next)(round);
                 });
}

void SimulatedRank::Connect(bool must_exist, Next next) {
  must_exist_ = must_exist;
  on_connected_ = next;
  socket_ = ++*around_.next_socket;
  v1::Hello hello;
  hello.set_protocol_version_min(accept::kProtocolVersionMin);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_wire(v1::WIRE_GRPC);
  hello.set_job(TinyJob::kName);
  hello.set_client_version("simulated");
  hello.set_must_exist(must_exist);
  const accept::PeerCredentials peer = {
      .caller = access::UnixCaller(daemon_.owner())};
  daemon_.Connect(
      peer, std::move(hello), socket_,
      [this, process = process_, socket = socket_](const absl::Status& status) {
        if (process != process_ || socket != socket_) return;
        if (status.ok()) return LaterLocally(on_connected_);
        OnRefused(status);
      });
}

void SimulatedRank::OnRefused(const absl::Status& status) {
  if (absl::IsUnavailable(status)) return TryAgain(&SimulatedRank::Reconnect);
  // A node without the job is a position too.
  if (absl::IsNotFound(status) &&
      on_connected_ == &SimulatedRank::ReadPosition) {
    return LaterLocally(&SimulatedRank::GatherPosition);
  }
  Fail(status);
}

void SimulatedRank::TryAgain(Next next) {
  daemon_.Close(socket_);
  Later(backoff_, next);
  backoff_ = std::min(2 * backoff_, kBackoffMax);
}

void SimulatedRank::Settle() {
  position_ = std::nullopt;
  if (rank_ != 0) return GatherPosition();
  Connect(/*must_exist=*/true, &SimulatedRank::ReadPosition);
}

void SimulatedRank::ReadPosition() {
  if (daemon_.job() == nullptr) return TryAgain(&SimulatedRank::Reconnect);
  const absl::StatusOr<session::JobPosition> found = daemon_.job()->Position();
  if (absl::IsUnavailable(found.status())) {
    return TryAgain(&SimulatedRank::Reconnect);
  }
  daemon_.Close(socket_);
  if (!found.ok()) return Fail(found.status());
  NodePosition& position = position_.emplace();
  position.committed.step = found->committed_step;
  position.loads_finished = found->loads_finished;
  if (found->last_outcome.has_value()) {
    position.committed.digest = found->last_outcome->digest;
    position.committed.found_inf = found->last_outcome->found_inf;
  }
  if (found->prepared.has_value()) {
    position.prepared = NodeStep{.step = found->prepared->step,
                                 .digest = found->prepared->digest,
                                 .found_inf = found->prepared->found_inf};
  }
  GatherPosition();
}

void SimulatedRank::GatherPosition() {
  Contribution contribution;
  contribution.position = position_;
  Gather(std::move(contribution), &SimulatedRank::OnPositions);
}

void SimulatedRank::OnPositions(const Round& round) {
  const auto& resolution = round.resolution();
  if (!resolution.ok()) return Fail(resolution.status());
  backoff_ = kBackoffMin;
  if (resolution->empty()) {
    return Connect(/*must_exist=*/false, &SimulatedRank::Register);
  }
  if (++settle_rounds_ > kSettleRoundsMax) {
    return Fail(absl::AbortedError("the nodes do not settle"));
  }
  const auto mine = resolution->find(member_);
  if (rank_ != 0 || mine == resolution->end()) {
    return Gather({}, &SimulatedRank::OnBrought);
  }
  const NodeStep& prepared = *round.position(member_)->prepared;
  verdict_ = {.step = prepared.step,
              .digest = prepared.digest,
              .verdict = mine->second};
  if (around_.mutation == Mutation::kDropsWhatOthersTook) {
    verdict_.verdict = Verdict::kAbort;
  }
  Connect(/*must_exist=*/true, &SimulatedRank::BringVerdict);
}

void SimulatedRank::BringVerdict() {
  if (daemon_.job() == nullptr) return TryAgain(&SimulatedRank::Reconnect);
  const absl::Status brought =
      daemon_.job()->DecideUnattached(verdict_).status();
  // The engine has not seen the end of the former sessions yet.
  if (absl::IsUnavailable(brought)) return TryAgain(&SimulatedRank::Reconnect);
  daemon_.Close(socket_);
  // Another process was faster, which the next positions show.
  if (!brought.ok() && !absl::IsFailedPrecondition(brought)) {
    return Fail(brought);
  }
  Gather({}, &SimulatedRank::OnBrought);
}

void SimulatedRank::OnBrought(const Round& /*round*/) { Settle(); }

void SimulatedRank::Register() {
  attaching_to_ = daemon_.engine();
  if (attaching_to_ == 0) return TryAgain(&SimulatedRank::Reconnect);
  Later(daemon_.QueueInEngine(world_.model.attach), &SimulatedRank::Attach);
}

void SimulatedRank::Attach() {
  if (daemon_.engine() != attaching_to_) {
    return TryAgain(&SimulatedRank::Reconnect);
  }
  const absl::Status attached = AttachTo(daemon_.job());
  // The engine has not seen the end of the place's last session yet.
  if (absl::IsUnavailable(attached) || absl::IsAlreadyExists(attached)) {
    return TryAgain(&SimulatedRank::Reconnect);
  }
  if (!attached.ok()) return Fail(attached);
  engine_ = attaching_to_;
  daemon_.NoteAttached(rank_, socket_,
                       [this, process = process_, engine = engine_] {
                         if (process != process_ || engine != engine_) return;
                         const NodeLog::Scope scope = daemon_.LogHere();
                         OnEngineLost();
                       });
  LaterLocally(comes_back_ ? &SimulatedRank::OnAttachedAgain
                           : &SimulatedRank::OnAttached);
}

absl::Status SimulatedRank::AttachTo(session::Job* job) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const session::RegisterResult registered,
      job->Register(around_.tiny->RegisterSpecOf(rank_, node_, comes_back_)));
  OPTSTATE_ASSIGN_OR_RETURN(const RankPartition* const partition,
                            job->partition(rank_));
  const uint64_t bytes = partition->gradient_area_bytes;
  pieces_ = partition->pieces;
  OPTSTATE_ASSIGN_OR_RETURN(
      area_,
      GradientArea::Map(job->StagingPath(rank_, client_instance_), bytes));
  session::AttachSpec spec;
  spec.rank = rank_;
  spec.layout_hash = registered.layout_hash;
  spec.shape = registered.shape;
  spec.gradient_area = area_->data();
  spec.gradient_area_bytes = bytes;
  spec.listener = this;
  spec.client_instance = client_instance_;
  spec.comes_back = comes_back_;
  spec.gradients_present = area_->was_present();
  spec.uid = daemon_.owner();
  spec.wire = "grpc";
  spec.client_version = "simulated";
  OPTSTATE_ASSIGN_OR_RETURN(const session::AttachResult attached,
                            job->Attach(spec));
  attached_step_ = attached.committed_step;
  phase_ = attached.phase;
  return absl::OkStatus();
}

void SimulatedRank::OnAttached() {
  around_.on_attached(world_.queue.now() - started_at_);
  committed_step_ = attached_step_;
  if (phase_ == v1::JOB_PHASE_READY) return CheckAlike();
  if (phase_ != v1::JOB_PHASE_LOADING || !IsConnected()) {
    return Fail(absl::AbortedError("the job cannot be loaded"));
  }
  session::Job* const job = daemon_.job();
  absl::Status status = job->BeginLoad(rank_);
  if (status.ok()) status = around_.tiny->LoadMasters(job, rank_, pieces_);
  if (!status.ok()) return Fail(status);
  awaited_ = Awaited::kLoad;
  job->FinishLoad(rank_, ++request_, {});
}

void SimulatedRank::OnLoaded() {
  if (!answer_status_.ok()) return Fail(answer_status_);
  CheckAlike();
}

void SimulatedRank::CheckAlike() {
  Contribution contribution;
  contribution.facts = committed_step_ + 1;
  Gather(std::move(contribution), &SimulatedRank::OnAlike);
}

void SimulatedRank::OnAlike(const Round& round) {
  if (!round.facts_are_equal()) {
    return Fail(absl::FailedPreconditionError(
        "the nodes of the job differ in the step at which ranks attached"));
  }
  NextStep();
}

void SimulatedRank::NextStep() {
  has_pushed_ = false;
  if (committed_step_ >= last_step_) {
    return End(State::kDone, absl::OkStatus());
  }
  Later(world_.Draw(world_.model.compute), &SimulatedRank::Push);
}

void SimulatedRank::WriteGradients() {
  const absl::Span<const float> gradients =
      around_.tiny->ValuesOf(committed_step_ + 1);
  for (const Piece& piece : pieces_) {
    std::memcpy(
        area_->data() + piece.gradient_offset_bytes,
        TinyJob::OfParameter(gradients, piece.parameter).data() + piece.begin,
        piece.numel * sizeof(float));
  }
}

absl::Status SimulatedRank::PushAll() {
  return daemon_.job()->Push(rank_, committed_step_ + 1, /*micro_step=*/0,
                             /*first_parameter=*/0, TinyJob::kParameters);
}

void SimulatedRank::Push() {
  if (!IsConnected()) return Recover(&SimulatedRank::Push);
  WriteGradients();
  const absl::Status pushed = PushAll();
  if (!pushed.ok()) return Fail(pushed);
  has_pushed_ = true;
  LaterLocally(&SimulatedRank::Commit);
}

bool SimulatedRank::FindsInf(uint64_t step) const {
  return TinyJob::IsSkipped(step) && member_ == step % group_->size() &&
         rank_ == step % around_.tiny->ranks();
}

void SimulatedRank::Commit() {
  if (!IsConnected()) return Recover(&SimulatedRank::Commit);
  const uint64_t step = committed_step_ + 1;
  awaited_ = Awaited::kCommit;
  daemon_.job()->Commit(
      rank_, ++request_,
      around_.tiny->CommitOf(step, /*two_phase=*/true, FindsInf(step)));
}

// Called by the job, with its lock held.
void SimulatedRank::OnStepDone(uint64_t request_id, const absl::Status& status,
                               const session::StepOutcome& outcome) {
  world_.queue.After(
      world_.Draw(world_.model.step_part) + world_.Draw(world_.model.local),
      {.kind = EventKind::kRank, .node = node_, .rank = rank_},
      [this, process = process_, request_id, status, outcome] {
        if (process != process_ || request_id != request_) return;
        const NodeLog::Scope scope = daemon_.LogHere();
        TakeAnswer(status, outcome);
      });
}

void SimulatedRank::TakeAnswer(const absl::Status& status,
                               const session::StepOutcome& outcome) {
  const Awaited awaited = std::exchange(awaited_, Awaited::kNothing);
  if (awaited == Awaited::kNothing) return;  // the engine was lost before
  answer_status_ = status;
  answer_ = outcome;
  switch (awaited) {
    case Awaited::kLoad:
      return OnLoaded();
    case Awaited::kCommit:
      return OnPrepared();
    default:
      return OnDecided();
  }
}

std::optional<NodeStep> SimulatedRank::OwnVote() const {
  if (!answer_status_.ok()) return std::nullopt;
  return NodeStep{.step = answer_.step,
                  .digest = answer_.digest,
                  .found_inf = answer_.found_inf};
}

void SimulatedRank::OnPrepared() {
  Contribution contribution;
  contribution.vote = OwnVote();
  Gather(std::move(contribution), &SimulatedRank::OnVotes);
}

void SimulatedRank::OnVotes(const Round& round) {
  verdict_ = {.step = answer_.step,
              .digest = answer_.digest,
              .verdict = VerdictOf(round)};
  if (!answer_status_.ok()) return Fail(answer_status_);
  if (around_.mutation == Mutation::kBringsNoDecision) {
    answer_.prepared = false;
  }
  if (answer_.prepared) return Decide();
  if (verdict_.verdict != Verdict::kAbort) return TakeOutcome(answer_);
  Fail(absl::FailedPreconditionError("the nodes have taken different steps"));
}

Verdict SimulatedRank::VerdictOf(const Round& round) {
  const Verdict verdict = round.verdict();
  switch (around_.mutation) {
    case Mutation::kDecidesAlone: {
      const std::optional<NodeStep> own = OwnVote();
      return client::DecideVotes(absl::MakeConstSpan(&own, 1));
    }
    case Mutation::kDecidesAboutTheLastStep:
      return std::exchange(last_verdict_, verdict);
    case Mutation::kBringsSkipsAsCommits:
      return verdict == Verdict::kSkip ? Verdict::kCommit : verdict;
    default:
      return verdict;
  }
}

void SimulatedRank::Decide() {
  if (!IsConnected()) return Recover(&SimulatedRank::Decide);
  awaited_ = Awaited::kDecide;
  daemon_.NoteDecision();
  daemon_.job()->Decide(rank_, ++request_, verdict_);
}

void SimulatedRank::OnDecided() {
  if (!answer_status_.ok()) return Fail(answer_status_);
  if (verdict_.verdict == Verdict::kAbort) {
    return Fail(absl::FailedPreconditionError(
        "the nodes have prepared different steps, and the step is taken on "
        "none"));
  }
  TakeOutcome(answer_);
}

void SimulatedRank::TakeOutcome(const session::StepOutcome& outcome) {
  if (outcome.step != committed_step_ + 1) {
    return Fail(absl::InternalError(absl::StrCat(
        "told of step ", outcome.step, " after step ", committed_step_)));
  }
  around_.book->Note(node_, rank_, outcome);
  committed_step_ = outcome.step;
  NextStep();
}

void SimulatedRank::Recover(Next then) {
  after_recovery_ = then;
  awaited_ = Awaited::kNothing;
  engine_ = 0;
  comes_back_ = true;
  backoff_ = kBackoffMin;
  ++reconnects_;
  daemon_.Close(socket_);
  Connect(/*must_exist=*/true, &SimulatedRank::Register);
}

void SimulatedRank::OnAttachedAgain() {
  if (!IsConnected()) return Recover(after_recovery_);
  if (attached_step_ == committed_step_) {
    if (has_pushed_) {
      WriteGradients();
      const absl::Status pushed = PushAll();
      if (!pushed.ok()) return Fail(pushed);
    }
  } else if (attached_step_ != committed_step_ + 1) {
    return Fail(absl::FailedPreconditionError(
        absl::StrCat("the job is at step ", attached_step_,
                     " after the connection was lost, this session is at step ",
                     committed_step_)));
  }
  (this->*after_recovery_)();
}

void SimulatedRank::OnEngineLost() {
  switch (awaited_) {
    case Awaited::kNothing:
      return;  // the next call notices
    case Awaited::kLoad:
      return Fail(
          absl::AbortedError("the connection was lost while state was loaded"));
    case Awaited::kCommit:
      return Recover(&SimulatedRank::Commit);
    case Awaited::kDecide:
      return Recover(&SimulatedRank::Decide);
  }
}

void SimulatedRank::Kill(bool is_lost) {
  if (state_ != State::kRunning) return;
  if (is_lost) engine_ = 0;
  End(State::kKilled, absl::OkStatus());
}

void SimulatedRank::End(State state, const absl::Status& status) {
  state_ = state;
  status_ = status;
  ++process_;
  awaited_ = Awaited::kNothing;
  daemon_.Close(socket_);
  if (engine_ != 0) {
    // The job reads the gradients until it has seen the end.
    world_.queue.After(
        world_.Draw(world_.model.local),
        {.kind = EventKind::kSessionEnd, .node = node_, .rank = rank_},
        [this, engine = engine_, is_leaving = state == State::kDone,
         area = std::move(area_)] {
          const NodeLog::Scope scope = daemon_.LogHere();
          daemon_.EndSession(rank_, engine, is_leaving);
        });
  }
  engine_ = 0;
  around_.on_ended(node_);
}

}  // namespace optstate::simulation
