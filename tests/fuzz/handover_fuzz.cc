// The message that one build of the supervisor leaves for the next, and the
// packets between supervisor and engine. Input: a byte (0: the handover, 1: a
// packet to an engine, 2: one to a supervisor), the bytes.

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "optstate/v1/engine.pb.h"
#include "proto/types/unique_fd.h"
#include "server/engine/control_socket.h"
#include "server/upgrade/handover.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

void ReadHandover(absl::string_view bytes) {
  UniqueFd file(::memfd_create("fuzz-handover", MFD_CLOEXEC));
  Require(::pwrite(file.get(), bytes.data(), bytes.size(), 0) ==
              static_cast<ssize_t>(bytes.size()),
          "the handover can be written");
  (void)upgrade::ReadHandover(file.release());
}

// Sends the bytes as one packet, which is taken whole or not at all.
template <typename Message>
void ReceivePacket(absl::string_view bytes) {
  int fds[2];
  Require(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK,
                       0, fds) == 0,
          "a pair of sockets can be made");
  const UniqueFd to(fds[0]);
  const UniqueFd from(fds[1]);
  if (engine::SendPacket(to.get(), bytes, to.get()) != 0) return;
  const auto packet = engine::ReceivePacket(from.get());
  if (!packet.ok()) return;
  Require(
      packet->has_value() && (*packet)->bytes == bytes && (*packet)->fd.ok(),
      "a packet arrives whole, with its fd");
  Message message;
  if (message.ParseFromString((*packet)->bytes)) {
    Require(message.DebugString().size() < (size_t{64} << 20),
            "a message is of the size of its bytes");
  }
}

}  // namespace

std::vector<std::string> Seeds() {
  v1::SupervisorHandover handover;
  handover.set_state_lock_fd(1000);
  auto* const listener = handover.add_listeners();
  listener->set_address("unix:/tmp/x.sock");
  listener->set_fd(1001);
  listener->set_lock_fd(-1);
  handover.add_kept()->set_fd(1002);
  v1::SupervisorRequest request;
  request.mutable_adopt_connection();
  v1::EngineEvent event;
  event.mutable_ready();
  return {std::string(1, '\0') + handover.SerializeAsString(),
          std::string(1, '\1') + request.SerializeAsString(),
          std::string(1, '\2') + event.SerializeAsString()};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate;
  using namespace optstate::fuzz;
  FuzzInput input(data, size);
  switch (input.Take<uint8_t>() % 3) {
    case 0:
      ReadHandover(input.rest());
      break;
    case 1:
      ReceivePacket<v1::SupervisorRequest>(input.rest());
      break;
    default:
      ReceivePacket<v1::EngineEvent>(input.rest());
  }
  return 0;
}
