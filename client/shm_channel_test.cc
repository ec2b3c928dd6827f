// What a rank makes of an engine that breaks the protocol: nothing that it
// wrote is trusted. The engine here is a thread that does as the test says.

#include "client/shm_channel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/transport_error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/types/conversions.h"

namespace optstate::client {
namespace {

using shm::Completion;
using shm::CompletionHeader;
using shm::CompletionSegmentLayout;
using shm::Submission;
using testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

ChannelSetup SetupOfTest() {
  LayoutSpec spec{.optimizer = OptimizerKind::kAdamW,
                  .groups = {{.options = 0}},
                  .parameters = {{.name = "w",
                                  .shape = {100},
                                  .numel = 100,
                                  .dtype = DType::kFloat32,
                                  .gradient_dtype = DType::kFloat32,
                                  .group = 0}}};
  ChannelSetup setup{.job = "job",
                     .layout = *Layout::Make(spec),
                     .partition = {},
                     .loss_scaler = {}};
  setup.partition =
      *MakeRankPartition(setup.layout, PartitionMode::kGreedy, 1, 0);
  return setup;
}

UniqueFd ReadOnlyFile(uint64_t bytes) {
  std::string path = testing::TempDir() + "/parameters-XXXXXX";
  const UniqueFd file(mkstemp(path.data()));
  EXPECT_EQ(posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)), 0);
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  unlink(path.c_str());
  return fd;
}

shm::SealedSegment Segment(uint64_t bytes) {
  auto segment = shm::SealedSegment::Create("test", bytes);
  EXPECT_TRUE(segment.ok()) << segment.status();
  return *std::move(segment);
}

// An engine's side of one session, for as long as the script runs.
class FakeEngine {
 public:
  explicit FakeEngine(int connection)
      : completions(Segment(CompletionSegmentLayout::kSegmentBytes)),
        parameters(ReadOnlyFile(shm::ParameterSegmentBytes(400))),
        connection_(connection) {
    auto* const header = this->header();
    header->magic = shm::kCompletionMagic;
    header->version = shm::kSegmentVersion;
    header->segment_bytes = CompletionSegmentLayout::kSegmentBytes;
    header->parameter_area_bytes = SetupOfTest().layout.parameter_area_bytes();
  }

  CompletionHeader* header() {
    return reinterpret_cast<CompletionHeader*>(completions.data());
  }

  // Hello, register and attach, with these segments.
  void Admit() { Admit({completions.fd(), parameters.get()}); }
  void Admit(const std::vector<int>& fds) {
    v1::HelloReply hello;
    hello.set_protocol_version(shm::kProtocolVersion);
    Receive();
    Send(hello.SerializeAsString(), {});
    v1::SessionReply registered;
    registered.mutable_register_()->set_layout_hash(
        SetupOfTest().layout.hash());
    Receive();
    Send(registered.SerializeAsString(), {});
    v1::SessionReply attached;
    attached.mutable_attach()->set_parameter_bytes(
        SetupOfTest().layout.parameter_area_bytes());
    attached.mutable_attach()->set_phase(v1::JOB_PHASE_READY);
    shm::Frame frame = Receive();
    ASSERT_EQ(frame.fds.size(), 1);
    auto client = shm::PeerSegment::Map(
        std::move(frame.fds[0]),
        shm::ClientSegmentLayout(1, SetupOfTest().partition.gradient_area_bytes)
            .segment_bytes);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    Send(attached.SerializeAsString(), fds);
  }

