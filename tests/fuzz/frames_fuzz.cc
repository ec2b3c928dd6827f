// The frames of a rank's session over shared memory, on its socket, until it
// would be attached. Input: the bytes of the connection behind the Hello.

#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/unique_fd.h"
#include "server/transport/fd_watcher.h"
#include "server/transport/peer.h"
#include "server/transport/session_table.h"
#include "server/transport/shm/shm_session.h"
#include "server/transport/shm/spin_policy.h"
#include "server/transport/test_layout.h"
#include "tests/fuzz/bounded_job.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

// The socket's buffer takes the replies to so much, one to 12 bytes at most.
constexpr size_t kBytesMax = 2048;

std::string Frame(const v1::SessionRequest& request) {
  const std::string payload = request.SerializeAsString();
  return std::string(shm::kFrameMagic, sizeof(shm::kFrameMagic)) +
         FuzzBytes(static_cast<uint32_t>(payload.size())) + payload;
}

v1::SessionRequest RegisterRequest() {
  v1::SessionRequest request;
  request.set_request_id(1);
  v1::RegisterRequest& body = *request.mutable_register_();
  *body.mutable_layout() = ToProto(transport::TestLayout());
  body.set_world_size(2);
  body.set_local_world_size(2);
  body.set_partition(v1::PARTITION_MODE_CONTIGUOUS);
  return request;
}

void ReadReplies(int fd) {
  while (true) {
    const auto frame =
        shm::ReceiveFrame(fd, shm::kFrameBytesMax, absl::InfinitePast());
    if (!frame.ok()) return;
    v1::SessionReply reply;
    Require(reply.ParseFromString(frame->payload),
            "a client can parse each reply");
  }
}

}  // namespace

std::vector<std::string> Seeds() {
  v1::SessionRequest attach, detach, position, decide;
  attach.set_request_id(2);
  attach.mutable_attach()->set_layout_hash(transport::TestLayout().hash());
  attach.mutable_attach()->set_rank(1);
  detach.mutable_detach()->set_rank(1);
  detach.mutable_detach()->set_client_instance(9);
  position.mutable_position();
  decide.mutable_decide()->set_step(1);
  const std::string first = Frame(RegisterRequest());
  return {first + Frame(attach), first + Frame(detach),
          Frame(position) + Frame(decide) + Frame(detach)};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate;
  using namespace optstate::fuzz;
  static transport::FdWatcher* const watcher =
      transport::FdWatcher::Start().value().release();
  static transport::SpinPolicy* const spin =
      new transport::SpinPolicy(v1::EngineSettings());
  if (size > kBytesMax) return 0;
  int fds[2];
  Require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0,
          "a pair of sockets can be made");
  const UniqueFd client(fds[1]);
  Require(::send(client.get(), data, size, MSG_NOSIGNAL) ==
              static_cast<ssize_t>(size),
          "the socket takes the input");
  ::shutdown(client.get(), SHUT_WR);
  BoundedJob job;
  transport::SessionTable table;
  transport::Peer peer;
  peer.hello.set_job("fuzz");
  peer.hello.set_protocol_version_max(shm::kProtocolVersion);
  transport::ShmSession session(UniqueFd(fds[0]), std::move(peer),
                                {.job = &job,
                                 .table = &table,
                                 .watcher = watcher,
                                 .spin = spin,
                                 .handshake_timeout = absl::Minutes(5)});
  session.Run();
  ReadReplies(client.get());
  return 0;
}
