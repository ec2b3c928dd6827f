#ifndef OPTSTATE_SERVER_ENGINE_ENGINE_FIXTURE_H_
#define OPTSTATE_SERVER_ENGINE_ENGINE_FIXTURE_H_

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/engine.grpc.pb.h"
#include "proto/shm/frame.h"
#include "proto/types/unique_fd.h"
#include "proto/types/version.h"
#include "server/engine/control_socket.h"
#include "server/transport/shm/shm_test_peer.h"
#include "server/transport/test_layout.h"

namespace optstate::engine {

// Tests of engines are linked with engine_test_main.cc: the engine processes
// are the test binary, started again.

inline absl::Time Patience() { return absl::Now() + absl::Minutes(2); }

inline UniqueFd MemoryFile(const std::string& text) {
  UniqueFd file(::memfd_create("gradients", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(file.get(), text.data(), text.size(), 0),
            static_cast<ssize_t>(text.size()));
  return file;
}

struct TestEvent {
  v1::EngineEvent event;
  UniqueFd fd;
};

// A supervisor's end of the control connection and of the private gRPC one.
class TestSupervisor {
 public:
  explicit TestSupervisor(const std::string& job_dir) {
    auto connection = ConnectToEngine(job_dir);
    EXPECT_TRUE(connection.ok()) << connection.status();
    if (connection.ok()) control_ = *std::move(connection);
  }

  // `control_version`: 0 is that of a supervisor of the first release.
  // `quotas`: none are said when there are none, as by an older supervisor.
  void Supervise(bool draining = false, const v1::Limits& limits = {},
                 uint32_t control_version = 0,
                 const std::vector<v1::Quota>& quotas = {}) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ::fcntl(fds[0], F_SETFL, O_NONBLOCK | O_RDWR);
    stub_ = v1::Engine::NewStub(
        grpc::CreateInsecureChannelFromFd("engine", fds[0]));
    const UniqueFd theirs(fds[1]);
    v1::SupervisorRequest request;
    request.mutable_supervise()->set_log_level("info");
    request.mutable_supervise()->set_control_version(control_version);
    request.mutable_supervise()->set_draining(draining);
    *request.mutable_supervise()->mutable_limits() = limits;
    for (const v1::Quota& quota : quotas) {
      *request.mutable_supervise()->mutable_quotas()->add_quotas() = quota;
    }
    Send(request, theirs.get());
  }
  void StartJob() {
    v1::SupervisorRequest request;
    request.mutable_start_job();
    Send(request);
  }
  void Keep(uint32_t rank, const std::string& text) {
    v1::SupervisorRequest request;
    request.mutable_kept_gradients()->set_rank(rank);
    request.mutable_kept_gradients()->set_client_instance(rank + 50);
    Send(request, MemoryFile(text).get());
  }
  void Drain(bool draining) {
    v1::SupervisorRequest request;
    request.mutable_drain()->set_draining(draining);
    Send(request);
  }
  void Stop() {
    v1::SupervisorRequest request;
    request.mutable_stop();
    Send(request);
  }
  void Send(const v1::SupervisorRequest& request, int fd = -1) {
    SendBytes(request.SerializeAsString(), fd);
  }
  // Sends a request, waiting for room.
  void SendWhenItCan(const v1::SupervisorRequest& request, int fd) {
    while (true) {
      const int error =
          SendPacket(control_.get(), request.SerializeAsString(), fd);
      if (error == 0) return;
      ASSERT_EQ(error, EAGAIN);
      pollfd writable{control_.get(), POLLOUT, 0};
      ::poll(&writable, 1, -1);
    }
  }
  void SendBytes(const std::string& packet, int fd = -1) {
    EXPECT_EQ(SendPacket(control_.get(), packet, fd), 0);
  }

  // Waits for the next event; empty when the engine has gone.
  TestEvent AwaitEvent() {
    pollfd readable{control_.get(), POLLIN, 0};
    ::poll(&readable, 1, -1);
    TestEvent event;
    auto packet = ReceivePacket(control_.get());
    if (!packet.ok() || !packet->has_value()) return event;
    EXPECT_TRUE(event.event.ParseFromString((*packet)->bytes));
    event.fd = std::move((*packet)->fd);
    return event;
  }
  // Waits for the next event that is not about gradients; those are in kept()
  // afterwards.
  TestEvent AwaitOther() {
    while (true) {
      TestEvent event = AwaitEvent();
      if (event.event.has_keep_gradients()) {
        const uint32_t rank = event.event.keep_gradients().rank();
        kept_[rank] = std::move(event.fd);
      } else if (event.event.has_drop_gradients()) {
        kept_.erase(event.event.drop_gradients().rank());
      } else {
        return event;
      }
    }
  }
  const std::map<uint32_t, UniqueFd>& kept() const { return kept_; }
  v1::EngineEvent::Ready AwaitReady() {
    const TestEvent event = AwaitOther();
    EXPECT_TRUE(event.event.has_ready()) << event.event.ShortDebugString();
    return event.event.ready();
  }

  v1::Engine::Stub* stub() { return stub_.get(); }

 private:
  UniqueFd control_;
  std::map<uint32_t, UniqueFd> kept_;
  std::unique_ptr<v1::Engine::Stub> stub_;
};

// An engine process and its first supervisor.
class TestEngine {
 public:
  explicit TestEngine(const std::string& job_dir, bool is_private = false) {
    const auto listener = ListenForSupervisor(job_dir);
    EXPECT_TRUE(listener.ok()) << listener.status();
    if (!listener.ok()) return;
    supervisor_ = std::make_unique<TestSupervisor>(job_dir);
    const std::string fd = absl::StrCat(listener->get());
    pid_ = ::fork();
    if (pid_ == 0) {
      ::fcntl(listener->get(), F_SETFD, 0);
      ::execl("/proc/self/exe", "engine", "--engine", fd.c_str(),
              job_dir.c_str(), is_private ? "private" : "", nullptr);
      ::_exit(127);
    }
  }
  ~TestEngine() {
    if (pid_ > 0) Kill();
  }

