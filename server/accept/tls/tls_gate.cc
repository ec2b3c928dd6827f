#include "server/accept/tls/tls_gate.h"

#include <spdlog/spdlog.h>

#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "proto/types/status_macros.h"
#include "server/accept/tls/tls_connection.h"
#include "server/observe/peer_log.h"
#include "server/os/event_loop.h"

namespace optstate::accept {
namespace {

using access::AccessRules;
using access::Caller;
using os::EventLoop;

absl::Status SpeaksTls() {
  return absl::FailedPreconditionError(
      "the daemon speaks TLS alone there: use grpcs:HOST:PORT");
}

void LogEnd(const PeerCredentials& peer, absl::string_view what,
            const absl::Status& why) {
  observe::LogOfPeer(spdlog::level::info, what, peer.quota_name(), "{}: {}: {}",
                     std::string(what), peer.quota_name(), why.ToString());
}

class Gate final : public TlsGate {
 public:
  Gate(std::unique_ptr<EventLoop> loop, access::LiveAccess* access,
       absl::Duration timeout, Callback on_connection)
      : loop_(std::move(loop)),
        access_(access),
        timeout_(timeout),
        on_connection_(std::move(on_connection)),
        rules_(access->Current()) {
    LookAgain();
    thread_ = std::thread([this] { loop_->Run(); });
  }

  ~Gate() override {
    Flush(absl::Now() + absl::Seconds(1));
    loop_->Stop();
    thread_.join();
    entries_.clear();
  }

  void Accept(UniqueFd connection, PeerCredentials peer) override;
  void Flush(absl::Time deadline) override;

 private:
  struct Entry {
    PeerCredentials peer;
    // The rules that the peer was judged by, and by which names.
    std::shared_ptr<const AccessRules> rules;
    std::vector<std::string> names;
    std::unique_ptr<TlsConnection> connection;
  };

  void Add(UniqueFd fd, const PeerCredentials& peer);
  absl::Status CheckRoom(const PeerCredentials& peer) const;
  void OnReady(uint64_t number, UniqueFd inside,
               const std::vector<std::string>& names);
  void OnEnd(uint64_t number, const absl::Status& why);
  // Looks whether the rules have changed, and again in a while.
  void LookAgain();
  void Reassess(const std::shared_ptr<const AccessRules>& rules);

  const std::unique_ptr<EventLoop> loop_;
  access::LiveAccess* const access_;
  const absl::Duration timeout_;
  const Callback on_connection_;
  // The members from here on belong to the loop's thread.
  std::shared_ptr<const AccessRules> rules_;
  uint64_t next_ = 0;
  std::map<uint64_t, Entry> entries_;
  std::thread thread_;
};

void Gate::Accept(UniqueFd connection, PeerCredentials peer) {
  // Until the handshake is over, the peer is nobody.
  peer.caller = Caller{.via = access::Via::kTls};
  // std::function needs a copyable callable.
  const auto fd = std::make_shared<UniqueFd>(std::move(connection));
  loop_->Post([this, fd, peer] { Add(std::move(*fd), peer); });
}

// Connections that nobody inside has yet, or any more, count.
absl::Status Gate::CheckRoom(const PeerCredentials& peer) const {
  size_t all = 0;
  size_t of_peer = 0;
  for (const auto& [number, entry] : entries_) {
    if (entry.connection->is_established()) continue;
    ++all;
    if (entry.peer.address == peer.address) ++of_peer;
  }
  if (all < kPendingMax && of_peer < kPendingMax / 2) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      "too many connections are in their TLS handshake");
}

void Gate::Add(UniqueFd fd, const PeerCredentials& peer) {
  const absl::Status room = CheckRoom(peer);
  if (!room.ok()) return LogEnd(peer, "TLS connection refused", room);
  std::shared_ptr<const AccessRules> rules = access_->Current();
  auto stream = tls::TlsStream::Accept(rules->context());
  if (!stream.ok()) {
    return LogEnd(peer, "TLS connection refused", stream.status());
  }
  const uint64_t number = next_++;
  TlsConnection::Callbacks callbacks;
  callbacks.on_plaintext = [this, peer](UniqueFd network) {
    on_connection_(std::move(network), peer, SpeaksTls());
  };
  callbacks.on_ready = [this, number](UniqueFd inside,
                                      const std::vector<std::string>& names) {
    OnReady(number, std::move(inside), names);
  };
  callbacks.on_end = [this, number](const absl::Status& why) {
    OnEnd(number, why);
  };
  Entry& entry = entries_[number];
  entry.peer = peer;
  entry.rules = std::move(rules);
  entry.connection = std::make_unique<TlsConnection>(
      loop_.get(), std::move(fd), *std::move(stream), timeout_,
      std::move(callbacks));
  const absl::Status started = entry.connection->Start();
  if (!started.ok()) OnEnd(number, started);
}

void Gate::OnReady(uint64_t number, UniqueFd inside,
                   const std::vector<std::string>& names) {
  Entry& entry = entries_.at(number);
  entry.names = names;
  absl::StatusOr<Caller> caller = entry.rules->FindByNames(names);
  if (caller.ok()) entry.peer.caller = *caller;
  on_connection_(std::move(inside), entry.peer, caller.status());
}

void Gate::OnEnd(uint64_t number, const absl::Status& why) {
  auto ended = entries_.extract(number);
  const Entry& entry = ended.mapped();
  // The end of a connection after its handshake is no fault of anybody's.
  if (why.ok() || !entry.connection->is_shaking_hands()) return;
  LogEnd(entry.peer, "TLS handshake failed", why);
}

void Gate::LookAgain() {
  std::shared_ptr<const AccessRules> rules = access_->Current();
  if (rules != rules_) Reassess(rules);
  rules_ = std::move(rules);
  loop_->RunAfter(access::LiveAccess::kLookEvery, [this] { LookAgain(); });
}

void Gate::Reassess(const std::shared_ptr<const AccessRules>& rules) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    const absl::StatusOr<Caller> caller = rules->FindByNames(entry.names);
    const bool is_alike = caller.ok() && *caller == entry.peer.caller;
    // A peer in its handshake has shown nothing yet, and is judged by the new
    // rules then.
    if (entry.rules->trust() == rules->trust() &&
        (is_alike || entry.connection->is_shaking_hands())) {
      entry.rules = rules;
      ++it;
      continue;
    }
    LogEnd(entry.peer, "TLS connection closed",
           caller.ok() ? absl::PermissionDeniedError(
                             "what the files of tls and access say of this "
                             "client has changed")
                       : caller.status());
    it = entries_.erase(it);
  }
}

void Gate::Flush(absl::Time deadline) {
  const auto done = std::make_shared<absl::Notification>();
  loop_->Post([this, done] {
    for (auto it = entries_.begin(); it != entries_.end();) {
      const auto next = std::next(it);
      it->second.connection->Pump();  // may erase it
      it = next;
    }
    done->Notify();
  });
  done->WaitForNotificationWithDeadline(deadline);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsGate>> TlsGate::Start(
    access::LiveAccess* access, absl::Duration handshake_timeout,
    Callback on_connection) {
  OPTSTATE_ASSIGN_OR_RETURN(auto loop, EventLoop::Create());
  // std::thread reports a lack of threads by throwing; when the daemon starts,
  // nothing is lost by that.
  return std::make_unique<Gate>(std::move(loop), access, handshake_timeout,
                                std::move(on_connection));
}

}  // namespace optstate::accept
