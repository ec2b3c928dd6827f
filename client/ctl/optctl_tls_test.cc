// Sessions and optctl over TLS, against a real daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "absl/time/time.h"
#include "client/client.h"
#include "client/ctl/exit_code.h"
#include "client/ctl/optctl_tls_fixture.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
