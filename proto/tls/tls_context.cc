#include "proto/tls/tls_context.h"

#include <openssl/err.h>
#include <openssl/x509err.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/tls/peer_names.h"
#include "proto/tls/tls_error.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"

namespace optstate::tls {
namespace {

constexpr unsigned char kHttp2[] = {2, 'h', '2'};

absl::Status CheckReadable(const char* what, const std::string& path) {
  if (::access(path.c_str(), R_OK) == 0) return absl::OkStatus();
  return OsError(errno, absl::StrCat(what, " ", path));
}

absl::Status DoNotFit(const TlsFiles& files) {
  ERR_clear_error();
  return absl::InvalidArgumentError(
      absl::StrCat("key ", files.key, " does not belong to certificate ",
                   files.certificate));
}

absl::Status BadFile(const char* what, const std::string& path) {
  return absl::InvalidArgumentError(
      absl::StrCat(what, " ", path, ": ", TakeReason(), ". PEM is expected"));
}

// gRPC libraries insist on this answer to their offer; our own clients offer
// nothing.
int SelectProtocol(SSL*, const unsigned char** chosen, unsigned char* size,
                   const unsigned char* offered, unsigned int offered_size,
                   void*) {
  unsigned char* found = nullptr;
  if (SSL_select_next_proto(&found, size, kHttp2, sizeof(kHttp2), offered,
                            offered_size) != OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_NOACK;
  }
  *chosen = found;
  return SSL_TLSEXT_ERR_OK;
}

// A resumed session would show a certificate that may have expired since.
SSL_TICKET_RETURN IgnoreTicket(SSL*, SSL_SESSION*, const unsigned char*, size_t,
                               SSL_TICKET_STATUS, void*) {
  return SSL_TICKET_RETURN_IGNORE;
}

TlsFacts* FactsOf(const SSL* ssl) {
  return static_cast<TlsFacts*>(SSL_get_app_data(ssl));
}

// A refused certificate is not to be had from the connection later.
int OnVerified(int ok, X509_STORE_CTX* verification) {
  if (ok != 0) return ok;
  const auto* const ssl = static_cast<const SSL*>(X509_STORE_CTX_get_ex_data(
      verification, SSL_get_ex_data_X509_STORE_CTX_idx()));
  FactsOf(ssl)->refused_names =
      PeerNames(X509_STORE_CTX_get0_cert(verification));
  return ok;
}

int OnTicket(SSL* ssl, SSL_SESSION*) {
  FactsOf(ssl)->is_confirmed = true;
  return 0;  // the session is not kept
}

int MakeTicket(SSL*, void*) { return 1; }

// An encrypted key would make OpenSSL ask for its password on the terminal.
int NoPassword(char*, int, int, void*) { return -1; }

void SetServerRules(SSL_CTX* context) {
  SSL_CTX_set_alpn_select_cb(context, SelectProtocol, nullptr);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  // One ticket tells the client that its certificate was accepted, see
  // TlsStream. It is good for nothing else.
  SSL_CTX_set_num_tickets(context, 1);
  SSL_CTX_set_session_ticket_cb(context, MakeTicket, IgnoreTicket, nullptr);
  static constexpr unsigned char kName[] = "optstate";
  SSL_CTX_set_session_id_context(context, kName, sizeof(kName) - 1);
}

}  // namespace

TlsContext::~TlsContext() { SSL_CTX_free(context_); }

absl::Status TlsContext::LoadOwnCertificate() const {
  if (files_.certificate.empty() != files_.key.empty()) {
    return absl::InvalidArgumentError(
        "a certificate needs its key, and a key its certificate: give both "
        "files");
  }
  if (files_.certificate.empty()) return absl::OkStatus();
  OPTSTATE_RETURN_IF_ERROR(CheckReadable("certificate", files_.certificate));
  OPTSTATE_RETURN_IF_ERROR(CheckReadable("key", files_.key));
  ERR_clear_error();
  if (SSL_CTX_use_certificate_chain_file(context_,
                                         files_.certificate.c_str()) != 1) {
    return BadFile("certificate", files_.certificate);
  }
  if (SSL_CTX_use_PrivateKey_file(context_, files_.key.c_str(),
                                  SSL_FILETYPE_PEM) != 1) {
    const int reason = ERR_GET_REASON(ERR_peek_last_error());
    const bool fits = reason != X509_R_KEY_VALUES_MISMATCH &&
                      reason != X509_R_KEY_TYPE_MISMATCH;
    return fits ? BadFile("key", files_.key) : DoNotFit(files_);
  }
  return SSL_CTX_check_private_key(context_) == 1 ? absl::OkStatus()
                                                  : DoNotFit(files_);
}

absl::Status TlsContext::LoadCas() const {
  if (files_.ca.empty()) {
    if (is_server_) return absl::OkStatus();
    if (SSL_CTX_set_default_verify_paths(context_) == 1) {
      return absl::OkStatus();
    }
    return absl::InternalError(
        absl::StrCat("the system's CAs: ", TakeReason()));
  }
  OPTSTATE_RETURN_IF_ERROR(CheckReadable("CA file", files_.ca));
  ERR_clear_error();
  if (SSL_CTX_load_verify_locations(context_, files_.ca.c_str(), nullptr) !=
      1) {
    return BadFile("CA file", files_.ca);
  }
  if (!is_server_) return absl::OkStatus();
  STACK_OF(X509_NAME)* const names = SSL_load_client_CA_file(files_.ca.c_str());
  if (names == nullptr) return BadFile("CA file", files_.ca);
  SSL_CTX_set_client_CA_list(context_, names);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const TlsContext>> TlsContext::Server(
    const TlsFiles& files) {
  if (files.certificate.empty()) {
    return absl::InvalidArgumentError("the daemon's side needs a certificate");
  }
  ERR_clear_error();
  SSL_CTX* const context = SSL_CTX_new(TLS_server_method());
  if (context == nullptr) return absl::InternalError(TakeReason());
  const std::shared_ptr<const TlsContext> made(
      new TlsContext(context, files, /*is_server=*/true));
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  SSL_CTX_set_default_passwd_cb(context, NoPassword);
  SetServerRules(context);
  OPTSTATE_RETURN_IF_ERROR(made->LoadOwnCertificate());
  OPTSTATE_RETURN_IF_ERROR(made->LoadCas());
  if (!files.ca.empty()) {
    SSL_CTX_set_verify(
        context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, OnVerified);
  }
  return made;
}

absl::StatusOr<std::shared_ptr<const TlsContext>> TlsContext::Client(
    const TlsFiles& files) {
  ERR_clear_error();
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  if (context == nullptr) return absl::InternalError(TakeReason());
  const std::shared_ptr<const TlsContext> made(
      new TlsContext(context, files, /*is_server=*/false));
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  SSL_CTX_set_default_passwd_cb(context, NoPassword);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, OnVerified);
  // New sessions are looked at, see TlsStream, and none is stored.
  SSL_CTX_set_session_cache_mode(
      context, SSL_SESS_CACHE_CLIENT | SSL_SESS_CACHE_NO_INTERNAL);
  SSL_CTX_sess_set_new_cb(context, OnTicket);
  OPTSTATE_RETURN_IF_ERROR(made->LoadOwnCertificate());
  OPTSTATE_RETURN_IF_ERROR(made->LoadCas());
  return made;
}

}  // namespace optstate::tls
