// Bytes that a rank of a collective gets from another one, and from the store
// where ranks meet. Input: one byte that says how much of the rest the other
// rank sends before it closes, and the rest, which every parser gets too.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/collective/gradients/block_quantizer.h"
#include "client/collective/tcp/address_record.h"
#include "client/collective/tcp/frame.h"
#include "client/collective/tcp/mesh.h"
#include "proto/types/unique_fd.h"
#include "tests/fuzz/fuzz_target.h"

namespace optstate::fuzz {
namespace {

using client::Frame;
using client::Mesh;

constexpr size_t kPayloadBytes = 8;

Frame Expected(uint32_t from) {
  return {.operation = client::Operation::kAllGather,
          .type = client::ElementType::kUint8,
          .from = from,
          .root = 0,
          .sequence = 1,
          .exchange = 0,
          .count = kPayloadBytes,
          .payload_bytes = kPayloadBytes};
}

std::string TextOf(const Frame& frame) {
  const Frame::Bytes bytes = client::Encode(frame);
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// Has rank 0 exchange a frame with a rank 1 that sends these bytes.
void ExchangeWith(const std::string& bytes) {
  int ends[2];
  Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0,
          "there are sockets");
  UniqueFd peer(ends[1]);
  std::vector<UniqueFd> sockets(2);
  sockets[1].reset(ends[0]);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  const size_t sent = std::min<size_t>(bytes.size(), 4096);
  Require(send(peer.get(), bytes.data(), sent, MSG_NOSIGNAL) ==
              static_cast<ssize_t>(sent),
          "a socket takes 4 KiB");
  shutdown(peer.get(), SHUT_WR);
  auto mesh = Mesh::Make(0, std::move(sockets));
  Require(mesh.ok(), "there are descriptors");
  // Memory behind the place of the payload stays as it is.
  std::vector<std::byte> place(kPayloadBytes + 64, std::byte{0x5A});
  const std::vector<std::byte> mine(kPayloadBytes);
  std::vector<client::PeerPayloads> payloads(2);
  payloads[1] = {.send = mine,
                 .receive = absl::MakeSpan(place).subspan(0, kPayloadBytes)};
  const absl::Status status =
      (*mesh)->Exchange(Expected(0), payloads, absl::Now() + absl::Minutes(5));
  Require(std::all_of(place.begin() + kPayloadBytes, place.end(),
                      [](std::byte each) { return each == std::byte{0x5A}; }),
          "a payload is written to its place alone");
  Require(status.ok() || absl::IsUnavailable(status) ||
              absl::IsAborted(status) || absl::IsFailedPrecondition(status) ||
              absl::IsDataLoss(status),
          "an exchange ends with one of its errors");
  if (status.ok()) {
    Require(sent >= Frame::kBytes + kPayloadBytes &&
                bytes.substr(0, Frame::kBytes) == TextOf(Expected(1)),
            "only the expected frame is taken");
  } else {
    (*mesh)->Leave(status);
  }
}

}  // namespace

std::vector<std::string> Seeds() {
  const std::string whole =
      TextOf(Expected(1)) + std::string(kPayloadBytes, 'x');
  Frame abort = Expected(1);
  abort.operation = client::Operation::kAbort;
  abort.payload_bytes = 13;
  client::AddressRecord record;
  record.world_size = 2;
  record.port = 29500;
  record.host = "node7";
  const client::Greeting::Bytes greeting = client::Encode(
      client::Greeting{.secret = {}, .rank = 1, .world_size = 2});
  return {"\xFF" + whole,
          "\xFF" + whole + TextOf(abort) + "out of memory",
          "\xFF" + TextOf(abort) + "out of memory",
          "\x20" + whole,
          "\xFF" + record.ToString(),
          "\xFF" + std::string(greeting.begin(), greeting.end())};
}

}  // namespace optstate::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace optstate;
  using namespace optstate::fuzz;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  ExchangeWith(text.substr(0, data[0] == 0xFF ? text.size() : data[0]));
  const auto record = client::ParseAddressRecord(text);
  if (record.ok()) {
    Require(client::ParseAddressRecord(record->ToString()).ok(),
            "a record can be written again");
  }
  client::Greeting::Bytes greeting = {};
  std::copy_n(text.begin(), std::min(text.size(), greeting.size()),
              greeting.begin());
  const auto decoded = client::DecodeGreeting(greeting);
  if (decoded.ok()) {
    Require(client::Encode(*decoded) == greeting,
            "a greeting has no byte without a meaning");
  }
  // One scale, and codes of one block.
  if (text.size() <= sizeof(float)) return 0;
  float scale;
  std::memcpy(&scale, text.data(), sizeof(scale));
  const std::vector<int8_t> codes(text.begin() + sizeof(scale), text.end());
  std::vector<float> sums(codes.size());
  (void)client::AddBlocks(absl::MakeConstSpan(&scale, 1), codes, codes.size(),
                          absl::MakeSpan(sums));
  return 0;
}
