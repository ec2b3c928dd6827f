#ifndef OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_PARAMETERS_READER_H_
#define OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_PARAMETERS_READER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "proto/shm/device_parameters.h"
#include "proto/shm/sealed_segment.h"
#include "proto/types/layout.h"
#include "server/scheduler/executors/shared_parameters.h"
#include "storage/accelerator/device_runtime.h"

namespace optstate::scheduler {

// A rank's side of parameters that are shared on a device.
class SharedReader {
 public:
  SharedReader(std::unique_ptr<accelerator::Device> device,
               DeviceParameters shared, uint64_t run_count)
      : index_(shared.device),
        device_(std::move(device)),
        buffer_(kTileElements * sizeof(float)) {
    EXPECT_TRUE(device_->RegisterHost(absl::MakeSpan(buffer_)).ok());
    auto table = shm::PeerSegment::Map(std::move(shared.table),
                                       shm::DeviceParametersBytes(run_count));
    EXPECT_TRUE(table.ok()) << table.status();
    table_ = *std::move(table);
    EXPECT_EQ(header().magic, shm::kDeviceParametersMagic);
    EXPECT_EQ(header().version, shm::kDeviceParametersVersion);
    EXPECT_EQ(header().run_count, run_count);
    EXPECT_EQ(header().segment_bytes, table_.size());
    const auto memory = device_->Import(shared.memory);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *memory;
    bytes_ = shared.memory.bytes;
    stream_ = *device_->MakeStream();
  }
  SharedReader(const SharedReader&) = delete;
  SharedReader& operator=(const SharedReader&) = delete;
  ~SharedReader() {
    stream_.reset();
    device_->Free(memory_);
    device_->UnregisterHost(buffer_.data());
  }

  bool is_over() const { return header().is_over.load() != 0; }
  // Returns the step whose values the device has of a run; 0: it has none.
  uint64_t StepOf(size_t run) const {
    const shm::DeviceParameterRun& entry = entries()[run];
    const uint64_t step = entry.step.load();
    return shm::DeviceOfPlace(entry.place.load()) == index_ ? step : 0;
  }
  uint64_t OffsetOf(size_t run) const {
    return shm::OffsetOfPlace(entries()[run].place.load());
  }
  // Returns the bytes of the run there.
  absl::Span<const std::byte> Read(size_t run, size_t bytes) {
    EXPECT_LE(OffsetOf(run) + bytes, bytes_);
    absl::Status status =
        stream_->CopyToHost(buffer_.data(), memory_ + OffsetOf(run), bytes);
    status.Update(stream_->Wait());
    EXPECT_TRUE(status.ok()) << status;
    return absl::MakeConstSpan(buffer_).first(bytes);
  }

 private:
  const shm::DeviceParametersHeader& header() const {
    return *reinterpret_cast<const shm::DeviceParametersHeader*>(table_.data());
  }
  const shm::DeviceParameterRun* entries() const {
    return reinterpret_cast<const shm::DeviceParameterRun*>(&header() + 1);
  }

  const size_t index_;
  const std::unique_ptr<accelerator::Device> device_;
  std::vector<std::byte> buffer_;
  shm::PeerSegment table_;
  accelerator::DeviceAddress memory_;
  uint64_t bytes_ = 0;
  std::unique_ptr<accelerator::DeviceStream> stream_;
};

}  // namespace optstate::scheduler

#endif  // OPTSTATE_SERVER_SCHEDULER_EXECUTORS_SHARED_PARAMETERS_READER_H_
