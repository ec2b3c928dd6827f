#include "tests/crash/killer.h"

#include <sys/types.h>

#include <algorithm>
#include <csignal>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/types/status_macros.h"
#include "tests/crash/poll_until.h"

namespace optstate::crash {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
// The time within which most of what goes on happens: a step, a start, a
// recovery.
constexpr absl::Duration kAnyInstant = absl::Milliseconds(50);
// The time of an upgrade, which starts the new build three times.
constexpr absl::Duration kUpgrade = absl::Milliseconds(400);
constexpr absl::Duration kMoment = absl::Milliseconds(3);
// The wait for what may not come: ranks that look for a daemon take no steps.
constexpr absl::Duration kNotForLong = absl::Milliseconds(500);

uint64_t Left(uint64_t wanted, uint64_t done) {
  return wanted > done ? wanted - done : 0;
}

}  // namespace

absl::Status Killer::Await(absl::string_view what,
                           absl::FunctionRef<bool()> done) {
  absl::Status ranks;
  const absl::Status status = PollUntil(what, [&] {
    ranks = job_.CheckRanks();
    return !ranks.ok() || job_.finished() || done();
  });
  return ranks.ok() ? status : ranks;
}

absl::Status Killer::AwaitSteps(uint64_t steps) {
  const uint64_t target = job_.committed_step() + steps;
  return Await(absl::StrCat("step ", target),
               [&] { return job_.committed_step() >= target; });
}

void Killer::Spin(absl::Duration longest) {
  const absl::Time end = absl::Now() + Unit() * longest;
  while (absl::Now() < end) {
  }
}

absl::Status Killer::AwaitInsideStep() {
  OPTSTATE_RETURN_IF_ERROR(AwaitNotForLong([&] { return job_.in_step(); }));
  SpinInsideStep();
  return absl::OkStatus();
}

absl::Status Killer::AwaitNotForLong(absl::FunctionRef<bool()> done) {
  const absl::Time end = absl::Now() + kNotForLong;
  return Await("some time", [&] { return done() || absl::Now() > end; });
}

void Killer::SpinInsideStep() {
  Spin(absl::Nanoseconds(storage::CurrentRecord(job_.control()).update_ns));
}

absl::Status Killer::KillEngine(bool again) {
  const pid_t pid = job_.engine();
  if (pid == 0) return absl::OkStatus();
  const Process engine(pid);
  const uint64_t before = job_.committed_step();
  engine.Signal(SIGKILL);
  OPTSTATE_RETURN_IF_ERROR(engine.AwaitEnd(absl::Now() + kPatience));
  const uint64_t mark = job_.control().step_in_progress.load();
  const uint64_t after = job_.committed_step();
  ++tally_.engine;
  if (mark == after + 1) ++tally_.engine_in_step;
  if (storage::LoadIsSealed(job_.control())) ++tally_.engine_in_sealed_load;
  if (again) ++tally_.engine_again;
  if (!supervised_) ++tally_.engine_unsupervised;
  if (after < before) {
    return absl::DataLossError(
        absl::StrCat("step ", after, " is committed after step ", before));
  }
  return absl::OkStatus();
}

// Waits until the engine starts, or is inside the step that the one before it
// left.
absl::Status Killer::AwaitRecovery() {
  const uint64_t recovered = job_.control().steps_recovered;
  if (job_.in_step() && Unit() < 0.7) {
    OPTSTATE_RETURN_IF_ERROR(AwaitNotForLong(
        [&] { return job_.control().steps_recovered != recovered; }));
    SpinInsideStep();
    return absl::OkStatus();
  }
  Spin(Unit() < 0.5 ? kMoment : kAnyInstant);
  return absl::OkStatus();
}

absl::Status Killer::KillEngineAgain() {
  for (uint64_t i = 1 + Below(3); i > 0; --i) {
    OPTSTATE_RETURN_IF_ERROR(
        Await("the next engine", [&] { return job_.engine() != 0; }));
    OPTSTATE_RETURN_IF_ERROR(AwaitRecovery());
    OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/true));
  }
  return absl::OkStatus();
}

absl::Status Killer::KillSupervisor() {
  ++tally_.supervisor;
  if (job_.in_step()) ++tally_.supervisor_in_step;
  supervised_ = false;
  return job_.daemon().Kill();
}

absl::Status Killer::KillRank(uint32_t rank) {
  if (!job_.rank(rank).running()) return absl::OkStatus();
  ++tally_.rank;
  switch (job_.rank(rank).phase()) {
    case RankPhase::kPush:
      ++tally_.rank_in_push;
      break;
    case RankPhase::kCommit:
      ++tally_.rank_in_commit;
      break;
    case RankPhase::kFetch:
      ++tally_.rank_in_fetch;
      break;
    case RankPhase::kLoad:
      ++tally_.rank_in_load;
      break;
    case RankPhase::kOther:
      break;
  }
  return job_.rank(rank).Kill();
}

