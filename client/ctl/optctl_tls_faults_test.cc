// Faults of TLS between a client and a real daemon are said at once and on both
// sides: by optctl, by a session that attaches, and in the daemon's log.
//
// No time is measured. The limits of the clients are hours instead, so that one
// that waits or tries again, be it with a backoff, never comes to an end.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_tls_fixture.h"
#include "client/endpoint/dial.h"
#include "client/endpoint/endpoint.h"
#include "proto/tls/test_certificates.h"
#include "proto/types/unique_fd.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::ctl {
namespace {

using client::Session;
using ::testing::HasSubstr;

constexpr char kTrainer[] = "URI:spiffe://test/trainer";
constexpr absl::Duration kHour = absl::Hours(1);

class TlsFaultsTest : public OptctlTlsTest {
 protected:
  static absl::StatusOr<std::unique_ptr<Session>> Attach(
      const std::string& endpoint) {
    return Open(endpoint, kHour);
  }

  // Starts the daemon anew with these files.
  void StartWith(const tls::TlsFiles& files) {
    Start(absl::StrCat(
        "tls: {certificate_file: ", files.certificate,
        ", key_file: ", files.key, ", client_ca_file: ", files.ca,
        "}\naccess: {identities_file: ", directory_, "/identities.yaml}\n"));
  }
  void StartInsecure() {
    daemon_.reset();
    auto daemon = TestDaemon::Start({.tcp = true, .flags = {}, .config = ""});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    secure_ = absl::StrCat(
        "grpcs:", absl::StripPrefix(*daemon_->tcp_endpoint(), "grpc:"));
  }
  void Show(const tls::TlsFiles& files) const {
    ::setenv("OPTSTATE_TLS_CA", files.ca.c_str(), 1);
    ::setenv("OPTSTATE_TLS_CERTIFICATE", files.certificate.c_str(), 1);
    ::setenv("OPTSTATE_TLS_KEY", files.key.c_str(), 1);
  }

  // Counts the lines of the daemon's log that have all of these in them.
  size_t LinesWith(const std::vector<std::string>& texts) const {
    size_t count = 0;
    for (const absl::string_view line : absl::StrSplit(daemon_->Log(), '\n')) {
      bool has_all = true;
      for (const std::string& text : texts) {
        has_all = has_all && absl::StrContains(line, text);
      }
      if (has_all) ++count;
    }
    return count;
  }
  void AwaitLines(const std::vector<std::string>& texts, size_t count) const {
    const absl::Time deadline = absl::Now() + absl::Minutes(1);
    while (LinesWith(texts) < count) {
      ASSERT_LT(absl::Now(), deadline) << daemon_->Log();
      std::this_thread::yield();
    }
  }

  // Expects a session and optctl to be refused alike, and one line of the
  // daemon's log for each.
  void ExpectRefused(const std::string& endpoint, absl::StatusCode code,
                     const std::vector<std::string>& says,
                     const std::vector<std::string>& logs) {
    const size_t before = LinesWith(logs);
    const absl::Status session = Attach(endpoint).status();
    EXPECT_EQ(session.code(), code) << session;
    const Ran ran = At(endpoint, "--timeout 3600 status");
    EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
    for (const std::string& text : says) {
      EXPECT_THAT(std::string(session.message()), HasSubstr(text));
      EXPECT_THAT(ran.output, HasSubstr(text));
    }
    AwaitLines(logs, before + 2);
    EXPECT_EQ(LinesWith(logs), before + 2) << daemon_->Log();
  }
  void ExpectUnauthenticated(const std::vector<std::string>& says,
                             const std::vector<std::string>& logs) {
    ExpectRefused(secure_, absl::StatusCode::kUnauthenticated, says, logs);
  }

  // Expects the daemon to close the session's connection once it has read the
  // file that has changed, and to refuse whoever comes back.
  void ExpectRevoked(Session* session, const std::vector<std::string>& says,
                     const std::vector<std::string>& logs) {
    AwaitLines({"TLS connection closed"}, 1);
    const absl::Status step = Step(*session, 2).status();
    EXPECT_TRUE(absl::IsUnauthenticated(step)) << step;
    for (const std::string& text : says) {
      EXPECT_THAT(std::string(step.message()), HasSubstr(text));
    }
    AwaitLines(logs, 1);
    ExpectUnauthenticated(says, logs);
  }

