#include "client/fake/fake_daemon.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel/transport_error.h"
#include "client/endpoint/interrupt.h"
#include "client/fake/fake_daemon_job.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

absl::Status Lost() {
  return TransportError(absl::UnavailableError("the connection was lost"));
}

}  // namespace

FakeDaemon::FakeDaemon() = default;
FakeDaemon::~FakeDaemon() = default;

absl::StatusOr<FakeDaemon::Connection> FakeDaemon::Open(
    const ChannelSetup& setup, bool must_exist, const std::byte* gradient_area,
    Attached* attached) {
  absl::MutexLock lock(&mutex_);
  if (refuse_opens_ > 0) {
    --refuse_opens_;
    return UnreachableError(absl::UnavailableError("connection refused"));
  }
  std::unique_ptr<FakeDaemonJob>& job = jobs_[setup.job];
  const bool created = job == nullptr;
  if (created && must_exist) {
    jobs_.erase(setup.job);
    return absl::NotFoundError(absl::StrCat("no job \"", setup.job, "\""));
  }
  if (created) job = std::make_unique<FakeDaemonJob>(setup);
  OPTSTATE_RETURN_IF_ERROR(job->CheckRegister(setup));
  OPTSTATE_RETURN_IF_ERROR(job->Attach(setup, gradient_area));
  *attached = job->Describe();
  attached->takes_begin_at = takes_begin_at_;
  attached->created = created;
  seats_[++last_connection_] = {.job = job.get(), .rank = setup.rank};
  return last_connection_;
}

void FakeDaemon::Close(Connection connection) {
  absl::MutexLock lock(&mutex_);
  const absl::StatusOr<Seat> seat = Find(connection);
  if (!seat.ok()) return;
  seat->job->Detach(seat->rank);
  seats_.erase(connection);
  for (auto it = jobs_.begin(); it != jobs_.end();) {
    it = it->second->finished() ? jobs_.erase(it) : std::next(it);
  }
}

absl::Status FakeDaemon::Farewell() {
  absl::MutexLock lock(&mutex_);
  if (refuse_opens_ > 0) {
    --refuse_opens_;
    return UnreachableError(absl::UnavailableError("connection refused"));
  }
  ++farewells_;
  return absl::OkStatus();
}

int FakeDaemon::farewells() const {
  absl::MutexLock lock(&mutex_);
  return farewells_;
}

bool FakeDaemon::connected(Connection connection) const {
  absl::MutexLock lock(&mutex_);
  return seats_.contains(connection);
}

absl::Span<const std::byte> FakeDaemon::parameter_area(
    Connection connection) const {
  absl::MutexLock lock(&mutex_);
  const absl::StatusOr<Seat> seat = Find(connection);
  return seat.ok() ? seat->job->parameter_area()
                   : absl::Span<const std::byte>();
}

absl::StatusOr<FakeDaemon::Seat> FakeDaemon::Find(Connection connection) const {
  const auto found = seats_.find(connection);
  if (found == seats_.end()) return Lost();
  return found->second;
}

template <typename Done>
absl::Status FakeDaemon::Await(Connection connection, absl::Time deadline,
                               const InterruptCheck& interrupted,
                               const Done& done) {
  const auto ready = [&] {
    const auto found = seats_.find(connection);
    return found == seats_.end() || done(found->second);
  };
  const auto slice_end = [&] {
    return std::min(deadline, absl::Now() + kInterruptSlice);
  };
  while (!mutex_.AwaitWithDeadline(absl::Condition(&ready), slice_end())) {
    OPTSTATE_RETURN_IF_ERROR(CheckInterrupted(interrupted));
    if (absl::Now() < deadline) continue;
    const Seat seat = seats_.at(connection);
    seat.job->Detach(seat.rank);
    seats_.erase(connection);
    return NoAnswerError();
  }
  return Find(connection).status();
}

absl::Status FakeDaemon::Push(Connection connection, const PushRange& range) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_ASSIGN_OR_RETURN(const Seat seat, Find(connection));
  return seat.job->Push(seat.rank, range);
}

absl::Status FakeDaemon::StartCommit(Connection connection,
                                     const CommitOptions& options) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_ASSIGN_OR_RETURN(const Seat seat, Find(connection));
  const absl::StatusOr<bool> decided = seat.job->Commit(seat.rank, options);
  // The answer comes later, as over a wire.
  if (!decided.ok()) seat.job->answer(seat.rank) = decided.status();
  if (decided.ok() && *decided && std::exchange(lose_after_step_, false)) {
    LoseAll();
    return Lost();
  }
  return absl::OkStatus();
}

absl::StatusOr<Outcome> FakeDaemon::WaitCommit(
    Connection connection, absl::Time deadline,
    const InterruptCheck& interrupted) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_RETURN_IF_ERROR(
      Await(connection, deadline, interrupted, [](const Seat& seat) {
        return seat.job->answer(seat.rank).has_value();
      }));
  const Seat seat = seats_.at(connection);
  return *std::exchange(seat.job->answer(seat.rank), std::nullopt);
}

absl::Status FakeDaemon::Abort(Connection connection, uint64_t step) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_ASSIGN_OR_RETURN(const Seat seat, Find(connection));
  return seat.job->Abort(seat.rank, step);
}

absl::Status FakeDaemon::BeginLoad(Connection connection) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_ASSIGN_OR_RETURN(const Seat seat, Find(connection));
  return seat.job->BeginLoad(seat.rank);
}

absl::Status FakeDaemon::Load(Connection connection, StateArray array,
                              uint32_t parameter, uint64_t begin, DType dtype,
                              absl::Span<const std::byte> data) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_ASSIGN_OR_RETURN(const Seat seat, Find(connection));
  return seat.job->Load(seat.rank, array, parameter, begin, dtype, data);
}

absl::Status FakeDaemon::FinishLoad(Connection connection, const LoadEnd& end,
                                    absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_ASSIGN_OR_RETURN(const Seat seat, Find(connection));
  OPTSTATE_RETURN_IF_ERROR(seat.job->FinishLoad(seat.rank, end));
  if (!seat.job->loading() && std::exchange(lose_after_load_, false)) {
    LoseAll();
  }
  return Await(connection, deadline, nullptr,
               [](const Seat& at) { return !at.job->loading(); });
}

absl::StatusOr<uint64_t> FakeDaemon::Fetch(Connection connection,
                                           StateArray array, uint32_t parameter,
                                           uint64_t begin,
                                           absl::Span<std::byte> out) {
  absl::MutexLock lock(&mutex_);
  OPTSTATE_ASSIGN_OR_RETURN(const Seat seat, Find(connection));
  OPTSTATE_RETURN_IF_ERROR(seat.job->Fetch(array, parameter, begin, out));
  return seat.job->committed_step();
}

void FakeDaemon::LoseAll() {
  for (const auto& [connection, seat] : seats_) seat.job->Detach(seat.rank);
  seats_.clear();
}

void FakeDaemon::LoseConnections() {
  absl::MutexLock lock(&mutex_);
  LoseAll();
}

void FakeDaemon::LoseConnectionsAfterNextStep() {
  absl::MutexLock lock(&mutex_);
  lose_after_step_ = true;
}

void FakeDaemon::LoseConnectionsAfterNextLoad() {
  absl::MutexLock lock(&mutex_);
  lose_after_load_ = true;
}

void FakeDaemon::ForgetBeginAt() {
  absl::MutexLock lock(&mutex_);
  takes_begin_at_ = false;
}

void FakeDaemon::RefuseOpens(int count) {
  absl::MutexLock lock(&mutex_);
  refuse_opens_ = count;
}

}  // namespace optstate::client
