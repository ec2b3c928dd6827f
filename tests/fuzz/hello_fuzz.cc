// The first bytes that a stranger sends to the daemon's socket: a frame with a
// Hello, HTTP/2 or garbage, in two parts. Input: a byte of flags (1: over a
// unix socket), two bytes: where the second part begins, the bytes of the
// connection.

#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"
#include "server/accept/handshake.h"
#include "server/accept/hello_check.h"
#include "server/access/caller.h"
#include "server/os/event_loop.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

constexpr uint8_t kIsUnix = 1;
// A socket's buffer takes so much without a reader.
constexpr size_t kBytesMax = 65536;

std::string ReadRest(int fd) {
  std::string rest(kBytesMax, '\0');
  const ssize_t count =
      ::recv(fd, rest.data(), rest.size(), MSG_DONTWAIT | MSG_TRUNC);
  rest.resize(count < 0 ? 0 : static_cast<size_t>(count));
  return rest;
}

void CheckName(const v1::Hello& hello, const accept::PeerCredentials& peer) {
  const auto version = accept::CheckHello(hello, peer);
  if (!version.ok()) return;
  Require(accept::CheckJobName(hello.job()).ok(), "a Hello has a job's name");
  Require(*version <= shm::kProtocolVersion &&
              *version >= accept::kProtocolVersionMin,
          "a version that both sides speak is chosen");
}

access::Caller CallerOf(bool is_unix) {
  return is_unix ? access::UnixCaller(1000) : access::InsecureTcpCaller();
}

// One connection, from its first byte to the end of its handshake.
class Connection {
 public:
  Connection(absl::string_view bytes, size_t cut, bool is_unix)
      : bytes_(bytes), cut_(cut), peer_{.caller = CallerOf(is_unix)} {
    accept::Handshakes::Callbacks callbacks;
    callbacks.on_hello = [this](UniqueFd fd,
                                const accept::PeerCredentials& peer,
                                const v1::Hello& hello) {
      CheckName(hello, peer);
      CheckRest(fd.get());
    };
    callbacks.on_grpc = [this](UniqueFd fd, const accept::PeerCredentials&) {
      Require(ReadRest(fd.get()) == Sent(), "gRPC gets every byte");
    };
    handshakes_ = std::make_unique<accept::Handshakes>(
        loop_.get(), absl::InfiniteDuration(), std::move(callbacks));
  }

  void Run() {
    int fds[2];
    Require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
                         fds) == 0,
            "a pair of sockets can be made");
    client_.reset(fds[1]);
    handshakes_->Start(UniqueFd(fds[0]), peer_);
    Turn(0);
    loop_->Run();
  }

 private:
  // Each turn is a wake-up of the loop.
  void Turn(int turn) {
    if (turn == 0) Send(bytes_.substr(0, cut_));
    if (turn == 2) {
      Send(bytes_.substr(std::min(cut_, bytes_.size())));
      ::shutdown(client_.get(), SHUT_WR);
    }
    if (turn == 4) return loop_->Stop();
    loop_->Post([this, turn] { Turn(turn + 1); });
  }

  void Send(absl::string_view part) {
    // A connection that was refused is gone.
    if (::send(client_.get(), part.data(), part.size(), MSG_NOSIGNAL) < 0) {
      return;
    }
    sent_ += part.size();
  }
  absl::string_view Sent() const { return bytes_.substr(0, sent_); }

  void CheckRest(int fd) {
    constexpr size_t kHeaderBytes = 8;
    uint32_t payload = 0;
    std::memcpy(&payload, bytes_.data() + sizeof(shm::kFrameMagic),
                sizeof(payload));
    Require(ReadRest(fd) == Sent().substr(kHeaderBytes + payload),
            "no byte beyond the Hello is read");
  }

  const absl::string_view bytes_;
  const size_t cut_;
  const accept::PeerCredentials peer_;
  const std::unique_ptr<os::EventLoop> loop_ = os::EventLoop::Create().value();
  std::unique_ptr<accept::Handshakes> handshakes_;
  UniqueFd client_;
  size_t sent_ = 0;
};

std::string Frame(const v1::Hello& hello) {
  const std::string payload = hello.SerializeAsString();
  return std::string(shm::kFrameMagic, sizeof(shm::kFrameMagic)) +
         FuzzBytes(static_cast<uint32_t>(payload.size())) + payload;
}

std::string Input(uint8_t flags, uint16_t cut, const std::string& bytes) {
  return FuzzBytes(flags) + FuzzBytes(cut) + bytes;
}

}  // namespace

std::vector<std::string> Seeds() {
  v1::Hello hello;
  hello.set_job("gpt-2.run_1");
  hello.set_protocol_version_min(accept::kProtocolVersionMin);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_client_version("0.9.0");
  hello.set_wire(v1::WIRE_SHM);
  hello.set_pid(4711);
  std::vector<std::string> seeds = {
      Input(kIsUnix, 65535, Frame(hello) + "and more"),
      Input(kIsUnix, 6, Frame(hello)),
      Input(0, 65535, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
      Input(kIsUnix, 2, "GET / HTTP/1.1\r\n\r\n"),
  };
  hello.set_wire(v1::WIRE_GRPC);
  hello.set_protocol_version_max(100);
  seeds.push_back(Input(0, 12, Frame(hello)));
  return seeds;
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate::fuzz;
  FuzzInput input(data, std::min(size, kBytesMax));
  const bool is_unix = (input.Take<uint8_t>() & kIsUnix) != 0;
  const size_t cut = input.Take<uint16_t>();
  Connection(input.rest(), cut, is_unix).Run();
  return 0;
}
