#include "server/accept/tls/tls_gate.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "proto/tls/test_certificates.h"
#include "server/accept/tls/testing_client.h"

namespace optstate::accept {
namespace {

using ::testing::HasSubstr;

struct Given {
  UniqueFd fd;
  PeerCredentials peer;
  absl::Status verdict;
};

class TlsGateTest : public testing::Test {
 protected:
  TlsGateTest() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address_);
    auto* const any = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(::bind(listener_.get(), any, size), 0);
    EXPECT_EQ(::listen(listener_.get(), 1024), 0);
    EXPECT_EQ(::getsockname(listener_.get(), any, &size), 0);
    SetIdentities("DNS:rank");
    const tls::TlsFiles files = ca_.Issue("daemon", "DNS:daemon");
    config_.mutable_tls()->set_certificate_file(files.certificate);
    config_.mutable_tls()->set_key_file(files.key);
    config_.mutable_tls()->set_client_ca_file(files.ca);
    config_.mutable_access()->set_identities_file(directory_ + "/i.yaml");
  }
  ~TlsGateTest() override {
    gate_.reset();
    std::filesystem::remove_all(directory_);
  }

  static std::string MakeDirectory() {
    std::string directory = ::testing::TempDir() + "/gate-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    return directory;
  }
  void SetIdentities(const std::string& san) const {
    std::ofstream(directory_ + "/next.yaml")
        << "identities: [{san: \"" << san
        << "\", user: \"4711\", role: trainer}]\n";
    std::filesystem::rename(directory_ + "/next.yaml", directory_ + "/i.yaml");
  }

  void Start(absl::Duration timeout = absl::InfiniteDuration()) {
    access_ = *access::LiveAccess::Load(config_);
    gate_ =
        *TlsGate::Start(access_.get(), timeout,
                        [this](UniqueFd fd, const PeerCredentials& peer,
                               const absl::Status& verdict) {
                          absl::MutexLock lock(&mutex_);
                          given_.push_back(Given{std::move(fd), peer, verdict});
                        });
  }

  // Connects; the gate has the other end.
  UniqueFd Connect() {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address_),
                        sizeof(address_)),
              0);
    UniqueFd accepted(::accept4(listener_.get(), nullptr, nullptr,
                                SOCK_CLOEXEC | SOCK_NONBLOCK));
    gate_->Accept(std::move(accepted), {.caller = {}, .address = "127.0.0.1"});
    return fd;
  }
  TlsClient ConnectAs(const std::string& names) {
    return {Connect(), ca_.Issue("client", names)};
  }

  Given Take() {
    absl::MutexLock lock(&mutex_);
    const auto some = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      return !given_.empty();
    };
    mutex_.Await(absl::Condition(&some));
    Given first = std::move(given_.front());
    given_.pop_front();
    return first;
  }

  const std::string directory_ = MakeDirectory();
  const tls::TestCa ca_{directory_, "ca"};
  v1::DaemonConfig config_;
  sockaddr_in address_ = {};
  UniqueFd listener_;
  std::unique_ptr<access::LiveAccess> access_;
  absl::Mutex mutex_;
  std::deque<Given> given_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<TlsGate> gate_;
};

// Makes the gate's ends blocking, for the test.
std::string ReceiveInside(const Given& given, size_t size) {
  std::string all;
  while (all.size() < size) {
    char byte;
    const ssize_t count = ::recv(given.fd.get(), &byte, 1, 0);
    if (count < 0 && errno == EAGAIN) continue;
    if (count <= 0) break;
    all += byte;
  }
  return all;
}

TEST_F(TlsGateTest, BytesPassBothWaysAndThePeerIsKnown) {
  Start();
  TlsClient client = ConnectAs("URI:spiffe://a/b,DNS:rank");
  const absl::Status ready = client.ShakeHands();
  ASSERT_TRUE(ready.ok()) << ready;
  const Given given = Take();
  EXPECT_TRUE(given.verdict.ok()) << given.verdict;
  EXPECT_EQ(given.peer.caller.uid, 4711u);
  EXPECT_EQ(given.peer.caller.role, access::Role::kTrainer);
  EXPECT_EQ(given.peer.quota_name(), "DNS:rank (uid 4711)");
  client.Send("hello");
  EXPECT_EQ(ReceiveInside(given, 5), "hello");
  SendAll(given.fd.get(), "welcome");
  EXPECT_EQ(client.Receive(7), "welcome");
}