absl::Status Killer::AwaitInsideLoad() {
  const uint32_t rank = SomeRank();
  OPTSTATE_RETURN_IF_ERROR(AwaitNotForLong(
      [&] { return job_.rank(rank).phase() == RankPhase::kLoad; }));
  Spin(kAnyInstant);
  return absl::OkStatus();
}

absl::Status Killer::DisturbEngine() {
  const double what = Unit();
  if (what < 0.15) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideLoad());
    if (job_.rank(SomeRank()).phase() == RankPhase::kLoad) {
      ++tally_.engine_in_load;
    }
  } else if (what < 0.85) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  } else {
    Spin(kAnyInstant);
  }
  OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
  return Unit() < 0.33 ? KillEngineAgain() : absl::OkStatus();
}

absl::Status Killer::RestartSupervisor() {
  supervised_ = true;
  return job_.daemon().Restart();
}

absl::Status Killer::DisturbSupervisor() {
  if (Unit() < 0.2) return EndDaemon();
  switch (Below(4)) {
    case 0:
      return KillSupervisorAlone();
    case 1:
      return KillEngineThenSupervisor();
    case 2:
      return KillSupervisorThenEngine();
    default:
      return KillSupervisorAndRank();
  }
}

absl::Status Killer::KillSupervisorAlone() {
  if (Unit() < 0.5) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  } else {
    Spin(kAnyInstant);
  }
  OPTSTATE_RETURN_IF_ERROR(KillSupervisor());
  Spin(kAnyInstant);
  return RestartSupervisor();
}

// Kills the supervisor while the next engine starts or recovers.
absl::Status Killer::KillEngineThenSupervisor() {
  OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
  Spin(kAnyInstant);
  OPTSTATE_RETURN_IF_ERROR(KillSupervisor());
  if (Unit() < 0.3) OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/true));
  OPTSTATE_RETURN_IF_ERROR(RestartSupervisor());
  return Unit() < 0.3 ? KillEngineAgain() : absl::OkStatus();
}

// Kills both: gradients are with the ranks alone then, or in staging files.
absl::Status Killer::KillSupervisorThenEngine() {
  OPTSTATE_RETURN_IF_ERROR(KillSupervisor());
  if (Unit() < 0.7) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  } else {
    Spin(kAnyInstant);
  }
  OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
  OPTSTATE_RETURN_IF_ERROR(RestartSupervisor());
  return Unit() < 0.3 ? KillEngineAgain() : absl::OkStatus();
}

// Kills both: the engine lives, or the gradients are in staging files.
absl::Status Killer::KillSupervisorAndRank() {
  const uint32_t rank = SomeRank();
  OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  OPTSTATE_RETURN_IF_ERROR(KillSupervisor());
  OPTSTATE_RETURN_IF_ERROR(KillRank(rank));
  if (job_.wire() == Wire::kGrpc && Unit() < 0.5) {
    OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
  }
  OPTSTATE_RETURN_IF_ERROR(RestartSupervisor());
  return job_.StartRank(rank);
}

// Ends the daemon as a service manager does. It has the engine finish its open
// step, which may be killed over that.
absl::Status Killer::EndDaemon() {
  OPTSTATE_RETURN_IF_ERROR(AwaitAdoption());
  if (Unit() < 0.7) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  } else {
    Spin(kAnyInstant);
  }
  ++tally_.terminations;
  if (job_.in_step()) ++tally_.terminations_in_step;
  const Process& daemon = job_.daemon().process();
  daemon.Signal(SIGTERM);
  if (Unit() < 0.5) {
    Spin(Unit() < 0.5 ? kMoment : kAnyInstant);
    OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
  }
  OPTSTATE_RETURN_IF_ERROR(daemon.AwaitEnd(absl::Now() + kPatience));
  return RestartSupervisor();
}

absl::Status Killer::DisturbRanks() {
  return Unit() < 0.5 ? KillRanks() : KillRankAndEngine();
}

absl::Status Killer::KillRanks() {
  static constexpr RankPhase kPhases[] = {RankPhase::kPush, RankPhase::kCommit,
                                          RankPhase::kFetch, RankPhase::kLoad};
  const RankPhase phase = kPhases[Below(std::size(kPhases))];
  const uint32_t first = SomeRank();
  OPTSTATE_RETURN_IF_ERROR(
      Await("a rank", [&] { return job_.rank(first).phase() == phase; }));
  Spin(Unit() < 0.5 ? kMoment : kAnyInstant);
  const uint64_t ranks = job_.scenario().world_size;
  const uint64_t count = Unit() < 0.5 ? 1 : ranks;
  for (uint64_t i = 0; i < count; ++i) {
    OPTSTATE_RETURN_IF_ERROR(
        KillRank(static_cast<uint32_t>((first + i) % ranks)));
  }
  Spin(kMoment);
  for (uint64_t i = 0; i < count; ++i) {
    OPTSTATE_RETURN_IF_ERROR(
        job_.StartRank(static_cast<uint32_t>((first + i) % ranks)));
  }
  return absl::OkStatus();
}

