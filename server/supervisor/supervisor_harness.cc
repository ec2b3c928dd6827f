#include "server/supervisor/supervisor_harness.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "proto/shm/frame.h"
#include "proto/types/conversions.h"
#include "proto/types/os_error.h"
#include "proto/types/status_macros.h"
#include "server/access/caller.h"
#include "server/config/config.h"
#include "server/os/private_directory.h"

namespace optstate::supervisor {
namespace {

constexpr char kFakeEngine[] = "server/supervisor/fake_engine";

}  // namespace

SupervisorHarness::SupervisorHarness() {
  std::string name = "/tmp/supervisor-XXXXXX";  // short, as socket paths are
  root_ = ::mkdtemp(name.data());
  config_ = config::DefaultConfig({0, ""});
  config_.set_state_dir(root_);
  config_.set_socket(root_ + "/s.sock");
}

SupervisorHarness::~SupervisorHarness() {
  Stop();
  EXPECT_TRUE(os::RemoveTree(root_).ok());
}

void SupervisorHarness::Start() {
  loop_ = *os::EventLoop::Create();
  auto registry = JobRegistry::Open(root_ + "/jobs");
  ASSERT_TRUE(registry.ok()) << registry.status();
  auto disks = DiskDirectories::Open(config_.nvme());
  ASSERT_TRUE(disks.ok()) << disks.status();
  auto sleep = SleepDirectory::Open(config_);
  ASSERT_TRUE(sleep.ok()) << sleep.status();
  registry->UseSleepDirectory(*std::move(sleep));
  registry->UseDisks(*std::move(disks));
  supervisor_ = std::make_unique<Supervisor>(
      loop_.get(),
      Supervisor::Options{config_, kFakeEngine, engines_exit_,
                          std::exchange(kept_, {}), check_state_directory_,
                          std::exchange(sleeps_, {})},
      *std::move(registry),
      Supervisor::Callbacks{[](const std::string&, UniqueFd) {},
                            [](const std::string&) {},
                            [](const std::string&) {}});
  handshakes_ = std::make_unique<accept::Handshakes>(
      loop_.get(), absl::Milliseconds(config_.limits().handshake_timeout_ms()),
      accept::Handshakes::Callbacks{
          [this](UniqueFd fd, const accept::PeerCredentials& peer,
                 v1::Hello hello) {
            supervisor_->OnHello(std::move(fd), peer, std::move(hello));
          },
          [](UniqueFd, const accept::PeerCredentials&) {}});
  auto listener = accept::Listener::Open({config_.socket(), "", 0}, 0666);
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::vector<std::unique_ptr<accept::Listener>> listeners;
  listeners.push_back(*std::move(listener));
  acceptor_ = std::make_unique<accept::Acceptor>(
      loop_.get(), std::move(listeners),
      [this](UniqueFd fd, const accept::PeerCredentials& peer) {
        handshakes_->Start(std::move(fd), peer);
      });
  supervisor_->Start();
  ASSERT_TRUE(acceptor_->Start().ok());
  thread_ = std::thread([this] { loop_->Run(); });
}

void SupervisorHarness::Stop() {
  if (supervisor_ == nullptr) return;
  loop_->Post([this] { supervisor_->Stop([this] { loop_->Stop(); }); });
  thread_.join();
  Destroy();
}

void SupervisorHarness::StopEngines() {
  absl::Notification done;
  loop_->Post([&] { supervisor_->Stop([&done] { done.Notify(); }); });
  done.WaitForNotification();
}

void SupervisorHarness::Abandon() {
  loop_->Stop();
  thread_.join();
  Destroy();
}

void SupervisorHarness::HandOverKept() {
  absl::Notification done;
  loop_->Post([&] {
    kept_ = supervisor_->Kept();
    done.Notify();
  });
  done.WaitForNotification();
}

void SupervisorHarness::HandOverSleeps() {
  absl::Notification done;
  loop_->Post([&] {
    sleeps_ = supervisor_->SleepsUnderWay();
    done.Notify();
  });
  done.WaitForNotification();
}

void SupervisorHarness::Destroy() {
  acceptor_.reset();
  handshakes_.reset();
  supervisor_.reset();
  loop_.reset();
}

std::string SupervisorHarness::JobDirectory(const std::string& job) const {
  return root_ + "/jobs/" + job;
}

UniqueFd SupervisorHarness::Connect() const {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, config_.socket().c_str());
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                      sizeof(address)),
            0);
  return fd;
}

