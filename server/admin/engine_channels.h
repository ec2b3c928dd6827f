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

// The private gRPC connections to the engines that run.
//
// An engine that does not answer (it hangs) costs a caller its deadline and
// nobody else anything: calls to several engines run side by side.
//
// Threads: thread-safe. Calls block the calling thread.
class EngineChannels {
 public:
  EngineChannels();
  ~EngineChannels();

  // A new engine of `job`; replaces the one before.
  void Set(const std::string& job, UniqueFd grpc);
  // The job has no engine, but one is being started.
  void Lose(const std::string& job);
  // The job has no engine, and gets none.
  void Erase(const std::string& job);

  // UNAVAILABLE when the job has no engine just now; DEADLINE_EXCEEDED.
  // `memory`: see GetJobRequest.
  absl::StatusOr<v1::Job> GetJob(const std::string& job, absl::Time deadline,
                                 bool memory = false);
  absl::StatusOr<v1::ListParametersReply> ListParameters(
      const v1::ListParametersRequest& request, absl::Time deadline);

  // Asks all of them at once; in the order of `jobs`.
  std::vector<absl::StatusOr<v1::Job>> GetJobs(
      const std::vector<std::string>& jobs, absl::Time deadline,
      bool memory = false);
  // The same of jobs that have an engine or are about to: one that is being
  // started or adopted, or dies meanwhile, is waited for.
  std::vector<absl::StatusOr<v1::Job>> AwaitJobs(
      const std::vector<std::string>& jobs, absl::Time deadline);

  // Has every engine finish its open step, or (resume) take steps again. One
  // that dies meanwhile leaves that to the next. The first failure, naming the
  // job, is returned when all have answered. CANCELLED once `caller`, for whom
  // this is, is cancelled; null: for nobody who could be.
  absl::Status DrainAll(bool resume, absl::Time deadline,
                        const grpc::ServerContext* caller);

  // Has every engine rest until it is told to stop, see v1::RestRequest. Those
  // that have no engine, or lose it, rest. The first failure is returned when
  // all have answered.
  absl::Status RestAll(absl::Time deadline);
  // Of one; `deadline` is the engine's. UNIMPLEMENTED: of an
  // engine older than that.
  absl::Status Rest(const std::string& job, absl::Time deadline);

 private:
  struct Channel;
  struct Call;

  // One for each job.
  std::vector<std::unique_ptr<Call>> MakeCalls(
      absl::Time deadline, const grpc::ServerContext* caller) const;
  std::vector<std::unique_ptr<Call>> MakeCalls(
      const std::vector<std::string>& jobs, absl::Time deadline) const;
  // Of those that had no engine or lost it, the ones that have another now, as
  // soon as there is one. Empty: there is nothing to wait for, or none came.
  std::vector<std::unique_ptr<Call>> AwaitNextCalls(
      const std::vector<std::unique_ptr<Call>>& calls,
      absl::Time deadline) const;
  static void AskForJobs(const std::vector<std::unique_ptr<Call>>& calls,
                         bool memory);
  static std::vector<absl::StatusOr<v1::Job>> AnswersOf(
      const std::vector<std::unique_ptr<Call>>& calls);
  // At once; returns when all have answered, and sets their `status`.
  using OnAnswer = std::function<void(const grpc::Status&)>;
  static void AskAll(const std::vector<std::unique_ptr<Call>>& calls,
                     absl::FunctionRef<void(Call*, OnAnswer)> ask);
  // Null: there is no engine just now.
  std::shared_ptr<Channel> Find(const std::string& job) const;
  // Another one than `last`. Null: the job gets none, and `*status` is OK, or
  // none has come by the deadline or while somebody asks.
  std::shared_ptr<Channel> Next(const std::string& job,
                                const std::shared_ptr<Channel>& last,
                                absl::Time deadline,
                                const grpc::ServerContext* caller,
                                absl::Status* status) const;
  absl::Status DrainNext(const std::string& job, std::shared_ptr<Channel> last,
                         absl::Time deadline,
                         const grpc::ServerContext* caller) const;

  mutable absl::Mutex mutex_;
  // Of jobs that have an engine, or get one (null).
  std::map<std::string, std::shared_ptr<Channel>> channels_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_ENGINE_CHANNELS_H_