// Waits until the supervisor knows the engine, so that it has the gradients of
// its ranks.
absl::Status Killer::AwaitAdoption() {
  return Await("the engine's adoption", [&] {
    const auto described = job_.daemon().GetJob(job_.name());
    return described.ok() && described->engine_pid() != 0 &&
           described->engine_pid() == job_.engine() &&
           described->phase() == v1::JOB_PHASE_READY;
  });
}

// Kills both: the step is finished with the gradients that were kept, or it
// never began.
absl::Status Killer::KillRankAndEngine() {
  const uint32_t rank = SomeRank();
  OPTSTATE_RETURN_IF_ERROR(AwaitAdoption());
  if (Unit() < 0.7) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  } else {
    Spin(kAnyInstant);
  }
  ++tally_.rank_with_engine;
  const bool rank_first = Unit() < 0.5;
  if (rank_first) OPTSTATE_RETURN_IF_ERROR(KillRank(rank));
  OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
  if (!rank_first) OPTSTATE_RETURN_IF_ERROR(KillRank(rank));
  OPTSTATE_RETURN_IF_ERROR(job_.StartRank(rank));
  return Unit() < 0.3 ? KillEngineAgain() : absl::OkStatus();
}

// Kills all processes and removes all memory, as a loss of power does but for
// what a disk's cache loses. The job goes on from its disk.
absl::Status Killer::CutPower() {
  if (Unit() < 0.7) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  } else {
    Spin(kAnyInstant);
  }
  ++tally_.power;
  if (job_.in_step()) ++tally_.power_in_step;
  OPTSTATE_RETURN_IF_ERROR(job_.daemon().Kill());
  if (const pid_t pid = job_.engine(); pid != 0) {
    const Process engine(pid);
    engine.Signal(SIGKILL);
    OPTSTATE_RETURN_IF_ERROR(engine.AwaitEnd(absl::Now() + kPatience));
  }
  const uint32_t ranks = job_.scenario().world_size;
  uint64_t answered = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    OPTSTATE_RETURN_IF_ERROR(job_.rank(rank).Kill());
    answered = std::max(answered, job_.rank(rank).answered_step());
  }
  const uint64_t committed = job_.committed_step();
  OPTSTATE_RETURN_IF_ERROR(job_.DropMemory());
  OPTSTATE_RETURN_IF_ERROR(RestartSupervisor());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    OPTSTATE_RETURN_IF_ERROR(job_.StartRank(rank));
  }
  OPTSTATE_RETURN_IF_ERROR(job_.AwaitFiles());
  // Ranks may have taken steps since.
  const uint64_t restored = job_.committed_step();
  if (restored < committed) ++tally_.power_lost_steps;
  if (restored >= answered) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "step ", restored, " is there after a loss of power, and step ", answered,
      " was answered"));
}

absl::Status Killer::DisturbByUpgrade() {
  switch (Below(3)) {
    case 0:
      return UpgradeAlone();
    case 1:
      return UpgradeAndKillEngine();
    default:
      return UpgradeAndKillSupervisor();
  }
}

UpgradeWay Killer::DrawUpgradeWay() {
  return Unit() < 0.3 ? UpgradeWay::kSignal : UpgradeWay::kCall;
}

void Killer::NoteUpgrade(UpgradeWay way) {
  ++tally_.upgrades;
  if (way == UpgradeWay::kSignal) ++tally_.upgrades_by_signal;
  if (job_.in_step()) ++tally_.upgrades_in_step;
}

// Waits for an instant before the new build is checked, while the daemon
// changes, or while the engine is replaced.
void Killer::AwaitUpgradeInstant() {
  Spin(Unit() < 0.5 ? kAnyInstant : kUpgrade);
}

absl::StatusOr<std::string> Killer::LastUpgrade() {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ServerStatus status,
                            job_.daemon().GetStatus());
  return status.upgrade().id();
}

