#ifndef OPTSTATE_SERVER_TRANSPORT_REQUEST_NAME_H_
#define OPTSTATE_SERVER_TRANSPORT_REQUEST_NAME_H_

#include <string>

#include "optstate/v1/session.pb.h"

namespace optstate::transport {

// Returns a request's name for messages: "read_parameters".
inline std::string RequestName(const v1::SessionRequest& request) {
  const auto* const field =
      v1::SessionRequest::descriptor()->FindFieldByNumber(request.op_case());
  return field == nullptr ? "a request without an operation" : field->name();
}

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_REQUEST_NAME_H_
