#include "server/transport/shm/shm_transport.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "server/observe/peer_log.h"
#include "spdlog/spdlog.h"

namespace optstate::transport {

ShmTransport::ShmTransport(Options options)
    : options_(std::move(options)),
      spin_(options_.settings),
      handshake_timeout_(options_.handshake_timeout) {}

ShmTransport::~ShmTransport() { Shutdown("the engine ends"); }

void ShmTransport::Serve(UniqueFd socket, Peer peer) {
  auto served = std::make_unique<Served>();
  Served* const borrowed = served.get();
  std::list<std::unique_ptr<Served>> ended;
  {
    absl::MutexLock lock(&mutex_);
    if (shut_down_) return;
    served->session = std::make_unique<ShmSession>(
        std::move(socket), std::move(peer),
        ShmSession::Environment{.job = options_.job,
                                .table = options_.table,
                                .watcher = options_.watcher,
                                .spin = &spin_,
                                .handshake_timeout = handshake_timeout_});
    ended = TakeEnded();
    // std::thread reports a lack of threads by throwing.
    try {
      served->thread = std::thread([this, borrowed] { RunSession(borrowed); });
    } catch (const std::system_error& error) {
      observe::LogOfPeer(spdlog::level::err, "session refused", "a rank",
                         "session refused: no thread for it: {}", error.what());
      return;
    }
    sessions_.push_back(std::move(served));
  }
  for (auto& old : ended) old->thread.join();
}

void ShmTransport::RunSession(Served* served) {
  ::pthread_setname_np(::pthread_self(), "shm-session");
  spin_.AddSession();
  served->session->Run();
  spin_.RemoveSession();
  std::unique_ptr<ShmSession> session;
  {
    absl::MutexLock lock(&mutex_);
    session = std::move(served->session);
  }
  // The session is destroyed now, not when the thread is joined, to release the
  // peer's memory and its fds.
  session.reset();
  served->ended.store(true);
  if (options_.on_session_end) options_.on_session_end();
}

std::list<std::unique_ptr<ShmTransport::Served>> ShmTransport::TakeEnded() {
  std::list<std::unique_ptr<Served>> ended;
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    const auto next = std::next(it);
    if ((*it)->ended.load()) ended.splice(ended.end(), sessions_, it);
    it = next;
  }
  return ended;
}

void ShmTransport::SetHandshakeTimeout(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  handshake_timeout_ = timeout;
}

size_t ShmTransport::session_count() const {
  absl::MutexLock lock(&mutex_);
  size_t count = 0;
  for (const auto& served : sessions_) count += served->ended.load() ? 0 : 1;
  return count;
}

void ShmTransport::Shutdown(absl::string_view why) {
  std::list<std::unique_ptr<Served>> sessions;
  {
    absl::MutexLock lock(&mutex_);
    shut_down_ = true;
    for (auto& served : sessions_) {
      if (served->session != nullptr) served->session->Stop(why);
    }
    sessions.swap(sessions_);
  }
  for (auto& served : sessions) served->thread.join();
}

}  // namespace optstate::transport