  // The next submission; an empty one when the rank has hung up.
  Submission Take() {
    auto* const peer =
        &reinterpret_cast<const shm::ClientHeader*>(client_.data())->ring;
    shm::RingConsumer<Submission> consumer(
        &header()->ring, peer,
        reinterpret_cast<const Submission*>(client_.data() +
                                            shm::ClientSegmentLayout::kRing));
    Submission submission = {};
    for (uint64_t i = 0; i < taken_; ++i) consumer.Release();
    char byte = 0;
    while (*consumer.Take(&submission) == shm::Poll::kEmpty) {
      if (recv(connection_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) return {};
      consumer.Wait(absl::ZeroDuration(), absl::Milliseconds(10));
    }
    consumer.Release();
    ++taken_;
    return submission;
  }

  void Answer(const Completion& completion, const std::string& text = "") {
    const uint64_t slot = answered_ % shm::kRingEntries;
    std::memcpy(completions.data() + CompletionSegmentLayout::kText +
                    slot * shm::kTextBytes,
                text.data(), text.size());
    std::memcpy(completions.data() + CompletionSegmentLayout::kRing +
                    slot * sizeof(Completion),
                &completion, sizeof(completion));
    header()->ring.produced_tail.store(++answered_);
    header()->ring.doorbell.fetch_add(1);
  }

  void Farewell(const absl::Status& status) {
    v1::SessionReply farewell;
    *farewell.mutable_status() = ToProto(status);
    Send(farewell.SerializeAsString(), {});
  }

  shm::SealedSegment completions;
  UniqueFd parameters;

 private:
  shm::Frame Receive() {
    auto frame = shm::ReceiveFrame(connection_, shm::kFrameBytesMax, Soon());
    EXPECT_TRUE(frame.ok()) << frame.status();
    return frame.ok() ? *std::move(frame) : shm::Frame();
  }
  void Send(const std::string& payload, const std::vector<int>& fds) {
    EXPECT_TRUE(shm::SendFrame(connection_, payload, fds, Soon()).ok());
  }

  const int connection_;
  shm::PeerSegment client_;
  uint64_t taken_ = 0;
  uint64_t answered_ = 0;
};

class ShmChannelTest : public testing::Test {
 protected:
  // A channel to an engine that does what `script` says.
  ShmChannel* ChannelTo(std::function<void(FakeEngine&)> script) {
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
    const std::string path = directory_ + "/sock";
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address),
                   sizeof(address)),
              0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    thread_ =
        std::thread([script = std::move(script), fd = std::move(listener)]() {
          const UniqueFd connection(accept(fd.get(), nullptr, nullptr));
          FakeEngine engine(connection.get());
          script(engine);
        });
    channel_ = std::make_unique<ShmChannel>(*ParseEndpoint("unix:" + path),
                                            SetupOfTest());
    return channel_.get();
  }

  void TearDown() override {
    channel_.reset();
    if (thread_.joinable()) thread_.join();
    unlink((directory_ + "/sock").c_str());
    rmdir(directory_.c_str());
  }

  // What Connect says to an engine that does this.
  absl::Status ConnectTo(std::function<void(FakeEngine&)> script) {
    ShmChannel* const channel = ChannelTo(std::move(script));
    absl::Status status = channel->Connect(false, Soon()).status();
    EXPECT_EQ(channel->connected(), status.ok());
    return status;
  }

  // What a push and flush say after that.
  absl::Status FlushTo(const std::function<void(FakeEngine&)>& script) {
    const absl::Status connected = ConnectTo([script](FakeEngine& engine) {
      engine.Admit();
      script(engine);
    });
    EXPECT_TRUE(connected.ok()) << connected;
    absl::Status status = channel_->Push({.step = 1,
                                          .micro_step = 0,
                                          .first_parameter = 0,
                                          .parameter_count = 1},
                                         Soon());
    if (status.ok()) status = channel_->Flush(Soon());
    return status;
  }

  std::string directory_ = "/tmp/optstate-engine-XXXXXX";
  std::thread thread_;
  std::unique_ptr<ShmChannel> channel_;
};

TEST_F(ShmChannelTest, AnswersArriveWithTheirText) {
  const absl::Status status = FlushTo([](FakeEngine& engine) {
    const Submission push = engine.Take();
    EXPECT_EQ(push.op, static_cast<uint16_t>(shm::Op::kPush));
    EXPECT_EQ(push.numel, 1);
    Completion refusal = {};
    refusal.request_id = push.request_id;
    refusal.status = static_cast<uint32_t>(absl::StatusCode::kDataLoss);
    refusal.text_bytes = 3;
    engine.Answer(refusal, "bad");
  });
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(channel_->failed_push().has_value());
  EXPECT_EQ(channel_->failed_push()->status, absl::DataLossError("bad"));
}

