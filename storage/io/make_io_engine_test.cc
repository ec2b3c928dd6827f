#include "storage/io/make_io_engine.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <string>
#include <thread>

#include "gtest/gtest.h"

namespace optstate::io {
namespace {

// Makes io_uring_setup fail with an errno in the calling thread, as filters of
// containers do. Returns whether the machine permits that.
bool RefuseIoUring(int error_number) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K,
               SECCOMP_RET_ERRNO | static_cast<unsigned>(error_number)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program = {.len = 4, .filter = filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

struct Refusal {
  int error_number;
  const char* cause;
  absl::StatusCode code;
};

class RefusedIoUringTest : public testing::TestWithParam<Refusal> {};

TEST_P(RefusedIoUringTest, FallsBackAndSaysWhy) {
  bool refused = false;
  absl::StatusOr<MadeIoEngine> any;
  absl::Status forced;
  // The filter goes with the thread.
  std::thread([&] {
    refused = RefuseIoUring(GetParam().error_number);
    any = MakeIoEngine(IoEngineKind::kAny, {});
    forced = MakeIoEngine(IoEngineKind::kIoUring, {}).status();
  }).join();
  if (!refused) GTEST_SKIP() << "seccomp filters are not permitted here";
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_STREQ(any->engine->name(), "blocking");
  EXPECT_NE(any->without.find(GetParam().cause), std::string::npos)
      << any->without;
  EXPECT_EQ(forced.code(), GetParam().code) << forced;
  EXPECT_NE(forced.message().find(GetParam().cause), std::string::npos)
      << forced;
}

INSTANTIATE_TEST_SUITE_P(
    Errors, RefusedIoUringTest,
    testing::Values(Refusal{EPERM, "kernel.io_uring_disabled",
                            absl::StatusCode::kPermissionDenied},
                    Refusal{ENOSYS, "too old",
                            absl::StatusCode::kUnimplemented},
                    Refusal{ENOMEM, "RLIMIT_MEMLOCK",
                            absl::StatusCode::kResourceExhausted}));

TEST(MakeIoEngineTest, BlockingWhenAsked) {
  const auto made = MakeIoEngine(IoEngineKind::kBlocking, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_STREQ(made->engine->name(), "blocking");
  EXPECT_EQ(made->without, "");
}

TEST(MakeIoEngineTest, IoUringWhereItIs) {
  const auto forced = MakeIoEngine(IoEngineKind::kIoUring, {});
  if (!forced.ok()) GTEST_SKIP() << forced.status();
  const auto made = MakeIoEngine(IoEngineKind::kAny, {});
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_STREQ(made->engine->name(), "io_uring");
  EXPECT_EQ(made->without, "");
}

// A FIFO's error shows that a sync reaches the kernel. Only a power cut could
// show that it reaches the disk.
TEST(MakeIoEngineTest, SyncReachesTheKernel) {
  std::string folder = testing::TempDir() + "/make_io_engine_XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/fifo";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  for (const IoEngineKind kind :
       {IoEngineKind::kBlocking, IoEngineKind::kIoUring}) {
    const auto made = MakeIoEngine(kind, {});
    if (!made.ok()) continue;
    const auto file = made->engine->Open(path, 0, IoEngine::OpenMode::kOpen);
    ASSERT_TRUE(file.ok()) << file.status();
    IoRequest sync;
    sync.kind = IoRequest::Kind::kSync;
    sync.file = *file;
    made->engine->Submit(&sync);
    std::array<IoRequest*, 1> completed;
    EXPECT_EQ(made->engine->Poll(absl::MakeSpan(completed), true), 1);
    EXPECT_TRUE(absl::IsInvalidArgument(sync.status)) << sync.status;
    EXPECT_NE(sync.status.message().find("fdatasync"), std::string::npos);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace optstate::io
