#ifndef OPTSTATE_PROTO_TLS_TLS_CONTEXT_H_
#define OPTSTATE_PROTO_TLS_TLS_CONTEXT_H_

#include <openssl/ssl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace optstate::tls {

// PEM files. An empty path means that there is no such file.
struct TlsFiles {
  // This side's certificate, followed by its intermediate CAs.
  std::string certificate = "";
  std::string key = "";  // of `certificate`
  std::string ca = "";   // the CAs that sign the other side's certificates
};

// Notes of OpenSSL's callbacks about a connection; SSL_set_app_data() points
// at it.
struct TlsFacts {
  // The daemon has sent a session ticket.
  bool is_confirmed = false;
  // The names in the other side's certificate, when that was refused.
  std::vector<std::string> refused_names;
};

// The part that all connections of one side share: keys, CAs and the rules.
// TLS 1.3 is the only version. Sessions are never resumed, so each connection
// shows its certificates anew.
//
// Threads: immutable and thread-safe.
class TlsContext {
 public:
  // Makes the daemon's side; `certificate` and `key` are needed. With `ca` a
  // client needs a certificate of one of these CAs, else it has none.
  // INVALID_ARGUMENT or the error of the system names the file and the reason.
  static absl::StatusOr<std::shared_ptr<const TlsContext>> Server(
      const TlsFiles& files);
  // Makes the client's side. Without `ca`, the system's CAs count.
  static absl::StatusOr<std::shared_ptr<const TlsContext>> Client(
      const TlsFiles& files);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  SSL_CTX* get() const { return context_; }
  const TlsFiles& files() const { return files_; }
  bool is_server() const { return is_server_; }

 private:
  TlsContext(SSL_CTX* context, TlsFiles files, bool is_server)
      : context_(context), files_(std::move(files)), is_server_(is_server) {}

  absl::Status LoadOwnCertificate() const;
  absl::Status LoadCas() const;

  SSL_CTX* const context_;
  const TlsFiles files_;
  const bool is_server_;
};

}  // namespace optstate::tls

#endif  // OPTSTATE_PROTO_TLS_TLS_CONTEXT_H_
