#include "tests/load/load_daemon.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/types/grpc_status.h"
#include "proto/types/status_macros.h"
#include "tests/crash/poll_until.h"
#include "tests/faults/process_state.h"
#include "tests/load/admin_load.h"

namespace optstate::load {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(120);
// Fds have settled when so many samples in a row are equal, with a call to the
// daemon between each two; not to find that is an error after so many samples.
constexpr int kEqualSamples = 50;
constexpr int kSamplesMax = 20'000;

void SetDeadline(grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
}

}  // namespace

LoadDaemon::LoadDaemon(std::unique_ptr<TestDaemon> daemon)
    : daemon_(std::move(daemon)), operator_(ConnectAdmin(daemon_->socket())) {}

absl::StatusOr<std::unique_ptr<LoadDaemon>> LoadDaemon::Start(
    std::string config) {
  TestDaemon::Options options;
  options.config = std::move(config);
  OPTSTATE_ASSIGN_OR_RETURN(std::unique_ptr<TestDaemon> daemon,
                            TestDaemon::Start(std::move(options)));
  return std::unique_ptr<LoadDaemon>(new LoadDaemon(std::move(daemon)));
}

absl::StatusOr<v1::ListJobsReply> LoadDaemon::ListJobs() const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::ListJobsReply reply;
  OPTSTATE_RETURN_IF_ERROR(FromGrpc(operator_->ListJobs(&context, {}, &reply)));
  return reply;
}

absl::Status LoadDaemon::DeleteJob(const std::string& name, bool force) const {
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::DeleteJobRequest request;
  request.set_name(name);
  request.set_force(force);
  v1::DeleteJobReply reply;
  const absl::Status status =
      FromGrpc(operator_->DeleteJob(&context, request, &reply));
  // UNAVAILABLE: it is ending by itself, which AwaitFds() waits for.
  if (absl::IsNotFound(status) || absl::IsUnavailable(status)) {
    return absl::OkStatus();
  }
  return Annotate(status, absl::StrCat("deletion of ", name));
}

absl::Status LoadDaemon::DeleteJobs(bool force) const {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ListJobsReply list, ListJobs());
  for (const v1::Job& job : list.jobs()) {
    OPTSTATE_RETURN_IF_ERROR(DeleteJob(job.name(), force));
  }
  return absl::OkStatus();
}

absl::Status LoadDaemon::DeleteJobsOf(uid_t uid) const {
  OPTSTATE_ASSIGN_OR_RETURN(const v1::ListJobsReply list, ListJobs());
  for (const v1::Job& job : list.jobs()) {
    if (job.uid() != uid) continue;
    OPTSTATE_RETURN_IF_ERROR(DeleteJob(job.name(), /*force=*/true));
  }
  return absl::OkStatus();
}

LoadDaemon::Fds LoadDaemon::CountFds() const {
  return {.supervisor = faults::OpenFds(pid()),
          .ranks = faults::OpenFds(getpid())};
}

absl::StatusOr<LoadDaemon::Fds> LoadDaemon::SettledFds() const {
  OPTSTATE_RETURN_IF_ERROR(crash::PollUntil(
      "engines to go", [this] { return ChildrenOf(pid()).empty(); }));
  Fds last = CountFds();
  int equal = 1;
  for (int i = 0; i < kSamplesMax && equal < kEqualSamples; ++i) {
    OPTSTATE_RETURN_IF_ERROR(ListJobs().status());
    const Fds now = CountFds();
    equal = now == last ? equal + 1 : 1;
    last = now;
  }
  if (equal >= kEqualSamples) return last;
  return absl::DeadlineExceededError(
      absl::StrCat("the numbers of fds do not settle: ", last.supervisor,
                   " of the supervisor, ", last.ranks, " of this process"));
}

absl::Status LoadDaemon::AwaitFds(const Fds& expected) const {
  const absl::Status status = crash::PollUntil("fds and engines to go", [&] {
    return ChildrenOf(pid()).empty() && CountFds() == expected;
  });
  const Fds now = CountFds();
  return Annotate(
      status,
      absl::StrCat("the supervisor has ", now.supervisor, " fds, and had ",
                   expected.supervisor, "; this process ", now.ranks,
                   ", and had ", expected.ranks, "; ", ChildrenOf(pid()).size(),
                   " engines are left"));
}

}  // namespace optstate::load
