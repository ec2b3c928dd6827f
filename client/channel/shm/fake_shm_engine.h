#ifndef OPTSTATE_CLIENT_CHANNEL_SHM_FAKE_SHM_ENGINE_H_
#define OPTSTATE_CLIENT_CHANNEL_SHM_FAKE_SHM_ENGINE_H_

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/channel/channel.h"
#include "client/endpoint/endpoint.h"
#include "gtest/gtest.h"
#include "optstate/v1/session.pb.h"
#include "proto/shm/frame.h"
#include "proto/shm/ring.h"
#include "proto/shm/sealed_segment.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/conversions.h"
#include "proto/types/unique_fd.h"

// An engine over shared memory: a thread that follows a test's script.

namespace optstate::client {

using shm::Completion;
using shm::CompletionHeader;
using shm::CompletionSegmentLayout;
using shm::Submission;

inline absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// The layout of a job with one parameter of 100 floats.
inline LayoutSpec LayoutOfTest() {
  return {.optimizer = OptimizerKind::kAdamW,
          .groups = {{.options = 0}},
          .parameters = {{.name = "w",
                          .shape = {100},
                          .numel = 100,
                          .dtype = DType::kFloat32,
                          .gradient_dtype = DType::kFloat32,
                          .group = 0}}};
}

inline ChannelSetup SetupOfTest() {
  ChannelSetup setup{.job = "job",
                     .layout = *Layout::Make(LayoutOfTest()),
                     .partition = {},
                     .loss_scaler = {},
                     .loss_scaler_state = {},
                     .storage = {}};
  setup.partition =
      *MakeRankPartition(setup.layout, PartitionMode::kGreedy, 1, 0);
  return setup;
}

// A file that the engine owns and the copy of it that a rank receives.
struct FakeStateFile {
  explicit FakeStateFile(uint64_t bytes) {
    std::string path = testing::TempDir() + "/state-XXXXXX";
    writable.reset(mkstemp(path.data()));
    EXPECT_EQ(posix_fallocate(writable.get(), 0, static_cast<off_t>(bytes)), 0);
    readable.reset(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    unlink(path.c_str());
  }
  template <typename T>
  void Write(const std::vector<T>& values) const {
    const size_t bytes = values.size() * sizeof(T);
    EXPECT_EQ(pwrite(writable.get(), values.data(), bytes, 0),
              static_cast<ssize_t>(bytes));
  }

  UniqueFd writable;
  UniqueFd readable;
};

inline shm::SealedSegment Segment(uint64_t bytes) {
  auto segment = shm::SealedSegment::Create("test", bytes);
  EXPECT_TRUE(segment.ok()) << segment.status();
  return *std::move(segment);
}

// The engine's side of one session, for as long as the script runs.
class FakeShmEngine {
 public:
  explicit FakeShmEngine(int connection)
      : completions(Segment(CompletionSegmentLayout::kSegmentBytes)),
        parameters(shm::ParameterSegmentBytes(400)),
        run_stamps(shm::RunStampsBytes(1)),
        connection_(connection) {
    auto* const header = this->header();
    header->magic = shm::kCompletionMagic;
    header->version = shm::kCompletionSegmentVersion;
    header->segment_bytes = CompletionSegmentLayout::kSegmentBytes;
    header->parameter_area_bytes = SetupOfTest().layout.parameter_area_bytes();
  }

  CompletionHeader* header() {
    return reinterpret_cast<CompletionHeader*>(completions.data());
  }

  // Answers Hello, register and attach, with these segments.
  void Admit() {
    Admit({completions.fd(), parameters.readable.get(),
           run_stamps.readable.get()});
  }
  void Admit(const std::vector<int>& fds) {
    v1::HelloReply hello;
    hello.set_protocol_version(shm::kProtocolVersion);
    Receive();
    Send(hello.SerializeAsString(), {});
    v1::SessionReply registered;
    registered.mutable_register_()->set_layout_hash(
        SetupOfTest().layout.hash());
    registered.mutable_register_()->set_pages_may_follow(pages_may_follow);
    Receive();
    on_register();
    Send(registered.SerializeAsString(), {});
    v1::SessionReply attached;
    attached.mutable_attach()->set_parameter_bytes(
        SetupOfTest().layout.parameter_area_bytes());
    attached.mutable_attach()->set_phase(v1::JOB_PHASE_READY);
    attached.mutable_attach()->set_shares_parameters(shares_parameters);
    attached.mutable_attach()->set_shares_gradients(shares_gradients);
    shm::Frame frame = Receive();
    ASSERT_EQ(frame.fds.size(), 1);
    v1::SessionRequest request;
    ASSERT_TRUE(request.ParseFromString(frame.payload));
    pages_follow = request.attach().pages_follow();
    const shm::ClientSegmentLayout layout = SegmentLayout();
    auto client = shm::PeerSegment::MapPartly(
        std::move(frame.fds[0]), layout.segment_bytes,
        pages_follow ? layout.gradient_pages() : layout.segment_bytes);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    Send(attached.SerializeAsString(), fds);
  }