  // Attaches as somebody whom the daemon knows; returns the session, which has
  // loaded its job.
  std::unique_ptr<Session> AttachKnown() {
    auto session = Attach(secure_);
    EXPECT_TRUE(session.ok()) << session.status() << daemon_->Log();
    if (!session.ok()) return nullptr;
    LoadOnes(**session);
    EXPECT_TRUE(Step(**session, 1).ok());
    return *std::move(session);
  }
};

TEST_F(TlsFaultsTest, CertificateOfTheClientHasExpired) {
  Show(ca_.Issue("client", kTrainer, absl::Now() - absl::Hours(1)));
  ExpectUnauthenticated(
      {"this client's certificate", "client.crt has expired at 20",
       "get a new one (OPTSTATE_TLS_CERTIFICATE, OPTSTATE_TLS_KEY)"},
      {"TLS handshake failed", "the client's certificate has expired",
       "the client needs a new one"});
}

TEST_F(TlsFaultsTest, CertificateOfTheClientIsNotValidYet) {
  Show(ca_.Issue("client", kTrainer, absl::Now() + absl::Hours(48),
                 absl::Now() + absl::Hours(24)));
  ExpectUnauthenticated(
      {"this client's certificate", "client.crt is not valid before 20",
       "compare the clocks of both machines"},
      {"TLS handshake failed", "the client's certificate is not valid yet",
       "compare the clocks"});
}

TEST_F(TlsFaultsTest, CertificateOfTheClientIsOfAnotherCa) {
  const tls::TestCa other(directory_, "other-ca");
  tls::TlsFiles files = other.Issue("client", kTrainer);
  files.ca = ca_.file();
  Show(files);
  ExpectUnauthenticated(
      {"client.crt is not signed by a CA that the other side trusts",
       "use one of a CA in the daemon's tls.client_ca_file"},
      {"TLS handshake failed",
       absl::StrCat(
           "the client's certificate is not signed by a CA of CA file ",
           files_.ca),
       "tls.client_ca_file"});
}

TEST_F(TlsFaultsTest, TheClientHasNoCertificate) {
  Show({.certificate = "", .key = "", .ca = ca_.file()});
  ::unsetenv("OPTSTATE_TLS_CERTIFICATE");
  ::unsetenv("OPTSTATE_TLS_KEY");
  ExpectUnauthenticated(
      {"the daemon requires a client certificate",
       "set OPTSTATE_TLS_CERTIFICATE and OPTSTATE_TLS_KEY"},
      {"TLS handshake failed", "the client has shown no certificate"});
}

TEST_F(TlsFaultsTest, NoIdentityFitsTheClient) {
  ActAs("DNS:stranger");
  ExpectUnauthenticated(
      {"no identity of this daemon fits the client's certificate",
       "DNS:stranger", "access.identities_file"},
      {"connection of", "refused", "no identity of this daemon fits",
       "DNS:stranger"});
}

TEST_F(TlsFaultsTest, CertificateOfTheDaemonHasExpired) {
  StartWith(ca_.Issue("daemon", "IP:127.0.0.1", absl::Now() - absl::Hours(1)));
  ActAs(kTrainer);
  ExpectUnauthenticated({"the daemon's certificate has expired",
                         "the daemon's operator replaces tls.certificate_file"},
                        {"TLS handshake failed", "daemon.crt has expired at 20",
                         "replace tls.certificate_file and tls.key_file"});
}

TEST_F(TlsFaultsTest, CertificateOfTheDaemonIsNotValidYet) {
  StartWith(ca_.Issue("daemon", "IP:127.0.0.1", absl::Now() + absl::Hours(48),
                      absl::Now() + absl::Hours(24)));
  ActAs(kTrainer);
  ExpectUnauthenticated(
      {"the daemon's certificate is not valid yet",
       "compare the clocks of both machines"},
      {"TLS handshake failed", "daemon.crt is not valid before 20",
       "compare the clocks"});
}

TEST_F(TlsFaultsTest, CertificateOfTheDaemonIsOfAnotherCa) {
  const tls::TestCa other(directory_, "other-ca");
  ActAs(kTrainer);
  ::setenv("OPTSTATE_TLS_CA", other.file().c_str(), 1);
  ExpectUnauthenticated(
      {absl::StrCat(
           "the daemon's certificate is not signed by a CA of CA file ",
           other.file()),
       "set OPTSTATE_TLS_CA to the CA that signed it"},
      {"TLS handshake failed",
       "daemon.crt is not signed by a CA that the other side trusts",
       "OPTSTATE_TLS_CA"});
}

TEST_F(TlsFaultsTest, CertificateOfTheDaemonIsForAnotherName) {
  ActAs(kTrainer);
  ::setenv("OPTSTATE_TLS_SERVER_NAME", "elsewhere", 1);
  ExpectUnauthenticated(
      {"the daemon's certificate is not for \"elsewhere\" but for",
       "DNS:localhost", "or set OPTSTATE_TLS_SERVER_NAME"},
      {"TLS handshake failed", "daemon.crt is refused by the other side",
       "by a name that it does not have"});
}

TEST_F(TlsFaultsTest, AnIdentityIsRemovedWhileItsSessionTrains) {
  ActAs(kTrainer);
  const auto session = AttachKnown();
  ASSERT_NE(session, nullptr);
  WriteIdentities("URI:spiffe://test/another");
  ExpectRevoked(session.get(),
                {"no identity of this daemon fits the client's certificate",
                 kTrainer, "access.identities_file"},
                {"connection of", "refused", "no identity of this daemon fits",
                 kTrainer});
}

// The new CA has the name of the old one, as one that was made anew.
TEST_F(TlsFaultsTest, TheCaOfClientsIsReplacedWhileASessionTrains) {
  const tls::TestCa clients(directory_, "clients-ca");
  tls::TlsFiles files = files_;
  files.ca = clients.file();
  StartWith(files);
  tls::TlsFiles client = clients.Issue("client", kTrainer);
  client.ca = ca_.file();
  Show(client);
  const auto session = AttachKnown();
  ASSERT_NE(session, nullptr);
  const tls::TestCa next(directory_, "clients-ca");  // in the file's place
  ExpectRevoked(session.get(),
                {"client.crt is not signed by a CA that the other side trusts",
                 "use one of a CA in the daemon's tls.client_ca_file"},
                {"TLS handshake failed",
                 "the client's certificate is not signed by a CA of CA file"});
}

TEST_F(TlsFaultsTest, ATokenIsRemovedWhileItsSessionTrains) {
  StartWithTokens();
  ::setenv("OPTSTATE_TLS_CA", files_.ca.c_str(), 1);
  ::setenv("OPTSTATE_TOKEN", "secret", 1);
  const auto session = AttachKnown();
  ASSERT_NE(session, nullptr);
  WriteTokens(std::string(64, '0'));
  ExpectRevoked(session.get(),
                {"the token is none of this daemon's", "access.tokens_file"},
                {"refused", "the token is none of this daemon's"});
}

TEST_F(TlsFaultsTest, PlaintextToAPortWithTls) {
  ExpectRefused(plain_, absl::StatusCode::kFailedPrecondition,
                {"the daemon speaks TLS alone there", "use grpcs:HOST:PORT"},
                {"connection of", "refused", "speaks TLS alone there"});
}

TEST_F(TlsFaultsTest, TlsToAPortWithout) {
  StartInsecure();
  ActAs("DNS:admin");
  ExpectRefused(
      secure_, absl::StatusCode::kFailedPrecondition,
      {"does not speak TLS there", "use grpc:HOST:PORT"},
      {"connection of", "refused", "began with TLS", "use grpc:HOST:PORT"});
}

// Endpoints of ours cannot ask for it; other clients of gRPC can.
TEST_F(TlsFaultsTest, TlsToAUnixSocket) {
  const std::string endpoint = absl::StrCat("grpcs:", daemon_->shm_endpoint());
  const absl::Status session = Attach(endpoint).status();
  EXPECT_TRUE(absl::IsInvalidArgument(session)) << session;
  const Ran ran = At(endpoint, "--timeout 3600 status");
  EXPECT_EQ(ran.exit_code, kExitUsage) << ran.output;
  for (const std::string& said : {std::string(session.message()), ran.output}) {
    EXPECT_THAT(said, HasSubstr("a unix socket has no TLS"));
    EXPECT_THAT(said, HasSubstr("use grpc:unix:PATH"));
  }
  const auto parsed = client::ParseEndpoint(daemon_->shm_endpoint());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  const auto socket = client::Dial(*parsed, absl::Now() + kHour);
  ASSERT_TRUE(socket.ok()) << socket.status();
  constexpr char kClientHello[] = "\x16\x03\x01\x02\x01\x01";
  ASSERT_GT(::send(socket->get(), kClientHello, sizeof(kClientHello), 0), 0);
  std::string answer;
  char byte;
  while (::recv(socket->get(), &byte, 1, 0) == 1) answer += byte;
  EXPECT_THAT(answer, HasSubstr("a unix socket has none: use unix:PATH"));
  AwaitLines({"connection of uid", "refused", "began with TLS", "unix:PATH"},
             1);
}

// A file that is missing is the client's own fault, and no daemon is asked.
TEST_F(TlsFaultsTest, AFileOfTheClientIsMissing) {
  ActAs(kTrainer);
  const std::string missing = directory_ + "/none";
  ::setenv("OPTSTATE_TLS_CA", missing.c_str(), 1);
  const absl::Status session = Attach(secure_).status();
  EXPECT_TRUE(absl::IsNotFound(session) || absl::IsUnavailable(session))
      << session;
  EXPECT_THAT(std::string(session.message()), HasSubstr(missing));
}

}  // namespace
}  // namespace optstate::ctl
