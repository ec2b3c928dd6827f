// Access to a job, as the client library and optctl say it to a real daemon:
// its owner and a stranger over TLS, its operator over the unix socket.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
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
using ::testing::Not;

constexpr char kOwner[] = "URI:spiffe://test/owner";
constexpr char kStranger[] = "URI:spiffe://test/stranger";
constexpr char kReader[] = "URI:spiffe://test/reader";

class OptctlAccessTest : public OptctlTest {
 protected:
  void SetUp() override {
    ASSERT_NE(::mkdtemp(directory_.data()), nullptr);
    ca_.emplace(directory_, "ca");
    const tls::TlsFiles files =
        ca_->Issue("daemon", "IP:127.0.0.1,DNS:localhost");
    std::ofstream(directory_ + "/identities.yaml")
        << "identities:\n"
        << "- {san: \"" << kOwner << "\", user: \"4711\", role: trainer}\n"
        << "- {san: \"" << kStranger << "\", user: \"4712\", role: trainer}\n"
        << "- {san: \"" << kReader << "\", user: \"4713\", role: viewer}\n";
    auto daemon = TestDaemon::Start(
        {.tcp = false,
         .flags = {"--listen", "127.0.0.1:0"},
         .config = absl::StrCat("tls: {certificate_file: ", files.certificate,
                                ", key_file: ", files.key,
                                ", client_ca_file: ", files.ca,
                                "}\naccess: {identities_file: ", directory_,
                                "/identities.yaml}\n")});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
    const auto endpoint = daemon_->tcp_endpoint();
    ASSERT_TRUE(endpoint.ok()) << endpoint.status();
    secure_ = absl::StrCat("grpcs:", absl::StripPrefix(*endpoint, "grpc:"));
  }
  void TearDown() override {
    for (const char* variable :
         {"OPTSTATE_TLS_CA", "OPTSTATE_TLS_CERTIFICATE", "OPTSTATE_TLS_KEY"}) {
      ::unsetenv(variable);
    }
    daemon_.reset();
    std::filesystem::remove_all(directory_);
  }

  void ActAs(const std::string& names) const {
    const tls::TlsFiles files = ca_->Issue("client", names);
    ::setenv("OPTSTATE_TLS_CA", files.ca.c_str(), 1);
    ::setenv("OPTSTATE_TLS_CERTIFICATE", files.certificate.c_str(), 1);
    ::setenv("OPTSTATE_TLS_KEY", files.key.c_str(), 1);
  }
  client::SessionOptions Options() {
    client::SessionOptions options;
    options.endpoint = secure_;
    options.job = "secret";
    options.layout.groups.resize(1);
    options.layout.parameters = {{"weight", {2, 3}, 6}, {"bias", {3}, 3}};
    options.notice = [this](const std::string& text) {
      notices_.push_back(text);
    };
    return options;
  }
  // Makes the job as its owner, which no one else may look at.
  absl::StatusOr<std::unique_ptr<Session>> MakeSecret() {
    ActAs(kOwner);
    client::SessionOptions options = Options();
    options.access.emplace();
    options.access->is_private = true;
    return Session::Open(options);
  }
  Ran AsIdentity(const std::string& arguments) const {
    return RunBinary(absl::StrCat("--endpoint ", secure_, " ", arguments));
  }

  std::string directory_ = ::testing::TempDir() + "/access-XXXXXX";
  std::optional<tls::TestCa> ca_;
  std::string secure_;
  std::vector<std::string> notices_;
};

TEST_F(OptctlAccessTest, AStrangerFindsNoSuchJob) {
  const auto session = MakeSecret();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE(notices_.empty());
  EXPECT_THAT(AsIdentity("get jobs").output, HasSubstr("secret"));
  ActAs(kStranger);
  EXPECT_THAT(AsIdentity("get jobs").output, Not(HasSubstr("secret")));
  for (const char* command :
       {"describe job secret", "get sessions --job secret", "delete job secret",
        "recover secret", "sleep secret", "wake secret", "verify secret",
        "set job secret private=false", "set job secret host_budget=8MiB"}) {
    const Ran ran = AsIdentity(command);
    EXPECT_EQ(ran.exit_code, kExitNotFound) << command << ": " << ran.output;
    EXPECT_THAT(ran.output, HasSubstr("there is no job \"secret\""));
  }
  // The name is taken all the same, and that is all that is said.
  const absl::Status taken = Session::Open(Options()).status();
  EXPECT_TRUE(absl::IsPermissionDenied(taken)) << taken;
  EXPECT_THAT(std::string(taken.message()),
              AllOf(HasSubstr("is taken"), Not(HasSubstr("4711"))));
  ActAs(kReader);
  EXPECT_EQ(AsIdentity("describe job secret").exit_code, kExitNotFound);
}

