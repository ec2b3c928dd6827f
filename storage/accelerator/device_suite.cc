#include "storage/accelerator/device_suite.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace optstate::accelerator {
namespace {

uint32_t Seed() {
  const uint32_t seed = std::random_device{}();
  std::cerr << "seed " << seed << std::endl;
  return seed;
}

}  // namespace

DeviceSuite::DeviceSuite() : runtime_(GetParam().make()), random_(Seed()) {}

void DeviceSuite::SetUp() {
  const auto devices = runtime_->Devices();
  if (!devices.ok()) GTEST_SKIP() << devices.status();
  if (devices->empty()) GTEST_SKIP() << "this machine has no such device";
  auto device = runtime_->Open(0);
  ASSERT_TRUE(device.ok()) << device.status();
  device_ = *std::move(device);
}

std::unique_ptr<DeviceStream> DeviceSuite::MakeStream() {
  auto stream = device_->MakeStream();
  EXPECT_TRUE(stream.ok()) << stream.status();
  return *std::move(stream);
}

std::unique_ptr<DeviceEvent> DeviceSuite::MakeEvent() {
  auto event = device_->MakeEvent();
  EXPECT_TRUE(event.ok()) << event.status();
  return *std::move(event);
}

DeviceAddress DeviceSuite::Allocate(size_t bytes) {
  const auto memory = device_->Allocate(bytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *memory;
}

namespace {

TEST_P(DeviceSuite, ListsItsDevices) {
  const auto devices = runtime_->Devices();
  ASSERT_TRUE(devices.ok());
  for (const DeviceInfo& info : *devices) {
    EXPECT_FALSE(info.name.empty());
    EXPECT_GT(info.memory_bytes, 0u);
  }
  EXPECT_EQ(device_->info().name, devices->front().name);
  EXPECT_EQ(device_->info().id, devices->front().id);
  std::set<std::string> ids;
  for (const DeviceInfo& info : *devices) ids.insert(info.id);
  EXPECT_EQ(ids.size(), devices->size());
  EXPECT_EQ(ids.count(""), 0u);
  EXPECT_EQ(runtime_->Open(devices->size()).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_P(DeviceSuite, CopiesRangesOfAnyLength) {
  constexpr size_t kBytes = 10'000;
  const DeviceAddress memory = Allocate(kBytes);
  EXPECT_EQ(memory.value % 256, 0u);
  HostBuffer from(device_.get(), kBytes);
  HostBuffer to(device_.get(), kBytes);
  from.Fill(&random_);
  to.Fill(&random_);
  std::vector<std::byte> expected = to.bytes();
  const auto stream = MakeStream();
  ASSERT_TRUE(stream->CopyToDevice(memory, from.data(), kBytes).ok());
  for (const size_t begin : {0, 1, 255, 4097}) {
    for (const size_t length : {1, 3, 4096}) {
      ASSERT_TRUE(stream
                      ->CopyToHost(to.data() + begin,
                                   memory + (kBytes - begin - length), length)
                      .ok());
      std::copy_n(from.data() + (kBytes - begin - length), length,
                  expected.data() + begin);
    }
  }
  ASSERT_TRUE(stream->Wait().ok());
  EXPECT_EQ(to.bytes(), expected);
  device_->Free(memory);
}

TEST_P(DeviceSuite, CopiesOnTheDevice) {
  constexpr size_t kBytes = 10'000;
  const DeviceAddress first = Allocate(kBytes);
  const DeviceAddress second = Allocate(kBytes);
  HostBuffer from(device_.get(), kBytes);
  HostBuffer to(device_.get(), kBytes);
  from.Fill(&random_);
  std::vector<std::byte> expected = from.bytes();
  std::copy_n(from.data() + 256, 4097, expected.data() + 5000);
  const auto stream = MakeStream();
  ASSERT_TRUE(stream->CopyToDevice(first, from.data(), kBytes).ok());
  ASSERT_TRUE(stream->CopyOnDevice(second, first, kBytes).ok());
  ASSERT_TRUE(stream->CopyOnDevice(second + 5000, first + 256, 4097).ok());
  ASSERT_TRUE(stream->CopyToHost(to.data(), second, kBytes).ok());
  ASSERT_TRUE(stream->Wait().ok());
  EXPECT_EQ(to.bytes(), expected);
  device_->Free(first);
  device_->Free(second);
}

// Fills device memory with other values each time, and returns them.
std::vector<std::byte> Fill(DeviceAddress memory, HostBuffer* from,
                            std::mt19937* random, DeviceStream* stream) {
  from->Fill(random);
  absl::Status status =
      stream->CopyToDevice(memory, from->data(), from->bytes().size());
  status.Update(stream->Wait());
  EXPECT_TRUE(status.ok()) << status;
  return from->bytes();
}

TEST_P(DeviceSuite, ExportedMemoryIsReadWhereItIsImported) {
  constexpr size_t kBytes = 10'000;
  const auto memory = device_->AllocateShareable(kBytes);
  if (absl::IsFailedPrecondition(memory.status())) {
    GTEST_SKIP() << memory.status();
  }
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->value % 256, 0u);
  auto exported = device_->Export(*memory);
  ASSERT_TRUE(exported.ok()) << exported.status();
  EXPECT_TRUE(exported->file.ok());
  EXPECT_EQ(::fcntl(exported->file.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_GE(exported->bytes, kBytes);
  EXPECT_EQ(exported->device, device_->info().id);
  const auto importer = runtime_->Open(0);
  ASSERT_TRUE(importer.ok()) << importer.status();
  const auto imported = (*importer)->Import(*exported);
  ASSERT_TRUE(imported.ok()) << imported.status();
  // The file is needed no more.
  exported->file.reset();
  HostBuffer from(device_.get(), kBytes);
  HostBuffer to(importer->get(), kBytes);
  const auto stream = MakeStream();
  auto reader = (*importer)->MakeStream();
  ASSERT_TRUE(reader.ok()) << reader.status();
  for (int round = 0; round < 3; ++round) {
    const auto written = Fill(*memory, &from, &random_, stream.get());
    ASSERT_TRUE((*reader)->CopyToHost(to.data(), *imported, kBytes).ok());
    ASSERT_TRUE((*reader)->Wait().ok());
    EXPECT_EQ(to.bytes(), written);
  }
  // It is copied to other memory of the importer's, as a batch of updates does.
  const auto own = (*importer)->Allocate(kBytes);
  ASSERT_TRUE(own.ok()) << own.status();
  const auto shown = Fill(*memory, &from, &random_, stream.get());
  ASSERT_TRUE((*reader)->CopyOnDevice(*own, *imported, kBytes).ok());
  ASSERT_TRUE((*reader)->CopyToHost(to.data(), *own, kBytes).ok());
  ASSERT_TRUE((*reader)->Wait().ok());
  EXPECT_EQ(to.bytes(), shown);
  (*importer)->Free(*own);
  // It outlives the process that made it, or what that has freed.
  const auto last = Fill(*memory, &from, &random_, stream.get());
  device_->Free(*memory);
  ASSERT_TRUE((*reader)->CopyToHost(to.data(), *imported, kBytes).ok());
  ASSERT_TRUE((*reader)->Wait().ok());
  EXPECT_EQ(to.bytes(), last);
  (*importer)->Free(*imported);
}

TEST_P(DeviceSuite, OnlyWhatIsSharedIsExportedAndImported) {
  const DeviceAddress memory = Allocate(4096);
  EXPECT_EQ(device_->Export(memory).status().code(),
            absl::StatusCode::kInvalidArgument);
  device_->Free(memory);
  const auto shared = device_->AllocateShareable(4096);
  if (absl::IsFailedPrecondition(shared.status())) {
    GTEST_SKIP() << shared.status();
  }
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_FALSE(device_->Export(*shared + 256).ok());
  auto exported = device_->Export(*shared);
  ASSERT_TRUE(exported.ok()) << exported.status();
  ExportedMemory wrong;
  wrong.bytes = exported->bytes;
  wrong.device = exported->device;
  EXPECT_FALSE(device_->Import(wrong).ok()) << "without a file";
  wrong.file = std::move(exported->file);
  wrong.device = "another";
  EXPECT_EQ(device_->Import(wrong).status().code(),
            absl::StatusCode::kInvalidArgument);
  wrong.device = exported->device;
  wrong.bytes = 64 * exported->bytes;
  EXPECT_FALSE(device_->Import(wrong).ok()) << "more bytes than there are";
  wrong.bytes = exported->bytes;
  const auto imported = device_->Import(wrong);
  ASSERT_TRUE(imported.ok()) << imported.status();
  device_->Free(*imported);
  device_->Free(*shared);
}

// The number of commands is larger than a queue.
TEST_P(DeviceSuite, AStreamKeepsItsOrder) {
  constexpr size_t kBytes = 64;
  constexpr size_t kRounds = 300;
  const DeviceAddress memory = Allocate(kBytes);
  HostBuffer from(device_.get(), kRounds * kBytes);
  HostBuffer to(device_.get(), kRounds * kBytes);
  from.Fill(&random_);
  const auto stream = MakeStream();
  for (size_t i = 0; i < kRounds; ++i) {
    ASSERT_TRUE(
        stream->CopyToDevice(memory, from.data() + i * kBytes, kBytes).ok());
    ASSERT_TRUE(
        stream->CopyToHost(to.data() + i * kBytes, memory, kBytes).ok());
  }
  ASSERT_TRUE(stream->Wait().ok());
  EXPECT_EQ(to.bytes(), from.bytes());
  device_->Free(memory);
}

TEST_P(DeviceSuite, AnEventSaysWhatIsOver) {
  constexpr size_t kBytes = 1 << 20;
  const DeviceAddress memory = Allocate(kBytes);
  HostBuffer from(device_.get(), kBytes);
  HostBuffer to(device_.get(), kBytes);
  const auto stream = MakeStream();
  const auto event = MakeEvent();
  EXPECT_TRUE(event->Wait().ok());
  // An event is recorded again and again.
  for (int round = 0; round < 3; ++round) {
    from.Fill(&random_);
    ASSERT_TRUE(stream->CopyToDevice(memory, from.data(), kBytes).ok());
    ASSERT_TRUE(stream->CopyToHost(to.data(), memory, kBytes).ok());
    ASSERT_TRUE(stream->Record(event.get()).ok());
    ASSERT_TRUE(event->Wait().ok());
    EXPECT_TRUE(*event->IsOver());
    EXPECT_EQ(to.bytes(), from.bytes());
  }
  device_->Free(memory);
}

TEST_P(DeviceSuite, TimedEventsSayHowLongWorkTook) {
  constexpr size_t kBytes = 1 << 20;
  const DeviceAddress memory = Allocate(kBytes);
  HostBuffer from(device_.get(), kBytes);
  const auto stream = MakeStream();
  const auto make = [this] {
    auto event = device_->MakeTimedEvent();
    EXPECT_TRUE(event.ok()) << event.status();
    return *std::move(event);
  };
  const auto begin = make();
  const auto middle = make();
  const auto end = make();
  EXPECT_FALSE(end->NanosSince(begin.get()).ok());  // never recorded
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(stream->Record(begin.get()).ok());
    ASSERT_TRUE(stream->CopyToDevice(memory, from.data(), kBytes).ok());
    ASSERT_TRUE(stream->Record(middle.get()).ok());
    ASSERT_TRUE(stream->CopyToDevice(memory, from.data(), kBytes).ok());
    ASSERT_TRUE(stream->Record(end.get()).ok());
    ASSERT_TRUE(end->Wait().ok());
    const auto half = middle->NanosSince(begin.get());
    const auto whole = end->NanosSince(begin.get());
    ASSERT_TRUE(half.ok()) << half.status();
    ASSERT_TRUE(whole.ok()) << whole.status();
    EXPECT_GE(*half, 0);
    EXPECT_GE(*whole, *half);
  }
  device_->Free(memory);
}

TEST_P(DeviceSuite, AStreamWaitsForAnother) {
  constexpr size_t kBytes = 1 << 20;
  const DeviceAddress memory = Allocate(kBytes);
  HostBuffer from(device_.get(), kBytes);
  HostBuffer to(device_.get(), kBytes);
  const auto writer = MakeStream();
  const auto reader = MakeStream();
  const auto written = MakeEvent();
  const auto was_read = MakeEvent();
  for (int round = 0; round < 5; ++round) {
    from.Fill(&random_);
    ASSERT_TRUE(writer->WaitFor(was_read.get()).ok());
    ASSERT_TRUE(writer->CopyToDevice(memory, from.data(), kBytes).ok());
    ASSERT_TRUE(writer->Record(written.get()).ok());
    ASSERT_TRUE(reader->WaitFor(written.get()).ok());
    ASSERT_TRUE(reader->CopyToHost(to.data(), memory, kBytes).ok());
    ASSERT_TRUE(reader->Record(was_read.get()).ok());
    ASSERT_TRUE(was_read->Wait().ok());
    EXPECT_EQ(to.bytes(), from.bytes());
  }
  device_->Free(memory);
}

TEST_P(DeviceSuite, ADestroyedStreamHasDoneItsWork) {
  constexpr size_t kBytes = 1 << 20;
  const DeviceAddress memory = Allocate(kBytes);
  HostBuffer from(device_.get(), kBytes);
  HostBuffer to(device_.get(), kBytes);
  from.Fill(&random_);
  {
    const auto stream = MakeStream();
    ASSERT_TRUE(stream->CopyToDevice(memory, from.data(), kBytes).ok());
    ASSERT_TRUE(stream->CopyToHost(to.data(), memory, kBytes).ok());
  }
  EXPECT_EQ(to.bytes(), from.bytes());
  device_->Free(memory);
}

TEST_P(DeviceSuite, CopiesRegisteredMemoryAlone) {
  const DeviceAddress memory = Allocate(4096);
  HostBuffer buffer(device_.get(), 4096);
  std::vector<std::byte> other(64);
  const auto stream = MakeStream();
  const auto is_refused = [](const absl::Status& status) {
    return status.code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(is_refused(stream->CopyToDevice(memory, other.data(), 64)));
  EXPECT_TRUE(is_refused(stream->CopyToHost(other.data(), memory, 64)));
  EXPECT_TRUE(
      is_refused(stream->CopyToDevice(memory, buffer.data() + 1, 4096)));
  EXPECT_TRUE(is_refused(
      device_->RegisterHost(absl::MakeSpan(buffer.data() + 64, 64))));
  // The stream goes on.
  EXPECT_TRUE(stream->CopyToDevice(memory, buffer.data(), 4096).ok());
  EXPECT_TRUE(stream->Wait().ok());
  device_->Free(memory);
}

TEST_P(DeviceSuite, MemoryThatIsUsedUpIsAnErrorAndNoMore) {
  const uint64_t bytes = device_->info().memory_bytes;
  const auto refused = device_->Allocate(2 * bytes);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted)
      << refused.status();
  for (int round = 0; round < 3; ++round) {
    const auto half = device_->Allocate(bytes / 2);
    ASSERT_TRUE(half.ok()) << half.status();
    EXPECT_EQ(device_->Allocate(bytes / 2 + 4096).status().code(),
              absl::StatusCode::kResourceExhausted);
    device_->Free(*half);
  }
  const auto shared = device_->AllocateShareable(2 * bytes);
  if (absl::IsFailedPrecondition(shared.status())) return;
  EXPECT_EQ(shared.status().code(), absl::StatusCode::kResourceExhausted)
      << shared.status();
}

}  // namespace
}  // namespace optstate::accelerator
