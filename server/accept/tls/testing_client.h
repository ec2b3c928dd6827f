#ifndef OPTSTATE_SERVER_ACCEPT_TLS_TESTING_CLIENT_H_
#define OPTSTATE_SERVER_ACCEPT_TLS_TESTING_CLIENT_H_

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "proto/tls/tls_context.h"
#include "proto/tls/tls_stream.h"
#include "proto/types/unique_fd.h"

namespace optstate::accept {

// The other side of TLS, for tests of those who end it.

// Receives once; "": the peer has closed.
inline std::string ReceiveSome(int fd) {
  char buffer[16 << 10];
  const ssize_t count = ::recv(fd, buffer, sizeof(buffer), 0);
  return count > 0 ? std::string(buffer, static_cast<size_t>(count)) : "";
}

inline void SendAll(int fd, std::string bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return;
    bytes.erase(0, static_cast<size_t>(count));
  }
}

// A client with blocking calls.
class TlsClient {
 public:
  TlsClient(UniqueFd fd, const tls::TlsFiles& files)
      : fd_(std::move(fd)),
        stream_(*tls::TlsStream::Connect(*tls::TlsContext::Client(files),
                                         "daemon")) {}

  absl::Status ShakeHands() {
    while (true) {
      const absl::Status status = stream_->Handshake();
      SendAll(fd_.get(), std::exchange(stream_->output(), ""));
      if (!status.ok() || stream_->is_ready()) return status;
      const std::string bytes = ReceiveSome(fd_.get());
      if (bytes.empty()) return absl::UnavailableError("closed");
      stream_->TakeEncrypted(bytes);
    }
  }
  void Send(const std::string& bytes) {
    EXPECT_TRUE(stream_->Encrypt(bytes).ok());
    SendAll(fd_.get(), std::exchange(stream_->output(), ""));
  }
  // Receives until there are `size` bytes, or the daemon closes.
  std::string Receive(size_t size) {
    std::string plain;
    while (plain.size() < size) {
      EXPECT_TRUE(stream_->Decrypt(size - plain.size(), &plain).ok());
      if (plain.size() == size || stream_->is_closed_by_peer()) break;
      const std::string bytes = ReceiveSome(fd_.get());
      if (bytes.empty()) break;
      stream_->TakeEncrypted(bytes);
    }
    return plain;
  }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  std::unique_ptr<tls::TlsStream> stream_;
};

}  // namespace optstate::accept

#endif  // OPTSTATE_SERVER_ACCEPT_TLS_TESTING_CLIENT_H_
