#include "server/access/live_access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "proto/tls/test_certificates.h"

namespace optstate::access {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class LiveAccessTest : public testing::Test {
 protected:
  LiveAccessTest() {
    SetIdentities("DNS:a");
    const tls::TlsFiles files = ca_.Issue("daemon", "DNS:daemon");
    config_.mutable_tls()->set_certificate_file(files.certificate);
    config_.mutable_tls()->set_key_file(files.key);
    config_.mutable_tls()->set_client_ca_file(files.ca);
    config_.mutable_access()->set_identities_file(Path("identities.yaml"));
  }
  ~LiveAccessTest() override { std::filesystem::remove_all(directory_); }

  static std::string MakeDirectory() {
    std::string directory = ::testing::TempDir() + "/access-XXXXXX";
    EXPECT_NE(::mkdtemp(directory.data()), nullptr);
    return directory;
  }

  std::string Path(const std::string& name) const {
    return directory_ + "/" + name;
  }
  // Replaces a file as an editor does.
  void Write(const std::string& name, const std::string& text,
             mode_t mode = 0600) const {
    const std::string next = Path(name + ".next");
    std::ofstream(next) << text;
    ::chmod(next.c_str(), mode);
    std::filesystem::rename(next, Path(name));
  }
  void SetIdentities(const std::string& san) const {
    Write("identities.yaml",
          "identities: [{san: \"" + san + "\", user: \"7\", role: viewer}]\n");
  }

  void Load() {
    auto access = LiveAccess::Load(config_, [this] { return now_; });
    ASSERT_TRUE(access.ok()) << access.status();
    access_ = *std::move(access);
  }
  absl::Status Problem() const {
    return LiveAccess::Load(config_, [this] { return now_; }).status();
  }
  bool Knows(const std::string& name) {
    return access_->Current()->FindByNames({name}).ok();
  }
  void Pass() { now_ += LiveAccess::kLookEvery; }

  const std::string directory_ = MakeDirectory();
  const tls::TestCa ca_{directory_, "ca"};
  absl::Time now_ = absl::UnixEpoch();
  v1::DaemonConfig config_;
  std::unique_ptr<LiveAccess> access_;
};

TEST_F(LiveAccessTest, ChangedIdentitiesComeIntoForce) {
  Load();
  EXPECT_TRUE(Knows("DNS:a"));
  SetIdentities("DNS:b");
  EXPECT_TRUE(Knows("DNS:a"));  // looked at at most once a second
  Pass();
  EXPECT_FALSE(Knows("DNS:a"));
  EXPECT_TRUE(Knows("DNS:b"));
}

TEST_F(LiveAccessTest, WhatIsWrongLeavesTheFormerInForce) {
  Load();
  const auto before = access_->Current();
  Write("identities.yaml", "nonsense: 1\n");
  Pass();
  EXPECT_EQ(access_->Current(), before);
  Pass();
  EXPECT_EQ(access_->Current(), before);
  std::filesystem::remove(Path("identities.yaml"));
  Pass();
  EXPECT_TRUE(Knows("DNS:a"));
  SetIdentities("DNS:b");
  Pass();
  EXPECT_TRUE(Knows("DNS:b"));
}

// The two files are replaced one after the other, and do not fit in between.
TEST_F(LiveAccessTest, ANewCertificateComesIntoForceWithItsKey) {
  Load();
  const auto before = access_->Current();
  const tls::TlsFiles next = ca_.Issue("next", "DNS:daemon");
  std::filesystem::rename(next.certificate, Path("daemon.crt"));
  Pass();
  EXPECT_EQ(access_->Current(), before);
  std::filesystem::rename(next.key, Path("daemon.key"));
  Pass();
  EXPECT_NE(access_->Current()->context(), before->context());
  EXPECT_EQ(access_->Current()->trust(), before->trust());
}

TEST_F(LiveAccessTest, OtherCasAreAnotherTrust) {
  Load();
  const auto before = access_->Current();
  const tls::TestCa other(directory_, "other");
  std::filesystem::rename(other.file(), Path("ca.crt"));
  Pass();
  EXPECT_NE(access_->Current()->trust(), before->trust());
}

TEST_F(LiveAccessTest, Tokens) {
  // The hash of "secret".
  constexpr char kTokens[] =
      "tokens: [{name: ci, user: \"7\", role: viewer, sha256: "
      "\"2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\"}]";
  config_.mutable_tls()->clear_client_ca_file();
  config_.mutable_access()->clear_identities_file();
  config_.mutable_access()->set_tokens_file(Path("tokens.yaml"));
  Write("tokens.yaml", kTokens, 0640);
  EXPECT_THAT(std::string(Problem().message()),
              AllOf(HasSubstr("tokens.yaml"), HasSubstr("chmod 0600")));
  Write("tokens.yaml", kTokens);
  Load();
  const auto before = access_->Current();
  EXPECT_TRUE(before->FindByToken("secret").ok());
  // Without a certificate, the client is let in and may do nothing.
  const auto nobody = before->FindByNames({});
  ASSERT_TRUE(nobody.ok()) << nobody.status();
  EXPECT_EQ(nobody->role, Role::kNone);
  EXPECT_EQ(nobody->via, Via::kTls);
  Write("tokens.yaml", "tokens: []\n");
  Pass();
  EXPECT_FALSE(access_->Current()->FindByToken("secret").ok());
  EXPECT_NE(access_->Current()->trust(), before->trust());
}

TEST_F(LiveAccessTest, AKeyThatOthersCanReadIsRefused) {
  ::chmod(Path("daemon.key").c_str(), 0644);
  EXPECT_THAT(std::string(Problem().message()),
              AllOf(HasSubstr("daemon.key"), HasSubstr("chmod o=")));
  ::chmod(Path("daemon.key").c_str(), 0640);
  EXPECT_TRUE(Problem().ok()) << Problem();
}

TEST_F(LiveAccessTest, AMissingFileIsNamedAtTheStart) {
  std::filesystem::remove(Path("identities.yaml"));
  EXPECT_TRUE(absl::IsNotFound(Problem())) << Problem();
  EXPECT_THAT(std::string(Problem().message()), HasSubstr("identities.yaml"));
}

}  // namespace
}  // namespace optstate::access
