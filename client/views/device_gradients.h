#ifndef OPTSTATE_CLIENT_VIEWS_DEVICE_GRADIENTS_H_
#define OPTSTATE_CLIENT_VIEWS_DEVICE_GRADIENTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shm/device_gradients.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/layout.h"
#include "proto/types/partition.h"

namespace optstate::client {

// The table that tells the engine which gradients a rank has in memory of its
// device besides its gradient area, and where. The memory is the caller's.
//
// Threads: thread-safe for different parameters.
class DeviceGradients {
 public:
  // Makes a table without entries for a rank of a job. `memory_bytes`: of the
  // memory. `connection`: the number of the session's connection to the engine.
  // RESOURCE_EXHAUSTED: there is no memory for the table.
  static absl::StatusOr<std::unique_ptr<DeviceGradients>> Make(
      const Layout& layout, const RankPartition& partition,
      uint64_t memory_bytes, uint32_t connection);
  DeviceGradients(const DeviceGradients&) = delete;
  DeviceGradients& operator=(const DeviceGradients&) = delete;

  int table_file() const { return table_.fd(); }
  uint32_t connection() const { return connection_; }

  // Says that no gradient of these parameters is in the memory: before its
  // bytes change. INVALID_ARGUMENT: the layout has no such parameter; nothing
  // has changed then, as with Mark().
  absl::Status Clear(absl::Span<const uint32_t> parameters);
  // Says that the rank's pieces of these parameters' gradients of a step are in
  // the memory, at these offsets in bytes, with the bytes of the gradient area:
  // before they are pushed. INVALID_ARGUMENT: the rank has no such piece, it
  // would not be within the memory or not at a multiple of 16, or the step is
  // 0.
  absl::Status Mark(uint64_t step, absl::Span<const uint32_t> parameters,
                    absl::Span<const uint64_t> offsets);

 private:
  DeviceGradients(const Layout& layout, const RankPartition& partition,
                  uint64_t memory_bytes, uint32_t connection);
  shm::DeviceGradient& entry(uint32_t parameter) const {
    auto* const header =
        reinterpret_cast<shm::DeviceGradientsHeader*>(table_.data());
    return reinterpret_cast<shm::DeviceGradient*>(header + 1)[parameter];
  }

  static constexpr uint64_t kNoPiece = ~uint64_t{0};

  std::vector<uint64_t> piece_bytes_;  // by parameter; kNoPiece: it has none
  const uint64_t memory_bytes_;
  const uint32_t connection_;
  shm::SealedSegment table_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_DEVICE_GRADIENTS_H_
