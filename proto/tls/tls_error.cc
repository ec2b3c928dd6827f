#include "proto/tls/tls_error.h"

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>

#include <ctime>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"

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

// Returns what to do about the other side's certificate, for whom this side's
// error is for: a user of the client, or a reader of the daemon's log.
absl::string_view RenewTheOther(const TlsContext& context) {
  return context.is_server()
             ? "the client needs a new one"
             : "the daemon's operator replaces tls.certificate_file";
}
absl::string_view TrustTheOther(const TlsContext& context) {
  return context.is_server()
             ? "the client needs one of these, or its CA is added to "
               "tls.client_ca_file"
             : "set OPTSTATE_TLS_CA to the CA that signed it";
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
      return absl::UnauthenticatedError(
          absl::StrCat(whose, " has expired: ", RenewTheOther(context)));
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
          absl::StrCat(whose, " is not signed by a CA of ", CasOf(context),
                       ": ", TrustTheOther(context)));
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

std::string TextOf(const ASN1_TIME* time) {
  std::tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "?";
  return absl::FormatTime(absl::RFC3339_sec,
                          absl::FromTM(parts, absl::UTCTimeZone()),
                          absl::UTCTimeZone());
}

// The other side does not say what is wrong with the dates of this side's
// certificate: an alert tells only that it has expired, or is bad. This side
// can look. Empty: by this side's clock nothing is wrong with them.
std::string WrongDates(const TlsContext& context) {
  const X509* const own = SSL_CTX_get0_certificate(context.get());
  if (own == nullptr) return "";
  const ASN1_TIME* const begin = X509_get0_notBefore(own);
  if (X509_cmp_current_time(begin) > 0) {
    return absl::StrCat(" is not valid before ", TextOf(begin),
                        ": compare the clocks of both machines, or wait");
  }
  const ASN1_TIME* const end = X509_get0_notAfter(own);
  if (X509_cmp_current_time(end) > 0) return "";
  return absl::StrCat(
      " has expired at ", TextOf(end), ": ",
      context.is_server()
          ? "replace tls.certificate_file and tls.key_file"
          : "get a new one (OPTSTATE_TLS_CERTIFICATE, OPTSTATE_TLS_KEY)");
}

absl::Status RefusedThere(const TlsContext& context, int reason) {
  const std::string dates = WrongDates(context);
  if (!dates.empty()) {
    return absl::UnauthenticatedError(
        absl::StrCat(OwnCertificate(context), dates));
  }
  if (reason == SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED) {
    return absl::UnauthenticatedError(
        absl::StrCat(OwnCertificate(context),
                     " has expired, says the other side: compare the clocks of "
                     "both machines"));
  }
  return absl::UnauthenticatedError(absl::StrCat(
      OwnCertificate(context), " is refused by the other side (",
      Reason(ERR_PACK(ERR_LIB_SSL, 0, reason)), "): ",
      context.is_server()
          ? "the client may call it by a name that it does not have"
          : "the daemon's log says why"));
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
    // The other side has a CA of the same name with another key, such as one
    // that was made anew.
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
      return absl::UnauthenticatedError(absl::StrCat(
          OwnCertificate(context),
          " is not signed by a CA that the other side trusts: ",
          context.is_server()
              ? "the client sets OPTSTATE_TLS_CA to the CA that signed it"
              : "use one of a CA in the daemon's tls.client_ca_file"));
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
      return RefusedThere(context, reason);
    default:
      return absl::OkStatus();
  }
}

// Takes all errors of this thread; returns the first one of TLS itself, or else
// the first. A signature that does not fit leaves one of the arithmetic before
// it.
unsigned long TakeTlsError() {
  unsigned long first = 0;
  while (const unsigned long error = ERR_get_error()) {
    if (first == 0) first = error;
    if (ERR_GET_LIB(error) != ERR_LIB_SSL) continue;
    ERR_clear_error();
    return error;
  }
  return first;
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
  const unsigned long error = TakeTlsError();
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