absl::Status Killer::AwaitUpgraded(const std::string& before) {
  v1::UpgradeProgress progress;
  absl::Status ranks;
  OPTSTATE_RETURN_IF_ERROR(PollUntil("the end of an upgrade", [&] {
    ranks = job_.CheckRanks();
    const absl::StatusOr<v1::ServerStatus> status = job_.daemon().GetStatus();
    if (status.ok()) progress = status->upgrade();
    return !ranks.ok() || (progress.id() != before && progress.done());
  }));
  OPTSTATE_RETURN_IF_ERROR(ranks);
  ++tally_.upgrades_done;
  for (const std::string& problem : progress.problems()) {
    if (!job_.scenario().accumulation.has_value() ||
        !absl::StrContains(problem, "it keeps its engine")) {
      return absl::InternalError(absl::StrCat("not upgraded: ", problem));
    }
    ++tally_.upgrades_keep_engine;
  }
  return absl::OkStatus();
}

absl::Status Killer::UpgradeAlone() {
  if (Unit() < 0.5) {
    OPTSTATE_RETURN_IF_ERROR(AwaitInsideStep());
  } else {
    Spin(kAnyInstant);
  }
  const pid_t engine = job_.engine();
  const UpgradeWay way = DrawUpgradeWay();
  OPTSTATE_ASSIGN_OR_RETURN(const std::string before, LastUpgrade());
  NoteUpgrade(way);
  OPTSTATE_RETURN_IF_ERROR(UpgradeCall(&job_.daemon(), way).Answer());
  const uint64_t kept = tally_.upgrades_keep_engine;
  OPTSTATE_RETURN_IF_ERROR(AwaitUpgraded(before));
  const bool keeps =
      way == UpgradeWay::kSignal || tally_.upgrades_keep_engine != kept;
  if ((job_.engine() == engine) == keeps) return absl::OkStatus();
  return absl::InternalError(keeps ? "an upgrade has replaced the engine"
                                   : "an upgrade has not replaced the engine");
}

// Kills the engine that is to be replaced, or the next one, and perhaps a rank.
// The daemon goes on, and has its gradients.
absl::Status Killer::UpgradeAndKillEngine() {
  const bool with_rank = Unit() < 0.5;
  const uint32_t rank = SomeRank();
  if (with_rank) OPTSTATE_RETURN_IF_ERROR(AwaitAdoption());
  Spin(kAnyInstant);
  const UpgradeWay way = DrawUpgradeWay();
  OPTSTATE_ASSIGN_OR_RETURN(const std::string before, LastUpgrade());
  NoteUpgrade(way);
  UpgradeCall call(&job_.daemon(), way);
  AwaitUpgradeInstant();
  const uint64_t killed = tally_.engine;
  OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
  tally_.engine_in_upgrade += tally_.engine - killed;
  if (with_rank) {
    const uint64_t ranks = tally_.rank;
    OPTSTATE_RETURN_IF_ERROR(KillRank(rank));
    tally_.rank_in_upgrade += tally_.rank - ranks;
    OPTSTATE_RETURN_IF_ERROR(job_.StartRank(rank));
  }
  OPTSTATE_RETURN_IF_ERROR(call.Answer());
  return AwaitUpgraded(before);
}

// The upgrade goes with the daemon; the process that starts the daemon again
// decides on its build.
absl::Status Killer::UpgradeAndKillSupervisor() {
  Spin(kAnyInstant);
  const UpgradeWay way = DrawUpgradeWay();
  NoteUpgrade(way);
  UpgradeCall call(&job_.daemon(), way);
  AwaitUpgradeInstant();
  OPTSTATE_RETURN_IF_ERROR(KillSupervisor());
  ++tally_.supervisor_in_upgrade;
  if (Unit() < 0.3) {
    Spin(kMoment);
    const uint64_t killed = tally_.engine;
    OPTSTATE_RETURN_IF_ERROR(KillEngine(/*again=*/false));
    tally_.engine_in_upgrade += tally_.engine - killed;
  }
  // There is no process that could still answer.
  call.Answer().IgnoreError();
  return RestartSupervisor();
}

absl::Status Killer::Disturb() {
  const uint64_t engine = Left(quota_.engine, tally_.engine);
  const uint64_t supervisor = Left(quota_.supervisor, tally_.supervisor);
  const uint64_t rank = Left(quota_.rank, tally_.rank);
  const uint64_t upgrade = Left(quota_.upgrade, tally_.upgrades);
  const uint64_t power =
      job_.scenario().durable() ? Left(quota_.power, tally_.power) : 0;
  const uint64_t all = engine + supervisor + rank + upgrade + power;
  if (all == 0) return absl::OkStatus();
  const uint64_t drawn = Below(all);
  if (drawn < engine) return DisturbEngine();
  if (drawn < engine + supervisor) return DisturbSupervisor();
  if (drawn < engine + supervisor + rank) return DisturbRanks();
  return drawn < engine + supervisor + rank + upgrade ? DisturbByUpgrade()
                                                      : CutPower();
}

}  // namespace optstate::crash
