#include "client/views/parameter_views.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/shm/segment_layout.h"
#include "proto/types/unique_fd.h"

namespace optstate::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

ParameterSpec Parameter(const char* name, int64_t numel,
                        DType dtype = DType::kFloat32) {
  return {.name = name,
          .shape = {numel},
          .numel = numel,
          .dtype = dtype,
          .gradient_dtype = dtype,
          .group = 0};
}

// A file in memory, mapped shared, like the engine's.
class File {
 public:
  explicit File(uint64_t bytes)
      : fd_(memfd_create("parameters", MFD_CLOEXEC)), bytes_(bytes) {
    EXPECT_EQ(ftruncate(fd_.get(), static_cast<off_t>(bytes)), 0);
    data_ = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
  }
  ~File() { munmap(data_, bytes_); }
  int fd() const { return fd_.get(); }
  std::byte* data() { return data_; }
  absl::Span<const std::byte> bytes() const { return {data_, bytes_}; }
  void Truncate(off_t bytes) { ASSERT_EQ(ftruncate(fd_.get(), bytes), 0); }

 private:
  UniqueFd fd_;
  uint64_t bytes_;
  std::byte* data_;
};

class ParameterViewsTest : public ::testing::Test {
 protected:
  ParameterViewsTest() {
    auto views = ParameterViews::Map(file_.fd(), layout_);
    EXPECT_TRUE(views.ok()) << views.status();
    views_ = *std::move(views);
  }

  std::vector<uint32_t> Written() { return Written(&file_); }
  std::vector<uint32_t> Written(File* file) {
    std::vector<uint32_t> found;
    const absl::Status status =
        views_->FindWritten(file->fd(), file->bytes(), &found);
    EXPECT_TRUE(status.ok()) << status;
    return found;
  }
  float* At(uint32_t parameter) {
    return reinterpret_cast<float*>(views_->parameter(parameter).data());
  }
  float* Engines(uint32_t parameter, File* file) {
    return reinterpret_cast<float*>(file->data() +
                                    layout_.parameter_offset_bytes(parameter));
  }
  float* Engines(uint32_t parameter) { return Engines(parameter, &file_); }

  const Layout layout_ = *Layout::Make(
      {.groups = {{}},
       .parameters = {Parameter("a", 100), Parameter("none", 0),
                      Parameter("b", 50000), Parameter("c", 3),
                      Parameter("d", 7), Parameter("last", 2000)}});
  const uint64_t bytes_ =
      shm::ParameterSegmentBytes(layout_.parameter_area_bytes());
  File file_{bytes_};
  std::unique_ptr<ParameterViews> views_;
};

TEST_F(ParameterViewsTest, WhatTheEngineWritesIsThere) {
  EXPECT_EQ(At(2)[49999], 0);
  Engines(2)[49999] = 7;
  Engines(0)[0] = 5;
  EXPECT_EQ(At(2)[49999], 7);
  EXPECT_EQ(At(0)[0], 5);
  EXPECT_THAT(Written(), IsEmpty());
}

TEST_F(ParameterViewsTest, WhatTheTrainerWritesIsFoundAndStaysItsOwn) {
  At(0)[99] = 1;
  At(2)[0] = 2;  // on the same page
  At(4)[6] = 3;
  EXPECT_EQ(Engines(0)[99], 0);
  EXPECT_EQ(Engines(2)[0], 0);
  EXPECT_THAT(Written(), ElementsAre(0, 2, 4));
  EXPECT_THAT(Written(), ElementsAre(0, 2, 4));
  // The engine has the uploaded values, and the copies are given back.
  Engines(0)[99] = 1;
  Engines(2)[0] = 2;
  Engines(4)[6] = 3;
  EXPECT_THAT(Written(), IsEmpty());
  Engines(0)[99] = 10;
  EXPECT_EQ(At(0)[99], 10);
}

TEST_F(ParameterViewsTest, AWriteThatChangesNothingIsNone) {
  At(2)[30000] = 0;
  EXPECT_THAT(Written(), IsEmpty());
  Engines(2)[30000] = 4;
  EXPECT_EQ(At(2)[30000], 4);
}

TEST_F(ParameterViewsTest, OneInTheMiddleOfPagesIsFoundOnce) {
  for (int i = 0; i < 50000; i += 3) At(2)[i] = 1;
  EXPECT_THAT(Written(), ElementsAre(2));
  ASSERT_TRUE(views_->Release().ok());
  EXPECT_EQ(At(2)[3], 0);
  EXPECT_THAT(Written(), IsEmpty());
}

TEST_F(ParameterViewsTest, KeptValuesStay) {
  At(5)[1] = 3;
  Engines(2)[5] = 4;
  ASSERT_TRUE(views_->Keep().ok());
  Engines(2)[5] = 6;
  Engines(5)[1] = 8;
  EXPECT_EQ(At(2)[5], 4);
  EXPECT_EQ(At(5)[1], 3);
  EXPECT_THAT(Written(), ElementsAre(2, 5));
}

TEST_F(ParameterViewsTest, FollowsToAnotherFileWithWhatWasWritten) {
  File other(bytes_);
  Engines(2, &other)[5] = 4;
  const float* const address = At(2);
  At(5)[1999] = 3;
  EXPECT_THAT(Written(&other), ElementsAre(5));
  EXPECT_EQ(At(2), address);
  EXPECT_EQ(At(2)[5], 4);
  EXPECT_EQ(At(5)[1999], 3);
}

