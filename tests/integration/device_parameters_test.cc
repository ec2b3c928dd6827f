// A rank on a device of a real daemon gets its parameters from memory of that
// device: the values of the parameter area, step by step, when the engine is
// killed, and when an operator takes the memory back. With emulated devices,
// whose memory is a file that this process maps.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/dtype.h"
#include "proto/types/layout.h"
#include "proto/types/optimizer.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate {
namespace {

using client::DeviceParameters;
using client::Session;
using testing::HasSubstr;

constexpr char kDevice[] = "emulated-0";

ParameterSpec Parameter(const std::string& name, int64_t numel, DType dtype) {
  return {.name = name,
          .shape = {numel},
          .numel = numel,
          .dtype = dtype,
          .gradient_dtype = dtype,
          .group = 0};
}

// Parameters that are their own masters and ones that are not, and a small one.
LayoutSpec MakeLayout() {
  return {.optimizer = OptimizerKind::kAdamW,
          .groups = {{.options = 0}},
          .parameters = {Parameter("a", 300'000, DType::kFloat32),
                         Parameter("b", 400'000, DType::kBFloat16),
                         Parameter("c", 16, DType::kFloat32)}};
}

// The memory of a device, as a rank maps it.
class MappedMemory {
 public:
  explicit MappedMemory(std::unique_ptr<DeviceParameters> parameters)
      : parameters_(std::move(parameters)) {
    data_ = mmap(nullptr, parameters_->memory_bytes(), PROT_READ, MAP_SHARED,
                 parameters_->memory_file(), 0);
    EXPECT_NE(data_, MAP_FAILED);
    // A rank cannot write what the engine has.
    EXPECT_EQ(mmap(nullptr, parameters_->memory_bytes(), PROT_WRITE, MAP_SHARED,
                   parameters_->memory_file(), 0),
              MAP_FAILED);
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  ~MappedMemory() { munmap(data_, parameters_->memory_bytes()); }

  const DeviceParameters& parameters() const { return *parameters_; }
  absl::Span<const std::byte> At(uint64_t offset, uint64_t bytes) const {
    EXPECT_LE(offset + bytes, parameters_->memory_bytes());
    return {static_cast<const std::byte*>(data_) + offset, bytes};
  }

 private:
  const std::unique_ptr<DeviceParameters> parameters_;
  void* data_ = nullptr;
};

class DeviceParametersTest : public testing::Test {
 protected:
  void Start(const std::string& devices, uint64_t budget_bytes) {
    TestDaemon::Options options;
    options.flags = {"--devices", devices};
    auto daemon = TestDaemon::Start(options);
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    job_ = NewJob(MakeLayout());
    job_.storage.offload_fraction = 0;
    job_.storage.device_budget_bytes = budget_bytes;
    Open(daemon_->shm_endpoint());
    ASSERT_NE(session_, nullptr);
    const absl::Status loaded = LoadConstant(*session_, 1);
    ASSERT_TRUE(loaded.ok()) << loaded;
  }
  void Open(const std::string& endpoint) {
    session_.reset();
    job_.endpoint = endpoint;
    auto session = Session::Open(job_);
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }
  void Step() {
    const uint64_t step = session_->committed_step() + 1;
    const absl::Status pushed =
        PushConstant(*session_, step, 0, 0.5F / static_cast<float>(step));
    ASSERT_TRUE(pushed.ok()) << pushed;
    const auto outcome = session_->Commit(CommitOf(*session_, step));
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_TRUE(outcome->applied);
  }
  std::unique_ptr<MappedMemory> Map() {
    auto parameters = session_->MapDeviceParameters(kDevice);
    EXPECT_TRUE(parameters.ok()) << parameters.status();
    if (!parameters.ok()) return nullptr;
    return std::make_unique<MappedMemory>(*std::move(parameters));
  }
  // Compares all that is in the memory with the parameter area; returns how
  // many parameters are there whole.
  size_t CheckMemory(const MappedMemory& memory) {
    const Layout& layout = session_->layout();
    std::vector<uint32_t> all(layout.parameters().size());
    std::iota(all.begin(), all.end(), 0);
    std::vector<uint64_t> offsets(all.size());
    const absl::Status found_all = session_->FindWholeOnDevice(
        memory.parameters(), all, absl::MakeSpan(offsets));
    EXPECT_TRUE(found_all.ok()) << found_all;
    size_t whole = 0;
    for (uint32_t p = 0; p < layout.parameters().size(); ++p) {
      std::vector<DeviceParameters::Range> ranges;
      const absl::Status found =
          session_->FindOnDevice(memory.parameters(), p, &ranges);
      EXPECT_TRUE(found.ok()) << found;
      const ParameterSpec& spec = layout.parameters()[p];
      const uint64_t element_bytes = SizeInBytes(spec.dtype);
      uint64_t elements = 0;
      for (const DeviceParameters::Range& range : ranges) {
        elements += range.end - range.begin;
        const uint64_t bytes = (range.end - range.begin) * element_bytes;
        EXPECT_TRUE(
            memory.At(range.offset_bytes, bytes) ==
            session_->parameter(p).subspan(range.begin * element_bytes, bytes))
            << spec.name << " from " << range.begin << " to " << range.end;
      }
      const bool is_whole = elements == static_cast<uint64_t>(spec.numel);
      EXPECT_EQ(offsets[p],
                is_whole ? ranges[0].offset_bytes : DeviceParameters::kNowhere);
      whole += is_whole ? 1 : 0;
    }
    return whole;
  }
  absl::Status Refusal() {
    return session_->MapDeviceParameters(kDevice).status();
  }

  std::unique_ptr<TestDaemon> daemon_;
  client::SessionOptions job_;
  std::unique_ptr<Session> session_;
};

TEST_F(DeviceParametersTest, EachStepIsOnTheDevice) {
  ASSERT_NO_FATAL_FAILURE(Start("emulated:1", uint64_t{1} << 30));
  const auto memory = Map();
  ASSERT_NE(memory, nullptr);
  EXPECT_EQ(CheckMemory(*memory), 0u) << "before the first step";
  for (int i = 0; i < 6; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step());
    EXPECT_EQ(CheckMemory(*memory), 3u);
  }
  // A load changes the parameter area alone.
  const absl::Status loaded = LoadConstant(*session_, 2);
  ASSERT_TRUE(loaded.ok()) << loaded;
  EXPECT_EQ(CheckMemory(*memory), 0u);
  ASSERT_NO_FATAL_FAILURE(Step());
  EXPECT_EQ(CheckMemory(*memory), 3u);
  EXPECT_FALSE(memory->parameters().is_over());
  const auto job = daemon_->GetJob(job_.job);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->device_updates().problem(), "");
  EXPECT_GT(job->device_updates().uses(0).shared_bytes(), 0u);
}

TEST_F(DeviceParametersTest, WhatDoesNotStayComesFromTheArea) {
  // Room for the records of a part of "a".
  ASSERT_NO_FATAL_FAILURE(Start("emulated:1", uint64_t{2} << 20));
  const auto memory = Map();
  ASSERT_NE(memory, nullptr);
  ASSERT_NO_FATAL_FAILURE(Step());
  // The small parameter may have room yet.
  EXPECT_LE(CheckMemory(*memory), 1u);
  std::vector<DeviceParameters::Range> ranges;
  ASSERT_TRUE(session_->FindOnDevice(memory->parameters(), 0, &ranges).ok());
  ASSERT_EQ(ranges.size(), 1u);
  EXPECT_EQ(ranges[0].begin, 0u);
  EXPECT_LT(ranges[0].end, 300'000u);
}

TEST_F(DeviceParametersTest, TheMemoryOutlivesAnEngineThatIsKilled) {
  ASSERT_NO_FATAL_FAILURE(Start("emulated:1", uint64_t{1} << 30));
  const auto former = Map();
  ASSERT_NE(former, nullptr);
  ASSERT_NO_FATAL_FAILURE(Step());
  EXPECT_EQ(CheckMemory(*former), 3u);
  const absl::Span<const std::byte> there = former->At(0, 4096);
  const std::vector<std::byte> before(there.begin(), there.end());
  const absl::Status killed = daemon_->KillEngine(job_.job);
  ASSERT_TRUE(killed.ok()) << killed;
  ASSERT_NO_FATAL_FAILURE(Step());
  EXPECT_EQ(CheckMemory(*former), 0u) << "it is of another engine";
  EXPECT_TRUE(former->At(0, 4096) == absl::MakeConstSpan(before));
  const auto next = Map();
  ASSERT_NE(next, nullptr);
  ASSERT_NO_FATAL_FAILURE(Step());
  EXPECT_EQ(CheckMemory(*next), 3u);
}

TEST_F(DeviceParametersTest, AnOperatorTakesTheMemoryBack) {
  ASSERT_NO_FATAL_FAILURE(Start("emulated:1", uint64_t{1} << 30));
  const auto memory = Map();
  ASSERT_NE(memory, nullptr);
  ASSERT_NO_FATAL_FAILURE(Step());
  EXPECT_EQ(CheckMemory(*memory), 3u);
  const std::string command =
      absl::StrCat("client/ctl/optctl --endpoint ", daemon_->shm_endpoint(),
                   " set job ", job_.job, " device_budget=0 > /dev/null");
  // The names are the test's own.
  ASSERT_EQ(std::system(command.c_str()), 0) << command;  // NOLINT
  EXPECT_TRUE(memory->parameters().is_over());
  EXPECT_EQ(CheckMemory(*memory), 0u);
  EXPECT_TRUE(absl::IsNotFound(Refusal())) << Refusal();
  EXPECT_THAT(Refusal().message(), HasSubstr("device_budget"));
  ASSERT_NO_FATAL_FAILURE(Step());
  EXPECT_EQ(CheckMemory(*memory), 0u);
}

TEST_F(DeviceParametersTest, WhoCannotHaveItIsToldWhy) {
  ASSERT_NO_FATAL_FAILURE(Start("emulated:2", uint64_t{1} << 30));
  const absl::Status elsewhere =
      session_->MapDeviceParameters("another").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(elsewhere)) << elsewhere;
  EXPECT_THAT(elsewhere.message(), HasSubstr("emulated-0, emulated-1"));
  ASSERT_NO_FATAL_FAILURE(Step());
  // Over gRPC there are no files to send.
  ASSERT_NO_FATAL_FAILURE(Open(daemon_->grpc_endpoint()));
  EXPECT_TRUE(absl::IsUnimplemented(Refusal())) << Refusal();
  EXPECT_THAT(Refusal().message(), HasSubstr("over grpc"));
  ASSERT_NO_FATAL_FAILURE(Step());
}

}  // namespace
}  // namespace optstate
