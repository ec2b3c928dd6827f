#ifndef OPTSTATE_PROTO_TLS_TLS_ERROR_H_
#define OPTSTATE_PROTO_TLS_TLS_ERROR_H_

#include <openssl/ssl.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/tls/tls_context.h"

namespace optstate::tls {

// Takes OpenSSL's last error of this thread, in OpenSSL's words, and clears
// all.
std::string TakeReason();

// Makes the error of a handshake or connection that failed: UNAUTHENTICATED
// when a certificate is the reason, and the text says which and what is wrong
// with it; FAILED_PRECONDITION when the other side speaks no TLS 1.3; else
// UNAVAILABLE. `expected_name`: the name that the other side's certificate has
// to have (the daemon's side expects none), and `names` those that it has.
absl::Status ExplainFailure(SSL* ssl, const TlsContext& context,
                            absl::string_view expected_name,
                            const std::vector<std::string>& names);

}  // namespace optstate::tls

#endif  // OPTSTATE_PROTO_TLS_TLS_ERROR_H_
