#ifndef OPTSTATE_CLIENT_VIEWS_DEVICE_PARAMETERS_H_
#define OPTSTATE_CLIENT_VIEWS_DEVICE_PARAMETERS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "proto/shm/device_parameters.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/layout.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {

// The parameters that the engine keeps in memory of a device, for a rank that
// has this device: the driver's file of that memory, and which parameters are
// there. The caller maps the memory by the driver, and only reads it.
//
// Threads: not thread-safe.
class DeviceParameters {
 public:
  // As an engine has sent it; see v1::ShareParametersReply.
  struct Shared {
    UniqueFd table;
    UniqueFd memory;
    uint32_t device_index = 0;
    uint64_t memory_bytes = 0;
  };
  // Elements [begin, end) of a parameter, from a byte of the memory on.
  struct Range {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t offset_bytes = 0;
  };
  // A copy of its own for fewer bytes than this costs more than it spares.
  static constexpr uint64_t kRangeBytesMin = uint64_t{256} << 10;
  static constexpr uint64_t kNowhere = ~uint64_t{0};

  // Maps the table of a job of this layout. `connection`: the number of the
  // session's connection to the engine. INTERNAL, INVALID_ARGUMENT: it is no
  // such table.
  static absl::StatusOr<std::unique_ptr<DeviceParameters>> Map(
      Shared shared, const Layout& layout, uint32_t connection);
  DeviceParameters(const DeviceParameters&) = delete;
  DeviceParameters& operator=(const DeviceParameters&) = delete;

  // The memory's file, which stays this object's, and its bytes.
  int memory_file() const { return memory_.get(); }
  uint64_t memory_bytes() const { return memory_bytes_; }
  uint32_t connection() const { return connection_; }
  // Returns whether the engine uses the memory no more: there may be another.
  bool is_over() const { return header().is_over.load() != 0; }

  // Finds the parts of a parameter whose values in the memory are those of the
  // parameter area, ascending. Parts of fewer than kRangeBytesMin are left out
  // unless they are the whole parameter. `run_stamps`: as Channel::run_stamps.
  // The values may be copied as long as those of the area may be. INTERNAL: the
  // engine names a place that is not in the memory.
  absl::Status FindRanges(uint32_t parameter,
                          const std::atomic<uint64_t>* run_stamps,
                          std::vector<Range>* ranges) const;
  // Finds likewise where whole parameters are, as offsets in bytes; kNowhere: a
  // parameter is not there, or is there in several parts.
  absl::Status FindWhole(absl::Span<const uint32_t> parameters,
                         const std::atomic<uint64_t>* run_stamps,
                         absl::Span<uint64_t> offsets) const;

 private:
  DeviceParameters(Shared shared, const Layout& layout, uint32_t connection)
      : layout_(layout),
        memory_(std::move(shared.memory)),
        memory_bytes_(shared.memory_bytes),
        device_index_(shared.device_index),
        connection_(connection) {}

  absl::Status MapTable(UniqueFd table);
  const shm::DeviceParametersHeader& header() const {
    return *reinterpret_cast<const shm::DeviceParametersHeader*>(table_.data());
  }
  const shm::DeviceParameterRun& entry(uint64_t run) const {
    return reinterpret_cast<const shm::DeviceParameterRun*>(&header() + 1)[run];
  }

  const Layout layout_;
  const UniqueFd memory_;
  const uint64_t memory_bytes_;
  const uint32_t device_index_;
  const uint32_t connection_;
  shm::PeerSegment table_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_VIEWS_DEVICE_PARAMETERS_H_
