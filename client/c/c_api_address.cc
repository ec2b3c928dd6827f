#include "client/c/c_api_address.h"

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/c/c_api_structs.h"
#include "proto/types/status_macros.h"

namespace optstate::client {

absl::StatusOr<JobAddress> ReadJobAddress(const optstate_job_address* address) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const optstate_job_address given,
      ReadStruct(address, OPTSTATE_SIZE_THROUGH(optstate_job_address, job),
                 "address"));
  if (given.job == nullptr) {
    return absl::InvalidArgumentError("address.job is NULL");
  }
  JobAddress read;
  read.job = given.job;
  if (given.endpoint != nullptr) read.endpoint = given.endpoint;
  if (given.daemon_path != nullptr) read.daemon_path = given.daemon_path;
  if (given.timeout_s > 0) read.timeout = absl::Seconds(given.timeout_s);
  if (given.interrupted != nullptr) {
    read.interrupted = [check = given.interrupted,
                        context = given.interrupted_context] {
      return check(context) != 0;
    };
  }
  return read;
}

}  // namespace optstate::client
