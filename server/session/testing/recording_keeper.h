#ifndef OPTSTATE_SERVER_SESSION_TESTING_RECORDING_KEEPER_H_
#define OPTSTATE_SERVER_SESSION_TESTING_RECORDING_KEEPER_H_

#include <cstdint>
#include <map>
#include <mutex>

#include "server/session/recovery/gradient_keeper.h"

namespace optstate::session {

// Records, by rank whose gradients it keeps, the client instance that wrote
// them.
class RecordingKeeper final : public GradientKeeper {
 public:
  void Keep(uint32_t rank, uint64_t client_instance,
            uint64_t /*gradient_offset_bytes*/, int /*segment_fd*/) override {
    const std::lock_guard<std::mutex> lock(mu_);
    kept_[rank] = client_instance;
  }
  void Drop(uint32_t rank) override {
    const std::lock_guard<std::mutex> lock(mu_);
    kept_.erase(rank);
  }
  std::map<uint32_t, uint64_t> kept() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return kept_;
  }

 private:
  mutable std::mutex mu_;
  std::map<uint32_t, uint64_t> kept_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_RECORDING_KEEPER_H_
