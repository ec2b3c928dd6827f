#include "server/transport/grpc/parameter_sender.h"

#include <fcntl.h>

#include <atomic>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/segment_layout.h"
#include "storage/state_file.h"

namespace optstate::transport {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kPartBytes = 64;
constexpr uint64_t kCommitId = 7;
constexpr uint64_t kStep = 3;

// A fixture with parts of two runs each.
class ParameterSenderTest : public ::testing::Test {
 protected:
  static constexpr size_t kParts = 3;

  ParameterSenderTest()
      : parameters_(Create("parameters",
                           shm::ParameterSegmentBytes(kParts * kPartBytes))),
        stamps_(Create("stamps", shm::RunStampsBytes(2 * kParts))) {
    for (size_t i = 0; i < kParts; ++i) {
      std::memset(parameters_.data() + i * kPartBytes,
                  static_cast<int>('a' + i), kPartBytes);
    }
  }

  static storage::StateFile Create(const std::string& name, uint64_t bytes) {
    const std::string path = ::testing::TempDir() + "/" + name;
    ::unlink(path.c_str());
    const storage::ByteRange all = {0, bytes};
    return *storage::StateFile::Create(path, bytes, {&all, 1});
  }
  static UniqueFd ToRead(const storage::StateFile& file) {
    return UniqueFd(::open(file.path().c_str(), O_RDONLY | O_CLOEXEC));
  }
  void Open(bool with_stamps = true) {
    std::vector<AreaPart> parts;
    for (uint64_t i = 0; i < kParts; ++i) {
      parts.push_back({i * kPartBytes, (i + 1) * kPartBytes, 2 * i, 2 * i + 2});
    }
    ASSERT_TRUE(sender_
                    .Open(ToRead(parameters_), kParts * kPartBytes,
                          with_stamps ? ToRead(stamps_) : UniqueFd(),
                          2 * kParts, std::move(parts))
                    .ok());
  }
  void Stamp(size_t run, uint64_t step) {
    reinterpret_cast<std::atomic<uint64_t>*>(stamps_.data())[run].store(
        step, std::memory_order_release);
  }
  // Returns the letters of the parts that one call sends.
  std::vector<std::string> Ready() {
    sent_.clear();
    EXPECT_EQ(sender_.SendReady(write_), is_there_);
    return sent_;
  }
  std::vector<std::string> Rest(v1::SessionReply* reply) {
    sent_.clear();
    EXPECT_EQ(sender_.SendRest(reply, write_), is_there_);
    return sent_;
  }
  static v1::SessionReply Outcome(uint64_t request_id, bool applied = true) {
    v1::SessionReply reply;
    reply.set_request_id(request_id);
    reply.mutable_outcome()->set_applied(applied);
    return reply;
  }

  bool Write(const v1::SessionReply& reply) {
    EXPECT_EQ(reply.request_id(), kCommitId);
    EXPECT_EQ(reply.status().code(), 0);
    const v1::ParameterChunk& chunk = reply.parameter_chunk();
    EXPECT_EQ(chunk.data(), std::string(kPartBytes, chunk.data()[0]));
    EXPECT_EQ(chunk.offset_bytes(),
              static_cast<uint64_t>(chunk.data()[0] - 'a') * kPartBytes);
    if (is_there_) sent_.push_back(chunk.data().substr(0, 1));
    return is_there_;
  }

  storage::StateFile parameters_;
  storage::StateFile stamps_;
  ParameterSender sender_;
  std::vector<std::string> sent_;
  bool is_there_ = true;
  const std::function<bool(const v1::SessionReply&)> write_ =
      [this](const v1::SessionReply& reply) { return Write(reply); };
};

TEST_F(ParameterSenderTest, SendsAPartOnceAllItsRunsAreStamped) {
  Open();
  sender_.Begin(kCommitId, kStep);
  EXPECT_THAT(Ready(), IsEmpty());
  Stamp(2, kStep);
  EXPECT_THAT(Ready(), IsEmpty());
  Stamp(3, kStep);
  EXPECT_THAT(Ready(), ElementsAre("b"));
  EXPECT_THAT(Ready(), IsEmpty());
  Stamp(4, kStep);
  Stamp(5, kStep);
  v1::SessionReply outcome = Outcome(kCommitId);
  EXPECT_THAT(Rest(&outcome), ElementsAre("a", "c"));
  EXPECT_TRUE(outcome.has_parameters());
}

TEST_F(ParameterSenderTest, AnotherStepsStampsAreNotEnough) {
  Open();
  for (size_t run = 0; run < 2 * kParts; ++run) Stamp(run, kStep - 1);
  sender_.Begin(kCommitId, kStep);
  EXPECT_THAT(Ready(), IsEmpty());
}

TEST_F(ParameterSenderTest, WithoutStampsAllComesBeforeTheOutcome) {
  Open(/*with_stamps=*/false);
  sender_.Begin(kCommitId, kStep);
  EXPECT_EQ(sender_.NextLook(), absl::InfiniteFuture());
  EXPECT_THAT(Ready(), IsEmpty());
  v1::SessionReply outcome = Outcome(kCommitId);
  EXPECT_THAT(Rest(&outcome), ElementsAre("a", "b", "c"));
}

TEST_F(ParameterSenderTest, NothingOfAStepThatIsSkippedOrFails) {
  Open();
  sender_.Begin(kCommitId, kStep);
  v1::SessionReply outcome = Outcome(kCommitId, /*applied=*/false);
  EXPECT_THAT(Rest(&outcome), IsEmpty());
  EXPECT_FALSE(outcome.has_parameters());
  sender_.Begin(kCommitId, kStep);
  v1::SessionReply error;
  error.set_request_id(kCommitId);
  error.mutable_status()->set_code(9);
  EXPECT_THAT(Rest(&error), IsEmpty());
  EXPECT_EQ(sender_.NextLook(), absl::InfiniteFuture());
}

TEST_F(ParameterSenderTest, OtherRepliesPassBy) {
  Open();
  sender_.Begin(kCommitId, kStep);
  v1::SessionReply other = Outcome(kCommitId + 1);
  EXPECT_THAT(Rest(&other), IsEmpty());
  EXPECT_FALSE(other.has_parameters());
  v1::SessionReply outcome = Outcome(kCommitId);
  EXPECT_THAT(Rest(&outcome), ElementsAre("a", "b", "c"));
}

TEST_F(ParameterSenderTest, LooksOnlyWhileACommitIsAwaited) {
  Open();
  EXPECT_EQ(sender_.NextLook(), absl::InfiniteFuture());
  sender_.Begin(kCommitId, kStep);
  EXPECT_LT(sender_.NextLook(), absl::InfiniteFuture());
  for (size_t run = 0; run < 2 * kParts; ++run) Stamp(run, kStep);
  EXPECT_THAT(Ready(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(sender_.NextLook(), absl::InfiniteFuture());
  v1::SessionReply outcome = Outcome(kCommitId);
  EXPECT_THAT(Rest(&outcome), IsEmpty());
  EXPECT_TRUE(outcome.has_parameters());
}

TEST_F(ParameterSenderTest, APeerThatIsGoneEndsIt) {
  Open();
  sender_.Begin(kCommitId, kStep);
  Stamp(0, kStep);
  Stamp(1, kStep);
  is_there_ = false;
  EXPECT_THAT(Ready(), IsEmpty());
}

}  // namespace
}  // namespace optstate::transport
