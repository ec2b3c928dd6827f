#include "client/admin/job_access.h"

#include <grpcpp/client_context.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/admin/admin_connection.h"
#include "client/endpoint/endpoint.h"
#include "optstate/v1/admin.pb.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

absl::StatusOr<AccessOptions> AskJobAccess(const std::string& endpoint,
                                           const std::string& job,
                                           absl::Duration timeout,
                                           const InterruptCheck& interrupted) {
  OPTSTATE_ASSIGN_OR_RETURN(const Endpoint parsed, ParseEndpoint(endpoint));
  AdminWords words = {.timeout = "connect_timeout",
                      .name_another = "or name another endpoint",
                      .when_silent = ""};
  OPTSTATE_ASSIGN_OR_RETURN(
      const std::unique_ptr<AdminConnection> connection,
      AdminConnection::Make(parsed, std::move(words), timeout));
  const absl::Time deadline = absl::Now() + timeout;
  OPTSTATE_RETURN_IF_ERROR(connection->Await(deadline, interrupted));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(deadline));
  connection->SayWhoCalls(&context);
  v1::GetJobRequest request;
  request.set_name(job);
  v1::Job reply;
  const grpc::Status status =
      connection->stub()->GetJob(&context, request, &reply);
  if (!status.ok()) return connection->Explain(status);
  if (!reply.has_access()) {
    return absl::UnimplementedError(
        "the daemon is of an older build, which takes no notice of group, "
        "private and readers, so that everybody may look at the job: upgrade "
        "it (optctl upgrade), delete the job if this session has made it, and "
        "try again");
  }
  return AccessOptions{.group = reply.access().group(),
                       .is_private = reply.access().is_private(),
                       .readers = {reply.access().readers().begin(),
                                   reply.access().readers().end()}};
}

std::string AccessText(const AccessOptions& access) {
  std::string text = access.is_private ? "private" : "not private";
  if (!access.group.empty()) absl::StrAppend(&text, "; group ", access.group);
  if (!access.readers.empty()) {
    absl::StrAppend(&text, "; readers ", absl::StrJoin(access.readers, ", "));
  }
  return text;
}

}  // namespace optstate::client