v1::Hello SupervisorHarness::GoodHello(const std::string& job) {
  v1::Hello hello;
  hello.set_protocol_version_min(shm::kProtocolVersion);
  hello.set_protocol_version_max(shm::kProtocolVersion);
  hello.set_wire(v1::WIRE_SHM);
  hello.set_job(job);
  hello.set_pid(::getpid());
  return hello;
}

absl::Status SupervisorHarness::SendHello(int fd, const v1::Hello& hello) {
  return shm::SendFrame(fd, hello.SerializeAsString(), {},
                        absl::Now() + kPatience);
}

absl::StatusOr<v1::HelloReply> SupervisorHarness::ReceiveReply(int fd) {
  OPTSTATE_ASSIGN_OR_RETURN(
      const shm::Frame frame,
      shm::ReceiveFrame(fd, shm::kHelloBytesMax, absl::Now() + kPatience));
  v1::HelloReply reply;
  if (!reply.ParseFromString(frame.payload)) {
    return absl::InternalError("malformed HelloReply");
  }
  OPTSTATE_RETURN_IF_ERROR(FromProto(reply.status()));
  return reply;
}

absl::StatusOr<TestSession> SupervisorHarness::Open(
    const v1::Hello& hello) const {
  TestSession session;
  session.fd = Connect();
  OPTSTATE_RETURN_IF_ERROR(SendHello(session.fd.get(), hello));
  OPTSTATE_ASSIGN_OR_RETURN(const v1::HelloReply reply,
                            ReceiveReply(session.fd.get()));
  session.engine_pid = reply.engine_instance();
  session.kept = reply.server_version();
  return session;
}

absl::StatusOr<TestSession> SupervisorHarness::OpenAs(uid_t uid,
                                                      const std::string& job) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
    return OsError(errno, "socketpair");
  }
  TestSession session;
  session.fd.reset(fds[0]);
  // Sockets that the acceptor hands over do not block.
  if (::fcntl(fds[1], F_SETFL, O_NONBLOCK) != 0) {
    ::close(fds[1]);
    return OsError(errno, "fcntl");
  }
  loop_->Post([this, uid, job, daemon = fds[1]] {
    const accept::PeerCredentials peer = {.caller = access::UnixCaller(uid),
                                          .pid = ::getpid()};
    supervisor_->OnHello(UniqueFd(daemon), peer, GoodHello(job));
  });
  OPTSTATE_ASSIGN_OR_RETURN(const v1::HelloReply reply,
                            ReceiveReply(session.fd.get()));
  session.engine_pid = reply.engine_instance();
  session.kept = reply.server_version();
  return session;
}

void SupervisorHarness::Greet(UniqueFd fd, const accept::PeerCredentials& peer,
                              const v1::Hello& hello) {
  absl::Notification done;
  loop_->Post([&] {
    supervisor_->OnHello(std::move(fd), peer, hello);
    done.Notify();
  });
  done.WaitForNotification();
}

std::optional<JobSummary> SupervisorHarness::Find(const std::string& job) {
  absl::StatusOr<JobSummary> found = supervisor_->FindJob(job);
  if (!found.ok()) return std::nullopt;
  return *std::move(found);
}

bool SupervisorHarness::Eventually(const std::function<bool()>& holds) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (!holds()) {
    if (absl::Now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

bool SupervisorHarness::ClosedByPeer(int fd) {
  pollfd entry{fd, POLLRDHUP, 0};
  return ::poll(&entry, 1,
                static_cast<int>(absl::ToInt64Milliseconds(kPatience))) == 1;
}

}  // namespace optstate::supervisor