TEST_F(OptctlAccessTest, TheOwnerAndOperatorsSayWhoMayLook) {
  const auto session = MakeSecret();
  ASSERT_TRUE(session.ok()) << session.status();
  Ran ran = AsIdentity("set job secret readers=4713,@root");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_THAT(ran.output,
              HasSubstr("job secret: private; readers 4713, @root\n"));
  ActAs(kReader);
  ran = AsIdentity("describe job secret");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_THAT(ran.output, AllOf(HasSubstr("owner uid"), HasSubstr("4711"),
                                HasSubstr("4713, @root")));
  EXPECT_THAT(AsIdentity("get jobs -o json").output,
              AllOf(HasSubstr("\"is_private\": true"), HasSubstr("\"4713\"")));
  // An operator, over the unix socket: what is not named stays.
  ran = Optctl("set job secret group=root");
  EXPECT_EQ(ran.exit_code, kExitUsage) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("uid 4711, is not in the group"));
  ran = Optctl("set job secret readers=");
  EXPECT_EQ(ran.exit_code, kExitOk) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("job secret: private\n"));
  EXPECT_EQ(AsIdentity("describe job secret").exit_code, kExitNotFound);
  ran = Optctl("set job secret private=false");
  EXPECT_THAT(ran.output, HasSubstr("job secret: not private\n"));
  EXPECT_EQ(AsIdentity("describe job secret").exit_code, kExitOk);
  EXPECT_THAT(Optctl("events").output, HasSubstr("who may use it: "));
  EXPECT_THAT(daemon_->Log(), HasSubstr("method=SetJob job=\"secret\" "
                                        "settings=\"access {"));
}

// Each changes a part, at the same time: none undoes the other's.
TEST_F(OptctlAccessTest, TwoChangesAtOnceAreBothMade) {
  const auto session = Train("gpt");
  ASSERT_NE(session, nullptr);
  const std::string group = absl::StrCat(::getegid());
  for (int i = 0; i < 10; ++i) {
    const Ran neither = Optctl("set job gpt private=false group=");
    ASSERT_EQ(neither.exit_code, kExitOk) << neither.output;
    Ran first;
    std::thread other(
        [&] { first = Optctl("set job gpt private=true readers=4713"); });
    const Ran second = Optctl("set job gpt group=" + group);
    other.join();
    ASSERT_EQ(first.exit_code, kExitOk) << first.output;
    ASSERT_EQ(second.exit_code, kExitOk) << second.output;
    EXPECT_THAT(Optctl("get jobs -o json").output,
                AllOf(HasSubstr("\"is_private\": true"), HasSubstr("\"4713\""),
                      HasSubstr(absl::StrCat("\"group\": \"", group, "\""))));
  }
}

TEST_F(OptctlAccessTest, WhatIsWrongIsSaid) {
  const auto session = MakeSecret();
  ASSERT_TRUE(session.ok()) << session.status();
  const struct {
    const char* arguments;
    const char* says;
  } asked[] = {
      {"private=maybe", "true or false"},
      {"readers=no-such-user", "no-such-user"},
      {"private=false readers=4713", "set private too"},
      {"private=true host_budget=8MiB", "is set alone"},
      {"group=a:b", "no name or number"},
  };
  for (const auto& [arguments, says] : asked) {
    const Ran ran = Optctl(absl::StrCat("set job secret ", arguments));
    EXPECT_EQ(ran.exit_code, kExitUsage) << arguments << ": " << ran.output;
    EXPECT_THAT(ran.output, HasSubstr(says));
  }
}

TEST_F(OptctlAccessTest, AJobThatWasThereKeepsItsOwnAndTheScriptIsTold) {
  {
    const auto session = MakeSecret();
    ASSERT_TRUE(session.ok()) << session.status();
  }
  client::SessionOptions options = Options();
  options.access.emplace();
  const auto session = Session::Open(options);
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_EQ(notices_.size(), 1u);
  EXPECT_THAT(notices_[0],
              AllOf(HasSubstr("(private)"), HasSubstr("(not private)"),
                    HasSubstr("optctl set job secret")));
}

TEST_F(OptctlAccessTest, WhatNoJobCanHaveIsRefusedBeforeTheDaemonIsAsked) {
  client::SessionOptions options = Options();
  options.endpoint = "unix:/nonexistent/socket";
  options.access.emplace();
  options.access->readers = {"alice"};
  const absl::Status readers = Session::Open(options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(readers)) << readers;
  EXPECT_THAT(std::string(readers.message()), HasSubstr("set private too"));
  options.endpoint = "embedded";
  options.access->is_private = true;
  const absl::Status embedded = Session::Open(options).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(embedded)) << embedded;
  EXPECT_THAT(std::string(embedded.message()), HasSubstr("private daemon"));
}

}  // namespace
}  // namespace optstate::ctl
