#ifndef OPTSTATE_SERVER_SUPERVISOR_SESSION_LEDGER_H_
#define OPTSTATE_SERVER_SUPERVISOR_SESSION_LEDGER_H_

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <set>
#include <string>

namespace optstate::supervisor {

// Counts the connections given to engines.
//
// An engine does not report when a session ends, and the supervisor keeps no
// copy of its socket once the engine has it (with a copy the peer would not
// notice that the engine closed its own). So the count only grows until the
// limit is reached: then the supervisor checks which sockets the engine still
// has open, by their inodes.
//
// Threads: one at a time.
class SessionLedger {
 public:
  void Add(const std::string& job, ino_t socket);
  void Remove(const std::string& job, ino_t socket);
  // Forgets the sessions of a job whose engine is gone.
  void Forget(const std::string& job);
  // Keeps the job's sessions whose socket is in `open`.
  void Retain(const std::string& job, const std::set<ino_t>& open);

  size_t count() const { return count_; }
  // Number of sessions of one job.
  size_t count(const std::string& job) const;

 private:
  std::map<std::string, std::set<ino_t>> sockets_;
  size_t count_ = 0;
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_SESSION_LEDGER_H_
