// Sessions and optctl over TLS, against a real daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_fixture.h"
#include "proto/tls/test_certificates.h"

namespace optstate::ctl {
namespace {

using client::Session;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A user that this test certainly does not run as.
constexpr uint32_t kTrainerUid = 4711;
// `printf %s secret | sha256sum`.
constexpr char kDigest[] =
    "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

class OptctlTlsTest : public OptctlTest {
 protected:
  void SetUp() override { StartWithCertificates(); }
  void TearDown() override {
    for (const char* variable :
         {"OPTSTATE_TLS_CA", "OPTSTATE_TLS_CERTIFICATE", "OPTSTATE_TLS_KEY",
          "OPTSTATE_TLS_SERVER_NAME", "OPTSTATE_TOKEN"}) {
      ::unsetenv(variable);
    }
    daemon_.reset();
    std::filesystem::remove_all(directory_);
  }

  static std::string MakeDirectory() {
    std::string directory = ::testing::TempDir() + "/tls-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    return directory;
  }

  void StartWithCertificates() {
    std::ofstream(directory_ + "/identities.yaml")
        << "identities:\n"
        << "- {san: \"URI:spiffe://test/trainer\", user: \"" << kTrainerUid
        << "\", role: trainer}\n"
        << "- {san: \"URI:spiffe://test/viewer\", user: \"4712\", role: "
           "viewer}\n"
        << "- {san: \"DNS:admin*\", user: \"4713\", role: operator}\n";
    Start(absl::StrCat(
        "tls: {certificate_file: ", files_.certificate,
        ", key_file: ", files_.key, ", client_ca_file: ", files_.ca,
        "}\naccess: {identities_file: ", directory_, "/identities.yaml}\n"));
  }
  void StartWithTokens() {
    const std::string file = directory_ + "/tokens.yaml";
    std::ofstream(file) << "tokens: [{name: ci, user: \"" << kTrainerUid
                        << "\", role: trainer, sha256: \"" << kDigest
                        << "\"}]\n";
    std::filesystem::permissions(file, std::filesystem::perms::owner_read);
    Start(absl::StrCat("tls: {certificate_file: ", files_.certificate,
                       ", key_file: ", files_.key,
                       "}\naccess: {tokens_file: ", file, "}\n"));
  }
  void Start(const std::string& config) {
    daemon_.reset();
    auto daemon = TestDaemon::Start(
        {.tcp = false, .flags = {"--listen", "127.0.0.1:0"}, .config = config});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    const auto endpoint = daemon_->tcp_endpoint();
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    plain_ = *endpoint;
    secure_ = absl::StrCat("grpcs:", absl::StripPrefix(plain_, "grpc:"));
  }

  void ActAs(const std::string& names) const {
    const tls::TlsFiles files = ca_.Issue("client", names);
    ::setenv("OPTSTATE_TLS_CA", files.ca.c_str(), 1);
    ::setenv("OPTSTATE_TLS_CERTIFICATE", files.certificate.c_str(), 1);
    ::setenv("OPTSTATE_TLS_KEY", files.key.c_str(), 1);
  }

  absl::StatusOr<std::unique_ptr<Session>> Open(const std::string& endpoint) {
    client::SessionOptions options;
    options.endpoint = endpoint;
    options.job = "gpt";
    options.layout.groups.resize(1);
    options.layout.parameters = {{"weight", {2, 3}, 6}, {"bias", {3}, 3}};
    return Session::Open(options);
  }
  static void LoadOnes(Session& session) {
    const std::vector<float> ones(6, 1.0f);
    const auto bytes = absl::MakeConstSpan(
        reinterpret_cast<const std::byte*>(ones.data()), 24);
    ASSERT_TRUE(session.BeginLoad().ok());
    for (uint32_t p = 0; p < 2; ++p) {
      ASSERT_TRUE(session
                      .Load(client::StateArray::kMaster, p, DType::kFloat32,
                            bytes.first(p == 0 ? 24 : 12))
                      .ok());
    }
    ASSERT_TRUE(session.FinishLoad().ok());
  }
  Ran At(const std::string& endpoint, const std::string& arguments) const {
    return RunBinary(absl::StrCat("--endpoint ", endpoint, " ", arguments));
  }