  pid_t pid() const { return pid_; }
  TestSupervisor* supervisor() { return supervisor_.get(); }
  // Closes the supervisor's ends, as a killed supervisor does.
  void LoseSupervisor() { supervisor_.reset(); }
  // Connects the next supervisor.
  void Adopt(const std::string& job_dir, uint32_t control_version = 0) {
    supervisor_ = std::make_unique<TestSupervisor>(job_dir);
    supervisor_->Supervise(/*draining=*/false, {}, control_version);
    supervisor_->StartJob();
  }
  v1::Engine::Stub* stub() { return supervisor_->stub(); }

  // Hands a new connection over; `reply` is what the engine says to its Hello.
  std::unique_ptr<transport::ShmTestPeer> Connect(v1::Wire wire,
                                                  v1::HelloReply* reply) {
    transport::SocketPair sockets = transport::MakeSocketPair();
    v1::SupervisorRequest request;
    v1::AdoptConnection& adopt = *request.mutable_adopt_connection();
    adopt.mutable_hello()->set_wire(wire);
    adopt.mutable_hello()->set_job("test");
    adopt.mutable_hello()->set_protocol_version_min(shm::kProtocolVersion);
    adopt.mutable_hello()->set_protocol_version_max(shm::kProtocolVersion);
    adopt.set_protocol_version(shm::kProtocolVersion);
    supervisor_->Send(request, sockets.engine.get());
    sockets.engine.reset();
    auto frame = shm::ReceiveFrame(sockets.client.get(), 4096, Patience());
    EXPECT_TRUE(frame.ok()) << frame.status();
    EXPECT_TRUE(frame.ok() && reply->ParseFromString(frame->payload));
    return std::make_unique<transport::ShmTestPeer>(
        std::move(sockets.client), transport::TestLayout(), 1, 0);
  }

  std::unique_ptr<transport::ShmTestPeer> Connect() {
    v1::HelloReply reply;
    auto peer = Connect(v1::WIRE_SHM, &reply);
    EXPECT_EQ(reply.status().code(), 0) << reply.status().message();
    return peer;
  }

