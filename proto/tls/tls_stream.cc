#include "proto/tls/tls_stream.h"

#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/tls/peer_names.h"
#include "proto/tls/tls_error.h"
#include "proto/types/status_macros.h"

namespace optstate::tls {
namespace {

bool IsAddress(const std::string& name) {
  in6_addr address;
  return ::inet_pton(AF_INET, name.c_str(), &address) == 1 ||
         ::inet_pton(AF_INET6, name.c_str(), &address) == 1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsStream>> TlsStream::Accept(
    std::shared_ptr<const TlsContext> context) {
  std::unique_ptr<TlsStream> stream(new TlsStream(std::move(context)));
  OPTSTATE_RETURN_IF_ERROR(stream->Make());
  SSL_set_accept_state(stream->ssl_);
  return stream;
}

absl::StatusOr<std::unique_ptr<TlsStream>> TlsStream::Connect(
    std::shared_ptr<const TlsContext> context, const std::string& server_name) {
  std::unique_ptr<TlsStream> stream(new TlsStream(std::move(context)));
  OPTSTATE_RETURN_IF_ERROR(stream->Make());
  SSL_set_connect_state(stream->ssl_);
  OPTSTATE_RETURN_IF_ERROR(stream->SetExpectedName(server_name));
  return stream;
}

TlsStream::~TlsStream() { SSL_free(ssl_); }

absl::Status TlsStream::Make() {
  ERR_clear_error();
  ssl_ = SSL_new(context_->get());
  in_ = BIO_new(BIO_s_mem());
  out_ = BIO_new(BIO_s_mem());
  if (ssl_ == nullptr || in_ == nullptr || out_ == nullptr) {
    BIO_free(in_);
    BIO_free(out_);
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for a TLS connection: ", TakeReason()));
  }
  SSL_set_bio(ssl_, in_, out_);
  SSL_set_app_data(ssl_, &facts_);
  return absl::OkStatus();
}

absl::Status TlsStream::SetExpectedName(const std::string& server_name) {
  expected_name_ = server_name;
  X509_VERIFY_PARAM* const rules = SSL_get0_param(ssl_);
  bool set;
  if (IsAddress(server_name)) {
    set = X509_VERIFY_PARAM_set1_ip_asc(rules, server_name.c_str()) == 1;
  } else {
    X509_VERIFY_PARAM_set_hostflags(rules,
                                    X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
    set = !server_name.empty() &&
          SSL_set1_host(ssl_, server_name.c_str()) == 1 &&
          SSL_set_tlsext_host_name(ssl_, server_name.c_str()) == 1;
  }
  if (set) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", server_name, "\" is no name that a daemon's certificate can have"));
}

absl::Status TlsStream::Failure() {
  absl::Status status =
      ExplainFailure(ssl_, *context_, expected_name_, facts_.refused_names);
  CollectOutput();
  return status;
}

void TlsStream::CollectOutput() {
  char buffer[16 << 10];
  int count;
  while ((count = BIO_read(out_, buffer, sizeof(buffer))) > 0) {
    output_.append(buffer, static_cast<size_t>(count));
  }
  // An empty BIO counts as an error of the last call.
  ERR_clear_error();
}

void TlsStream::TakeEncrypted(absl::string_view bytes) {
  if (bytes.empty()) return;
  // The BIO's memory grows; the owner bounds it by what it takes.
  (void)BIO_write(in_, bytes.data(), static_cast<int>(bytes.size()));
}

absl::Status TlsStream::Handshake() {
  if (is_ready_) return absl::OkStatus();
  if (!SSL_is_init_finished(ssl_)) {
    ERR_clear_error();
    const int result = SSL_do_handshake(ssl_);
    if (result != 1) {
      const int error = SSL_get_error(ssl_, result);
      if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) {
        return Failure();
      }
      CollectOutput();
      return absl::OkStatus();
    }
    CollectOutput();
    peer_names_ = PeerNames(SSL_get0_peer_certificate(ssl_));
  }
  if (!context_->is_server()) return AwaitConfirmation();
  is_ready_ = true;
  return absl::OkStatus();
}

absl::Status TlsStream::AwaitConfirmation() {
  char byte;
  ERR_clear_error();
  const int result = SSL_peek(ssl_, &byte, 1);
  if (result != 1) {
    const int error = SSL_get_error(ssl_, result);
    if (error == SSL_ERROR_ZERO_RETURN) {
      return absl::UnavailableError("the other side has closed");
    }
    if (error != SSL_ERROR_WANT_READ) return Failure();
  }
  CollectOutput();
  is_ready_ = facts_.is_confirmed || result == 1;
  return absl::OkStatus();
}

absl::Status TlsStream::Decrypt(size_t bytes_max, std::string* to) {
  const size_t before = to->size();
  size_t count = 0;
  to->resize(before + bytes_max);
  absl::Status status;
  while (count < bytes_max) {
    ERR_clear_error();
    size_t read = 0;
    const int result = SSL_read_ex(ssl_, to->data() + before + count,
                                   bytes_max - count, &read);
    if (result == 1) {
      count += read;
      continue;
    }
    const int error = SSL_get_error(ssl_, result);
    if (error == SSL_ERROR_ZERO_RETURN) {
      is_closed_by_peer_ = true;
    } else if (error != SSL_ERROR_WANT_READ) {
      status = Failure();
    }
    break;
  }
  to->resize(before + count);
  CollectOutput();
  return status;
}

absl::Status TlsStream::Encrypt(absl::string_view bytes) {
  if (bytes.empty()) return absl::OkStatus();
  ERR_clear_error();
  size_t written = 0;
  // Memory takes all at once.
  if (SSL_write_ex(ssl_, bytes.data(), bytes.size(), &written) != 1) {
    return Failure();
  }
  CollectOutput();
  return absl::OkStatus();
}

void TlsStream::Close() {
  ERR_clear_error();
  (void)SSL_shutdown(ssl_);
  CollectOutput();
}

}  // namespace optstate::tls