TEST_F(TlsGateTest, TheEndInsideIsTheEndOutside) {
  Start();
  TlsClient client = ConnectAs("DNS:rank");
  ASSERT_TRUE(client.ShakeHands().ok());
  Given given = Take();
  client.Send("unread");
  SendAll(given.fd.get(), "last words");
  given.fd.reset();
  EXPECT_EQ(client.Receive(100), "last words");
}

TEST_F(TlsGateTest, WhoHasNoIdentityIsToldSo) {
  Start();
  TlsClient client = ConnectAs("DNS:stranger");
  ASSERT_TRUE(client.ShakeHands().ok());
  const Given given = Take();
  EXPECT_TRUE(absl::IsUnauthenticated(given.verdict)) << given.verdict;
  EXPECT_THAT(std::string(given.verdict.message()), HasSubstr("DNS:stranger"));
  EXPECT_EQ(given.peer.caller.role, access::Role::kNone);
}

TEST_F(TlsGateTest, APeerWithoutTlsIsToldSo) {
  Start();
  const UniqueFd client = Connect();
  SendAll(client.get(), "OPST");
  const Given given = Take();
  EXPECT_TRUE(absl::IsFailedPrecondition(given.verdict)) << given.verdict;
  EXPECT_THAT(std::string(given.verdict.message()), HasSubstr("grpcs:"));
  EXPECT_EQ(ReceiveInside(given, 4), "OPST");  // nothing was read
}

TEST_F(TlsGateTest, ACertificateOfAnotherCaIsRefusedWithin) {
  Start();
  const tls::TestCa other(directory_, "other");
  tls::TlsFiles files = other.Issue("client", "DNS:rank");
  files.ca = ca_.file();
  TlsClient client(Connect(), files);
  const absl::Status refused = client.ShakeHands();
  EXPECT_TRUE(absl::IsUnauthenticated(refused)) << refused;
}

TEST_F(TlsGateTest, ASilentPeerIsGivenUp) {
  Start(absl::Milliseconds(20));
  const UniqueFd silent = Connect();
  EXPECT_EQ(ReceiveSome(silent.get()), "");
  // So is one that stops within the handshake.
  const UniqueFd slow = Connect();
  SendAll(slow.get(), "\x16\x03\x01\x02");
  EXPECT_EQ(ReceiveSome(slow.get()), "");
}

TEST_F(TlsGateTest, OneMachineHasHalfOfTheHandshakes) {
  Start();
  std::vector<UniqueFd> pending;
  for (size_t i = 0; i < TlsGate::kPendingMax / 2; ++i) {
    pending.push_back(Connect());
  }
  EXPECT_EQ(ReceiveSome(Connect().get()), "");
  // When one has gone, there is room again.
  pending.pop_back();
  while (true) {
    TlsClient client = ConnectAs("DNS:rank");
    if (client.ShakeHands().ok()) break;
  }
}

TEST_F(TlsGateTest, ARemovedIdentityLosesItsConnections) {
  Start();
  TlsClient client = ConnectAs("DNS:rank");
  ASSERT_TRUE(client.ShakeHands().ok());
  const Given given = Take();
  SetIdentities("DNS:other");
  EXPECT_EQ(ReceiveInside(given, 1), "");
  EXPECT_EQ(client.Receive(1), "");
  TlsClient again = ConnectAs("DNS:rank");
  ASSERT_TRUE(again.ShakeHands().ok());
  EXPECT_TRUE(absl::IsUnauthenticated(Take().verdict));
}

TEST_F(TlsGateTest, ANewCertificateOfTheDaemonLeavesConnections) {
  Start();
  TlsClient client = ConnectAs("DNS:rank");
  ASSERT_TRUE(client.ShakeHands().ok());
  const Given given = Take();
  const auto before = access_->Current();
  ca_.Issue("daemon", "DNS:daemon");
  while (access_->Current() == before) {
  }
  client.Send("still");
  EXPECT_EQ(ReceiveInside(given, 5), "still");
  TlsClient next = ConnectAs("DNS:rank");
  EXPECT_TRUE(next.ShakeHands().ok());
}

}  // namespace
}  // namespace optstate::accept