  const std::string directory_ = MakeDirectory();
  const tls::TestCa ca_{directory_, "ca"};
  const tls::TlsFiles files_ =
      ca_.Issue("daemon", "IP:127.0.0.1,DNS:localhost");
  std::string plain_;
  std::string secure_;
};

TEST_F(OptctlTlsTest, ATrainerTrainsAndItsSessionOutlivesAnUpgrade) {
  ActAs("URI:spiffe://test/trainer");
  auto session = Open(secure_);
  ASSERT_TRUE(session.ok()) << session.status() << daemon_->Log();
  LoadOnes(**session);
  const auto first = Step(**session, 1);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto job = daemon_->GetJob("gpt");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->uid(), kTrainerUid);
  EXPECT_EQ(job->committed_step(), 1u);
  // The supervisor's end is the connection's; the session makes another.
  ASSERT_TRUE(daemon_->Upgrade().ok());
  const auto second = Step(**session, 2);
  EXPECT_TRUE(second.ok()) << second.status();
  const Ran own = At(secure_, "delete job gpt --force");
  EXPECT_EQ(own.exit_code, kExitOk) << own.output;
}

TEST_F(OptctlTlsTest, RolesAreThoseOfTheCertificate) {
  // The job of another user, made over the unix socket.
  const auto session = Train("other");
  ActAs("URI:spiffe://test/viewer");
  const Ran list = At(secure_, "get jobs");
  EXPECT_EQ(list.exit_code, kExitOk) << list.output;
  EXPECT_THAT(list.output, HasSubstr("other"));
  const absl::Status viewer = Open(secure_).status();
  EXPECT_TRUE(absl::IsPermissionDenied(viewer)) << viewer;
  EXPECT_THAT(std::string(viewer.message()), HasSubstr("role viewer"));
  EXPECT_EQ(At(secure_, "drain").exit_code, kExitRefused);
  ActAs("URI:spiffe://test/trainer");
  const Ran foreign = At(secure_, "delete job other --force");
  EXPECT_EQ(foreign.exit_code, kExitRefused) << foreign.output;
  ActAs("DNS:admin7");
  EXPECT_EQ(At(secure_, "drain").exit_code, kExitOk);
  EXPECT_EQ(At(secure_, "drain --resume").exit_code, kExitOk);
  EXPECT_EQ(At(secure_, "delete job other --force").exit_code, kExitOk);
  EXPECT_THAT(
      daemon_->Log(),
      AllOf(HasSubstr("audit: actor=\"URI:spiffe://test/viewer (uid 4712)\" "
                      "method=Drain verdict=refused"),
            HasSubstr("audit: actor=\"DNS:admin7 (uid 4713)\" "
                      "method=DeleteJob job=\"other\" force=true "
                      "verdict=done")));
}

TEST_F(OptctlTlsTest, WhatIsWrongWithACertificateIsSaid) {
  ActAs("DNS:stranger");
  const absl::Status stranger = Open(secure_).status();
  EXPECT_TRUE(absl::IsUnauthenticated(stranger)) << stranger;
  EXPECT_THAT(std::string(stranger.message()), HasSubstr("DNS:stranger"));
  const Ran ran = At(secure_, "status");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("identities_file"));

  ::setenv("OPTSTATE_TLS_SERVER_NAME", "elsewhere", 1);
  const absl::Status name = Open(secure_).status();
  EXPECT_TRUE(absl::IsUnauthenticated(name)) << name;
  EXPECT_THAT(std::string(name.message()),
              AllOf(HasSubstr("elsewhere"), HasSubstr("DNS:localhost")));
  ::unsetenv("OPTSTATE_TLS_SERVER_NAME");

  ::unsetenv("OPTSTATE_TLS_CERTIFICATE");
  ::unsetenv("OPTSTATE_TLS_KEY");
  const Ran none = At(secure_, "status");
  EXPECT_EQ(none.exit_code, kExitRefused) << none.output;
  EXPECT_THAT(none.output, HasSubstr("requires a client certificate"));

  ::setenv("OPTSTATE_TLS_CA", (directory_ + "/none").c_str(), 1);
  EXPECT_THAT(std::string(Open(secure_).status().message()),
              HasSubstr(directory_ + "/none"));
}

TEST_F(OptctlTlsTest, PlaintextToAPortWithTls) {
  const absl::Status session = Open(plain_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(session)) << session;
  EXPECT_THAT(std::string(session.message()), HasSubstr("grpcs:HOST:PORT"));
  const Ran ran = At(plain_, "status");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("grpcs:HOST:PORT"));
}

TEST_F(OptctlTlsTest, TlsToAPortWithout) {
  daemon_.reset();
  auto daemon = TestDaemon::Start({.tcp = true, .flags = {}, .config = ""});
  ASSERT_TRUE(daemon.ok()) << daemon.status();
  daemon_ = *std::move(daemon);
  const std::string endpoint = absl::StrCat(
      "grpcs:", absl::StripPrefix(*daemon_->tcp_endpoint(), "grpc:"));
  ActAs("DNS:admin");
  const absl::Status session = Open(endpoint).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(session)) << session;
  EXPECT_THAT(std::string(session.message()),
              HasSubstr("does not speak TLS there"));
  const Ran ran = At(endpoint, "status");
  EXPECT_EQ(ran.exit_code, kExitRefused) << ran.output;
  EXPECT_THAT(daemon_->Log(), HasSubstr("began with TLS"));
}

TEST_F(OptctlTlsTest, TokensAreForClientsWithoutACertificate) {
  StartWithTokens();
  ::setenv("OPTSTATE_TLS_CA", files_.ca.c_str(), 1);
  const absl::Status nobody = Open(secure_).status();
  EXPECT_TRUE(absl::IsUnauthenticated(nobody)) << nobody;
  EXPECT_EQ(At(secure_, "status").exit_code, kExitRefused);
  ::setenv("OPTSTATE_TOKEN", "secret", 1);
  auto session = Open(secure_);
  ASSERT_TRUE(session.ok()) << session.status() << daemon_->Log();
  LoadOnes(**session);
  EXPECT_TRUE(Step(**session, 1).ok());
  EXPECT_EQ(daemon_->GetJob("gpt")->uid(), kTrainerUid);
  EXPECT_EQ(At(secure_, "get jobs").exit_code, kExitOk);
  EXPECT_EQ(At(secure_, "drain").exit_code, kExitRefused);
  EXPECT_THAT(daemon_->Log(), testing::Not(HasSubstr("secret")));
}

// A forked child has no part in the session, and its end is not the session's.
TEST_F(OptctlTlsTest, AForkedChildLeavesTheSessionAlone) {
  ActAs("URI:spiffe://test/trainer");
  auto session = Open(secure_);
  ASSERT_TRUE(session.ok()) << session.status();
  LoadOnes(**session);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  const Process process(child);
  EXPECT_TRUE(process.AwaitEnd(absl::InfiniteFuture()).ok());
  EXPECT_TRUE(Step(**session, 1).ok());
}

}  // namespace
}  // namespace optstate::ctl
