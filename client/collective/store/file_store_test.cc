#include "client/collective/store/file_store.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::client {
namespace {

class FileStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/file_store_XXXXXX";
    ASSERT_NE(mkdtemp(path.data()), nullptr);
    folder_ = path;
    auto store = FileStore::Open(folder_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string folder_;
  std::unique_ptr<FileStore> store_;
};

TEST_F(FileStoreTest, ValuesComeBack) {
  const std::string value("a\0b\n", 4);
  ASSERT_TRUE(store_->Set("run-rank-0", value).ok());
  const auto other = FileStore::Open(folder_);
  ASSERT_TRUE(other.ok());
  const auto found = (*other)->Get("run-rank-0", absl::Now());
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, value);
  ASSERT_TRUE(store_->Set("empty", "").ok());
  EXPECT_EQ(*store_->Get("empty", absl::Now()), "");
}

TEST_F(FileStoreTest, KeysOfAnyBytesAreDifferentFiles) {
  for (const char* key : {"a/b", "a_b", "a%b", "..", "a%2fb"}) {
    ASSERT_TRUE(store_->Set(key, key).ok()) << key;
  }
  for (const char* key : {"a/b", "a_b", "a%b", "..", "a%2fb"}) {
    EXPECT_EQ(*store_->Get(key, absl::Now()), key);
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/a"));
}

TEST_F(FileStoreTest, AKeyIsSetOnce) {
  ASSERT_TRUE(store_->Set("key", "first").ok());
  const absl::Status again = store_->Set("key", "second");
  EXPECT_TRUE(absl::IsAlreadyExists(again)) << again;
  EXPECT_THAT(std::string(again.message()), testing::HasSubstr(folder_));
  EXPECT_EQ(*store_->Get("key", absl::Now()), "first");
  // Nothing else is left in the folder.
  int files = 0;
  for (const auto& each : std::filesystem::directory_iterator(folder_)) {
    files += each.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, 1);
}

// Processes of two containers of a machine may have the same host name and
// number, and one that was killed may have left a file.
TEST_F(FileStoreTest, FilesOfOtherProcessesAreLeftAlone) {
  constexpr int kOthers = 100;  // more than this process has set keys
  char host[65] = "";
  ASSERT_EQ(gethostname(host, sizeof(host) - 1), 0);
  std::string name;
  for (const char each : std::string(host)) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(each)) || each == '-' ||
        each == '_') {
      name += each;
    } else {
      absl::StrAppend(&name, "%",
                      absl::Hex(static_cast<uint8_t>(each), absl::kZeroPad2));
    }
  }
  for (int i = 0; i < kOthers; ++i) {
    std::ofstream(
        absl::StrCat(folder_, "/new-key-", name, "-", getpid(), "-", i))
        << "another's";
  }
  const absl::Status set = store_->Set("key", "mine");
  ASSERT_TRUE(set.ok()) << set;
  EXPECT_EQ(*store_->Get("key", absl::Now()), "mine");
  int files = 0;
  for (const auto& each : std::filesystem::directory_iterator(folder_)) {
    files += each.is_regular_file() ? 1 : 0;
  }
  EXPECT_EQ(files, kOthers + 1);
}

TEST_F(FileStoreTest, GetWaitsForTheKey) {
  absl::StatusOr<std::string> found;
  std::thread reader(
      [&] { found = store_->Get("later", absl::Now() + absl::Minutes(2)); });
  EXPECT_TRUE(store_->Set("later", "value").ok());
  reader.join();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, "value");
  const auto missing = store_->Get("never", absl::Now());
  EXPECT_TRUE(absl::IsDeadlineExceeded(missing.status())) << missing.status();
}

TEST_F(FileStoreTest, OthersCannotReadTheSecrets) {
  ASSERT_TRUE(store_->Set("key", "secret").ok());
  for (const auto& each : std::filesystem::directory_iterator(folder_)) {
    struct stat found = {};
    ASSERT_EQ(stat(each.path().c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 0077, 0u);
  }
}

TEST_F(FileStoreTest, RefusesWhatItCannotKeep) {
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Set("", "value")));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store_->Set(std::string(kStoreKeyBytesMax + 1, 'k'), "value")));
  EXPECT_TRUE(absl::IsInvalidArgument(
      store_->Set("key", std::string(kStoreValueBytesMax + 1, 'v'))));
  EXPECT_TRUE(store_
                  ->Set(std::string(kStoreKeyBytesMax, '/'),
                        std::string(kStoreValueBytesMax, 'v'))
                  .ok());
  std::ofstream(folder_ + "/key-long")
      << std::string(kStoreValueBytesMax + 1, 'v');
  EXPECT_TRUE(absl::IsDataLoss(store_->Get("long", absl::Now()).status()));
}

TEST_F(FileStoreTest, RefusesFoldersThatAreNotItsOwn) {
  EXPECT_TRUE(absl::IsNotFound(FileStore::Open(folder_ + "/none").status()));
  std::ofstream(folder_ + "/file") << "text";
  EXPECT_TRUE(
      absl::IsFailedPrecondition(FileStore::Open(folder_ + "/file").status()));
  std::filesystem::create_directory(folder_ + "/shared");
  ASSERT_EQ(chmod((folder_ + "/shared").c_str(), 0777), 0);
  const absl::Status shared = FileStore::Open(folder_ + "/shared").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(shared)) << shared;
  EXPECT_THAT(std::string(shared.message()), testing::HasSubstr("chmod"));
}

TEST_F(FileStoreTest, RefusesFoldersOfOtherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  const std::string folder = folder_ + "/given";
  std::filesystem::create_directory(folder);
  ASSERT_EQ(chmod(folder.c_str(), 0700), 0);
  if (chown(folder.c_str(), 12345, 12345) != 0) {
    GTEST_SKIP() << "this root cannot give a folder away";
  }
  const absl::Status given = FileStore::Open(folder).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(given)) << given;
  EXPECT_THAT(std::string(given.message()), testing::HasSubstr("12345"));
}

}  // namespace
}  // namespace optstate::client