TEST_F(ShmChannelTest, WrongMagic) {
  EXPECT_THAT(ConnectTo([](FakeEngine& engine) {
                engine.header()->magic = 1;
                engine.Admit();
              }).message(),
              HasSubstr("magic"));
}

TEST_F(ShmChannelTest, OtherSegmentVersion) {
  const absl::Status status = ConnectTo([](FakeEngine& engine) {
    engine.header()->version = 7;
    engine.Admit();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("version 7"));
}

TEST_F(ShmChannelTest, OtherAreaSize) {
  EXPECT_THAT(ConnectTo([](FakeEngine& engine) {
                engine.header()->parameter_area_bytes = 1 << 20;
                engine.Admit();
              }).message(),
              HasSubstr("1048576"));
}

TEST_F(ShmChannelTest, UnsealedSegment) {
  const absl::Status status = ConnectTo([](FakeEngine& engine) {
    const UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC));
    ASSERT_EQ(ftruncate(unsealed.get(), CompletionSegmentLayout::kSegmentBytes),
              0);
    engine.Admit({unsealed.get(), engine.parameters.get()});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("completion segment"));
}

TEST_F(ShmChannelTest, SegmentOfAnotherSize) {
  const absl::Status status = ConnectTo([](FakeEngine& engine) {
    const UniqueFd small = ReadOnlyFile(4096 * 2);
    engine.Admit({engine.completions.fd(), small.get()});
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("parameter file"));
}

TEST_F(ShmChannelTest, MissingSegments) {
  EXPECT_THAT(ConnectTo([](FakeEngine& engine) {
                engine.Admit({engine.completions.fd()});
              }).message(),
              HasSubstr("1 segments"));
}

TEST_F(ShmChannelTest, AnswerToNobody) {
  const absl::Status status = FlushTo([](FakeEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id + 5;
    engine.Answer(answer);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, AnswerTwice) {
  const absl::Status status = FlushTo([](FakeEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id;
    engine.Answer(answer);
    engine.Answer(answer);
    engine.Take();
  });
  // Whether the second is seen in this call or the next is chance.
  absl::Status next = channel_->Abort(1, Soon());
  EXPECT_FALSE(status.ok() && next.ok());
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, ImpossibleTail) {
  const absl::Status status = FlushTo([](FakeEngine& engine) {
    engine.Take();
    engine.header()->ring.produced_tail.store(uint64_t{1} << 60);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, TextLongerThanItsSlot) {
  const absl::Status status = FlushTo([](FakeEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id;
    answer.status = 999;
    answer.text_bytes = 0xffffffff;
    engine.Answer(answer, std::string(shm::kTextBytes, 'x'));
  });
  EXPECT_TRUE(status.ok()) << status;
  ASSERT_TRUE(channel_->failed_push().has_value());
  EXPECT_EQ(channel_->failed_push()->status.message(),
            std::string(shm::kTextBytes, 'x'));
  EXPECT_EQ(channel_->failed_push()->status.code(), absl::StatusCode::kUnknown);
}

TEST_F(ShmChannelTest, DeathIsATransportError) {
  const absl::Status status =
      FlushTo([](FakeEngine& engine) { engine.Take(); });
  EXPECT_TRUE(IsTransportError(status)) << status;
  EXPECT_FALSE(channel_->connected());
}

// What it answered before it died counts.
TEST_F(ShmChannelTest, LastAnswerBeforeDeath) {
  const absl::Status status = FlushTo([](FakeEngine& engine) {
    Completion answer = {};
    answer.request_id = engine.Take().request_id;
    engine.Answer(answer);
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ShmChannelTest, ReasonOfAnEnd) {
  absl::Status status = FlushTo([](FakeEngine& engine) {
    engine.Take();
    engine.Farewell(absl::InvalidArgumentError("ring index out of range"));
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), HasSubstr("ring index out of range"));
  EXPECT_FALSE(channel_->connected());
}

TEST_F(ShmChannelTest, ShutdownIsWorthAnotherTry) {
  const absl::Status status = FlushTo([](FakeEngine& engine) {
    engine.Take();
    engine.Farewell(absl::UnavailableError("optstated shuts down"));
  });
  EXPECT_TRUE(IsTransportError(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("shuts down"));
}

}  // namespace
}  // namespace optstate::client
