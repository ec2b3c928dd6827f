#ifndef OPTSTATE_SERVER_SUPERVISOR_JOB_AUDIENCE_H_
#define OPTSTATE_SERVER_SUPERVISOR_JOB_AUDIENCE_H_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "optstate/v1/admin.pb.h"
#include "optstate/v1/types.pb.h"
#include "server/access/caller.h"

namespace optstate::supervisor {

// Says who may see the events of jobs, of those that have ended too.
//
// The events of a job are for those who may look at it as it is now. Once it
// has ended, they are for those who could look at it then. Jobs of one name and
// owner that come after each other count as one that only they all show: the
// log does not tell them apart. An event of a job that this object does not
// know, as after the daemon was replaced, is for its owner and operators alone.
// An event without an owner, such as a refusal, is also for its actor, and is
// hidden from others where there is no job: whether a name is taken must not
// show by it.
//
// Threads: thread-safe. Calls look up groups, as MayLook() does.
class JobAudience {
 public:
  // Jobs that have ended, and are remembered; more of them than the log has
  // events.
  static constexpr size_t kEndedMax = 8192;

  // A job is there. `after_sequence`: earlier events are of others of its name.
  void Begin(const std::string& job, uid_t owner, const v1::JobAccess& access,
             uint64_t after_sequence = 0);
  void Change(const std::string& job, const v1::JobAccess& access);
  void End(const std::string& job);

  bool MaySee(const v1::Event& event, const access::Caller& caller) const;
  // Returns whether everybody may see the event.
  bool IsPublic(const v1::Event& event) const;

 private:
  struct Job {
    uid_t owner = access::Caller::kNobody;
    v1::JobAccess access;
    uint64_t after_sequence = 0;
  };
  using Ended = std::pair<std::string, uid_t>;

  // Returns the owner and the access that count for an event with a job.
  Job Find(const v1::Event& event) const;

  mutable absl::Mutex mutex_;
  std::map<std::string, Job> jobs_ ABSL_GUARDED_BY(mutex_);
  std::map<Ended, v1::JobAccess> ended_ ABSL_GUARDED_BY(mutex_);
  std::deque<Ended> ended_in_order_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::supervisor

#endif  // OPTSTATE_SERVER_SUPERVISOR_JOB_AUDIENCE_H_
