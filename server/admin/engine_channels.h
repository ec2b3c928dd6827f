#ifndef OPTSTATE_SERVER_ADMIN_ENGINE_CHANNELS_H_
#define OPTSTATE_SERVER_ADMIN_ENGINE_CHANNELS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"
#include "proto/types/unique_fd.h"

namespace optstate::admin {

// The private gRPC connections to the running engines.
//
// An engine that does not answer (it hangs) costs its caller the deadline and
// delays no other call: calls to several engines run side by side.
//
// Threads: thread-safe. Calls block the calling thread.
class EngineChannels {
 public:
  EngineChannels();
  ~EngineChannels();

  // Sets the connection to a new engine of `job`; replaces the previous one.
  void Set(const std::string& job, UniqueFd grpc);
  // Notes that the job has no engine, but one is being started.
  void Lose(const std::string& job);
  // Notes that the job has no engine, and gets none.
  void Erase(const std::string& job);

  // Asks the job's engine. UNAVAILABLE when there is none just now;
  // DEADLINE_EXCEEDED. `memory`: see GetJobRequest.
  absl::StatusOr<v1::Job> GetJob(const std::string& job, absl::Time deadline,
                                 bool memory = false);

  struct Channel;
  // The engine that a job had when it was taken, if any. A call that not
  // everybody may make of a job takes the engine first, and looks then whose
  // job has the name: a job goes after its engine has ended, so the engine is
  // that job's or reaches nobody, and never one of another job that got the
  // name meanwhile.
  using Engine = std::shared_ptr<Channel>;  // null: there was none
  Engine Take(const std::string& job) const { return Find(job); }

  // UNAVAILABLE: there was no engine, or it has ended.
  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const Engine& engine, const v1::ListParametersRequest& request,
      absl::Time deadline);

  // Asks all engines at once; the answers are in the order of `jobs`.
  std::vector<absl::StatusOr<v1::Job>> GetJobs(
      const std::vector<std::string>& jobs, absl::Time deadline,
      bool memory = false);
  // Asks all engines likewise, and also waits for an engine that is being
  // started or adopted, and for the successor of one that dies meanwhile.
  std::vector<absl::StatusOr<v1::Job>> AwaitJobs(
      const std::vector<std::string>& jobs, absl::Time deadline);

  // Has every engine finish its open step, or (resume) take steps again. An
  // engine that dies meanwhile leaves that to its successor. Returns the first
  // failure, naming the job, when all have answered. CANCELLED once `caller`,
  // the call that asked for this, is cancelled; null: no call that could be.
  absl::Status DrainAll(bool resume, absl::Time deadline,
                        const grpc::ServerContext* caller);

  // Has every engine pause until it is told to stop, see v1::RestRequest. Jobs
  // that have no engine, or lose it, count as paused. Returns the first
  // failure when all have answered.
  absl::Status PauseAll(absl::Time deadline);
  // Has one job's engine pause; `deadline` is the engine's. UNIMPLEMENTED: the
  // engine is older than this call.
  absl::Status Pause(const std::string& job, absl::Time deadline);

  // Changes settings of the job, which may last as long as its longest step.
  // UNAVAILABLE: there was no engine, or it has ended; UNIMPLEMENTED: it is
  // older than this call.
  absl::StatusOr<v1::SetJobReply> SetJob(const Engine& engine,
                                         const v1::SetJobRequest& request,
                                         absl::Time deadline);

  // Has the job's engine verify its records on disk, for as long as that takes
  // or until `caller` is cancelled or `pass` returns false; null: no call that
  // could be. `pass` gets each message. Errors as of SetJob.
  absl::Status VerifyJob(
      const Engine& engine, const std::string& job,
      const grpc::ServerContext* caller,
      absl::FunctionRef<bool(const v1::VerifyJobProgress&)> pass);

  // Has the job's engine trace it, in the same way and with the same errors.
  absl::Status TraceJob(const Engine& engine,
                        const v1::TraceJobRequest& request,
                        const grpc::ServerContext* caller,
                        absl::FunctionRef<bool(const v1::TraceChunk&)> pass);

 private:
  struct Call;

  // Makes one call for each job.
  std::vector<std::unique_ptr<Call>> MakeCalls(
      absl::Time deadline, const grpc::ServerContext* caller) const;
  std::vector<std::unique_ptr<Call>> MakeCalls(
      const std::vector<std::string>& jobs, absl::Time deadline) const;
  // Makes calls to the next engines of jobs whose call had no engine or lost
  // it, as soon as one has another engine. Empty: there is nothing to wait for,
  // or none came.
  std::vector<std::unique_ptr<Call>> AwaitNextCalls(
      const std::vector<std::unique_ptr<Call>>& calls,
      absl::Time deadline) const;
  static void AskForJobs(const std::vector<std::unique_ptr<Call>>& calls,
                         bool memory);
  static std::vector<absl::StatusOr<v1::Job>> AnswersOf(
      const std::vector<std::unique_ptr<Call>>& calls);
  // Makes the calls at once; sets their `status` and returns when all have
  // answered.
  using OnAnswer = std::function<void(const grpc::Status&)>;
  static void AskAll(const std::vector<std::unique_ptr<Call>>& calls,
                     absl::FunctionRef<void(Call*, OnAnswer)> ask);
  // Returns null when there is no engine just now.
  std::shared_ptr<Channel> Find(const std::string& job) const;
  // Waits for a channel other than `last`. Null: the job gets none, and
  // `*status` is OK, or none has come by the deadline or while the caller
  // waits.
  std::shared_ptr<Channel> Next(const std::string& job,
                                const std::shared_ptr<Channel>& last,
                                absl::Time deadline,
                                const grpc::ServerContext* caller,
                                absl::Status* status) const;
  absl::Status DrainNext(const std::string& job, std::shared_ptr<Channel> last,
                         absl::Time deadline,
                         const grpc::ServerContext* caller) const;

  mutable absl::Mutex mutex_;
  // Channels by job; null while the job's engine is being started.
  std::map<std::string, std::shared_ptr<Channel>> channels_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ENGINE_CHANNELS_H_
