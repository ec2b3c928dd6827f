#include "server/accept/entrance.h"

#include <spdlog/spdlog.h>

#include <string>
#include <utility>

#include "proto/types/status_macros.h"
#include "server/accept/refusal.h"
#include "server/access/caller.h"
#include "server/observe/peer_log.h"

namespace optstate::accept {
namespace {

absl::Duration HandshakeTimeout(const v1::DaemonConfig& config) {
  return absl::Milliseconds(config.limits().handshake_timeout_ms());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Entrance>> Entrance::Open(
    os::EventLoop* loop, const v1::DaemonConfig& config,
    access::LiveAccess* access, Callbacks callbacks) {
  std::unique_ptr<Entrance> entrance(
      new Entrance(loop, config, access, std::move(callbacks)));
  if (access == nullptr) return entrance;
  OPTSTATE_ASSIGN_OR_RETURN(
      entrance->tls_gate_,
      TlsGate::Start(
          access, HandshakeTimeout(config),
          [raw = entrance.get()](UniqueFd fd, const PeerCredentials& peer,
                                 const absl::Status& verdict) {
            raw->OnTlsConnection(std::move(fd), peer, verdict);
          }));
  return entrance;
}

Entrance::Entrance(os::EventLoop* loop, const v1::DaemonConfig& config,
                   access::LiveAccess* access, Callbacks callbacks)
    : loop_(loop),
      insecure_tcp_(config.insecure_tcp()),
      access_(access),
      callbacks_(std::move(callbacks)),
      handshakes_(loop, HandshakeTimeout(config),
                  Handshakes::Callbacks{
                      [this](UniqueFd fd, const PeerCredentials& peer,
                             v1::Hello hello) {
                        OnHello(std::move(fd), peer, std::move(hello));
                      },
                      callbacks_.on_grpc, callbacks_.on_grpc_refused}) {}

void Entrance::OnConnection(UniqueFd fd, PeerCredentials peer) {
  if (peer.is_unix()) return handshakes_.Start(std::move(fd), peer);
  if (tls_gate_ != nullptr) return tls_gate_->Accept(std::move(fd), peer);
  // The configuration has no TCP address without this permission.
  if (insecure_tcp_) peer.caller = access::InsecureTcpCaller();
  handshakes_.Start(std::move(fd), peer);
}

void Entrance::Flush(absl::Time deadline) {
  if (tls_gate_ != nullptr) tls_gate_->Flush(deadline);
}

void Entrance::OnTlsConnection(UniqueFd fd, const PeerCredentials& peer,
                               const absl::Status& verdict) {
  // std::function needs a copyable callable.
  const auto shared = std::make_shared<UniqueFd>(std::move(fd));
  loop_->Post([this, shared, peer, verdict] {
    handshakes_.Start(std::move(*shared), peer, verdict);
  });
}

void Entrance::OnHello(UniqueFd fd, PeerCredentials peer, v1::Hello hello) {
  const std::string token = std::move(*hello.mutable_token());
  hello.clear_token();
  if (peer.caller.via == access::Via::kTls && peer.caller.identity.empty()) {
    absl::StatusOr<access::Caller> caller =
        access_->Current()->FindByToken(token);
    if (!caller.ok()) {
      observe::LogOfPeer(spdlog::level::info, "session refused",
                         peer.quota_name(), "session of {} refused: {}",
                         peer.quota_name(), caller.status().ToString());
      return SendRefusal(fd.get(), caller.status());
    }
    peer.caller = *std::move(caller);
  }
  callbacks_.on_session(std::move(fd), peer, std::move(hello));
}

}  // namespace optstate::accept
