#ifndef OPTSTATE_CLIENT_CTL_ENDPOINTS_H_
#define OPTSTATE_CLIENT_CTL_ENDPOINTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace optstate::ctl {

// Returns the daemons that a user has named: those of --endpoint, then those of
// the lines of --endpoints-file ("": none) that are not empty and do not begin
// with '#'. INVALID_ARGUMENT names what is no endpoint, or is there twice,
// with its file and line; NOT_FOUND or PERMISSION_DENIED: the file cannot be
// read.
absl::StatusOr<std::vector<std::string>> NamedEndpoints(
    const std::vector<std::string>& endpoints, const std::string& file);

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_ENDPOINTS_H_
