#include "proto/tls/tls_error.h"

#include <openssl/err.h>
#include <openssl/x509_vfy.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace optstate::tls {
namespace {

std::string Reason(unsigned long error) {
  if (error == 0) return "no reason given";
  const char* const text = ERR_reason_error_string(error);
  return text != nullptr ? text : absl::StrCat("OpenSSL error ", error);
}

absl::Status NoTls() {
  return absl::FailedPreconditionError("the other side does not speak TLS 1.3");
}

std::string CasOf(const TlsContext& context) {
  return context.files().ca.empty()
             ? "the system's CAs"
             : absl::StrCat("CA file ", context.files().ca);
}

// The other side's certificate was refused here.
absl::Status ExplainVerification(long result, const TlsContext& context,
                                 absl::string_view expected_name,
                                 const std::vector<std::string>& names) {
  const absl::string_view whose = context.is_server()
                                      ? "the client's certificate"
                                      : "the daemon's certificate";
  switch (result) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return absl::UnauthenticatedError(absl::StrCat(whose, " has expired"));
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return absl::UnauthenticatedError(absl::StrCat(
          whose, " is not valid yet: compare the clocks of both machines"));
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return absl::UnauthenticatedError(
          absl::StrCat(whose, " is not for \"", expected_name, "\" but for ",
                       absl::StrJoin(names, ", "),
                       ": name the daemon as its certificate does, or set "
                       "OPTSTATE_TLS_SERVER_NAME"));
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return absl::UnauthenticatedError(
          absl::StrCat(whose, " is not signed by a CA of ", CasOf(context)));
    case X509_V_ERR_INVALID_PURPOSE:
      return absl::UnauthenticatedError(absl::StrCat(
          whose, " is not for this use: its extendedKeyUsage has to have ",
          context.is_server() ? "clientAuth" : "serverAuth"));
    default:
      return absl::UnauthenticatedError(absl::StrCat(
          whose, " is refused: ", X509_verify_cert_error_string(result)));
  }
}

std::string OwnCertificate(const TlsContext& context) {
  const absl::string_view whose = context.is_server()
                                      ? "the daemon's certificate"
                                      : "this client's certificate";
  return absl::StrCat(whose, " ", context.files().certificate);
}

// The other side has refused this side's certificate, or hung up; `reason` is
// the alert. OK: it is no such alert.
absl::Status ExplainAlert(int reason, const TlsContext& context) {
  switch (reason) {
    case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED:
    case SSL_R_SSLV3_ALERT_NO_CERTIFICATE:
      return absl::UnauthenticatedError(
          "the daemon requires a client certificate: set "
          "OPTSTATE_TLS_CERTIFICATE and OPTSTATE_TLS_KEY");
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
      return absl::UnauthenticatedError(absl::StrCat(
          OwnCertificate(context),
          " has expired, or is not valid yet, says the other side"));
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
      return absl::UnauthenticatedError(
          absl::StrCat(OwnCertificate(context),
                       " is not signed by a CA that the other side trusts"));
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
      return absl::UnauthenticatedError(absl::StrCat(
          OwnCertificate(context), " is refused by the other side: ",
          Reason(ERR_PACK(ERR_LIB_SSL, 0, reason))));
    default:
      return absl::OkStatus();
  }
}

}  // namespace

std::string TakeReason() {
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  return Reason(error);
}

absl::Status ExplainFailure(SSL* ssl, const TlsContext& context,
                            absl::string_view expected_name,
                            const std::vector<std::string>& names) {
  const unsigned long error = ERR_peek_error();
  ERR_clear_error();
  if (ERR_GET_LIB(error) == ERR_LIB_SSL) {
    const int reason = ERR_GET_REASON(error);
    if (reason == SSL_R_CERTIFICATE_VERIFY_FAILED) {
      return ExplainVerification(SSL_get_verify_result(ssl), context,
                                 expected_name, names);
    }
    if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
      return absl::UnauthenticatedError("the client has shown no certificate");
    }
    const absl::Status alert = ExplainAlert(reason, context);
    if (!alert.ok()) return alert;
    switch (reason) {
      case SSL_R_WRONG_VERSION_NUMBER:
      case SSL_R_UNSUPPORTED_PROTOCOL:
      case SSL_R_UNKNOWN_PROTOCOL:
      case SSL_R_HTTP_REQUEST:
      case SSL_R_BAD_RECORD_TYPE:
      case SSL_R_TLSV1_ALERT_PROTOCOL_VERSION:
        return NoTls();
      default:
        break;
    }
  }
  return absl::UnavailableError(absl::StrCat("TLS: ", Reason(error)));
}

}  // namespace optstate::tls
