#include "client/ctl/command.h"

#include <cerrno>
#include <cstring>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "proto/types/status_macros.h"

namespace optstate::ctl {

absl::StatusOr<std::unique_ptr<AdminClient>> Context::Connect() const {
  if (endpoints.size() > 1 || !endpoints_file.empty()) {
    return absl::InvalidArgumentError(
        "several daemons are named (--endpoint, --endpoints-file), and only "
        "`optctl get jobs -A` asks more than one");
  }
  return AdminClient::Make(endpoints.empty() ? "" : endpoints.front(),
                           absl::Seconds(timeout_s));
}

absl::Status Write(absl::string_view text) {
  errno = 0;
  std::cout << text << std::flush;
  if (std::cout.good()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("stdout: cannot write: ", std::strerror(errno)));
}

absl::Status Print(const Context& context,
                   const google::protobuf::Message& message,
                   const Table& table) {
  if (table.empty() && !context.machine_readable()) {
    std::cerr << "none found\n";
    return absl::OkStatus();
  }
  std::string text;
  if (!context.machine_readable()) {
    OPTSTATE_ASSIGN_OR_RETURN(
        text, table.Render(context.format == OutputFormat::kWide));
  }
  return PrintDone(context, message, text);
}

absl::Status PrintDone(const Context& context,
                       const google::protobuf::Message& message,
                       absl::string_view text) {
  if (!context.machine_readable()) return Write(text);
  OPTSTATE_ASSIGN_OR_RETURN(const std::string rendered,
                            RenderMessage(message, context.format));
  return Write(rendered);
}

absl::Status PrintOne(const Context& context,
                      const google::protobuf::Message& message,
                      absl::string_view text) {
  if (!context.machine_readable()) return Write(text);
  OPTSTATE_ASSIGN_OR_RETURN(const std::string rendered,
                            RenderOne(message, context.format));
  return Write(rendered);
}

absl::Status CheckAnswered(
    const google::protobuf::RepeatedPtrField<v1::UnansweredJob>& jobs) {
  if (jobs.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(
      "not all is known, for engines gave no answer: ",
      absl::StrJoin(
          jobs, ", ", [](std::string* out, const v1::UnansweredJob& job) {
            absl::StrAppend(out, "job ", job.name(), " (", job.reason(), ")");
          })));
}

}  // namespace optstate::ctl