TEST_F(ParameterViewsTest, AFileThatIsCutShortIsAnErrorAndNoSignal) {
  Engines(2)[49999] = 7;
  EXPECT_EQ(At(2)[49999], 7);
  file_.Truncate(4096);
  EXPECT_EQ(At(2)[49999], 0);
  At(2)[49998] = 5;
  std::vector<uint32_t> found;
  EXPECT_EQ(views_->FindWritten(file_.fd(), file_.bytes(), &found).code(),
            absl::StatusCode::kDataLoss);
  // The loss is also reported once the file has its size again.
  file_.Truncate(static_cast<off_t>(bytes_));
  EXPECT_EQ(views_->FindWritten(file_.fd(), file_.bytes(), &found).code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(ParameterViewsTest, ValuesOfAFileThatIsCutShortStayAsFarAsTheyAreThere) {
  Engines(0)[1] = 2;
  Engines(2)[49999] = 7;
  At(5)[1] = 3;
  file_.Truncate(4096);
  const absl::Status kept = views_->Keep();
  EXPECT_EQ(kept.code(), absl::StatusCode::kDataLoss) << kept;
  EXPECT_THAT(std::string(kept.message()), HasSubstr("memfd:parameters"));
  EXPECT_EQ(At(0)[1], 2);
  EXPECT_EQ(At(2)[49999], 0);
  EXPECT_EQ(At(5)[1], 0);
  // The memory is the process's own from now on.
  file_.Truncate(0);
  EXPECT_EQ(At(5)[1], 0);
  At(5)[1] = 4;
  EXPECT_EQ(At(5)[1], 4);
}

TEST_F(ParameterViewsTest, ViewsThatHaveLeftTheFileNeedItNoMore) {
  Engines(2)[49999] = 7;
  At(5)[1] = 3;  // copies the page, on which the engine's value is too
  const float* const address = At(2);
  ASSERT_TRUE(views_->Leave().ok());
  ASSERT_TRUE(views_->Leave().ok());
  ASSERT_TRUE(views_->Keep().ok());
  // This takes even private copies of the file's pages away.
  file_.Truncate(0);
  EXPECT_EQ(At(2), address);
  EXPECT_EQ(At(2)[49999], 7);
  EXPECT_EQ(At(5)[1], 3);
  At(0)[0] = 2;
  EXPECT_EQ(At(0)[0], 2);
  // These would give pages back below which there is no file.
  EXPECT_EQ(views_->Release().code(), absl::StatusCode::kFailedPrecondition);
  std::vector<uint32_t> found;
  EXPECT_EQ(views_->FindWritten(file_.fd(), file_.bytes(), &found).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(At(5)[1], 3);
}

TEST_F(ParameterViewsTest, LeavingAFileThatIsCutShortIsDataLoss) {
  Engines(0)[1] = 2;
  Engines(2)[49999] = 7;
  file_.Truncate(4096);
  EXPECT_EQ(views_->Leave().code(), absl::StatusCode::kDataLoss);
  file_.Truncate(0);
  EXPECT_EQ(At(0)[1], 2);
  EXPECT_EQ(At(2)[49999], 0);
}

// A large file leaves in several parts.
TEST(LargeParameterViewsTest, AllPartsLeaveTheFile) {
  constexpr int64_t kElements = (int64_t{72} << 20) / 4;
  const Layout layout = *Layout::Make(
      {.groups = {{}}, .parameters = {Parameter("large", kElements)}});
  File file(shm::ParameterSegmentBytes(layout.parameter_area_bytes()));
  auto views = ParameterViews::Map(file.fd(), layout);
  ASSERT_TRUE(views.ok()) << views.status();
  auto* const engines =
      reinterpret_cast<float*>(file.data() + layout.parameter_offset_bytes(0));
  constexpr int64_t kStride = 1021;  // not a multiple of a page's elements
  for (int64_t i = 0; i < kElements; i += kStride) {
    engines[i] = static_cast<float>(i % 4093);
  }
  ASSERT_TRUE((*views)->Leave().ok());
  file.Truncate(0);
  const auto* const left =
      reinterpret_cast<const float*>((*views)->parameter(0).data());
  int64_t wrong = 0;
  for (int64_t i = 0; i < kElements; i += kStride) {
    if (left[i] != static_cast<float>(i % 4093)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
}

TEST(WrittenPagesTest, BothWaysFindTheSame) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  constexpr size_t kPages = 5000;
  File file(kPages * page);
  auto* const data = static_cast<std::byte*>(mmap(nullptr, kPages * page,
                                                  PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE, file.fd(), 0));
  ASSERT_NE(data, MAP_FAILED);
  const auto mapping = absl::MakeSpan(data, kPages * page);
  int sum = 0;
  for (size_t i = 0; i < kPages; ++i) {
    if (i % 2 == 0) sum += std::to_integer<int>(data[i * page]);  // only reads
    if (i % 7 == 0 || (i > 1000 && i < 1500)) data[i * page] = std::byte{1};
  }
  EXPECT_EQ(sum, 0);
  WrittenPages scan, entries;
  ASSERT_TRUE(WrittenPages::Open(&scan).ok());
  ASSERT_TRUE(WrittenPages::Open(&entries).ok());
  entries.UseEntries();
  std::vector<absl::Span<std::byte>> scanned, read;
  ASSERT_TRUE(scan.Find(mapping, &scanned).ok());
  ASSERT_TRUE(entries.Find(mapping, &read).ok());
  ASSERT_EQ(scanned.size(), read.size());
  size_t bytes = 0;
  for (size_t i = 0; i < read.size(); ++i) {
    EXPECT_EQ(scanned[i].data(), read[i].data());
    EXPECT_EQ(scanned[i].size(), read[i].size());
    bytes += read[i].size();
  }
  size_t expected = 0;
  for (size_t i = 0; i < kPages; ++i) {
    if (i % 7 == 0 || (i > 1000 && i < 1500)) expected += page;
  }
  EXPECT_EQ(bytes, expected);
  munmap(data, kPages * page);
}

}  // namespace
}  // namespace optstate::client
