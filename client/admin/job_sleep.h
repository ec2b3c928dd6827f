#ifndef OPTSTATE_CLIENT_ADMIN_JOB_SLEEP_H_
#define OPTSTATE_CLIENT_ADMIN_JOB_SLEEP_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/session_types.h"

// A trainer puts its own job to sleep, and wakes it, without a rank of it: its
// sessions are closed before, and opened again afterwards.
namespace optstate::client {

// Says which job of a name it is, and how far it has come: equal before a sleep
// and after it.
struct JobMark {
  uint64_t created_at_ns = 0;  // 0: not known
  uint64_t committed_step = 0;
};

struct SleepRequest {
  std::string endpoint;  // as SessionOptions has it; not embedded
  std::string job;
  // The bound of every wait in which nothing goes on: for a daemon that is
  // started again, for ranks that have closed their sessions to be gone, and
  // for its next sign of life.
  absl::Duration timeout = absl::Seconds(30);
  // The bound of the whole; the daemon goes on when it has passed.
  absl::Duration whole_timeout = absl::InfiniteDuration();
  InterruptCheck interrupted = nullptr;
  // Told how far it is, several times a second or once a second, by the waiting
  // thread. `bytes_total`: 0 while it is not known, and when somebody else has
  // begun it.
  std::function<void(uint64_t bytes, uint64_t bytes_total)> progress = nullptr;
};

struct JobSleep {
  std::string directory;      // where the job sleeps, or slept
  uint64_t memory_bytes = 0;  // given back, or taken again
  bool was_so = false;        // it slept, or was awake, before the call
  JobMark mark;
};

// Puts a job to sleep. OK too when it sleeps already, or somebody else puts it
// to sleep. Waits until no rank is attached; when some stay, the daemon's
// refusal names them.
//
// Errors are those of Admin.SleepJob (admin.proto), on which the job is awake;
// UNIMPLEMENTED: the daemon is too old; UNAVAILABLE: no daemon answers;
// DEADLINE_EXCEEDED and CANCELLED (interrupted): the daemon goes on if it had
// begun.
absl::StatusOr<JobSleep> PutJobToSleep(const SleepRequest& request);

// Wakes a job. OK too when it is awake already, or somebody else wakes it.
// `expected`: what PutJobToSleep() said; FAILED_PRECONDITION, and the job
// sleeps on if it slept: it is another job of its name, or has taken steps
// since. Without a created_at_ns any job is woken. Other errors are those of
// Admin.WakeJob, on which the job stays asleep, and those above.
absl::StatusOr<JobSleep> WakeJob(const SleepRequest& request,
                                 const JobMark& expected = {});

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_ADMIN_JOB_SLEEP_H_
