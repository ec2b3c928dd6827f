#ifndef OPTSTATE_SERVER_TESTING_DAEMON_FIXTURE_H_
#define OPTSTATE_SERVER_TESTING_DAEMON_FIXTURE_H_

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "optstate/v1/admin.grpc.pb.h"
#include "proto/types/grpc_status.h"
#include "server/testing/daemon_harness.h"

namespace optstate::server {

// A fixture that gives each test its own daemon and that daemon's admin
// interface.
class DaemonTest : public testing::Test, protected DaemonHarness {
 protected:
  std::unique_ptr<v1::Admin::Stub> Admin(std::string target = "") const {
    if (target.empty()) target = "unix:" + socket();
    return v1::Admin::NewStub(
        grpc::CreateChannel(target, grpc::InsecureChannelCredentials()));
  }

  v1::Job GetJob(const std::string& name) const {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_name(name);
    v1::Job job;
    const grpc::Status status = Admin()->GetJob(&context, request, &job);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return job;
  }

  // Returns UNAVAILABLE or CANCELLED between two builds.
  absl::StatusOr<v1::ServerStatus> Status() const {
    grpc::ClientContext context;
    v1::ServerStatus status;
    const grpc::Status result = Admin()->GetStatus(&context, {}, &status);
    if (result.ok()) return status;
    return FromGrpc(result);
  }

  absl::StatusOr<v1::UpgradeReply> Upgrade(const std::string& binary) const {
    grpc::ClientContext context;
    v1::UpgradeRequest request;
    request.set_binary(binary);
    v1::UpgradeReply reply;
    const grpc::Status status = Admin()->Upgrade(&context, request, &reply);
    if (status.ok()) return reply;
    return FromGrpc(status);
  }

  v1::ServerStatus AwaitUpgrade(const std::string& id) const {
    absl::StatusOr<v1::ServerStatus> status;
    EXPECT_TRUE(Eventually([&] {
      status = Status();
      return status.ok() && status->upgrade().id() == id &&
             status->upgrade().done();
    })) << Log();
    return status.value_or(v1::ServerStatus());
  }

  std::string CopyOfTheBinary(const std::string& name) const {
    std::string copy = root() + "/" + name;
    std::filesystem::copy_file("server/optstated", copy);
    return copy;
  }

  static std::string ExecutableOf(int64_t pid) {
    return std::filesystem::read_symlink(absl::StrCat("/proc/", pid, "/exe"))
        .string();
  }

  // Awaits an engine whose daemon has died before it; returns its waitpid
  // status.
  static int AwaitOrphan(int64_t pid) {
    int status = -1;
    EXPECT_EQ(::waitpid(static_cast<pid_t>(pid), &status, 0), pid);
    return status;
  }
};

}  // namespace optstate::server

#endif  // OPTSTATE_SERVER_TESTING_DAEMON_FIXTURE_H_
