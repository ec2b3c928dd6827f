#ifndef OPTSTATE_CLIENT_COLLECTIVE_TCP_ADDRESS_RECORD_H_
#define OPTSTATE_CLIENT_COLLECTIVE_TCP_ADDRESS_RECORD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace optstate::client {

// The record that a rank writes into the store for the others.
//
// As text: "optstate-tcp-1 WORLD_SIZE PORT KNOCK ANSWER HOST", the secrets in
// hexadecimal.
struct AddressRecord {
  using Secret = std::array<uint8_t, 16>;

  uint32_t world_size = 1;
  uint16_t port = 0;
  Secret knock = {};   // said by who dials
  Secret answer = {};  // said by who is dialled
  std::string host;

  std::string ToString() const;
};

// DATA_LOSS: no rank has written this.
absl::StatusOr<AddressRecord> ParseAddressRecord(absl::string_view text);

// The message with which a connection begins, in both directions: 8 bytes of
// magic, a secret, the sender's rank and its world size, little endian.
struct Greeting {
  static constexpr size_t kBytes = 32;
  using Bytes = std::array<uint8_t, kBytes>;

  AddressRecord::Secret secret = {};
  uint32_t rank = 0;
  uint32_t world_size = 0;
};

Greeting::Bytes Encode(const Greeting& greeting);
// DATA_LOSS: this is no greeting.
absl::StatusOr<Greeting> DecodeGreeting(const Greeting::Bytes& bytes);

// Compares in a time that does not depend on where they differ.
bool AreEqual(const AddressRecord::Secret& a, const AddressRecord::Secret& b);

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_TCP_ADDRESS_RECORD_H_