  // Returns the next submission; an empty one when the rank has hung up.
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

  // The gradients as the rank has written them.
  std::vector<float> Gradients() const {
    std::vector<float> gradients(100);
    std::memcpy(gradients.data(),
                client_.data() + SegmentLayout().gradient_area,
                gradients.size() * sizeof(float));
    return gradients;
  }

  // Answers the rank's request for the memory of a device; returns the device.
  std::string AnswerShareParameters(const v1::ShareParametersReply& shared,
                                    const std::vector<int>& fds) {
    v1::SessionRequest request;
    EXPECT_TRUE(request.ParseFromString(Receive().payload));
    EXPECT_TRUE(request.has_share_parameters());
    v1::SessionReply reply;
    *reply.mutable_share_parameters() = shared;
    Send(reply.SerializeAsString(), fds);
    return request.share_parameters().device();
  }
  // Answers the rank's offer of memory of a device; returns the offer, and says
  // how many fds came with it.
  v1::ShareGradientsRequest AnswerShareGradients(const v1::SessionReply& reply,
                                                 size_t* fds) {
    const shm::Frame frame = Receive();
    v1::SessionRequest request;
    EXPECT_TRUE(request.ParseFromString(frame.payload));
    EXPECT_TRUE(request.has_share_gradients());
    *fds = frame.fds.size();
    Send(reply.SerializeAsString(), {});
    return request.share_gradients();
  }
  // Answers the rank's detach.
  void TakeDetach() {
    v1::SessionRequest request;
    EXPECT_TRUE(request.ParseFromString(Receive().payload));
    EXPECT_TRUE(request.has_detach());
    Send(v1::SessionReply().SerializeAsString(), {});
  }

  void Farewell(const absl::Status& status) {
    v1::SessionReply farewell;
    *farewell.mutable_status() = ToProto(status);
    Send(farewell.SerializeAsString(), {});
  }

  // The reply to a register, and an action that comes before it.
  bool pages_may_follow = false;
  bool shares_parameters = false;  // in the reply to an attach
  bool shares_gradients = false;   // likewise
  std::function<void()> on_register = [] {};
  // The field of the rank's attach request.
  bool pages_follow = false;

  shm::SealedSegment completions;
  FakeStateFile parameters;
  FakeStateFile run_stamps;

 private:
  static shm::ClientSegmentLayout SegmentLayout() {
    return {1, SetupOfTest().partition.gradient_area_bytes,
            shm::GradientLeadBytes(SetupOfTest().rank)};
  }
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

// Listens at `endpoint` and runs each script with one client that connects, one
// after the other.
class FakeShmDaemon {
 public:
  using Script = std::function<void(FakeShmEngine&)>;

  explicit FakeShmDaemon(Script script)
      : FakeShmDaemon(std::vector<Script>{std::move(script)}) {}
  explicit FakeShmDaemon(std::vector<Script> scripts) {
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
        std::thread([scripts = std::move(scripts), fd = std::move(listener)]() {
          for (const Script& script : scripts) {
            const UniqueFd connection(accept(fd.get(), nullptr, nullptr));
            FakeShmEngine engine(connection.get());
            script(engine);
          }
        });
  }
  // Waits until the scripts have ended.
  ~FakeShmDaemon() {
    thread_.join();
    unlink((directory_ + "/sock").c_str());
    rmdir(directory_.c_str());
  }

  Endpoint endpoint() const {
    return *ParseEndpoint("unix:" + directory_ + "/sock");
  }

 private:
  std::string directory_ = "/tmp/optstate-engine-XXXXXX";
  std::thread thread_;
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_CHANNEL_SHM_FAKE_SHM_ENGINE_H_
