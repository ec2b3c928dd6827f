#include "server/accept/entrance.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "proto/shm/frame.h"
#include "proto/tls/test_certificates.h"
#include "proto/types/conversions.h"
#include "server/accept/tls/testing_client.h"

namespace optstate::accept {
namespace {

using ::testing::HasSubstr;

// `printf %s secret | sha256sum`.
constexpr char kTokens[] = R"(tokens:
- name: ci
  sha256: "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
  user: "1001"
  role: trainer
)";
constexpr size_t kHeaderBytes = 8;

std::string HelloFrame(const std::string& job, const std::string& token) {
  v1::Hello hello;
  hello.set_job(job);
  hello.set_token(token);
  const std::string payload = hello.SerializeAsString();
  std::string frame(shm::kFrameMagic, sizeof(shm::kFrameMagic));
  for (int shift = 0; shift < 32; shift += 8) {
    frame += static_cast<char>((payload.size() >> shift) & 0xff);
  }
  return frame + payload;
}

// A connection as one of those who serve it gets it.
struct Given {
  UniqueFd fd;
  PeerCredentials peer;
  v1::Hello hello;
  bool is_grpc = false;
};

class EntranceTest : public testing::Test {
 protected:
  EntranceTest() {
    // A machine under load takes long.
    config_.mutable_limits()->set_handshake_timeout_ms(600'000);
  }
  ~EntranceTest() override {
    loop_->Stop();
    if (thread_.joinable()) thread_.join();
    entrance_.reset();
    std::filesystem::remove_all(directory_);
  }

  static std::string MakeDirectory() {
    std::string directory = ::testing::TempDir() + "/entrance-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    return directory;
  }

  // Clients over TLS show tokens.
  void UseTokens() {
    const tls::TlsFiles files = ca_.Issue("daemon", "DNS:daemon");
    config_.mutable_tls()->set_certificate_file(files.certificate);
    config_.mutable_tls()->set_key_file(files.key);
    const std::string tokens = directory_ + "/tokens.yaml";
    std::ofstream(tokens) << kTokens;
    ASSERT_EQ(::chmod(tokens.c_str(), 0600), 0);
    config_.mutable_access()->set_tokens_file(tokens);
  }
  // Clients over TLS show certificates.
  void UseCertificates() {
    const tls::TlsFiles files = ca_.Issue("daemon", "DNS:daemon");
    config_.mutable_tls()->set_certificate_file(files.certificate);
    config_.mutable_tls()->set_key_file(files.key);
    config_.mutable_tls()->set_client_ca_file(files.ca);
    const std::string identities = directory_ + "/identities.yaml";
    std::ofstream(identities)
        << "identities: [{san: \"DNS:rank\", user: \"4711\", role: trainer}]\n";
    config_.mutable_access()->set_identities_file(identities);
  }

  void Open() {
    if (config_.has_tls()) access_ = *access::LiveAccess::Load(config_);
    Entrance::Callbacks callbacks;
    callbacks.on_session = [this](UniqueFd fd, const PeerCredentials& peer,
                                  v1::Hello hello) {
      const absl::MutexLock lock(&mutex_);
      given_.push_back(Given{std::move(fd), peer, std::move(hello)});
    };
    callbacks.on_grpc = [this](UniqueFd fd, const PeerCredentials& peer) {
      const absl::MutexLock lock(&mutex_);
      given_.push_back(Given{std::move(fd), peer, {}, true});
    };
    callbacks.on_grpc_refused = [](UniqueFd, const absl::Status& why) {
      ADD_FAILURE() << why;
    };
    entrance_ = *Entrance::Open(loop_.get(), config_, access_.get(),
                                std::move(callbacks));
    thread_ = std::thread([this] { loop_->Run(); });
  }

  // Returns the peer's end of a connection.
  UniqueFd Connect(const PeerCredentials& peer) {
    int fds[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    EXPECT_EQ(::fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
    const auto ours = std::make_shared<UniqueFd>(fds[0]);
    loop_->Post([this, ours, peer] {
      entrance_->OnConnection(std::move(*ours), peer);
    });
    return UniqueFd(fds[1]);
  }
  // A peer over TCP, as the acceptor knows it.
  UniqueFd ConnectOverTcp() {
    return Connect(
        {.caller = {.via = access::Via::kInsecureTcp}, .address = "127.0.0.1"});
  }

  Given Take() {
    const absl::MutexLock lock(&mutex_);
    const auto some = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return !given_.empty();
    };
    mutex_.Await(absl::Condition(&some));
    Given first = std::move(given_.front());
    given_.pop_front();
    return first;
  }
  bool HasGivenNothing() {
    const absl::MutexLock lock(&mutex_);
    return given_.empty();
  }

  const std::string directory_ = MakeDirectory();
  const tls::TestCa ca_{directory_, "ca"};
  v1::DaemonConfig config_;
  std::unique_ptr<os::EventLoop> loop_ = *os::EventLoop::Create();
  std::unique_ptr<access::LiveAccess> access_;
  absl::Mutex mutex_;
  std::deque<Given> given_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Entrance> entrance_;
  std::thread thread_;
};

TEST_F(EntranceTest, AUnixPeerStaysWhoItIs) {
  Open();
  const UniqueFd peer = Connect({.caller = access::UnixCaller(4711), .pid = 7});
  SendAll(peer.get(), HelloFrame("a", "secret"));
  const Given given = Take();
  EXPECT_EQ(given.peer.caller, access::UnixCaller(4711));
  EXPECT_EQ(given.peer.pid, 7);
  EXPECT_EQ(given.hello.job(), "a");
  // The token has been checked; whoever serves the connection does not get it.
  EXPECT_EQ(given.hello.token(), "");
}

TEST_F(EntranceTest, GrpcGoesToThoseWhoServeIt) {
  Open();
  const UniqueFd peer = Connect({.caller = access::UnixCaller(4711)});
  SendAll(peer.get(), "PRI * HTTP/2.0");
  const Given given = Take();
  EXPECT_TRUE(given.is_grpc);
  EXPECT_EQ(given.peer.caller, access::UnixCaller(4711));
}

TEST_F(EntranceTest, ATcpPeerIsTheDaemonsUserWhereThatIsPermitted) {
  config_.set_insecure_tcp(true);
  Open();
  const UniqueFd peer = ConnectOverTcp();
  SendAll(peer.get(), HelloFrame("a", ""));
  EXPECT_EQ(Take().peer.caller, access::InsecureTcpCaller());
}

TEST_F(EntranceTest, ATcpPeerIsNobodyWithoutThePermission) {
  Open();
  const UniqueFd peer = ConnectOverTcp();
  SendAll(peer.get(), HelloFrame("a", ""));
  EXPECT_EQ(Take().peer.caller.role, access::Role::kNone);
}

TEST_F(EntranceTest, ATokenSaysWhoAClientOverTlsIs) {
  UseTokens();
  Open();
  TlsClient client(ConnectOverTcp(), {.ca = ca_.file()});
  const absl::Status ready = client.ShakeHands();
  ASSERT_TRUE(ready.ok()) << ready;
  client.Send(HelloFrame("a", "secret"));
  const Given given = Take();
  EXPECT_EQ(given.peer.quota_name(), "token:ci (uid 1001)");
  EXPECT_EQ(given.peer.caller.role, access::Role::kTrainer);
  EXPECT_EQ(given.hello.job(), "a");
  EXPECT_EQ(given.hello.token(), "");
}

TEST_F(EntranceTest, ATokenOfNobodysIsRefused) {
  UseTokens();
  Open();
  TlsClient client(ConnectOverTcp(), {.ca = ca_.file()});
  const absl::Status ready = client.ShakeHands();
  ASSERT_TRUE(ready.ok()) << ready;
  client.Send(HelloFrame("a", "wrong"));
  const std::string answer = client.Receive(size_t{64} << 10);
  ASSERT_GT(answer.size(), kHeaderBytes);
  v1::HelloReply reply;
  ASSERT_TRUE(reply.ParseFromString(answer.substr(kHeaderBytes)));
  const absl::Status refused = FromProto(reply.status());
  EXPECT_TRUE(absl::IsUnauthenticated(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("access.tokens_file"));
  EXPECT_TRUE(HasGivenNothing());
}

TEST_F(EntranceTest, ACertificateSaysWhoAClientOverTlsIs) {
  UseCertificates();
  Open();
  TlsClient client(ConnectOverTcp(), ca_.Issue("client", "DNS:rank"));
  const absl::Status ready = client.ShakeHands();
  ASSERT_TRUE(ready.ok()) << ready;
  client.Send(HelloFrame("a", "wrong"));  // nobody looks at it
  EXPECT_EQ(Take().peer.quota_name(), "DNS:rank (uid 4711)");
}

}  // namespace
}  // namespace optstate::accept
