// Tests of job directories with damaged or missing files.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/session/testing/job_harness.h"
#include "storage/format/checked_file.h"

namespace optstate::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

class JobFilesTest : public ::testing::Test {
 protected:
  JobFilesTest()
      : harness_([] {
          JobHarness::Setup setup;
          setup.layout.groups = {{}, {.options = adam::kAmsgrad}};
          setup.layout.parameters = {MakeParameter("a", 6000),
                                     MakeParameter("b", 9000, 1)};
          return setup;
        }()) {
    harness_.Start(harness_.RandomTensors(1));
    const std::vector<Hyperparams> groups(2, AdamHyperparams());
    CommitSpec spec;
    spec.step = 1;
    spec.groups = groups;
    harness_.Step(1, harness_.RandomTensors(2), spec);
    state_ = harness_.StateBytes();
    harness_.Close();
  }

  std::string Path(const std::string& file) const {
    return absl::StrCat(harness_.directory(), "/state/", file);
  }
  uint64_t AllocatedBytes(const std::string& file) const {
    struct stat file_stat = {};
    EXPECT_EQ(::stat(Path(file).c_str(), &file_stat), 0);
    return static_cast<uint64_t>(file_stat.st_blocks) * 512;
  }
  // Overwrites one byte; the sign says from which end.
  void Flip(const std::string& file, int64_t offset) const {
    std::fstream stream(Path(file),
                        std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(offset, offset < 0 ? std::ios::end : std::ios::beg);
    const char byte = static_cast<char>(stream.peek());
    stream.seekp(offset, offset < 0 ? std::ios::end : std::ios::beg);
    stream.put(static_cast<char>(byte ^ 0x40));
  }
  void ExpectDataLoss(const std::string& file, const std::string& text) {
    const absl::Status status = harness_.Open();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(status.message(), AllOf(HasSubstr("job \"test\""),
                                        HasSubstr(file), HasSubstr(text)));
  }

  JobHarness harness_;
  std::string state_;
};

TEST_F(JobFilesTest, UntouchedItOpens) {
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_TRUE(harness_.StateBytes() == state_);
}

TEST_F(JobFilesTest, AMissingFile) {
  for (const char* file :
       {"control", "parameters", "exp_avg.f32", "exp_avg_sq.f32",
        "max_exp_avg_sq.f32", "step_counts.i64", "job.binpb"}) {
    fs::rename(Path(file), Path("aside"));
    ExpectDataLoss(file, "is missing");
    fs::rename(Path("aside"), Path(file));
  }
  EXPECT_TRUE(harness_.Open().ok());
}

TEST_F(JobFilesTest, ATruncatedFile) {
  for (const char* file :
       {"control", "parameters", "exp_avg.f32", "exp_avg_sq.f32",
        "max_exp_avg_sq.f32", "step_counts.i64", "job.binpb"}) {
    const auto size = fs::file_size(Path(file));
    fs::copy(Path(file), Path("aside"));
    fs::resize_file(Path(file), size - 1);
    ExpectDataLoss(file, absl::StrCat("has ", size - 1, " bytes"));
    fs::rename(Path("aside"), Path(file));
  }
  EXPECT_TRUE(harness_.Open().ok());
}

TEST_F(JobFilesTest, AnEmptyDescription) {
  fs::resize_file(Path("job.binpb"), 0);
  ExpectDataLoss("job.binpb", "ends too early");
}

TEST_F(JobFilesTest, FlippedBytesOfTheDescription) {
  const struct {
    int64_t offset;
    const char* text;
  } cases[] = {{0, "magic is"},
               {8, "format version is 65"},
               {16, "header's checksum"},
               {40, "header's checksum"},
               {-1, "payload's checksum"}};
  for (const auto& flipped : cases) {
    Flip("job.binpb", flipped.offset);
    ExpectDataLoss("job.binpb", flipped.text);
    Flip("job.binpb", flipped.offset);
  }
  EXPECT_TRUE(harness_.Open().ok());
}

TEST_F(JobFilesTest, FlippedBytesOfTheControlFile) {
  const struct {
    int64_t offset;
    const char* text;
  } cases[] = {{0, "magic is"},
               {8, "format version is 71"},
               {24, "header's checksum"},
               {16, "header's checksum"},
               {72, "step 64 is in progress after committed step 1"},
               {80, "counts_begun is 66, it can be 2 at most"},
               {136, "step_speculated is 64, it can be 2 at most"},
               {144, "parameter_loading is 64, it can be 2 at most"},
               {168, "step_given_up is 64, it can be 2 at most"}};
  for (const auto& flipped : cases) {
    Flip("control", flipped.offset);
    ExpectDataLoss("control", flipped.text);
    Flip("control", flipped.offset);
  }
  // One of the two records is the current one.
  for (const int64_t offset : {192, 320}) Flip("control", offset);
  ExpectDataLoss("control", "record's checksum");
  for (const int64_t offset : {192, 320}) Flip("control", offset);
  EXPECT_TRUE(harness_.Open().ok());
}

TEST_F(JobFilesTest, AnotherLayoutHash) {
  absl::StatusOr<storage::CheckedFile> file =
      storage::ReadCheckedFile(Path("job.binpb"));
  ASSERT_TRUE(file.ok());
  file->layout_hash.assign(32, 'x');
  ASSERT_TRUE(storage::WriteCheckedFile(Path("job.binpb"), *file).ok());
  ExpectDataLoss("job.binpb", "layout hash is 7878");
}

TEST_F(JobFilesTest, TheControlFileOfAnotherJob) {
  absl::StatusOr<storage::CheckedFile> file =
      storage::ReadCheckedFile(Path("job.binpb"));
  ASSERT_TRUE(file.ok());
  ++file->incarnation;
  ASSERT_TRUE(storage::WriteCheckedFile(Path("job.binpb"), *file).ok());
  ExpectDataLoss("control", "belongs to incarnation");
}

// A run of a step that has not begun would be left out of that step.
TEST_F(JobFilesTest, AStampOfALaterStep) {
  constexpr int64_t kSecondRun = sizeof(uint64_t);
  Flip("run_stamps.u64", kSecondRun);  // step 1 becomes 65
  ASSERT_TRUE(harness_.Open().ok());
  const v1::Job job = harness_.job().Describe();
  EXPECT_EQ(job.phase(), v1::JOB_PHASE_FAILED);
  EXPECT_THAT(job.reason(),
              AllOf(HasSubstr("job \"test\""), HasSubstr("run_stamps.u64"),
                    HasSubstr("run 1 (from byte 8 on) is stamped with step 65"),
                    HasSubstr("Last good step: 1")));
  harness_.Close();
  Flip("run_stamps.u64", kSecondRun);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_TRUE(harness_.StateBytes() == state_);
}

TEST_F(JobFilesTest, APayloadThatIsNoJob) {
  absl::StatusOr<storage::CheckedFile> file =
      storage::ReadCheckedFile(Path("job.binpb"));
  ASSERT_TRUE(file.ok());
  const std::string payload = file->payload;
  for (const std::string& bad : {std::string("\xff\xff"), std::string()}) {
    file->payload = bad;
    ASSERT_TRUE(storage::WriteCheckedFile(Path("job.binpb"), *file).ok());
    ExpectDataLoss("job.binpb", "");
  }
  file->payload = payload;
  ASSERT_TRUE(storage::WriteCheckedFile(Path("job.binpb"), *file).ok());
  EXPECT_TRUE(harness_.Open().ok());
}

TEST_F(JobFilesTest, AHalfMadeJobIsRemoved) {
  fs::rename(harness_.directory() + "/state",
             harness_.directory() + "/state.tmp");
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_EQ(harness_.job().Describe().phase(), v1::JOB_PHASE_EMPTY);
  EXPECT_FALSE(fs::exists(harness_.directory() + "/state.tmp"));
  EXPECT_TRUE(harness_.Register(0).ok());
}

// An extension that died before its description was replaced: larger files and
// further ones, but the old job.
TEST_F(JobFilesTest, AHalfMadeExtensionIsUndone) {
  const auto size = fs::file_size(Path("exp_avg.f32"));
  fs::resize_file(Path("exp_avg.f32"), size * 2);
  std::ofstream(Path("accumulator.f32")) << "x";
  std::ofstream(Path("job.binpb.tmp")) << "x";
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_TRUE(harness_.StateBytes() == state_);
  EXPECT_EQ(fs::file_size(Path("exp_avg.f32")), size);
  EXPECT_FALSE(fs::exists(Path("accumulator.f32")));
}

// A copy by cp --sparse has holes where the state is zero: they are reserved
// again before anything is mapped.
TEST_F(JobFilesTest, HolesAreFilled) {
  const int fd = ::open(Path("exp_avg.f32").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  const uint64_t size = fs::file_size(Path("exp_avg.f32"));
  ASSERT_EQ(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                        static_cast<off_t>(size)),
            0);
  ::close(fd);
  EXPECT_LT(AllocatedBytes("exp_avg.f32"), size);
  ASSERT_TRUE(harness_.Open().ok());
  EXPECT_GE(AllocatedBytes("exp_avg.f32"), size);
}

// Group 0 has 6,000 elements in two tiles, group 1 9,000 in three.
TEST_F(JobFilesTest, OnlyAmsgradGroupsTakeMemoryInTheirArray) {
  EXPECT_EQ(fs::file_size(Path("max_exp_avg_sq.f32")), 5 * 16384);
  EXPECT_GE(AllocatedBytes("max_exp_avg_sq.f32"), 3 * 16384);
  ASSERT_TRUE(harness_.Open().ok());
  const v1::Job job = harness_.job().Describe();
  ASSERT_EQ(job.arrays_size(), 9);
  EXPECT_EQ(job.arrays(3).name(), "max_exp_avg_sq");
  EXPECT_EQ(job.arrays(3).bytes(), 3 * 16384);
}

}  // namespace
}  // namespace optstate::session
