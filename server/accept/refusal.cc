#include "server/accept/refusal.h"

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/version.h"
#include "server/observe/counters.h"

namespace optstate::accept {
namespace {

constexpr int kDrainReads = 32;

std::string EncodeFrame(const std::string& payload) {
  std::string frame(shm::kFrameMagic, sizeof(shm::kFrameMagic));
  const auto size = static_cast<uint32_t>(payload.size());
  for (int shift = 0; shift < 32; shift += 8) {
    frame += static_cast<char>((size >> shift) & 0xff);
  }
  return frame + payload;
}

}  // namespace

void SendRefusal(int fd, const absl::Status& status) {
  observe::Count(observe::Answered::kSession, status.code());
  v1::HelloReply reply;
  *reply.mutable_status() = ToProto(status);
  reply.set_protocol_version(shm::kProtocolVersion);
  reply.set_server_version(std::string(kVersion));
  const std::string frame = EncodeFrame(reply.SerializeAsString());
  (void)::send(fd, frame.data(), frame.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  (void)::shutdown(fd, SHUT_WR);
  char ignored[4096];
  for (int i = 0; i < kDrainReads; ++i) {
    if (::recv(fd, ignored, sizeof(ignored), MSG_DONTWAIT) <= 0) return;
  }
}

}  // namespace optstate::accept
