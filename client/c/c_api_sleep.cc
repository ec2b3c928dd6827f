// Putting a job to sleep, and waking it.
#include "client/c_api_sleep.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/admin/job_sleep.h"
#include "client/c/c_api_address.h"
#include "client/c/c_api_call.h"
#include "client/c/c_api_structs.h"
#include "client/session/job_position.h"
#include "proto/types/status_macros.h"

namespace client = optstate::client;

using client::Guarded;

namespace {

constexpr size_t kOptionsSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_sleep_options, expected_step);
constexpr size_t kResultSizeMin =
    OPTSTATE_SIZE_THROUGH(optstate_sleep_result, directory);

// The string to which this thread's last optstate_sleep_result points.
std::string& ThreadDirectory() {
  thread_local std::string directory;
  return directory;
}

struct Asked {
  client::SleepRequest request;
  client::JobMark expected;
};

absl::StatusOr<Asked> ReadAsked(const optstate_job_address* address,
                                const optstate_sleep_options* options) {
  OPTSTATE_ASSIGN_OR_RETURN(client::JobAddress of,
                            client::ReadJobAddress(address));
  Asked asked;
  asked.request.endpoint = std::move(of.endpoint);
  asked.request.job = std::move(of.job);
  asked.request.timeout = of.timeout;
  asked.request.interrupted = std::move(of.interrupted);
  if (options == nullptr) return asked;
  OPTSTATE_ASSIGN_OR_RETURN(
      const optstate_sleep_options given,
      client::ReadStruct(options, kOptionsSizeMin, "options"));
  if (!(given.whole_timeout_s >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("options.whole_timeout_s is ", given.whole_timeout_s));
  }
  if (given.whole_timeout_s > 0) {
    asked.request.whole_timeout = absl::Seconds(given.whole_timeout_s);
  }
  if (given.progress != nullptr) {
    asked.request.progress = [tell = given.progress,
                              context = given.progress_context](
                                 uint64_t bytes, uint64_t bytes_total) {
      const optstate_sleep_progress now = {context, bytes, bytes_total};
      tell(&now);
    };
  }
  asked.expected = {.created_at_ns = given.expected_created_at_ns,
                    .committed_step = given.expected_step};
  return asked;
}

void WriteResult(client::JobSleep from, optstate_sleep_result* result) {
  ThreadDirectory() = std::move(from.directory);
  optstate_sleep_result to = {};
  to.memory_bytes = from.memory_bytes;
  to.was_so = from.was_so ? 1 : 0;
  to.created_at_ns = from.mark.created_at_ns;
  to.committed_step = from.mark.committed_step;
  to.directory = ThreadDirectory().c_str();
  client::WriteStruct(to, result->struct_size, result);
}

}  // namespace

extern "C" {

int optstate_sleep_job(const optstate_job_address* address,
                       const optstate_sleep_options* options,
                       optstate_sleep_result* result) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(
        client::CheckStruct(result, kResultSizeMin, "result"));
    OPTSTATE_ASSIGN_OR_RETURN(const Asked asked, ReadAsked(address, options));
    OPTSTATE_ASSIGN_OR_RETURN(client::JobSleep slept,
                              client::PutJobToSleep(asked.request));
    WriteResult(std::move(slept), result);
    return absl::OkStatus();
  });
}

int optstate_wake_job(const optstate_job_address* address,
                      const optstate_sleep_options* options,
                      optstate_sleep_result* result) {
  return Guarded([&]() -> absl::Status {
    OPTSTATE_RETURN_IF_ERROR(
        client::CheckStruct(result, kResultSizeMin, "result"));
    OPTSTATE_ASSIGN_OR_RETURN(const Asked asked, ReadAsked(address, options));
    OPTSTATE_ASSIGN_OR_RETURN(client::JobSleep woken,
                              client::WakeJob(asked.request, asked.expected));
    WriteResult(std::move(woken), result);
    return absl::OkStatus();
  });
}

}  // extern "C"
