#include "server/supervisor/session_ledger.h"

namespace optstate::supervisor {

void SessionLedger::Add(const std::string& job, ino_t socket) {
  if (sockets_[job].insert(socket).second) ++count_;
}

void SessionLedger::Remove(const std::string& job, ino_t socket) {
  const auto found = sockets_.find(job);
  if (found == sockets_.end()) return;
  count_ -= found->second.erase(socket);
  if (found->second.empty()) sockets_.erase(found);
}

size_t SessionLedger::count(const std::string& job) const {
  const auto found = sockets_.find(job);
  return found == sockets_.end() ? 0 : found->second.size();
}

void SessionLedger::Forget(const std::string& job) { Retain(job, {}); }

void SessionLedger::Retain(const std::string& job,
                           const std::set<ino_t>& open) {
  const auto found = sockets_.find(job);
  if (found == sockets_.end()) return;
  count_ -= std::erase_if(
      found->second, [&open](ino_t socket) { return !open.contains(socket); });
  if (found->second.empty()) sockets_.erase(found);
}

}  // namespace optstate::supervisor
