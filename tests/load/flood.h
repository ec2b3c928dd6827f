#ifndef OPTSTATE_TESTS_LOAD_FLOOD_H_
#define OPTSTATE_TESTS_LOAD_FLOOD_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/client.h"
#include "client/endpoint/endpoint.h"
#include "proto/types/unique_fd.h"

namespace optstate::load {

// How often what became of it was what: "garbage", "refused_job
// RESOURCE_EXHAUSTED".
using FloodCounts = std::map<std::string, uint64_t>;

// One thread of a user who floods a daemon in every way that costs nothing.
//
// It holds a bounded number of connections open, fewer than a user may have in
// their handshake, so that what it asks for is refused by the other limits too.
//
// Threads: one at a time.
class Flood {
 public:
  // `socket` is the daemon's. One thread of the flood has `pushes`: it attaches
  // to a job of its own and pushes garbage there.
  static absl::StatusOr<std::unique_ptr<Flood>> Start(const std::string& socket,
                                                      uint64_t seed,
                                                      bool pushes);

  // Makes some attacks of each kind.
  void Round();
  const FloodCounts& counts() const { return counts_; }

 private:
  Flood(const std::string& socket, uint64_t seed);

  absl::Status AttachOwnJob();
  void Count(const std::string& what) { ++counts_[what]; }
  void Count(const std::string& what, const absl::Status& answer);
  UniqueFd Connect();
  // Connects, says this and keeps the connection; false: no connection.
  bool Say(absl::string_view bytes);
  std::string RandomBytes(size_t size_max);
  // Says Hello, and returns the daemon's answer and the connection.
  absl::Status SayHello(const std::string& job, UniqueFd* connection);

  void Silence();
  void HangUp();
  void Garbage();
  void MalformedHellos();
  void RefusedJobs();
  void GarbageToEngine();
  void RefusedRegistration();
  void GarbagePush();
  void PushOutOfOrder();

  client::Endpoint endpoint_;
  std::mt19937_64 random_;
  std::deque<UniqueFd> held_;
  std::unique_ptr<client::Session> session_;  // null: pushes nothing
  FloodCounts counts_;
};

}  // namespace optstate::load

#endif  // OPTSTATE_TESTS_LOAD_FLOOD_H_