  v1::Job Describe() {
    grpc::ClientContext context;
    v1::Job job;
    v1::GetJobRequest request;
    const grpc::Status status = stub()->GetJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }

  int StopAndWait() {
    supervisor_->Stop();
    return Wait();
  }
  void Kill() {
    ::kill(pid_, SIGKILL);
    Wait();
  }
  int Wait() {
    int status = -1;
    EXPECT_EQ(::waitpid(std::exchange(pid_, -1), &status, 0) > 0, true);
    return status;
  }

 private:
  pid_t pid_ = -1;
  std::unique_ptr<TestSupervisor> supervisor_;
};

// Gives each test a job directory and engines for it.
class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = absl::StrCat(testing::TempDir(), "/engine-XXXXXX");
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    job_dir_ = name;
  }

  std::unique_ptr<TestEngine> Start() {
    auto engine = std::make_unique<TestEngine>(job_dir_);
    engine->supervisor()->Supervise();
    engine->supervisor()->StartJob();
    const v1::EngineEvent::Ready ready = engine->supervisor()->AwaitReady();
    EXPECT_EQ(ready.version(), kVersion);
    EXPECT_EQ(ready.restarts(), 2u);
    EXPECT_FALSE(ready.executable().empty());
    return engine;
  }

  // Registers with `request` changed, attaches and loads zeros.
  static v1::RegisterReply Register(transport::ShmTestPeer* peer,
                                    bool ephemeral) {
    v1::SessionRequest request = peer->RegisterRequest();
    request.mutable_register_()->set_ephemeral(ephemeral);
    EXPECT_TRUE(peer->Send(request).ok());
    const auto reply = peer->Receive();
    EXPECT_TRUE(reply.ok()) << reply.status();
    if (!reply.ok()) return {};
    EXPECT_EQ(reply->status().code(), 0) << reply->status().message();
    return reply->register_();
  }
  static void Begin(transport::ShmTestPeer* peer, bool ephemeral) {
    const v1::RegisterReply registered = Register(peer, ephemeral);
    const absl::Status attached = peer->Attach(peer->MakeSegment());
    ASSERT_TRUE(attached.ok()) << attached;
    if (registered.phase() != v1::JOB_PHASE_LOADING) return;
    shm::Submission submission = {};
    submission.op = static_cast<uint16_t>(shm::Op::kBeginLoad);
    ASSERT_TRUE(peer->Call(submission).status.ok());
    submission.op = static_cast<uint16_t>(shm::Op::kLoad);
    submission.array = v1::STATE_ARRAY_MASTER;
    submission.dtype = static_cast<uint16_t>(DType::kFloat32);
    for (const Piece& piece : peer->partition().pieces) {
      submission.parameter = piece.parameter;
      submission.numel = piece.numel;
      const auto loaded = peer->Call(submission);
      ASSERT_TRUE(loaded.status.ok()) << loaded.status;
    }
    submission = {};
    submission.op = static_cast<uint16_t>(shm::Op::kFinishLoad);
    const auto finished = peer->Call(submission);
    ASSERT_TRUE(finished.status.ok()) << finished.status;
  }

  static void TakeStep(transport::ShmTestPeer* peer, uint64_t step) {
    const auto pushed = peer->Call(peer->Push(step));
    ASSERT_TRUE(pushed.status.ok()) << pushed.status;
    for (int group = 0; group < 2; ++group) {
      peer->commit_groups()[group] = {.value = {1e-3, 0.9, 0.999, 1e-8},
                                      .max_norm = 0,
                                      .clips_with = 0,
                                      .reserved0 = 0,
                                      .reserved = {}};
    }
    const auto committed = peer->Call(peer->Commit(step));
    ASSERT_TRUE(committed.status.ok()) << committed.status;
    EXPECT_EQ(committed.completion.step, step);
  }

  std::string job_dir_;
};

}  // namespace optstate::engine

#endif  // OPTSTATE_SERVER_ENGINE_ENGINE_FIXTURE_H_
