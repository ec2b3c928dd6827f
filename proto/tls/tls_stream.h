#ifndef OPTSTATE_PROTO_TLS_TLS_STREAM_H_
#define OPTSTATE_PROTO_TLS_TLS_STREAM_H_

#include <openssl/ssl.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/tls/tls_context.h"

namespace optstate::tls {

// One TLS connection, without its socket: encrypted bytes go in and come out as
// memory, so that the owner alone waits, and bounds what is buffered.
//
// A client of TLS 1.3 has finished its handshake before the daemon has looked
// at its certificate. So this client waits for the session ticket that the
// daemon sends when it has accepted the certificate: a refusal is an error of
// the handshake, not of the first use.
//
// Errors are those of ExplainFailure(); after one the connection is of no use,
// but for output() with the alert for the other side.
// Threads: one at a time.
class TlsStream {
 public:
  static absl::StatusOr<std::unique_ptr<TlsStream>> Accept(
      std::shared_ptr<const TlsContext> context);
  // The other side's certificate has to be for `server_name`, a host name or an
  // IP address.
  static absl::StatusOr<std::unique_ptr<TlsStream>> Connect(
      std::shared_ptr<const TlsContext> context,
      const std::string& server_name);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // Takes bytes from the network.
  void TakeEncrypted(absl::string_view bytes);
  // Bytes for the network; the owner removes from the front what it has sent.
  std::string& output() { return output_; }

  // Goes on with the handshake as far as the bytes taken allow.
  absl::Status Handshake();
  bool is_ready() const { return is_ready_; }

  // Decrypts at most `bytes_max` of the bytes taken, and appends them to `to`.
  // Nothing is appended when more has to be taken first, or when the other side
  // has closed.
  absl::Status Decrypt(size_t bytes_max, std::string* to);
  // Returns whether the other side has said that it sends nothing more, and all
  // before that was decrypted.
  bool is_closed_by_peer() const { return is_closed_by_peer_; }

  // Encrypts all of `bytes`.
  absl::Status Encrypt(absl::string_view bytes);
  // Says that this side sends nothing more.
  void Close();

  // The names in the other side's certificate, see PeerNames().
  const std::vector<std::string>& peer_names() const { return peer_names_; }

 private:
  explicit TlsStream(std::shared_ptr<const TlsContext> context)
      : context_(std::move(context)) {}

  absl::Status Make();
  absl::Status SetExpectedName(const std::string& server_name);
  absl::Status AwaitConfirmation();
  void CollectOutput();
  absl::Status Failure();

  const std::shared_ptr<const TlsContext> context_;
  SSL* ssl_ = nullptr;
  BIO* in_ = nullptr;   // ssl_'s
  BIO* out_ = nullptr;  // ssl_'s
  std::string output_;
  std::string expected_name_;
  std::vector<std::string> peer_names_;
  TlsFacts facts_;
  bool is_ready_ = false;
  bool is_closed_by_peer_ = false;
};

}  // namespace optstate::tls

#endif  // OPTSTATE_PROTO_TLS_TLS_STREAM_H_
