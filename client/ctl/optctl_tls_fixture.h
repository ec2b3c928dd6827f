#ifndef OPTSTATE_CLIENT_CTL_OPTCTL_TLS_FIXTURE_H_
#define OPTSTATE_CLIENT_CTL_OPTCTL_TLS_FIXTURE_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/ctl/optctl_fixture.h"
#include "gtest/gtest.h"
#include "proto/tls/test_certificates.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::ctl {

// A user that this test certainly does not run as.
inline constexpr uint32_t kTrainerUid = 4711;
// `printf %s secret | sha256sum`.
inline constexpr char kDigest[] =
    "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

// A daemon with TLS, and clients with certificates or tokens.
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

  // Puts a file in the place of the one that is there, whole.
  void Replace(const std::string& name, const std::string& text) const {
    const std::string next = directory_ + "/next";
    std::ofstream(next) << text;
    std::filesystem::permissions(next, std::filesystem::perms::owner_read |
                                           std::filesystem::perms::owner_write);
    std::filesystem::rename(next, directory_ + "/" + name);
  }
  void WriteIdentities(const std::string& trainer) const {
    Replace("identities.yaml",
            absl::StrCat("identities:\n- {san: \"", trainer, "\", user: \"",
                         kTrainerUid,
                         "\", role: trainer}\n"
                         "- {san: \"URI:spiffe://test/viewer\", user: "
                         "\"4712\", role: viewer}\n"
                         "- {san: \"DNS:admin*\", user: \"4713\", role: "
                         "operator}\n"));
  }
  void WriteTokens(const std::string& digest) const {
    Replace("tokens.yaml",
            absl::StrCat("tokens: [{name: ci, user: \"", kTrainerUid,
                         "\", role: trainer, sha256: \"", digest, "\"}]\n"));
  }

  void StartWithCertificates() {
    WriteIdentities("URI:spiffe://test/trainer");
    Start(absl::StrCat(
        "tls: {certificate_file: ", files_.certificate,
        ", key_file: ", files_.key, ", client_ca_file: ", files_.ca,
        "}\naccess: {identities_file: ", directory_, "/identities.yaml}\n"));
  }
  void StartWithTokens() {
    WriteTokens(kDigest);
    Start(absl::StrCat("tls: {certificate_file: ", files_.certificate,
                       ", key_file: ", files_.key, "}\naccess: {tokens_file: ",
                       directory_, "/tokens.yaml}\n"));
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

  static absl::StatusOr<std::unique_ptr<client::Session>> Open(
      const std::string& endpoint,
      absl::Duration patience = absl::Seconds(30)) {
    client::SessionOptions options;
    options.endpoint = endpoint;
    options.connect_timeout = patience;
    options.job = "gpt";
    options.layout.groups.resize(1);
    options.layout.parameters = {{"weight", {2, 3}, 6}, {"bias", {3}, 3}};
    return client::Session::Open(options);
  }
  static void LoadOnes(client::Session& session) {
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

}  // namespace optstate::ctl

#endif  // OPTSTATE_CLIENT_CTL_OPTCTL_TLS_FIXTURE_H_
