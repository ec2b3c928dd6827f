#include "server/admin/grpc_gate.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/admin/grpc_refusals.h"
#include "server/admin/guarded_connection.h"
#include "server/os/event_loop.h"

namespace optstate::admin {
namespace {

using os::EventLoop;

// The units that a peer may still send.
struct Budget {
  double units = GrpcGate::kBurst;
  absl::Time at;
  size_t connections = 0;
};

class Gate final : public GrpcGate {
 public:
  explicit Gate(std::unique_ptr<EventLoop> loop)
      : loop_(std::move(loop)), thread_([this] { loop_->Run(); }) {}

  ~Gate() override {
    loop_->Stop();
    thread_.join();
    connections_.clear();
  }

  absl::StatusOr<UniqueFd> Guard(UniqueFd connection,
                                 std::string peer) override;
  void Refuse(UniqueFd connection, absl::Status why) override;
  void Flush(absl::Time deadline) override;

 private:
  void Add(UniqueFd connection, UniqueFd grpc, const std::string& peer);
  absl::Duration Charge(const std::string& peer, double units);
  void Forget(const std::string& peer);

  const std::unique_ptr<EventLoop> loop_;
  // The members from here on belong to the loop's thread.
  uint64_t next_ = 0;
  std::map<uint64_t, std::unique_ptr<GuardedConnection>> connections_;
  std::map<std::string, Budget> budgets_;
  GrpcRefusals refusals_{loop_.get()};
  std::thread thread_;
};

absl::StatusOr<UniqueFd> Gate::Guard(UniqueFd connection, std::string peer) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
                   ends) != 0) {
    return OsError(errno, "socketpair for a gRPC connection");
  }
  // std::function needs a copyable callable.
  const auto outside = std::make_shared<UniqueFd>(std::move(connection));
  const auto inside = std::make_shared<UniqueFd>(ends[0]);
  loop_->Post([this, outside, inside, peer = std::move(peer)] {
    Add(std::move(*outside), std::move(*inside), peer);
  });
  return UniqueFd(ends[1]);
}

void Gate::Add(UniqueFd connection, UniqueFd grpc, const std::string& peer) {
  const uint64_t number = next_++;
  if (!peer.empty()) {
    ++budgets_.try_emplace(peer, Budget{.at = absl::Now()})
          .first->second.connections;
  }
  GuardedConnection::Callbacks callbacks;
  callbacks.charge = [this, peer](double units) { return Charge(peer, units); };
  callbacks.on_end = [this, number, peer] {
    Forget(peer);
    connections_.erase(number);
  };
  auto guarded = std::make_unique<GuardedConnection>(
      loop_.get(), std::move(connection), std::move(grpc),
      std::move(callbacks));
  if (guarded->Start().ok()) {
    connections_[number] = std::move(guarded);
  } else {
    Forget(peer);
  }
}

absl::Duration Gate::Charge(const std::string& peer, double units) {
  if (peer.empty()) return absl::ZeroDuration();
  Budget& budget = budgets_.at(peer);
  const absl::Time now = absl::Now();
  budget.units =
      std::min(kBurst, budget.units + kUnitsPerSecond * absl::ToDoubleSeconds(
                                                            now - budget.at)) -
      units;
  budget.at = now;
  return absl::Seconds(-budget.units / kUnitsPerSecond);
}

// Forgets a peer's budget once that is full again, so that reconnecting brings
// no new budget.
void Gate::Forget(const std::string& peer) {
  if (peer.empty()) return;
  --budgets_.at(peer).connections;
  const absl::Time now = absl::Now();
  std::erase_if(budgets_, [now](const auto& each) {
    const Budget& budget = each.second;
    return budget.connections == 0 &&
           budget.units +
                   kUnitsPerSecond * absl::ToDoubleSeconds(now - budget.at) >=
               kBurst;
  });
}

void Gate::Refuse(UniqueFd connection, absl::Status why) {
  const auto fd = std::make_shared<UniqueFd>(std::move(connection));
  loop_->Post([this, fd, why = std::move(why)] {
    refusals_.Refuse(std::move(*fd), why);
  });
}

void Gate::Flush(absl::Time deadline) {
  const auto done = std::make_shared<absl::Notification>();
  loop_->Post([this, done] {
    for (auto it = connections_.begin(); it != connections_.end();) {
      const auto next = std::next(it);
      it->second->Pump();  // may erase it
      it = next;
    }
    done->Notify();
  });
  done->WaitForNotificationWithDeadline(deadline);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcGate>> GrpcGate::Start() {
  OPTSTATE_ASSIGN_OR_RETURN(auto loop, EventLoop::Create());
  // std::thread reports a lack of threads by throwing; when the daemon starts,
  // nothing is lost by that.
  return std::make_unique<Gate>(std::move(loop));
}

}  // namespace optstate::admin
